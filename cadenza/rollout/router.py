"""Which replica serves a request.

A session wants the replica that holds its prefix, the first turn of a group member the one that holds the group's
prompt, and everybody the replica under the least pressure. What these wishes are worth is weighed in time, summed over
all who wait for it. To leave costs the prefill of the prefix, which holds up everybody on the other replica. To stay
costs, with every token of the answer, a decode step that is longer by the context which the replica has in excess. A
replica without room is left anyway. Pressure is the context that is to be expected: what was granted, and for each
request half of the answer it is going to write, so that a long context that comes back weighs as much as it will.

A session that is away, with its env, keeps its context in the cache of its replica, and so it counts there. Where the
contexts do not fit any more, sessions that are away give way to older groups, and a turn that finds no room waits
(line.py). An engine would throw contexts out in the order of their last use, which is the order in which they come
back, so that everybody would prefill everything with every turn.

The least loaded replica is on top of a heap whose entries may be old; an entry whose pressure is not its seat's
any more is dropped when it surfaces. So a decision costs O(log replicas) and nothing per session.
"""

from __future__ import annotations

import asyncio
import heapq
from enum import Enum
from typing import NamedTuple

from cadenza.inference.replica import Replica

SEQUENCE_WEIGHT = 128
"""What a running sequence costs besides its context, in tokens of context (b/c of the cost model)."""
PREFILL_WEIGHT = 400.0
"""What the prefill of a token costs, in decode steps over a token of context (p/c of the cost model: 300 to 1500)."""
MEMORY = 256
"""Answers over which their mean length is taken."""
FULL = 0.85
"""The share of a KV cache that is given out where answers do not give way: an engine also holds what is left of
sessions that ended or gave way."""
HOLD_SECONDS = 30.0
"""How long a session may be away before its context gives way to younger ones too."""
MAX_HOMES = 1 << 16
"""Groups whose home is remembered; beyond it the oldest are forgotten."""


