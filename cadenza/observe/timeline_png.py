"""The timeline of a run as a picture: the load of every replica, and the fate of every attempt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cadenza.observe.timeline import FATES, VERSIONS, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, SHADE = "#22272e", "#8a929c", "#f0d9a8"
LEFT, RIGHT, TOP, BOTTOM, GAP = 1.2, 0.15, 0.55, 0.8, 0.12
"""Inches around the lanes, and between them."""
COLUMNS = 1500
"""Columns in which the requests in flight are averaged; more would not be visible."""


def write_png(timeline: Timeline, path: Path, *, title: str = "cadenza") -> None:
    """Draw the timeline into a PNG file."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a timeline as PNG needs matplotlib: pip install 'cadenza[plot]'") from error
    swim = float(np.clip(0.045 * timeline.slots, 2.0, 8.0))
    heights = [0.4, *[0.52] * len(timeline.replicas), 0.52, swim]
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(15, sum(heights) + GAP * len(heights) + TOP + BOTTOM), dpi=120, facecolor="white")
        axes = _lanes(figure, heights)
        for ax in axes:
            _plain(ax, timeline)
        edges = np.linspace(timeline.start, max(timeline.end, timeline.start + 1e-9), COLUMNS + 1)
        _headline(axes[0], timeline)
        _replicas(axes[1:-2], timeline, edges)
        _busy(axes[-2], timeline, edges)
        _swim(axes[-1], timeline)
        _words(figure, timeline, title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _lanes(figure: Figure, heights: list[float]) -> list[Axes]:
    """Return axes below each other, of these heights in inches."""
    width, height = figure.get_size_inches()
    axes: list[Axes] = []
    above = TOP
    for number, lane in enumerate(heights, 1):
        above += lane
        box = (LEFT / width, 1 - above / height, 1 - (LEFT + RIGHT) / width, lane / height)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes else None))
        axes[-1].tick_params(labelbottom=number == len(heights))
        above += GAP
    return axes


