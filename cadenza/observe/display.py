"""What a run shows in the terminal: one picture that stays in place, or plain lines where there is no terminal.

    update(step, metrics) --> RunTerminalView: at most four pictures a second, and at most 1 % of the CPU time
                          --> RunTextView: the first and the last step, each validation, else one line every two seconds

Drawing happens inside `update` and nowhere else: no thread, no timer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

WIDTH = 112
"""Columns of the picture, where the terminal has them."""
HEIGHT = 9
"""Rows of the curve, with its axis."""
SIDE = 32
"""Columns of the numbers beside it."""
FRAME = 0.25
"""Seconds between two pictures at least."""
SHARE = 0.01
"""Of the time, what drawing may take at most."""
PAUSE = 2.0
"""Seconds between two lines at least."""
WINDOW = 50
"""Steps from which the time left is estimated."""


class CurvePoint(NamedTuple):
    """Neighbouring values as one."""

    x: float
    y: float
    """Their mean."""
    low: float
    high: float
    weight: int
    """How many they are."""


class DownsampledCurve:
    """A curve of any length in bounded memory: when it is full, every two neighbours become one point."""

    def __init__(self, limit: int = 600) -> None:
        self._limit = limit
        self._values_per_point = 1
        self._points: list[CurvePoint] = []
        self.bad = 0
        """Values that were not finite; they are no points."""

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
        return self._points

    @property
    def count(self) -> int:
        return sum(point.weight for point in self._points)


def _merge(one: CurvePoint, two: CurvePoint) -> CurvePoint:
    weight = one.weight + two.weight
    x = (one.x * one.weight + two.x * two.weight) / weight
    y = (one.y * one.weight + two.y * two.weight) / weight
    return CurvePoint(x, y, min(one.low, two.low), max(one.high, two.high), weight)


class Display:
    """A run before your eyes. With `quiet` it shows nothing, for programs that print JSON."""

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        target: float | None = None,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`target` is the success at which the run would be content."""
        self._console = console or Console(highlight=False)
        self._status = RunStatus(title, steps, target, clock)
        self._quiet = quiet
        self._view: _RunView | None = None

    def __enter__(self) -> Display:
        if not self._quiet:
            terminal = self._console.is_terminal and not self._console.is_dumb_terminal
            self._view = (RunTerminalView if terminal else RunTextView)(self._console, self._status)
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, and this is what was measured; what is missing keeps its last value."""
        self._status.add(step, metrics)
        if self._view is not None:
            self._view.update(news=any(name.startswith("val/") for name in metrics))

    def say(self, text: str) -> None:
        """A line above the picture."""
        if not self._quiet:
            plain = Text.from_ansi(text).plain
            clean = "".join(sign for sign in plain if sign.isprintable() or sign in "\n\t")
            self._console.print(Text(clean), soft_wrap=True)


class RunStatus:
    """Progress of the run: its newest metrics, the success curves, the pace."""

    def __init__(self, title: str, steps: int, target: float | None, clock: Callable[[], float]) -> None:
        self.title = title
        self.steps = steps
        self.step = 0
        self.target = target
        self.latest: dict[str, float] = {}
        self.success = {"train": DownsampledCurve(), "val": DownsampledCurve()}
        self.clock = clock
        self._began = clock()
        self._done: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self._done.append((step, self.clock()))
        self.latest.update(metrics)
        for mode, series in self.success.items():
            if (value := metrics.get(f"{mode}/success")) is not None:
                series.add(step, value)

    @property
    def over(self) -> bool:
        return self.step >= self.steps

    @property
    def seconds(self) -> float:
        return self.clock() - self._began

    @property
    def pace(self) -> float | None:
        """Seconds per step, of the last steps."""
        if len(self._done) < 2:
            return None
        (first, began), (last, ended) = self._done[0], self._done[-1]
        return (ended - began) / (last - first) if last > first else None

    @property
    def left(self) -> float | None:
        """Seconds to the last step."""
        return None if self.pace is None else self.pace * max(0, self.steps - self.step)

    def to_target(self) -> str | None:
        """When the success gets there, if it goes on as in the last third of its points."""
        series = self.success["val"] if self.success["val"].points else self.success["train"]
        if self.target is None or not series.points:
            return None
        points = series.points[-max(3, len(series.points) // 3) :]
        now = points[-1].y if series is self.success["val"] else float(np.mean([point.y for point in points]))
        if now >= self.target:
            return "reached"
        if self.pace is None or len(points) < 3:
            return None
        slope = float(np.polyfit([point.x for point in points], [point.y for point in points], 1)[0])
        if slope <= 0:
            return "not in sight"
        steps = (self.target - now) / slope
        return duration(steps * self.pace) if self.step + steps <= self.steps else "after the last step"


class _RunView(Protocol):
    def update(self, *, news: bool) -> None: ...

    def close(self) -> None: ...


class RunTextView:
    """Plain lines of text, for a file or a pipe."""

    def __init__(self, console: Console, status: RunStatus) -> None:
        self._console = console
        self._status = status
        self._said: float | None = None
        self._pending = False
        console.print(Text(f"{status.title}, {status.steps:,} steps"), soft_wrap=True)

    def update(self, *, news: bool) -> None:
        now = self._status.clock()
        self._pending = True
        if news or self._status.over or self._said is None or now - self._said >= PAUSE:
            self._say(now)

    def close(self) -> None:
        if self._pending:
            self._say(self._status.clock())

    def _say(self, now: float) -> None:
        self._said, self._pending = now, False
        self._console.print(Text(sentence(self._status)), soft_wrap=True)


def sentence(status: RunStatus) -> str:
    """Where the run stands, on one line."""
    words = [f"step {status.step:,}/{status.steps:,}"]
    words += [f"{name} {value}" for name, value in numbers(status.latest)]
    words.append(f"{duration(status.seconds)} gone")
    if status.left is not None and not status.over:
        words.append(f"{duration(status.left)} left")
    if (when := status.to_target()) is not None:
        words.append(f"to {status.target:.0%}: {when}")
    return "  ".join(words)


def numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """What to show of the metrics that there are, by name."""

    def number(name: str, form: str, unit: str = "") -> str | None:
        value = metrics.get(name)
        return None if value is None else f"{value:{form}}{unit}"

    success = [number("train/success", ".0%"), number("val/success", ".0%", " val")]
    stale = [number("staleness/mean", ".2f"), number("staleness/max", ".0f", " max")]
    shown = {
        "reward": number("train/score", ".3f") or number("val/score", ".3f", " val"),
        "success": ", ".join(filter(None, success)),
        "response": number("train/response_tokens", ",.1f", " tokens"),
        "turns": number("train/turns", ".1f"),
        "staleness": ", ".join(filter(None, stale)),
        "speed": number("perf/tokens_per_second", ",.0f", " tokens/s"),
        "samples": number("samples", ",.0f"),
    }
    return [(name, value) for name, value in shown.items() if value]


class RunTerminalView:
    """A picture that stays in place, for a terminal."""

    def __init__(self, console: Console, status: RunStatus) -> None:
        self._status = status
        self._live = Live(Text(""), console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        self._next = -math.inf
        self.frames = 0

    def update(self, *, news: bool) -> None:
        now = self._status.clock()
        if now < self._next:
            return
        began = time.process_time()
        self._draw()
        self._next = now + max(FRAME, (time.process_time() - began) / SHARE)

    def close(self) -> None:
        if self._status.step:
            self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self.frames += 1
        console = self._live.console
        self._live.update(
            terminal_text(self._status, min(console.width, WIDTH), console.options.ascii_only), refresh=True
        )


def terminal_text(status: RunStatus, width: int, ascii_only: bool = False) -> Text:
    """A headline, and the curve of the success beside the numbers. Lines of text: tables cost five times as much."""
    side = numbers(status.latest)
    if status.pace is not None:
        side.append(("step", f"{status.pace:.2f} s" if status.pace < 100 else duration(status.pace)))
    if (when := status.to_target()) is not None:
        side.append((f"to {status.target:.0%}", when))
    rows = [Text() for _ in range(max(HEIGHT, len(side)))] if width >= SIDE + 28 else [Text() for _ in side]
    if width >= SIDE + 28:
        _success(rows, status, width - SIDE)
    for row, (name, value) in zip(rows, side, strict=False):
        row.append(f"{name:>9}  ", "dim")
        row.append(value, "bold")
    text = Text("\n", no_wrap=True, overflow="crop").join([_headline(status, width), *rows])
    if ascii_only:
        text.plain = text.plain.translate(_ASCII)
    return text


def _headline(status: RunStatus, width: int) -> Text:
    times = f"{duration(status.seconds)} gone"
    if status.left is not None and not status.over:
        times += f", {duration(status.left)} left"
    position = f"step {status.step:,} of {status.steps:,}"
    title = status.title[: max(0, width - len(position) - len(times) - 18)]
    bar_width = max(0, width - len(title) - len(position) - len(times) - 7)
    full = round(bar_width * min(1.0, status.step / max(1, status.steps)))
    return Text.assemble(
        (title, "bold"),
        "  ",
        position,
        "  ",
        ("━" * full, "cyan"),
        ("─" * (bar_width - full), "dim"),
        "  ",
        (times, "dim"),
    )


def _success(rows: list[Text], status: RunStatus, width: int) -> None:
    """The curve over the whole run, so that it grows to the right: training dim, validation bright."""
    columns, lines = width - 8, HEIGHT - 1
    first = min((series.points[0].x for series in status.success.values() if series.points), default=0.0)
    span = first, max(float(status.steps), first + 1)
    cells = {
        mode: _cells([p.x for p in series.points], [p.y for p in series.points], columns, lines, span, (0.0, 1.0))
        for mode, series in status.success.items()
    }
    labels = {0: "100%", lines // 2: " 50%", lines - 1: "  0%"}
    mark = None if status.target is None else min(lines - 1, int((1 - status.target) * lines))
    for number, row in enumerate(rows[:lines]):
        row.append(f"{labels.get(number, ''):>6}┤", "dim")
        empty = "┈" if number == mark else " "
        both = zip(cells["train"][number], cells["val"][number], strict=True)
        styled = [(_STYLES[bool(val), bool(train)], chr(0x2800 | (val or train))) for train, val in both]
        for style, run in itertools.groupby(styled, key=itemgetter(0)):
            signs = "".join(sign for _, sign in run)
            row.append(signs.replace(_BLANK, empty), style)
        row.append(" ")
    rows[lines].append(_axis(*span, columns), "dim")
    rows[lines].append(" ")
    for row in rows[HEIGHT:]:
        row.append(" " * width)


_BLANK = chr(0x2800)
_STYLES = {(True, True): "bold green", (True, False): "bold green", (False, True): "cyan", (False, False): "dim"}
"""Of a cell, by whether validation and training have dots in it."""
_ASCII = {ord("┤"): "|", ord("━"): "=", ord("─"): "-", ord("┈"): "-"} | {0x2800 + dots: "*" for dots in range(1, 256)}


def curve(xs: Sequence[float], ys: Sequence[float], width: int = 60, height: int = 9, *, percent: bool = False) -> str:
    """A curve as text of `height` lines, none wider than `width`; values that are not finite are left out.

    With `percent` the values are shares, and the picture goes from 0 % to 100 %.
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
    cells = _cells(across, up, columns, lines, span, (low, high))
    labels = {lines - 1: low, 0: high}
    rows = []
    for number, row in enumerate(cells):
        label = "" if number not in labels else f"{labels[number]:.0%}" if percent else short(labels[number])
        rows.append(f"{label:>6}┤" + "".join(chr(0x2800 | cell) if cell else " " for cell in row).rstrip())
    return "\n".join([*rows, _axis(*span, columns).rstrip()])


_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Braille: the bits of the left and the right column, from above."""


def _cells(
    xs: Sequence[float],
    ys: Sequence[float],
    width: int,
    height: int,
    span: tuple[float, float],
    limits: tuple[float, float],
) -> list[list[int]]:
    """The dots of a line, in cells of 2 x 4. Values in one column of dots are averaged."""
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


def _axis(first: float, last: float, columns: int) -> str:
    left, right = short(first), short(last)
    return f"{'':7}{left}{right:>{columns - len(left)}}"


def short(value: float) -> str:
    """A number in at most six characters."""
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
    """0:42, 1:02:05, 3 d 4 h."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