class ReplicaState(Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    ASLEEP = "asleep"
    LOST = "lost"


class RouteRequest(NamedTuple):
    """What a request asks for."""

    session: int
    group: int
    context: int
    age: int = 0
    """The number of its group among those of its scheduler: the lower, the older."""
    slices: int = 0
    """So many slices of its answer are written already."""
    slice_tokens: int = 0
    """After which it gives way to those that wait; 0 where nobody does."""

    @property
    def place(self) -> tuple[int, int]:
        """In the line: who has had fewer slices is first, and of these the oldest."""
        return self.slices, self.age


class CachedContext(NamedTuple):
    """The context of a session that is away."""

    context: int
    age: int
    until: float
    """When younger ones may have its room."""


class ReplicaEntry:
    """A replica's place in the sampler: its state, what is in flight on it, and how much that weighs."""

    __slots__ = (
        "asked", "capacity", "failures", "gone", "held", "index", "inflight", "kept", "load", "loading", "pressure",
        "progress", "replica", "served", "state", "strikes", "version",
    )  # fmt: skip

    def __init__(self, index: int, replica: Replica, gone: asyncio.Future[str]) -> None:
        self.index = index
        self.replica = replica
        self.capacity = max(replica.kv_capacity, 1)
        self.state = ReplicaState.ACTIVE
        self.version = 0
        self.loading = False
        """Weights are being loaded, under a deadline of their own."""
        self.load = 0
        """Tokens of context in flight when they were granted."""
        self.held: dict[int, CachedContext] = {}
        """Sessions that are away and left their context here."""
        self.kept = 0
        """Tokens of these."""
        self.pressure = 0.0
        """All of it, with what each request weighs besides and is going to write, as a share of the capacity."""
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
        self._heap: list[tuple[float, int, ReplicaEntry]] = []
        self._seats = 0
        self._homes: dict[int, ReplicaEntry] = {}

    def rebuild(self, seats: list[ReplicaEntry]) -> None:
        """The set of seats changed. What slept or died forgot its contexts."""
        for seat in seats:
            if seat.state is not ReplicaState.ACTIVE and seat.held:
                seat.held.clear()
                seat.kept = 0
        self._heap = [(seat.pressure, seat.index, seat) for seat in seats if seat.state is ReplicaState.ACTIVE]
        heapq.heapify(self._heap)
        self._seats = len(self._heap)

    @property
    def is_empty(self) -> bool:
        """No seat is active."""
        return self._least() is None

    def admit(self, need: RouteRequest, sticky: ReplicaEntry | None, cached: int, now: float) -> ReplicaEntry | None:
        """The seat for the next turn of a session; None if there is none with room for it."""
        own = sticky.held.get(need.session) if sticky is not None and cached else None
        if own is None:
            sticky = None
        if not need.slices:
            seat = self.pick(sticky, need.group, need.context, cached)
        else:  # in the middle of an answer its prompt is the least, and to move it is for balance.py to decide
            seat = sticky if sticky is not None and sticky.state is ReplicaState.ACTIVE else self._least()
        if seat is None:
            return None
        if not self._make_room(seat, need, own.context if own is not None and seat is sticky else 0, now):
            best = self._least()
            if best is None or best is seat or not self._make_room(best, need, 0, now):
                return None
            seat = best
        return seat

    def keep(self, seat: ReplicaEntry, session: int, context: int, age: int, now: float) -> None:
        """A session goes away and leaves its context there, as its request leaves: `remove` weighs both."""
        if seat.state is ReplicaState.ACTIVE:
            seat.held[session] = CachedContext(context, age, now + HOLD_SECONDS)
            seat.kept += context

    def forget(self, seat: ReplicaEntry, session: int) -> bool:
        """It came back, or never will. Whether its context was still there."""
        held = seat.held.pop(session, None)
        if held is None:
            return False
        seat.kept -= held.context
        self._weigh(seat, 0)
        return True

    def pick(self, sticky: ReplicaEntry | None, group: int, context: int, cached: int) -> ReplicaEntry | None:
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

    def add(self, seat: ReplicaEntry, context: int) -> None:
        """A request goes there."""
        seat.asked += 1
        seat.inflight += 1
        self._weigh(seat, context)

    def remove(self, seat: ReplicaEntry, context: int) -> None:
        """A request left."""
        seat.inflight -= 1
        self._weigh(seat, -context)

    def _make_room(self, seat: ReplicaEntry, need: RouteRequest, own: int, now: float) -> bool:
        """Whether there is room for a turn, `own` tokens of which are there: sessions that are away give way, as far as
        they must, the youngest first. An empty replica has room for anything. What is going to be written counts only
        where answers give way after a slice, half a slice each, or half a mean answer, and then the whole cache is
        given out: so the others wait in line, where who has had fewer slices goes first. Else it does not: sequences
        that begin together grow together, and by then others have ended."""
        missing: float = seat.load + seat.kept + need.context - own
        if need.slice_tokens:
            missing += (seat.inflight + 1) * min(self.answer, need.slice_tokens) / 2 - seat.capacity
        else:
            missing -= FULL * seat.capacity
        if missing <= 0:
            return True
        age = need.age
        away = [(held.age, session, held) for session, held in seat.held.items() if held.age > age or held.until < now]
        there = sum([held.context for _, _, held in away])
        if there < missing and (seat.inflight or seat.kept - own > there):
            return False
        for _, session, held in sorted(away, reverse=True):
            del seat.held[session]
            seat.kept -= held.context
            missing -= held.context
            if missing <= 0:
                break
        return True

    def _weigh(self, seat: ReplicaEntry, tokens: int) -> None:
        seat.load += tokens
        expected = seat.load + seat.kept + seat.inflight * (SEQUENCE_WEIGHT + self.answer / 2)
        seat.pressure = expected / seat.capacity
        if seat.state is ReplicaState.ACTIVE:
            if len(self._heap) > 8 * self._seats + 64:
                self.rebuild(list({seat.index: seat for _, _, seat in self._heap}.values()))
            else:
                heapq.heappush(self._heap, (seat.pressure, seat.index, seat))

    def _worth_it(self, seat: ReplicaEntry, best: ReplicaEntry, context: int, cached: int) -> bool:
        if seat.state is not ReplicaState.ACTIVE:
            return False
        if seat.load + context > seat.capacity and best.load + context <= best.capacity:
            return False
        weight = SEQUENCE_WEIGHT + self.answer / 2
        theirs = (best.load + best.inflight * weight) / best.capacity * seat.capacity
        excess = seat.load + seat.inflight * weight - theirs
        return self.answer * excess <= self.prefill_weight * cached * (1 + best.inflight)

    def _least(self) -> ReplicaEntry | None:
        heap = self._heap
        while heap:
            pressure, _, seat = heap[0]
            if seat.state is ReplicaState.ACTIVE and seat.pressure == pressure:
                return seat
            heapq.heappop(heap)
        return None
