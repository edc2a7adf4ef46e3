"""Which replica serves a request: the load of every replica, its KV cache, and the routing rule that chooses.

The rule (`sampler.routing`, prefix_routing.py by default) names a replica; the router checks that its KV cache has
capacity, takes the least loaded replica where it has not, and lets the request wait (wait_queue.py) where that has none
either. The load of a replica is its pressure, the context that is to be expected: what was granted, and for each
request half of the answer it is going to write, so that a long context that comes back weighs as much as it will.

A session that is away, with its env, keeps its context in the cache of its replica, and so it counts there. Where the
contexts do not fit any more, sessions that are away give way to older groups, and a turn that finds no capacity waits.
An engine would throw contexts out in the order of their last use, which is the order in which they come back, so that
every session would prefill its whole context with every turn.

The least loaded replica is on top of a heap whose items may be old; an item whose pressure is not its replica's
any more is dropped when it surfaces. So a decision costs O(log replicas) and nothing per session.
"""

from __future__ import annotations

import asyncio
import heapq
from enum import Enum
from typing import NamedTuple, Protocol

from cadenza.inference.replica import Replica

SEQUENCE_WEIGHT = 128
"""What a running sequence costs besides its context, in tokens of context (b/c of the cost model)."""
ANSWER_WINDOW = 256
"""Answers over which their mean length is taken."""
MAX_FILL = 0.85
"""The share of a KV cache that is given out where answers do not give way: an engine also holds what is left of
sessions that ended or gave way."""
HOLD_SECONDS = 30.0
"""How long a session may be away before its context gives way to younger ones too."""


class ReplicaState(Enum):
    ACTIVE = "active"
    LEAVING = "leaving"
    ASLEEP = "asleep"
    LOST = "lost"


class WaitReason(Enum):
    """Why a request must wait."""

    GATE = "gate"
    """The gate is closed."""
    CAPACITY = "capacity"
    """No KV cache has the capacity, or an earlier request waits for it."""
    RULE = "rule"
    """The routing rule named none."""


class RouteRequest(NamedTuple):
    """What the router must know of a request to choose a replica for it."""

    session: int
    group: int
    context: int
    """Tokens of the conversation so far, with what is written of this answer."""
    group_number: int = 0
    """The number of its group among those of its scheduler: the lower, the older."""
    slices: int = 0
    """So many slices of its answer are written already."""
    slice_tokens: int = 0
    """Tokens of a slice, after which the answer gives way to turns that wait; 0 where answers do not give way."""

    @property
    def priority(self) -> tuple[int, int]:
        """In the wait queue: turns with fewer slices come first, and of these the oldest group."""
        return self.slices, self.group_number


class CachedContext(NamedTuple):
    """The context that a session left in the KV cache of a replica, while its env runs."""

    tokens: int
    group_number: int
    until: float
    """When younger ones may evict it."""


class ReplicaEntry:
    """What the sampler knows of one replica: its state, what is in flight on it, and how much that weighs."""

    __slots__ = (
        "cached_contexts", "cached_tokens", "capacity", "failures", "gone", "index", "inflight", "inflight_tokens",
        "loading_weights", "pressure", "progress", "replica", "sent", "served", "state", "strikes", "version",
    )  # fmt: skip

    def __init__(self, index: int, replica: Replica, gone: asyncio.Future[str]) -> None:
        self.index = index
        self.replica = replica
        self.capacity = max(replica.kv_capacity, 1)
        self.state = ReplicaState.ACTIVE
        self.version = 0
        self.loading_weights = False
        """Weights are being loaded, under a deadline of their own."""
        self.inflight_tokens = 0
        """Tokens of context in flight when they were granted."""
        self.cached_contexts: dict[int, CachedContext] = {}
        """Sessions that are away and left their context here."""
        self.cached_tokens = 0
        """Tokens of these."""
        self.pressure = 0.0
        """All of it, with what each request weighs besides and is going to write, as a share of the capacity."""
        self.inflight = 0
        """Requests granted and not released."""
        self.gone = gone
        """Resolves with the cause when the replica is given up."""
        self.sent = 0
        self.served = 0
        """Requests sent and answered since the last health check, which looks closer when none was answered."""
        self.failures = 0
        """Requests that failed in a row."""
        self.strikes = 0
        """Health checks in a row without progress."""
        self.progress = -1


class RoutingRule(Protocol):
    """Chooses the replica of a request, once for every grant. See prefix_routing.py for one, and routing.py for how
    `sampler.routing` names another."""

    def choose(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None, cached: int, router: Router
    ) -> ReplicaEntry | None:
        """Returns one of `router.active`, or None to let the request wait: others go on, and the rule is asked for it
        again when a request has ended, and every 5 s. `sticky` is the replica that has `cached` tokens of the session
        in its KV cache; it may have left since. The rule need not look at KV-cache capacity."""
        ...


