"""The charts of a report: curves as SVG."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cadenza.observe.curve import CurvePoint, DownsampledCurve, short


class Chart(NamedTuple):
    """One chart: its title, the metrics that it shows, and their unit."""

    title: str
    names: tuple[str, ...]
    unit: str = ""


CHARTS = (
    Chart("Success", ("train/success", "val/success"), "%"),
    Chart("Reward", ("train/score", "val/score")),
    Chart("Response length", ("train/response_tokens",), "tokens"),
    Chart("Turns", ("train/turns",)),
    Chart("Entropy", ("train/entropy",)),
    Chart("KL", ("train/kl",)),
    Chart("Loss", ("train/loss", "val/loss")),
    Chart("Pairs in the right order", ("train/accuracy",), "%"),
    Chart("Gradient norm", ("train/grad_norm",)),
    Chart("Staleness", ("staleness/mean", "staleness/max"), "versions"),
    Chart("Speed", ("perf/tokens_per_second",), "tokens/s"),
)


class _PlotArea(NamedTuple):
    """The rectangle of a plot in pixels (left to bottom), and the range of values that it shows (x0 to y1)."""

    left: float
    top: float
    right: float
    bottom: float
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / ((self.x1 - self.x0) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / ((self.y1 - self.y0) or 1) * (self.bottom - self.top)

    def line(self, pairs: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in pairs)


def charts_html(metrics: Mapping[str, DownsampledCurve]) -> str:
    """Return the section with the charts of the metrics that the run has."""
    figures: list[str] = []
    for chart in CHARTS:
        drawn = {name: metrics[name] for name in chart.names if name in metrics}
        if any(series.points for series in drawn.values()):
            figures.append(_chart(chart, drawn, wide=not figures))
    if not figures:
        return "<h2>Curves</h2><p class='faint'>Nothing has been measured yet.</p>"
    note = "<p class='faint'>Thin: measured. Thick: smoothed. Point at a curve to read it.</p>"
    return f'<h2>Curves</h2>{note}<div class="charts">{"".join(figures)}</div>'


def _chart(chart: Chart, drawn: Mapping[str, DownsampledCurve], *, wide: bool) -> str:
    width, height = (1160, 250) if wide else (360, 180)
    points = [point for series in drawn.values() for point in series.points]
    low, high = _limits([y for point in points for y in (point.low, point.high)], share=chart.unit == "%")
    first, last = min(point.x for point in points), max(point.x for point in points)
    box = _PlotArea(left=44, top=10, right=width - 8, bottom=height - 22, x0=first, x1=last, y0=low, y1=high)
    lines = "".join(_curve(box, at, name, series.points) for at, (name, series) in enumerate(drawn.items()))
    keys = "".join(
        f'<span class="s{at}" title="{name}">{_key(name, drawn)}{_bad(series)}</span>'
        for at, (name, series) in enumerate(drawn.items())
    )
    unit = f"<span>{chart.unit}</span>" if chart.unit not in ("", "%") else ""
    now = ", ".join(_axis_label(series.points[-1].y, chart.unit) for series in drawn.values() if series.points)
    return (
        f'<figure data-box="{json.dumps(list(box))}"{" class=wide" if wide else ""}>'
        f'<figcaption>{chart.title}{unit}{keys}<span class="read">last {now}</span></figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{chart.title}">'
        f"{_axes(box, chart.unit, width)}{lines}</svg></figure>"
    )


def _key(name: str, drawn: Mapping[str, DownsampledCurve]) -> str:
    """Return the legend of a curve: what its name does not share with the others of its chart."""
    if len(drawn) == 1:
        return "" if name.startswith("train/") else '<i class="key"></i>' + name
    area, _, rest = name.partition("/")
    alike = len({other.partition("/")[2] for other in drawn}) == 1
    return f'<i class="key"></i>{area if alike else rest}'


def _bad(series: DownsampledCurve) -> str:
    return f' <b class="bad">{series.bad:,} not finite</b>' if series.bad else ""


def _curve(box: _PlotArea, at: int, name: str, points: Sequence[CurvePoint]) -> str:
    """Draw the measured values thin, with their range where points were merged, and the smoothed curve over them."""
    if not points:
        return ""
    label = html.escape(name)
    raw = box.line((point.x, point.y) for point in points)
    if len(points) <= 60:
        dots = "".join(f'<circle class="dot" cx="{box.x(p.x):.1f}" cy="{box.y(p.y):.1f}" r="2.5"/>' for p in points)
        line = f'<polyline class="smooth only" data-name="{label}" points="{raw}"/>'
        return f'<g class="s{at}">{line}{dots}</g>'
    band = ""
    if any(point.weight > 1 for point in points):
        around = [(point.x, point.high) for point in points] + [(point.x, point.low) for point in reversed(points)]
        band = f'<polygon class="band" points="{box.line(around)}"/>'
    soft = box.line(zip((point.x for point in points), smooth([point.y for point in points]), strict=True))
    lines = f'<polyline class="raw" data-name="{label}" points="{raw}"/><polyline class="smooth" points="{soft}"/>'
    return f'<g class="s{at}">{band}{lines}</g>'


def smooth(values: Sequence[float]) -> list[float]:
    """Return a moving average over about a thirtieth of the curve, to both sides, so that it does not lag."""
    keep = 1 - 1 / max(1.0, len(values) / 60)

    def one_side(values: Iterable[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        sums = []
        for value in values:
            total, weight = keep * total + value, keep * weight + 1
            sums.append((total, weight))
        return sums

    sides = zip(values, one_side(values), reversed(one_side(reversed(values))), strict=True)
    return [(left + right - value) / (w + v - 1) for value, (left, w), (right, v) in sides]


def _axes(box: _PlotArea, unit: str, width: int) -> str:
    out = []
    for at in range(5 if width > 500 else 3):
        value = box.y0 + (box.y1 - box.y0) * at / (4 if width > 500 else 2)
        y = box.y(value)
        label = _axis_label(value, unit)
        out.append(f'<line class="grid" x1="{box.left}" x2="{box.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{box.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, anchor in ((box.x0, "start"), (box.x1, "end")):
        label = f"step {value:,.0f}"
        out.append(f'<text x="{box.x(value):.1f}" y="{box.bottom + 17}" text-anchor="{anchor}">{label}</text>')
    return "".join(out)


def _axis_label(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else short(value)


def _limits(values: Sequence[float], *, share: bool = False) -> tuple[float, float]:
    """Return the range of an axis: 0 to 1 for shares, else that of the values, with 0 if it is near."""
    low, high = min(values), max(values)
    if share and low >= 0 and high <= 1:
        return 0.0, 1.0
    if 0 < low < high / 2:
        low = 0.0
    if low == high:
        return low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return low, high


def spark_html(points: Sequence[CurvePoint]) -> str:
    """Return a small curve for a cell of a table; empty with fewer than two points."""
    few = points[:: max(1, len(points) // 80)]
    if len(few) < 2:
        return ""
    low, high = _limits([point.y for point in few])
    box = _PlotArea(left=1, top=1, right=119, bottom=21, x0=few[0].x, x1=few[-1].x, y0=low, y1=high)
    line = box.line((point.x, point.y) for point in few)
    return f'<svg viewBox="0 0 120 22" class="s0"><polyline class="smooth" points="{line}"/></svg>'
