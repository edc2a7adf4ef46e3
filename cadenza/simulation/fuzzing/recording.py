"""Record a schedule, and replay it exactly.

Invariant: a recording is the scenario and every event of its run, in order. A replay runs the scenario again with the
code that is there, and either every event is the same or the first that is not is named.

A file of JSON lines: the scenario first, then one event per line as [source, time, kind, subject, detail].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from cadenza.observe.events import Event
from cadenza.simulation.fuzzing.monitor import LoggedEvent
from cadenza.simulation.fuzzing.scenario import Scenario
from cadenza.simulation.fuzzing.schedule import run

_Row = tuple[str, float, str, str, str]


@dataclass(frozen=True, slots=True)
class ScheduleRecording:
    """A scenario and all events of its run."""

    scenario: Scenario
    events: tuple[LoggedEvent, ...]

    def save(self, path: Path) -> None:
        encode = msgspec.json.encode
        rows = (encode((logged.source, *logged.event)) for logged in self.events)
        path.write_bytes(b"\n".join((encode(self.scenario), *rows)) + b"\n")

    @classmethod
    def load(cls, path: Path) -> ScheduleRecording:
        """Read a recording; what is wrong with it is said with its line."""
        rows = path.read_bytes().splitlines()
        if not rows:
            raise ValueError(f"{path} is empty: it should begin with a scenario")
        return cls(_decoded(path, 1, rows[0], Scenario), tuple(_decoded_events(path, rows[1:])))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that a replay does not share with its recording."""

    number: int
    """Events before it."""
    recorded: LoggedEvent | None
    """None when the recording ended before."""
    replayed: LoggedEvent | None

    def __str__(self) -> str:
        return f"event {self.number}: recorded {_describe(self.recorded)}, replayed {_describe(self.replayed)}"


def record(scenario: Scenario) -> ScheduleRecording:
    """Run a scenario and keep what happened."""
    return ScheduleRecording(scenario, tuple(run(scenario).events))


def replay(path: Path) -> Difference | None:
    """Run a recording again; None when it is the same, event by event."""
    recorded = ScheduleRecording.load(path)
    return first_difference(recorded.events, record(recorded.scenario).events)


def first_difference(recorded: Sequence[LoggedEvent], replayed: Sequence[LoggedEvent]) -> Difference | None:
    """The first event at which two runs differ."""
    for number, (left, right) in enumerate(zip_longest(recorded, replayed)):
        if left != right:
            return Difference(number, left, right)
    return None


def _decoded_events(path: Path, rows: list[bytes]) -> Iterator[LoggedEvent]:
    for number, row in enumerate(rows, start=2):
        source, time, kind, subject, detail = _decoded(path, number, row, _Row)
        yield LoggedEvent(source, Event(time, kind, subject, detail))


def _decoded(path: Path, number: int, row: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(row, type=type)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def _describe(logged: LoggedEvent | None) -> str:
    if logged is None:
        return "the end"
    event = logged.event
    return f"{logged.source} {event.kind} {event.subject} '{event.detail}' at {event.time!r} s"
