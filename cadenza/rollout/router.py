"""Which replica serves a request.

A session wants the replica that holds its prefix, the first turn of a group member the one that holds the group's
prompt, and everybody the replica under the least pressure. What these wishes are worth is weighed in time, summed over
all who wait for it. To leave costs the prefill of the prefix, which holds up everybody on the other replica. To stay
costs, with every token of the answer, a decode step that is longer by the context which the replica has in excess. A
replica without room is left anyway. Pressure is the context that is to be expected: what was granted, and for each
request half of the answer it is going to write, so that a long context that comes back weighs as much as it will.

The least loaded replica is on top of a heap whose entries may be old; an entry whose pressure is not its seat's
any more is dropped when it surfaces. So a decision costs O(log replicas) and nothing per session.
"""

from __future__ import annotations

import asyncio
import heapq
from enum import Enum

from cadenza.inference.replica import Replica

SEQUENCE_WEIGHT = 128
"""What a running sequence costs besides its context, in tokens of context (b/c of the cost model)."""
PREFILL_WEIGHT = 400.0
"""What the prefill of a token costs, in decode steps over a token of context (p/c of the cost model: 300 to 1500)."""
MEMORY = 256
"""Answers over which their mean length is taken."""
MAX_HOMES = 1 << 16
"""Groups whose home is remembered; beyond it the oldest are forgotten."""


class SeatState(Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    ASLEEP = "asleep"
    LOST = "lost"


class Seat:
    """A replica's place in the sampler: its state, what is in flight on it, and how much that weighs."""

    __slots__ = (
        "asked", "capacity", "failures", "gone", "index", "inflight", "load", "loading", "pressure", "progress",
        "replica", "served", "state", "strikes", "version",
    )  # fmt: skip

    def __init__(self, index: int, replica: Replica, gone: asyncio.Future[str]) -> None:
        self.index = index
        self.replica = replica
        self.capacity = max(replica.kv_capacity, 1)
        self.state = SeatState.ACTIVE
        self.version = 0
        self.loading = False
        """Weights are being loaded, under a deadline of their own."""
        self.load = 0
        """Tokens of context in flight when they were granted."""
        self.pressure = 0.0
        """The same with what each request weighs besides and is going to write, as a share of the capacity."""
        self.inflight = 0
        """Requests granted and not released."""
        self.gone = gone
        """Resolves with the cause when the replica is given up."""
        self.asked = 0
        self.served = 0
        """Requests sent and answered since the last health check, which looks closer when none was answered."""
        self.failures = 0
        """Requests that failed in a row."""
        self.strikes = 0
        """Health checks in a row without progress."""
        self.progress = -1


class Router:
    """Chooses among the active seats."""

    def __init__(self, prefill_weight: float = PREFILL_WEIGHT) -> None:
        self.prefill_weight = prefill_weight
        self.answer = 1024.0
        """Mean length of the last answers, in tokens."""
        self.escapes = 0
        """Requests that left the replica with their prefix because it was loaded."""
        self._heap: list[tuple[float, int, Seat]] = []
        self._seats = 0
        self._homes: dict[int, Seat] = {}

    def rebuild(self, seats: list[Seat]) -> None:
        """The set of seats changed."""
        self._heap = [(seat.pressure, seat.index, seat) for seat in seats if seat.state is SeatState.ACTIVE]
        heapq.heapify(self._heap)
        self._seats = len(self._heap)

    def pick(self, sticky: Seat | None, group: int, context: int, cached: int) -> Seat | None:
        """The seat for a request of `context` tokens, `cached` of which the sticky seat holds."""
        best = self._least()
        if best is None:
            return None
        if sticky is not None:
            if sticky is best or self._worth_it(sticky, best, context, cached):
                return sticky
            self.escapes += 1
            return best
        home = self._homes.get(group)
        if home is not None and (home is best or self._worth_it(home, best, context, context)):
            return home
        if home is None and len(self._homes) >= MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        self._homes[group] = best
        return best

    def learn(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self.answer += (tokens - self.answer) / MEMORY

    def add(self, seat: Seat, context: int) -> None:
        """A request goes there."""
        seat.asked += 1
        seat.inflight += 1
        self._weigh(seat, context)

    def remove(self, seat: Seat, context: int) -> None:
        """A request left."""
        seat.inflight -= 1
        self._weigh(seat, -context)

    def _weigh(self, seat: Seat, tokens: int) -> None:
        seat.load += tokens
        seat.pressure = (seat.load + seat.inflight * (SEQUENCE_WEIGHT + self.answer / 2)) / seat.capacity
        if seat.state is SeatState.ACTIVE:
            if len(self._heap) > 8 * self._seats + 64:
                self.rebuild(list({seat.index: seat for _, _, seat in self._heap}.values()))
            else:
                heapq.heappush(self._heap, (seat.pressure, seat.index, seat))

    def _worth_it(self, seat: Seat, best: Seat, context: int, cached: int) -> bool:
        if seat.state is not SeatState.ACTIVE:
            return False
        if seat.load + context > seat.capacity and best.load + context <= best.capacity:
            return False
        excess = (seat.pressure - best.pressure) * seat.capacity
        return self.answer * excess <= self.prefill_weight * cached * (1 + best.inflight)

    def _least(self) -> Seat | None:
        heap = self._heap
        while heap:
            pressure, _, seat = heap[0]
            if seat.state is SeatState.ACTIVE and seat.pressure == pressure:
                return seat
            heapq.heappop(heap)
        return None
