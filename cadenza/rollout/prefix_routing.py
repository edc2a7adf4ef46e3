"""The routing rule `prefix`: stay where the prefix is cached, as long as that is worth the load there.

A session wants the replica that holds its prefix, the first turn of a group member the one that holds the group's
prompt, and every request the replica under the least pressure. What these wishes are worth is weighed in time, summed
over all requests that wait for it. To leave costs the prefill of the prefix, which holds up every request on the other
replica. To stay costs, with every token of the answer, a decode step that is longer by the context which the replica
has in excess. A replica without free KV cache is left anyway.
"""

from __future__ import annotations

from cadenza.rollout.router import SEQUENCE_WEIGHT, ReplicaEntry, ReplicaState, Router, RouteRequest

PREFILL_WEIGHT = 400.0
"""What the prefill of a token costs, in decode steps over a token of context (p/c of the cost model: 300 to 1500)."""
MAX_HOMES = 1 << 16
"""Groups whose home is remembered; beyond it the oldest are forgotten."""


class PrefixRouting:
    """Weighs the prefill of a cached prefix against the load of the replica that has it."""

    def __init__(self, prefill_weight: float = PREFILL_WEIGHT) -> None:
        self.prefill_weight = prefill_weight
        self._homes: dict[int, ReplicaEntry] = {}
        """Where the prompt of a group was sent first."""

    def choose(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None, cached: int, router: Router
    ) -> ReplicaEntry | None:
        best = router.least_loaded()
        if best is None:
            return None
        if route_request.slices:  # in the middle of an answer its prompt is the least, and balance.py moves it
            return sticky if sticky is not None and sticky.state is ReplicaState.ACTIVE else best
        if sticky is not None:
            stays = sticky is best or self._worth_staying(sticky, best, route_request.context, cached, router)
            return sticky if stays else best
        group, context = route_request.group, route_request.context
        home = self._homes.get(group)
        if home is not None and (home is best or self._worth_staying(home, best, context, context, router)):
            return home
        if home is None and len(self._homes) >= MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        self._homes[group] = best
        return best

    def _worth_staying(
        self, entry: ReplicaEntry, best: ReplicaEntry, context: int, cached: int, router: Router
    ) -> bool:
        if entry.state is not ReplicaState.ACTIVE:
            return False
        if entry.inflight_tokens + context > entry.capacity and best.inflight_tokens + context <= best.capacity:
            return False
        weight = SEQUENCE_WEIGHT + router.mean_answer / 2
        theirs = (best.inflight_tokens + best.inflight * weight) / best.capacity * entry.capacity
        excess = entry.inflight_tokens + entry.inflight * weight - theirs
        return router.mean_answer * excess <= self.prefill_weight * cached * (1 + best.inflight)
