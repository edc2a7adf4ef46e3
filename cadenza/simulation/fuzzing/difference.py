"""The first event in which two runs of one scenario differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cadenza.simulation.fuzzing.monitor import LoggedEvent


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that the second run does not share with the first."""

    number: int
    """Events before it."""
    first: LoggedEvent | None
    """Event of the first run; None when that run had ended."""
    second: LoggedEvent | None
    """Event of the second run; None when that run had ended."""

    def __str__(self) -> str:
        return f"event {self.number}: first {_describe(self.first)}, then {_describe(self.second)}"


def first_difference(first: Sequence[LoggedEvent], second: Sequence[LoggedEvent]) -> Difference | None:
    """Compare two runs event by event; None when they are the same."""
    for number, (left, right) in enumerate(zip_longest(first, second)):
        if left != right:
            return Difference(number, left, right)
    return None


def _describe(logged: LoggedEvent | None) -> str:
    if logged is None:
        return "the end"
    event = logged.event
    return f"{logged.source} {event.kind} {event.subject} '{event.detail}' at {event.time!r} s"