class Router:
    """Keeps the load of the replicas and chooses among the active ones.

    router = Router(PrefixRouting())
    router.rebuild(entries)
    entry = router.admit(route_request, sticky=None, cached=0, now=loop.time())   # or a `WaitReason`
    router.add(entry, route_request.context)                                      # the request goes there
    router.remove(entry, route_request.context)                                   # and is over
    """

    def __init__(self, rule: RoutingRule) -> None:
        self.rule = rule
        self.active: list[ReplicaEntry] = []
        """The entries that may be chosen, in the order of their replicas."""
        self.mean_answer = 1024.0
        """Mean length of the last answers, in tokens."""
        self.escapes = 0
        """Requests that left the replica with their prefix."""
        self._heap: list[tuple[float, int, ReplicaEntry]] = []

    def rebuild(self, entries: list[ReplicaEntry]) -> None:
        """The set of entries changed. What slept or died forgot its contexts."""
        for entry in entries:
            if entry.state is not ReplicaState.ACTIVE and entry.cached_contexts:
                entry.cached_contexts.clear()
                entry.cached_tokens = 0
        self.active = [entry for entry in entries if entry.state is ReplicaState.ACTIVE]
        self._rebuild_heap()

    @property
    def is_empty(self) -> bool:
        """No entry is active."""
        return self.least_loaded() is None

    def least_loaded(self) -> ReplicaEntry | None:
        """The active entry with the least pressure for its capacity; None if no entry is active."""
        heap = self._heap
        while heap:
            pressure, _, entry = heap[0]
            if entry.state is ReplicaState.ACTIVE and entry.pressure == pressure:
                return entry
            heapq.heappop(heap)
        return None

    def admit(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None, cached: int, now: float
    ) -> ReplicaEntry | WaitReason:
        """The entry for the next turn of a session, or what the turn must wait for."""
        own = sticky.cached_contexts.get(route_request.session) if sticky is not None and cached else None
        if own is None:
            sticky = None
        entry = self.choose(route_request, sticky, cached)
        if entry is None:
            return WaitReason.RULE
        if entry.state is not ReplicaState.ACTIVE:
            raise ValueError(
                f"the routing rule {type(self.rule).__name__} chose replica {entry.replica.name}, which is "
                f"{entry.state.value}; it must choose one of router.active"
            )
        if not self._make_capacity(entry, route_request, own.tokens if own is not None and entry is sticky else 0, now):
            best = self.least_loaded()
            if best is None or best is entry or not self._make_capacity(best, route_request, 0, now):
                return WaitReason.CAPACITY
            entry = best
        return entry

    def keep_context(self, entry: ReplicaEntry, session: int, tokens: int, group_number: int, now: float) -> None:
        """A session goes away and leaves so many tokens there, as its request leaves: `remove` weighs both."""
        if entry.state is ReplicaState.ACTIVE:
            entry.cached_contexts[session] = CachedContext(tokens, group_number, now + HOLD_SECONDS)
            entry.cached_tokens += tokens

    def drop_context(self, entry: ReplicaEntry, session: int) -> bool:
        """It came back, or never will. Whether its context was still there."""
        cached = entry.cached_contexts.pop(session, None)
        if cached is None:
            return False
        entry.cached_tokens -= cached.tokens
        self._update_load(entry, 0)
        return True

    def choose(self, route_request: RouteRequest, sticky: ReplicaEntry | None, cached: int) -> ReplicaEntry | None:
        """The choice of the rule, before its KV cache is looked at."""
        entry = self.rule.choose(route_request, sticky, cached, self)
        if sticky is not None and entry is not sticky and entry is not None and not route_request.slices:
            self.escapes += 1
        return entry

    def observe_answer_length(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self.mean_answer += (tokens - self.mean_answer) / ANSWER_WINDOW

    def add(self, entry: ReplicaEntry, tokens: int) -> None:
        """A request goes there, with a context of so many tokens."""
        entry.sent += 1
        entry.inflight += 1
        self._update_load(entry, tokens)

    def remove(self, entry: ReplicaEntry, tokens: int) -> None:
        """A request left, with the tokens of its `add`."""
        entry.inflight -= 1
        self._update_load(entry, -tokens)

    def _make_capacity(self, entry: ReplicaEntry, route_request: RouteRequest, own: int, now: float) -> bool:
        """Whether the KV cache can take a turn, `own` tokens of which are there: sessions that are away give way, as
        far as they must, the youngest first. An empty replica can take anything. What is going to be written counts
        only where answers give way after a slice, half a slice each, or half a mean answer, and then the whole cache is
        given out: so the others wait in the queue, where turns with fewer slices go first. Else it does not:
        sequences that begin together grow together, and by then others have ended."""
        missing: float = entry.inflight_tokens + entry.cached_tokens + route_request.context - own
        if route_request.slice_tokens:
            missing += (entry.inflight + 1) * min(self.mean_answer, route_request.slice_tokens) / 2 - entry.capacity
        else:
            missing -= MAX_FILL * entry.capacity
        if missing <= 0:
            return True
        group_number = route_request.group_number
        away = [
            (cached.group_number, session, cached)
            for session, cached in entry.cached_contexts.items()
            if cached.group_number > group_number or cached.until < now
        ]
        there = sum([cached.tokens for _, _, cached in away])
        if there < missing and (entry.inflight or entry.cached_tokens - own > there):
            return False
        for _, session, cached in sorted(away, reverse=True):
            del entry.cached_contexts[session]
            entry.cached_tokens -= cached.tokens
            missing -= cached.tokens
            if missing <= 0:
                break
        return True

    def _update_load(self, entry: ReplicaEntry, tokens: int) -> None:
        entry.inflight_tokens += tokens
        expected = (
            entry.inflight_tokens + entry.cached_tokens + entry.inflight * (SEQUENCE_WEIGHT + self.mean_answer / 2)
        )
        entry.pressure = expected / entry.capacity
        if entry.state is ReplicaState.ACTIVE:
            if len(self._heap) > 8 * len(self.active) + 64:
                self._rebuild_heap()
            else:
                heapq.heappush(self._heap, (entry.pressure, entry.index, entry))

    def _rebuild_heap(self) -> None:
        self._heap = [(entry.pressure, entry.index, entry) for entry in self.active]
        heapq.heapify(self._heap)
