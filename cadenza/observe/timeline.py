"""The events of a run as intervals: when every attempt ran, on which replica and in which slot, and its fate.

The events are those of one scheduler and its sampler, in the order of time. An interval that is open when they stop (a
request in flight, a closed gate, an attempt without a fate) ends at the last event.

    events --build_timeline()--> Timeline --> timeline_png: a picture;  timeline_html: a page to explore
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from cadenza.observe.events import Event

FATES = {
    "trained": "#2f9e6e",
    "validated": "#3f7fc1",
    "filtered": "#e0a92e",
    "surplus": "#a86fc0",
    "stale": "#b5713a",
    "failed": "#d63a3a",
    "cancelled": "#9097a0",
    "running": "#c3c8ce",
}
"""The fates of an attempt and their colours; 'running' means that it has none yet."""

VERSIONS = ("#3568b0", "#86c5c0", "#6d4fa3", "#8fbbe8", "#22808a", "#bfa8e0")
"""Colours of the versions, repeated; neighbours differ clearly."""


@dataclass(slots=True)
class RequestSpan:
    """One request on one replica."""

    replica: str
    start: float
    end: float
    outcome: str = "cut off"
    """stop, length or abort; refused or error; 'cut off' when the attempt ended first."""
    tokens: int = 0


@dataclass(slots=True)
class AttemptSpan:
    """One attempt: when it ran, in which slot, and its fate."""

    key: str
    task: str
    version: int
    """Published version when its group began."""
    slot: int
    start: float
    end: float
    """Time at which its slot was free again."""
    closed: float
    """Time at which it got its fate."""
    fate: str = "running"
    cause: str = ""
    reward: float | None = None
    calls: list[RequestSpan] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Response tokens that the attempt received."""
        return sum(call.tokens for call in self.calls)


@dataclass(slots=True)
class Timeline:
    """The intervals and moments of a run."""

    attempts: list[AttemptSpan] = field(default_factory=list)
    replicas: list[str] = field(default_factory=list)
    """Names of the replicas that got a request or were lost, with numbers in natural order."""
    suspensions: list[tuple[float, float]] = field(default_factory=list)
    """From the closing of the gate to its opening."""
    published: list[tuple[float, int]] = field(default_factory=list)
    """Time and version."""
    cuts: list[tuple[float, int]] = field(default_factory=list)
    """Time and trajectories of every batch."""
    lost: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, replica and cause."""
    start: float = 0.0
    end: float = 0.0

    @property
    def slots(self) -> int:
        return 1 + max((attempt.slot for attempt in self.attempts), default=-1)


def build_timeline(events: Iterable[Event]) -> Timeline:
    """Build the timeline of a run from its events."""
    reader = _TimelineBuilder()
    for event in events:
        reader.read(event)
    return reader.close()


class _TimelineBuilder:
    """Builds the timeline event by event; holds the intervals that are still open."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._first: float | None = None
        self._groups: dict[str, tuple[str, int]] = {}
        self._attempts: dict[str, AttemptSpan] = {}
        self._calls: dict[str, RequestSpan] = {}
        self._suspended: float | None = None
        self._replicas: set[str] = set()

    def read(self, event: Event) -> None:
        time, kind, subject, detail = event
        timeline = self.timeline
        self._first = time if self._first is None else self._first
        timeline.end = max(timeline.end, time)
        if kind == "open":
            task, _, version = detail.rpartition(" at version ")
            self._groups[subject] = (task, int(version))
        elif kind == "issue":
            self._issue(time, subject, int(detail.removeprefix("slot ")))
        elif kind == "suspend":
            self._suspended = time
        elif kind == "resume":
            self._resume(time)
        elif kind == "publish":
            timeline.published.append((time, int(detail)))
        elif kind == "lost":
            timeline.lost.append((time, subject, detail))
            self._replicas.add(subject)
        elif (attempt := self._attempts.get(subject)) is not None:
            self._continue(attempt, time, kind, detail)

    def close(self) -> Timeline:
        timeline = self.timeline
        timeline.start = 0.0 if self._first is None else self._first
        self._resume(timeline.end)
        for attempt in list(self._attempts.values()):
            self._close(attempt, timeline.end, attempt.fate, "")
        timeline.replicas = sorted(self._replicas, key=_natural)
        _free_slots(timeline.attempts)
        return timeline

    def _issue(self, time: float, key: str, slot: int) -> None:
        task, version = self._groups.get(key.partition(".")[0], ("", 0))
        self._attempts[key] = attempt = AttemptSpan(key, task, version, slot, time, end=-1.0, closed=time)
        self.timeline.attempts.append(attempt)

    def _continue(self, attempt: AttemptSpan, time: float, kind: str, detail: str) -> None:
        if kind == "ask":
            self._calls[attempt.key] = call = RequestSpan(detail, time, time)
            self._replicas.add(detail)
            attempt.calls.append(call)
        elif kind == "answer" and attempt.key in self._calls:
            call = self._calls.pop(attempt.key)
            call.outcome, _, tokens = detail.partition(" ")
            call.tokens = int(tokens or 0)
            call.end = time
        elif kind == "finish":
            attempt.end = time
            attempt.reward = float(detail.removeprefix("reward "))
        elif kind in FATES:
            self._close(attempt, time, kind, detail)

    def _close(self, attempt: AttemptSpan, time: float, fate: str, cause: str) -> None:
        attempt.fate, attempt.cause, attempt.closed = fate, cause, time
        if attempt.end < 0:
            attempt.end = time
        if call := self._calls.pop(attempt.key, None):
            call.end = time
        del self._attempts[attempt.key]
        if fate in ("trained", "validated"):
            cuts = self.timeline.cuts
            if cuts and cuts[-1][0] == time:
                cuts[-1] = (time, cuts[-1][1] + 1)
            else:
                cuts.append((time, 1))

    def _resume(self, time: float) -> None:
        if self._suspended is not None:
            self.timeline.suspensions.append((self._suspended, time))
            self._suspended = None


def _free_slots(attempts: list[AttemptSpan]) -> None:
    """End each attempt at the latest when the next one takes its slot: a slot is free before the reward is known."""
    latest: dict[int, AttemptSpan] = {}
    for attempt in attempts:
        before = latest.get(attempt.slot)
        if before is not None:
            before.end = min(before.end, attempt.start)
        latest[attempt.slot] = attempt


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts r2 before r10."""
    pieces = [piece for piece in re.split(r"(\d+)", name) if piece]
    return [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces]
