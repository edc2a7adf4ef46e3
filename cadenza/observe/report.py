"""report.html: the curves of a run, its config and some of its episodes. One file, no network, no build.

The files are read as streams and downsampled, so the page stays below 2 MB however long the run was:

    metrics.jsonl --> one `DownsampledCurve` per metric --> report_charts: curves as SVG
    samples.jsonl --> an `EpisodeRef` per line --> report_episodes: the chosen ones, turn by turn

Everything that the run wrote passes `html.escape` on its way into the page.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from cadenza.observe.curve import DownsampledCurve, duration
from cadenza.observe.report_charts import charts_html, spark_html
from cadenza.observe.report_episodes import clip, episodes_html
from cadenza.observe.run import read_lines

POINTS = 800
"""Points of a curve at most."""
ROWS = 250
"""Metrics in the table of all metrics at most."""
FOLDED = 60_000
"""Characters of the config at most."""


def write_report(run_dir: Path | str) -> Path:
    """Write report.html from the files of a run, which may still be in progress; returns its path."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run in {run_dir}")
    path, beside = run_dir / "report.html", run_dir / ".report.html.new"
    beside.write_bytes(render(run_dir).encode("utf-8", "replace"))
    beside.replace(path)
    return path


def render(run_dir: Path) -> str:
    """Return the page as text."""
    metrics = _MetricHistory(run_dir / "metrics.jsonl")
    pieces = [
        _headline(run_dir, metrics),
        charts_html(metrics.series),
        episodes_html(run_dir / "samples.jsonl"),
        *(_folded(f"Config: {path.name}", path) for path in sorted(run_dir.glob("config*.yaml"))),
        _folded("Summary", run_dir / "summary.json"),
        _table(metrics),
    ]
    template = resources.files("cadenza.observe").joinpath("report.html").read_text(encoding="utf-8")
    title = html.escape(f"{run_dir.resolve().name}, cadenza")
    head, middle, tail = template.replace("__TITLE__", title).partition("__BODY__")
    assert middle, "report.html has lost its place for the body"
    return head + "\n".join(filter(None, pieces)) + tail


# -- numbers -----------------------------------------------------------------------------------------------------------


class _MetricHistory:
    """All metrics of the run, downsampled."""

    def __init__(self, path: Path) -> None:
        self.series: dict[str, DownsampledCurve] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.steps = self.lines = 0
        self.seconds = self.cpu_seconds = 0.0
        for record in read_lines(path):
            self._read(record)

    def _read(self, record: dict[str, Any]) -> None:
        step = record.pop("step", None)
        if not isinstance(step, int):
            return
        self.steps = max(self.steps, step)
        self.lines += 1
        self.seconds = record.pop("time", None) or self.seconds
        self.cpu_seconds = record.pop("cpu", None) or self.cpu_seconds
        for name, value in record.items():
            if value is not None and not isinstance(value, (int, float)):
                continue
            self.series.setdefault(name, DownsampledCurve(POINTS)).add(step, float("nan") if value is None else value)
            if value is not None:
                self.first.setdefault(name, value)
                self.last[name] = value


def _headline(run_dir: Path, metrics: _MetricHistory) -> str:
    summary = _json(run_dir / "summary.json")
    plays = not _has_rows(run_dir)
    tiles = []
    for mode, name in (("val", "validation success"), ("train", "training success")):
        series = metrics.series.get(f"{mode}/success")
        if series is not None and series.points:
            first, last = _ends(series, 1 if mode == "val" else 10)
            tiles.append((f"{first:.0%} → {last:.0%}", f"{name}, first and last"))
    if (losses := metrics.series.get("val/loss")) is not None and losses.points:
        first, last = _ends(losses, 1)
        tiles.append((f"{first:.3f} → {last:.3f}", "held-out loss, first and last"))
    tiles.append((f"{metrics.steps:,}", "steps"))
    if "samples" in metrics.last:
        tiles.append((f"{metrics.last['samples']:,.0f}", "trajectories trained" if plays else "rows trained"))
    tiles.append((duration(metrics.seconds), f"wall time ({metrics.seconds:,.0f} s)"))
    tiles.append((duration(metrics.cpu_seconds), f"CPU time ({metrics.cpu_seconds:,.0f} s)"))
    paths = {"run": f"<code>{html.escape(str(run_dir))}</code>"}
    if (checkpoint := _checkpoint(run_dir, summary)) is not None:
        paths["checkpoint"] = f"<code>{html.escape(checkpoint)}</code>"
        if plays:
            play = summary.get("play") or f"cadenza play {shlex.quote(str(run_dir))}"
            paths["play it"] = f"<code>{html.escape(str(play))}</code>"
    boxes = "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{name}</span></div>' for value, name in tiles)
    pairs = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in paths.items())
    name = html.escape(run_dir.resolve().name)
    return f'<h1>{name}</h1><div class="tiles">{boxes}</div><dl class="paths">{pairs}</dl>'


def _has_rows(run_dir: Path) -> bool:
    """Whether the run learns from rows: then it has no episodes to play."""
    path = run_dir / "config.yaml"
    return path.exists() and any(line.startswith("data:") for line in path.read_text(errors="replace").splitlines())


def _ends(series: DownsampledCurve, points: int) -> tuple[float, float]:
    """Return the mean of the first `points` points and of the last; at most a quarter of the curve each."""
    count = max(1, min(points, len(series.points) // 4))
    first, last = series.points[:count], series.points[-count:]
    return sum(point.y for point in first) / count, sum(point.y for point in last) / count


def _checkpoint(run_dir: Path, summary: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that the summary names, else the best, the last or the newest one."""
    if isinstance(named := summary.get("checkpoint"), str):
        return str(run_dir / named) if (run_dir / named).exists() else named
    there = run_dir / "checkpoints"
    found = [path for path in (there / "best", there / "last") if path.exists()] or sorted(there.glob("step-*"))[-1:]
    return str(found[0]) if found else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _table(metrics: _MetricHistory) -> str:
    """Return a table of every metric, also of those without a chart."""
    rows = []
    for name in sorted(metrics.series)[:ROWS]:
        series = metrics.series[name]
        if series.points:
            weight = series.count
            mean = sum(point.y * point.weight for point in series.points) / weight
            low, high = min(point.low for point in series.points), max(point.high for point in series.points)
            values = [_figure(value) for value in (metrics.first[name], metrics.last[name], low, high, mean)]
        else:
            values = [""] * 5
        bad = f'<span class="bad">{series.bad:,}</span>' if series.bad else ""
        cells = "".join(f"<td>{value}</td>" for value in (*values, f"{series.count:,}", bad))
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}<td>{spark_html(series.points)}</td></tr>")
    if not rows:
        return ""
    names = ("metric", "first", "last", "lowest", "highest", "mean", "values", "not finite", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    more = len(metrics.series) - ROWS
    rest = f"<p class='faint'>{more:,} more are in metrics.jsonl</p>" if more > 0 else ""
    return (
        f"<details><summary>All metrics ({len(metrics.series):,})</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>{rest}</details>'
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _folded(title: str, path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(clip(text, FOLDED))}</pre></details>"