def concurrency(spans: Iterable[tuple[float, float]], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean number of open spans in each column between two edges."""
    pairs = np.array(list(spans), dtype=np.float64).reshape(-1, 2)
    starts, ends = np.sort(pairs[:, 0]), np.sort(pairs[:, 1])
    return np.diff(_area(starts, edges) - _area(ends, edges)) / np.diff(edges)


def _area(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the integral, up to each edge, of the number of times passed."""
    passed = np.searchsorted(times, edges)
    sums = np.concatenate(([0.0], np.cumsum(times)))
    area: NDArray[np.float64] = passed * edges - sums[passed]
    return area


def _plain(ax: Axes, timeline: Timeline) -> None:
    """Draw what all lanes share: a bare axis with the suspensions and the versions."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color("#d5d9de")
    ax.tick_params(axis="both", length=0, labelsize=8, colors=FAINT)
    ax.set_xlim(timeline.start, max(timeline.end, timeline.start + 1e-9))
    for start, end in timeline.suspensions:
        ax.axvspan(start, end, color=SHADE, alpha=0.7, linewidth=0, zorder=0)
    for time, _ in timeline.published:
        ax.axvline(time, color=INK, linewidth=0.5, alpha=0.35, zorder=1)


def _headline(ax: Axes, timeline: Timeline) -> None:
    """Draw the names of the versions, and the batches that were cut for them."""
    ax.set_ylim(0, 1)
    ax.set_yticks([])
    ax.spines["bottom"].set_visible(False)
    every = max(1, len(timeline.published) // 40)
    for time, version in timeline.published[::every]:
        colour = _version(version)
        ax.text(time, 0.95, f" v{version}", ha="left", va="top", color=colour, fontsize=9, fontweight="bold")
    times = [time for time, _ in timeline.cuts]
    ax.plot(times, [0.14] * len(times), "v", color=INK, markersize=5, clip_on=False)
    _name(ax, "batches ▾", y=0.12)


def _replicas(axes: Any, timeline: Timeline, edges: NDArray[np.float64]) -> None:
    """Draw the requests in flight per replica, stacked by the version at which their groups began."""
    spans: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in timeline.replicas}
    for attempt in timeline.attempts:
        for call in attempt.calls:
            spans[call.replica].setdefault(attempt.version, []).append((call.start, call.end))
    middles = (edges[1:] + edges[:-1]) / 2
    lost = {name: (time, cause) for time, name, cause in timeline.lost}
    top = 1.0
    for ax, name in zip(axes, timeline.replicas, strict=True):
        layers = [(version, concurrency(spans[name][version], edges)) for version in sorted(spans[name])]
        if layers:
            colours = [_version(version) for version, _ in layers]
            stack = np.array([layer for _, layer in layers])
            ax.stackplot(middles, stack, colors=colours, step="mid", linewidth=0, zorder=2)
            top = max(top, float(stack.sum(axis=0).max()))
        if name in lost:
            _tombstone(ax, timeline, *lost[name])
        _name(ax, name)
    for ax in axes:
        ax.set_ylim(0, top * 1.08)
        ax.set_yticks([0, round(top)])


def _tombstone(ax: Axes, timeline: Timeline, time: float, cause: str) -> None:
    ax.axvspan(time, timeline.end, facecolor="#fbeeee", edgecolor=FATES["failed"], alpha=0.4, hatch="//", linewidth=0)
    text = _short(f"lost: {cause}", 60)
    late = time > timeline.start + 0.75 * (timeline.end - timeline.start)
    ax.text(
        time, 0.5, f"  {text}  ", transform=ax.get_xaxis_transform(), ha="right" if late else "left", va="center",
        fontsize=9, color=FATES["failed"], zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5},
    )  # fmt: skip


def _busy(ax: Axes, timeline: Timeline, edges: NDArray[np.float64]) -> None:
    busy = concurrency([(attempt.start, attempt.end) for attempt in timeline.attempts], edges)
    ax.stackplot((edges[1:] + edges[:-1]) / 2, [busy], colors=["#b9c2cc"], step="mid", linewidth=0, zorder=2)
    ax.axhline(timeline.slots, color=FAINT, linewidth=0.6, linestyle=":")
    ax.set_ylim(0, max(timeline.slots, 1) * 1.12)
    ax.set_yticks([0, timeline.slots])
    _name(ax, "slots busy")


def _swim(ax: Axes, timeline: Timeline) -> None:
    """Draw one bar per attempt, in the row of its slot."""
    from matplotlib.collections import PolyCollection

    row = ax.bbox.height / max(timeline.slots, 1)  # pixels
    margin, edge = (0.07, 0.35) if row > 3 else (0.0, 0.0)
    bars = [
        [(attempt.start, low), (attempt.end, low), (attempt.end, high), (attempt.start, high)]
        for attempt in timeline.attempts
        for low, high in [(attempt.slot + margin, attempt.slot + 1 - margin)]
    ]
    colours = [FATES[attempt.fate] for attempt in timeline.attempts]
    ax.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=edge, zorder=2))
    ax.set_ylim(max(timeline.slots, 1), 0)
    ax.set_yticks([])
    ax.tick_params(axis="x", labelsize=9, colors=INK)
    ax.set_xlabel("seconds", fontsize=9, color=INK)
    _name(ax, "slots")


def _words(figure: Figure, timeline: Timeline, title: str) -> None:
    """Write the title, the legend, and the meaning of the colours."""
    from matplotlib.patches import Patch

    counts = {fate: sum(attempt.fate == fate for attempt in timeline.attempts) for fate in FATES}
    handles = [Patch(color=FATES[fate], label=f"{fate} {count:,}") for fate, count in counts.items() if count]
    handles.append(Patch(color=SHADE, label="gate closed"))
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK,
        handlelength=1.1,
    )  # fmt: skip
    tokens = sum(attempt.tokens for attempt in timeline.attempts)
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.08 / height, title, va="top", fontsize=13, fontweight="bold", color=INK)
    figure.text(
        0.0125, 1 - 0.33 / height,
        f"{len(timeline.attempts):,} attempts, {tokens:,} tokens, {len(timeline.cuts)} batches in "
        f"{timeline.end - timeline.start:,.0f} s. Replicas: requests in flight, in the colour of the version at which "
        "their group began. Slots: one bar per attempt, in the colour of its fate.",
        fontsize=9, color=FAINT, va="top",
    )  # fmt: skip


def _name(ax: Axes, name: str, y: float = 0.5) -> None:
    ax.text(-0.022, y, _short(name, 13), transform=ax.transAxes, ha="right", va="center", fontsize=9, color=INK)


def _short(text: str, length: int) -> str:
    """Return the text without unprintable characters, cut to `length`."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= length else text[: length - 3] + "..."


def _version(version: int) -> str:
    return VERSIONS[version % len(VERSIONS)]
