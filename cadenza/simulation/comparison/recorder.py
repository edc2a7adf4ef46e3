"""What a run looks like: when every replica generated how much, and when the trainer worked or waited.

A recorder only watches: a run that is recorded is the same run.
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
"""Of a picture: with more replicas, neighbours share a row."""


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A window of a recorded run, cut into columns of equal time."""

    start: float
    end: float
    running: NDArray[np.float64]
    """[rows, columns] sequences that a replica decoded at once, on average."""
    trained: list[tuple[float, float]]
    """When the trainer worked."""
    waited: list[tuple[float, float]]
    """When it waited for a batch; else it handed out weights."""
    published: list[tuple[float, int]]
    """When a version was trained, and which."""

    @property
    def busy(self) -> float:
        """The share of the time for which the trainer worked."""
        return sum(end - start for start, end in self.trained) / (self.end - self.start)


@dataclass(slots=True)
class RunRecorder:
    """Records when every replica decoded which request, and when the trainer asked, began and ended."""

    spans: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By replica: from when to when each request was decoded. Times do not go back."""
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """When the trainer asked for a batch or a chunk of one, had it, and had trained it."""
    versions: list[float] = field(default_factory=list)
    """When all of a batch was trained."""
    running: dict[int, dict[int, float]] = field(default_factory=dict)
    """By replica and request: since when what is not finished is decoded."""

    def replica_listener(self, replica: int) -> Callable[[float, str, object], None]:
        """What hears of the events of a replica."""
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
        """So many seconds from a version on, or all that is left."""
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
