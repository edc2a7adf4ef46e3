"""Plots of a comparison: the figures of the strategies, and a window of time of each, as PNG files and as one page.

DIR/NAME-policies.png    efficiency, step time against its limit, staleness, waste
DIR/NAME-timeline.png    the same seconds of every strategy: load of the replicas, work of the trainer
DIR/index.html           both, for all workloads, interactive; one file, no network
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cadenza.observe.timeline_html import script_json
from cadenza.observe.timeline_png import FAINT, INK
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.experiment import STRATEGIES, StrategyResult, TrialPool
from cadenza.simulation.comparison.recorder import RunRecorder, TimelineWindow
from cadenza.simulation.comparison.strategy import run_training
from cadenza.simulation.comparison.workloads import Workload
from cadenza.simulation.virtual_cluster import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 400
"""Columns of a window."""
STEPS_SHOWN = 2.6
"""Steps of the slowest strategy that a window shows."""
MOST_STEPS = 60
"""Most steps that are simulated for a window after the warm-up."""
OURS, OTHERS, LIMIT, WORKS, WAITS = "#3568b0", "#9db4d3", "#d63a3a", "#2f9e6e", "#e0a92e"
WASTE = ("#b5713a", "#d63a3a", "#a86fc0", "#e0a92e", "#9097a0")


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """One strategy on one workload: its figures, and the window to draw."""

    result: StrategyResult
    window: TimelineWindow

    @property
    def name(self) -> str:
        shared = f", {shared} GPUs shared" if (shared := self.result.settings.shared) else ""
        alpha = f", alpha {self.result.alpha:g}" if self.is_asynchronous else ""
        return f"{self.result.strategy}{alpha}{shared}"

    @property
    def is_asynchronous(self) -> bool:
        return STRATEGIES[self.result.strategy].asynchronous

    @property
    def gpus(self) -> str:
        train = self.result.settings.train_gpus
        return f"{train} GPUs train" if train else "all GPUs in turn"


@dataclass(frozen=True, slots=True)
class _RecordingJob:
    """A second run of the first seed of a result, with a recorder."""

    workload: Workload
    result: StrategyResult
    warm_up: int
    seconds: float

    def record(self) -> PlottedRun:
        result, first = self.result, self.result.seeds[0]
        steps = self.warm_up + min(math.ceil(self.seconds / first.step_seconds) + 2, MOST_STEPS)
        trace = trace_of(self.workload, first.seed)
        strategy = STRATEGIES[result.strategy](self.workload, trace, result.alpha, result.settings)
        strategy.recorder = RunRecorder()
        clock.run(lambda: run_training(strategy, steps))
        return PlottedRun(result, strategy.recorder.window(self.warm_up - 1, self.seconds, COLUMNS))


def record_runs(
    pool: TrialPool, workload: Workload, results: Sequence[StrategyResult], warm_up: int
) -> list[PlottedRun]:
    """Record the same seconds after the warm-up of every result."""
    seconds = STEPS_SHOWN * max(result.typical.step_seconds for result in results)
    return pool.map(_RecordingJob.record, [_RecordingJob(workload, result, warm_up, seconds) for result in results])


def write(out: Path, plotted: Sequence[PlottedRun]) -> tuple[list[Path], str]:
    """Write all plots; returns the files, and a text that says why PNG files are missing."""
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(render(plotted), encoding="utf-8")
    try:
        from matplotlib import rc_context
    except ImportError:
        return [page], "no PNG: it needs matplotlib: pip install 'cadenza[plot]'"
    files = []
    with rc_context({"text.parse_math": False, "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        for name, own in _by_workload(plotted).items():
            stem = re.sub(r"[^\w.]+", "-", name).strip("-")
            for figure, kind in ((_strategies(name, own), "policies"), (_timeline(name, own), "timeline")):
                files.append(out / f"{stem}-{kind}.png")
                figure.savefig(files[-1])
    return [*files, page], ""


def _by_workload(plotted: Sequence[PlottedRun]) -> dict[str, list[PlottedRun]]:
    names = dict.fromkeys(run.result.workload for run in plotted)
    return {name: [run for run in plotted if run.result.workload == name] for name in names}


# -- strategies side by side -------------------------------------------------------------------------------------------


def _strategies(name: str, plotted: Sequence[PlottedRun]) -> Figure:
    """Draw one row per strategy, and one panel per figure."""
    from matplotlib.figure import Figure

    height = 0.36 * len(plotted)
    figure = Figure(figsize=(14, height + 1.5), dpi=120, facecolor="white")
    axes = figure.subplots(1, 4, sharey=True)
    figure.subplots_adjust(
        left=0.13, right=0.985, bottom=0.62 / (height + 1.5), top=1 - 0.85 / (height + 1.5), wspace=0.1
    )
    seeds = len(plotted[0].result.seeds)
    figure.text(
        0.012, 1 - 0.12 / (height + 1.5), f"{name}: strategies side by side", va="top", fontsize=13, weight="bold"
    )
    figure.text(
        0.012, 1 - 0.37 / (height + 1.5), f"medians over {seeds} {'seed' if seeds == 1 else 'seeds'}",
        va="top", color=FAINT,
    )  # fmt: skip
    typical = [run.result.typical for run in plotted]
    colours = [OURS if run.result.strategy == "cadenza" else OTHERS for run in plotted]
    rows = range(len(plotted))
    for ax in axes:
        _bare(ax)
        ax.set_ylim(len(plotted) - 0.4, -0.6)
        ax.grid(axis="x", color="#e6e9ed", linewidth=0.7)
        ax.set_axisbelow(True)
    axes[0].set_yticks(list(rows), [run.name for run in plotted], fontsize=9, color=INK)
    axes[0].barh(rows, [figures.efficiency for figures in typical], color=colours, height=0.62)
    axes[0].plot([run.result.worst.efficiency for run in plotted], rows, "|", color=INK, markersize=9)
    _caption(axes[0], "efficiency", "mark: the worst seed", [f"{figures.efficiency:.2f}" for figures in typical])
    axes[0].set_xlim(0, max(1.0, axes[0].get_xlim()[1]))
    axes[1].barh(rows, [figures.step_seconds for figures in typical], color=colours, height=0.62)
    axes[1].plot(
        [figures.limit_seconds for figures in typical], rows, "|", color=LIMIT, markersize=12, markeredgewidth=2
    )
    _caption(axes[1], "seconds per step", "red: its limit", [f"{figures.step_seconds:,.4g}" for figures in typical])
    axes[2].barh(rows, [figures.staleness_mean for figures in typical], color=colours, height=0.62)
    axes[2].plot([figures.staleness_max for figures in typical], rows, "|", color=INK, markersize=9)
    _caption(axes[2], "staleness", "bar: mean, mark: maximum", [f"{figures.staleness_mean:.2f}" for figures in typical])
    _waste(axes[3], [figures.waste for figures in typical])
    return figure


def _waste(ax: Axes, waste: Sequence[dict[str, float]]) -> None:
    """Draw the wasted tokens, stacked by cause."""
    causes = sorted({cause for own in waste for cause, share in own.items() if share >= 5e-4})
    left = [0.0] * len(waste)
    for number, cause in enumerate(causes):
        shares = [100 * own.get(cause, 0.0) for own in waste]
        colour = WASTE[number % len(WASTE)]
        ax.barh(range(len(waste)), shares, left=left, height=0.62, color=colour, label=cause)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    _caption(
        ax, "tokens wasted, %", "by cause" if causes else "none", [f"{100 * sum(own.values()):.1f}" for own in waste]
    )
    ax.set_xlim(0, max(*left, 1.0) * 1.16)
    if causes:
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.02 - 0.2 / len(waste) ** 0.5), ncols=3, frameon=False,
            fontsize=8, handlelength=1, columnspacing=1,
        )  # fmt: skip


def _caption(ax: Axes, title: str, note: str, values: Sequence[str]) -> None:
    """Write the title above a panel, and the value at the end of each bar."""
    ax.set_title(title, loc="left", fontsize=10, color=INK, pad=5)
    ax.set_title(note, loc="right", fontsize=8, color=FAINT, pad=5)
    width = ax.get_xlim()[1]
    ends = [0.0] * len(values)
    for patch in ax.patches:
        row = round(patch.get_y() + patch.get_height() / 2)  # type: ignore[attr-defined]
        ends[row] = max(ends[row], patch.get_x() + patch.get_width())  # type: ignore[attr-defined]
    for line in ax.lines:
        for row, x in enumerate(np.asarray(line.get_xdata(), np.float64).tolist()):
            ends[row] = max(ends[row], x)
    for row, (end, text) in enumerate(zip(ends, values, strict=True)):
        ax.text(end + 0.02 * width, row, text, va="center", fontsize=8, color=INK)
    ax.set_xlim(0, max(width, max(ends) * 1.16))


def _bare(ax: Axes) -> None:
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#d5d9de")
    ax.tick_params(axis="both", length=0, labelsize=8, colors=FAINT)


# -- the timeline ------------------------------------------------------------------------------------------------------


def _timeline(name: str, plotted: Sequence[PlottedRun]) -> Figure:
    """Draw a window per strategy, all of the same length in seconds."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = LinearSegmentedColormap.from_list("load", ["#f3f5f8", "#86a9d6", "#3568b0", "#16305c"])
    top, bottom, block = 0.8, 0.75, 1.3
    height = top + bottom + block * len(plotted)
    figure = Figure(figsize=(14, height), dpi=120, facecolor="white")
    most = max(float(run.window.running.max()) for run in plotted) or 1.0
    norm = PowerNorm(0.5, vmin=0, vmax=most)  # one sequence must differ from none
    seconds = max(run.window.end - run.window.start for run in plotted)
    figure.text(
        0.012,
        1 - 0.12 / height,
        f"{name}: the same {seconds:,.0f} s of every strategy",
        va="top",
        fontsize=13,
        weight="bold",
    )
    figure.text(
        0.012, 1 - 0.38 / height,
        "Blue: sequences decoded at once, one row per replica, empty where it idles. Above: the trainer. "
        "Lines: versions; the more there are, the faster.",
        va="top", color=FAINT,
    )  # fmt: skip
    for number, run in enumerate(plotted):
        below = height - top - block * (number + 1)
        lanes = [
            figure.add_axes((0.13, (below + at) / height, 0.855, lane / height))
            for at, lane in ((block - 0.22, 0.16), (0.12, block - 0.36))
        ]
        image = _draw_window(lanes[0], lanes[1], run, seconds, norm, colours)
        middle = (below + 0.12 + (block - 0.36) / 2) / height
        figure.text(0.122, middle + 0.14 / height, run.name, ha="right", va="center", weight="bold")
        figure.text(0.122, middle - 0.06 / height, run.gpus, ha="right", va="center", fontsize=7.5, color=FAINT)
        trains = f"trainer busy {run.window.busy:.0%}"
        figure.text(0.122, middle - 0.24 / height, trains, ha="right", va="center", fontsize=7.5, color=FAINT)
        lanes[1].tick_params(labelbottom=number == len(plotted) - 1)
    lanes[1].set_xlabel("seconds after the warm-up", fontsize=9)
    bar = figure.colorbar(
        image, cax=figure.add_axes((0.84, 0.22 / height, 0.14, 0.1 / height)), orientation="horizontal"
    )
    bar.ax.tick_params(labelsize=7, length=0, pad=1)
    bar.outline.set_visible(False)
    figure.text(0.832, 0.27 / height, "sequences per replica", ha="right", va="center", fontsize=8, color=FAINT)
    handles = [Patch(color=WORKS, label="trainer works"), Patch(color=WAITS, label="waits for a batch")]
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.125, 0.1 / height), ncols=2, frameon=False, fontsize=8
    )
    return figure


