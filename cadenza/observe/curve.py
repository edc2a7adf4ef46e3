"""Curves: bounded memory for a metric of any length, a picture in Braille dots, and short texts for numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class CurvePoint(NamedTuple):
    """One point of a curve: the mean of some neighbouring values."""

    x: float
    """Mean of their steps."""
    y: float
    """Mean of the values."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    weight: int
    """Number of values."""


class DownsampledCurve:
    """A curve of any length in bounded memory: when it is full, every two neighbours become one point."""

    def __init__(self, limit: int = 600) -> None:
        self._limit = limit
        self._values_per_point = 1
        self._points: list[CurvePoint] = []
        self.bad = 0
        """Number of values that were not finite; they are left out."""

    def add(self, x: float, y: float) -> None:
        if not math.isfinite(y):
            self.bad += 1
            return
        point = CurvePoint(x, y, y, y, 1)
        if self._points and self._points[-1].weight < self._values_per_point:
            self._points[-1] = _merge(self._points[-1], point)
            return
        if len(self._points) == self._limit:
            self._points = [
                _merge(*self._points[at : at + 2]) if at + 1 < self._limit else self._points[at]
                for at in range(0, self._limit, 2)
            ]
            self._values_per_point *= 2
        self._points.append(point)

    @property
    def points(self) -> Sequence[CurvePoint]:
        """The points, in the order of the steps."""
        return self._points

    @property
    def count(self) -> int:
        """Number of finite values."""
        return sum(point.weight for point in self._points)


def _merge(one: CurvePoint, two: CurvePoint) -> CurvePoint:
    weight = one.weight + two.weight
    x = (one.x * one.weight + two.x * two.weight) / weight
    y = (one.y * one.weight + two.y * two.weight) / weight
    return CurvePoint(x, y, min(one.low, two.low), max(one.high, two.high), weight)


def curve(xs: Sequence[float], ys: Sequence[float], width: int = 60, height: int = 9, *, percent: bool = False) -> str:
    """Return a curve as text of `height` lines, none wider than `width`; values that are not finite are left out.

    With `percent` the values are shares, and the axis goes from 0 % to 100 %.
    """
    if width < 20 or height < 2:
        raise ValueError(f"a curve needs at least 20 columns and 2 lines, got {width} and {height}")
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not pairs:
        return "no values"
    across, up = [x for x, _ in pairs], [y for _, y in pairs]
    low, high = (0.0, 1.0) if percent else (min(up), max(up))
    if low == high:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    lines, columns = height - 1, width - 7
    span = min(across), max(max(across), min(across) + 1)
    cells = dot_cells(across, up, columns, lines, span, (low, high))
    labels = {lines - 1: low, 0: high}
    rows = []
    for number, row in enumerate(cells):
        label = "" if number not in labels else f"{labels[number]:.0%}" if percent else short(labels[number])
        rows.append(f"{label:>6}┤" + "".join(chr(0x2800 | cell) if cell else " " for cell in row).rstrip())
    return "\n".join([*rows, axis_text(*span, columns).rstrip()])


_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character: the left and the right column, from the top."""


def dot_cells(
    xs: Sequence[float],
    ys: Sequence[float],
    width: int,
    height: int,
    span: tuple[float, float],
    limits: tuple[float, float],
) -> list[list[int]]:
    """Return the Braille dots of a curve in cells of 2 x 4; values in one column of dots are averaged."""
    cells = [[0] * width for _ in range(height)]
    if not xs:
        return cells
    columns, rows = width * 2, height * 4
    at = np.clip((np.asarray(xs) - span[0]) / (span[1] - span[0]) * (columns - 1), 0, columns - 1).round().astype(int)
    counts = np.bincount(at, minlength=columns)
    known = np.flatnonzero(counts)
    means = np.bincount(at, weights=ys, minlength=columns)[known] / counts[known]
    drawn = np.arange(known[0], known[-1] + 1)
    share = (np.interp(drawn, known, means) - limits[0]) / (limits[1] - limits[0])
    dots = ((1 - np.clip(share, 0, 1)) * (rows - 1)).round().astype(int).tolist()
    before = dots[0]
    for column, dot in zip(drawn.tolist(), dots, strict=True):
        top, bottom = (before + 1, dot) if dot > before else (dot, before - 1)
        for row in range(min(top, dot), max(bottom, dot) + 1):
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
        before = dot
    return cells


def axis_text(first: float, last: float, columns: int) -> str:
    """Return the line below a curve: its first and its last x."""
    left, right = short(first), short(last)
    return f"{'':7}{left}{right:>{columns - len(left)}}"


def short(value: float) -> str:
    """Return a number in at most six characters."""
    size = abs(value)
    if size and not 1e-3 <= size < 0.9995e12:
        return f"{value:.0e}"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995 and size >= 9999.5:
            return f"{value / unit:.3g}{name}"
    if size >= 999.5:
        return f"{value:.0f}"
    return next(text for digits in (3, 2, 1) if len(text := f"{value:.{digits}g}") <= 6)


def duration(seconds: float) -> str:
    """Return a time as 0:42, 1:02:05 or 3 d 4 h."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
