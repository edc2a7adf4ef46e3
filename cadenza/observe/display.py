"""What a run shows in the terminal: a picture that stays in place, or plain lines where there is no terminal.

    update(step, metrics) --> RunTerminalView: at most four pictures a second, and at most 1 % of the CPU time
                          --> RunTextView: the first and the last step, each validation, else one line every two seconds

Only `update` draws: there is no thread and no timer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from cadenza.observe.curve import DownsampledCurve, axis_text, dot_cells, duration

WIDTH = 112
"""Columns of the picture at most."""
HEIGHT = 9
"""Rows of the curve, its axis included."""
SIDE = 32
"""Columns of the numbers beside the curve."""
FRAME = 0.25
"""Fewest seconds between two pictures."""
SHARE = 0.01
"""Largest share of the time that drawing may take."""
PAUSE = 2.0
"""Fewest seconds between two lines."""
WINDOW = 50
"""Steps from which the time left is estimated."""


class Display:
    """Shows the progress of a run. With `quiet` it shows nothing, for programs that print JSON."""

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
        """`target` is the success rate that the run aims at; the display estimates when it is reached."""
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
        """Show the metrics of a finished step; a metric that is missing keeps its last value."""
        self._status.add(step, metrics)
        if self._view is not None:
            self._view.update(news=any(name.startswith("val/") for name in metrics))

    def say(self, text: str) -> None:
        """Print a line above the picture."""
        if not self._quiet:
            plain = Text.from_ansi(text).plain
            clean = "".join(sign for sign in plain if sign.isprintable() or sign in "\n\t")
            self._console.print(Text(clean), soft_wrap=True)


class RunStatus:
    """Progress of the run: its newest metrics, the success curves, the seconds per step."""

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
        """Mean seconds of the last steps; None before the second."""
        if len(self._done) < 2:
            return None
        (first, began), (last, ended) = self._done[0], self._done[-1]
        return (ended - began) / (last - first) if last > first else None

    @property
    def left(self) -> float | None:
        """Estimated seconds to the last step."""
        return None if self.pace is None else self.pace * max(0, self.steps - self.step)

    def to_target(self) -> str | None:
        """Estimate when the success reaches the target, from the slope of the last third of its points."""
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
    """Return the state of the run as one line of text."""
    words = [f"step {status.step:,}/{status.steps:,}"]
    words += [f"{name} {value}" for name, value in numbers(status.latest)]
    words.append(f"{duration(status.seconds)} elapsed")
    if status.left is not None and not status.over:
        words.append(f"{duration(status.left)} left")
    if (when := status.to_target()) is not None:
        words.append(f"to {status.target:.0%}: {when}")
    return "  ".join(words)


def numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the metrics to show, as pairs of name and text; absent metrics are left out."""

    def number(name: str, form: str, unit: str = "") -> str | None:
        value = metrics.get(name)
        return None if value is None else f"{value:{form}}{unit}"

    success = [number("train/success", ".0%"), number("val/success", ".0%", " val")]
    loss = [number("train/loss", ".3f"), number("val/loss", ".3f", " val")] if "val/loss" in metrics else []
    stale = [number("staleness/mean", ".2f"), number("staleness/max", ".0f", " max")]
    shown = {
        "reward": number("train/score", ".3f") or number("val/score", ".3f", " val"),
        "success": ", ".join(filter(None, success)),
        "loss": ", ".join(filter(None, loss)),
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
        console = self._live.console
        self._live.update(
            terminal_text(self._status, min(console.width, WIDTH), console.options.ascii_only), refresh=True
        )


def terminal_text(status: RunStatus, width: int, ascii_only: bool = False) -> Text:
    """Return a headline, and the curve of the success beside the numbers.

    The picture is lines of text, because a rich table costs five times as much time.
    """
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
    times = f"{duration(status.seconds)} elapsed"
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
    """Draw the success over all steps of the run: training dim, validation bright."""
    columns, lines = width - 8, HEIGHT - 1
    first = min((series.points[0].x for series in status.success.values() if series.points), default=0.0)
    span = first, max(float(status.steps), first + 1)
    cells = {
        mode: dot_cells([p.x for p in series.points], [p.y for p in series.points], columns, lines, span, (0.0, 1.0))
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
    rows[lines].append(axis_text(*span, columns), "dim")
    rows[lines].append(" ")
    for row in rows[HEIGHT:]:
        row.append(" " * width)


_BLANK = chr(0x2800)
_STYLES = {(True, True): "bold green", (True, False): "bold green", (False, True): "cyan", (False, False): "dim"}
"""Style of a cell, by whether validation and training have dots in it."""
_ASCII = {ord("┤"): "|", ord("━"): "=", ord("─"): "-", ord("┈"): "-"} | {0x2800 + dots: "*" for dots in range(1, 256)}