def _draw_window(trainer: Axes, replicas: Axes, run: PlottedRun, seconds: float, norm: Any, colours: Any) -> Any:
    window = run.window
    for ax in (trainer, replicas):
        _bare(ax)
        ax.set_xlim(0, seconds)
        ax.set_yticks([])
    trainer.set_ylim(0, 1)
    trainer.tick_params(labelbottom=False)
    trainer.spines["bottom"].set_visible(False)
    for spans, colour in ((window.waited, WAITS), (window.trained, WORKS)):
        trainer.broken_barh([(a - window.start, b - a) for a, b in spans], (0.1, 0.8), color=colour, linewidth=0)
    extent = (0.0, window.end - window.start, 0.0, 1.0)
    image = replicas.imshow(
        window.running, aspect="auto", extent=extent, cmap=colours, norm=norm, interpolation="nearest"
    )
    replicas.set_xlim(0, seconds)
    every = max(1, len(window.published) // 24)
    for number, (time, version) in enumerate(window.published):
        replicas.axvline(time - window.start, color=LIMIT, linewidth=0.8, alpha=0.75)
        if number % every == 0 and time - window.start < 0.985 * seconds:
            replicas.text(
                time - window.start + seconds * 0.002, 0.97, f"v{version}", va="top", fontsize=7.5, color=LIMIT,
                bbox={"facecolor": "white", "alpha": 0.8, "pad": 0.6, "linewidth": 0},
            )  # fmt: skip
    return image


# -- the page ----------------------------------------------------------------------------------------------------------


def render(plotted: Sequence[PlottedRun]) -> str:
    """Return the page as text."""
    template = resources.files("cadenza.simulation.comparison").joinpath("simulate.html").read_text(encoding="utf-8")
    title = f"cadenza simulate: {', '.join(_by_workload(plotted))}"
    head, middle, tail = template.replace("__TITLE__", html.escape(title)).partition("__DATA__")
    assert middle, "simulate.html has lost its place for the data"
    data = {
        "workloads": [
            {"name": name, "scenes": [_run_data(run) for run in own]} for name, own in _by_workload(plotted).items()
        ]
    }
    return head + script_json(data) + tail


def _run_data(run: PlottedRun) -> dict[str, Any]:
    window = run.window
    span = window.end - window.start

    def moved(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(round(a - window.start, 2), round(b - window.start, 2)) for a, b in spans]

    return {
        "name": run.name,
        "ours": run.result.strategy == "cadenza",
        "gpus": run.gpus,
        "figures": json.loads(json.dumps(run.result.to_json())),
        "seconds": span,
        "busy": window.busy,
        "running": [[round(value, 1) for value in row] for row in window.running.tolist()],
        "trained": moved(window.trained),
        "waited": moved(window.waited),
        "published": [(round(time - window.start, 2), version) for time, version in window.published],
    }
