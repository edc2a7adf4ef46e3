"""A recording of one simulated run: the load of every replica, and when the trainer worked or waited.

A recorder only listens: a run with a recorder has the same events as one without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cadenza.inference.replica import Request
from cadenza.observe.timeline_png import concurrency

MOST_ROWS = 64
"""Rows of a picture at most; with more replicas, neighbours share a row."""


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A window of a recorded run, divided into columns of equal time."""

    start: float
    end: float
    running: NDArray[np.float64]
    """[rows, columns] mean number of sequences that a replica decoded together."""
    trained: list[tuple[float, float]]
    """Intervals in which the trainer worked."""
    waited: list[tuple[float, float]]
    """Intervals in which it waited for a batch; in the others it published weights."""
    published: list[tuple[float, int]]
    """Times at which a version was trained, and the version."""

    @property
    def busy(self) -> float:
        """Share of the time for which the trainer worked."""
        return sum(end - start for start, end in self.trained) / (self.end - self.start)


@dataclass(slots=True)
class RunRecorder:
    """Records when every replica decoded which request, and when the trainer asked, began and ended."""

    spans: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By replica: the interval in which each request was decoded, in the order of the ends."""
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """Times at which the trainer asked for a batch or a chunk of one, received it, and had trained it."""
    versions: list[float] = field(default_factory=list)
    """Times at which a whole batch was trained."""
    running: dict[int, dict[int, float]] = field(default_factory=dict)
    """By replica and request: the time since which a request that is not finished is decoded."""

    def replica_listener(self, replica: int) -> Callable[[float, str, object], None]:
        """Return the `on_event` callback of a replica."""
        spans = self.spans.setdefault(replica, [])
        running = self.running.setdefault(replica, {})

        def on_event(time: float, kind: str, request: object) -> None:
            number = cast(Request, request).id
            if kind == "join":
                running[number] = time
            elif kind != "start" and (since := running.pop(number, None)) is not None:
                spans.append((since, time))

        return on_event

    def step(self, asked: float, began: float, ended: float) -> None:
        self.steps.append((asked, began, ended))

    def version(self, time: float) -> None:
        self.versions.append(time)

    def window(self, first: int, seconds: float, columns: int) -> TimelineWindow:
        """Return the window of `seconds` after version `first` was trained, or what the run has of it."""
        start = self.versions[first]
        end = min(start + seconds, self.versions[-1])
        edges = np.linspace(start, end, columns + 1)
        spans = [
            self.spans[replica] + [(since, max(since, end)) for since in self.running[replica].values()]
            for replica in sorted(self.spans)
        ]
        rows = np.array([concurrency(own, edges) for own in spans])
        if len(rows) > MOST_ROWS:
            shared_rows = np.array_split(np.arange(len(rows)), MOST_ROWS)
            rows = np.array([rows[rows_of_one].mean(axis=0) for rows_of_one in shared_rows])
        return TimelineWindow(
            start,
            end,
            rows,
            trained=[(max(b, start), min(e, end)) for _, b, e in self.steps if b < end and e > start],
            waited=[(max(a, start), min(b, end)) for a, b, _ in self.steps if a < b and a < end and b > start],
            published=[(time, number + 1) for number, time in enumerate(self.versions) if start <= time < end],
        )
