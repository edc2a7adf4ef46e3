"""Running requests change replicas, so that no replica falls behind the others, and give way to those that wait.

A decode step takes the longer the more context is in flight, so a sequence that shares a replica with long ones becomes
a straggler. Every `balance_seconds` the heaviest replicas give a request each to the lightest: the one whose context
comes nearest to half of what lies between them, so that both have the same afterwards.

An answer that has written a slice on its replica is interrupted as long as others wait that have had no more:
it goes on when the wait queue calls it again (wait_queue.py), or at once if it is the first there.

Invariant: a move is an interruption like any other. The balancer asks the source to abort the request and notes where
its turn should go on; the tokens travel with the client of the turn, as they do over a suspension. A note that is not
followed costs nothing: the request ended first, the abort was lost, the gate closed, the target left.

    tick -> requests of at most MAX_REPLICAS_PER_TICK replicas -> moves -> note the target, abort at the source
    client: its request comes back -> release -> grant(interrupted=its id) -> take_target() -> the target
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from cadenza.inference.replica import RequestProgress
from cadenza.rollout.failures import logger
from cadenza.rollout.router import SEQUENCE_WEIGHT, ReplicaEntry, RouteRequest

MAX_REPLICAS_PER_TICK = 128
"""Replicas that one tick looks at; if there are more, the next tick looks at the next ones."""
REPLICAS_PER_MOVE = 8
"""One replica in so many gives a request away in one tick."""
MAX_FILL_AFTER_MOVE = 0.7
"""The share of its KV cache that a replica may fill by taking a request: what it has will grow."""
STEP_SHARE = 0.25
"""What a decode step costs besides its context, as a share of the context that fills the KV cache (a / cM)."""
MIN_GAIN = 0.02
"""The share of a decode step by which a move must relieve the source."""


class Move(NamedTuple):
    """A request that goes from one replica to another."""

    request: int
    source: ReplicaEntry
    target: ReplicaEntry


class Balancer:
    """Decides about moves and knows which ones are under way."""

    def __init__(self, prefill_weight: float) -> None:
        self.prefill_weight = prefill_weight
        self.moved = 0
        """Requests that went on where they were sent."""
        self.moved_tokens = 0
        """Tokens of context that they had to prefill there."""
        self.gave_way = 0
        """Requests that were interrupted because others waited."""
        self._targets: dict[int, ReplicaEntry] = {}
        self._next_start = 0

    def tick(self, entries: Sequence[ReplicaEntry], first: RouteRequest | None = None, waiting: int = 0) -> None:
        """Even out the load of these entries, or of the next MAX_REPLICAS_PER_TICK of them. A note is good until the
        next tick. `waiting` requests are in the wait queue, and `first` is the first of them."""
        self._targets.clear()
        if len(entries) > MAX_REPLICAS_PER_TICK:
            start = self._next_start % len(entries)
            self._next_start = start + MAX_REPLICAS_PER_TICK
            entries = [
                *entries[start : start + MAX_REPLICAS_PER_TICK],
                *entries[: max(0, start + MAX_REPLICAS_PER_TICK - len(entries))],
            ]
        found = [(entry, _requests_in_flight(entry)) for entry in entries]
        if first is not None and first.slice_tokens and (leaving := requests_to_preempt(found, first)[:waiting]):
            for entry, request in leaving:
                entry.replica.abort(request, "gave_way")
            self.gave_way += len(leaving)
            gone = {request for _, request in leaving}
            found = [
                (entry, [progress for progress in requests if progress.id not in gone]) for entry, requests in found
            ]
        self._start_moves(moves_to_balance(found, self.prefill_weight))

    def spread(self, entries: Sequence[ReplicaEntry]) -> None:
        """Even out the load of all of them at once: some have just come, with nothing to do."""
        self._targets.clear()
        self._start_moves(
            moves_to_spread([(entry, _requests_in_flight(entry)) for entry in entries], self.prefill_weight)
        )

    def _start_moves(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._targets[move.request] = move.target
            move.source.replica.abort(move.request, "moved")

    def take_target(self, request: int) -> ReplicaEntry | None:
        """Where the turn of a request that came back should go on; None if it was not to be moved."""
        return self._targets.pop(request, None) if self._targets else None

    def count_move(self, tokens: int) -> None:
        """A request of so many tokens went on where it was sent."""
        self.moved += 1
        self.moved_tokens += tokens


def _requests_in_flight(entry: ReplicaEntry) -> Sequence[RequestProgress]:
    try:
        return entry.replica.requests_in_flight()
    except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; it is not balanced then
        logger.debug("replica %s does not tell its requests: %r", entry.replica.name, error)
        return ()


def requests_to_preempt(
    found: Sequence[tuple[ReplicaEntry, Sequence[RequestProgress]]], first: RouteRequest
) -> list[tuple[ReplicaEntry, int]]:
    """Requests that have had a slice on their replica, and at least as many in all as the first in the wait queue; the
    longest is first."""
    size = first.slice_tokens
    leaving = [
        (-progress.written, progress.id, entry)
        for entry, requests in found
        for progress in requests
        if progress.fresh >= size and progress.written // size >= first.slices
    ]
    return [(entry, id) for _, id, entry in sorted(leaving, key=lambda row: row[:2])]


def moves_to_balance(
    found: Sequence[tuple[ReplicaEntry, Sequence[RequestProgress]]], prefill_weight: float
) -> list[Move]:
    """Moves from the heaviest entries to the lightest, one each. Entries with work that they do not tell are left
    alone."""
    told = [(entry, requests, _load(requests)) for entry, requests in found if requests or not entry.inflight]
    told.sort(key=lambda row: (row[2] / row[0].capacity, row[0].index))
    moves = []
    for number in range(min(max(1, len(told) // REPLICAS_PER_MOVE), len(told) // 2)):
        light, _, light_load = told[number]
        heavy, requests, heavy_load = told[-1 - number]
        free_tokens = int(MAX_FILL_AFTER_MOVE * light.capacity) - light_load - light.cached_tokens
        even = (heavy_load * light.capacity - light_load * heavy.capacity) / (heavy.capacity + light.capacity)
        least = MIN_GAIN * (heavy_load + STEP_SHARE * heavy.capacity)
        best = _nearest(requests, even, least, min(free_tokens, 2 * even - least), prefill_weight)
        if best is not None:
            moves.append(Move(best, heavy, light))
    return moves


def moves_to_spread(
    found: Sequence[tuple[ReplicaEntry, Sequence[RequestProgress]]], prefill_weight: float
) -> list[Move]:
    """Moves that leave every entry with about its share of the load: entries with more give to the one with least.
    First go those that wait, then those that have written most of their context, as far as their prefill is won
    back."""
    told = [(entry, requests, _load(requests)) for entry, requests in found if requests or not entry.inflight]
    fair = sum(load for _, _, load in told) / max(sum(entry.capacity for entry, _, _ in told), 1)
    heap = [(load / entry.capacity, entry.index, load, entry) for entry, _, load in told]
    heapq.heapify(heap)
    moves = []
    for entry, requests, load in told:
        excess = load - fair * entry.capacity
        for progress in sorted(
            requests, key=lambda progress: (progress.computed > 0, -progress.written / progress.context)
        ):
            weight = progress.context + SEQUENCE_WEIGHT
            if weight > excess or progress.written * progress.context < prefill_weight * progress.computed:
                continue
            _, index, taken, target = heap[0]
            if taken + weight > min(fair, MAX_FILL_AFTER_MOVE) * target.capacity - target.cached_tokens:
                break
            heapq.heapreplace(heap, ((taken + weight) / target.capacity, index, taken + weight, target))
            moves.append(Move(progress.id, entry, target))
            excess -= weight
    return moves


def _load(requests: Sequence[RequestProgress]) -> int:
    return sum([progress.context for progress in requests]) + SEQUENCE_WEIGHT * len(requests)


def _nearest(
    requests: Sequence[RequestProgress], wanted: float, least: float, most: float, prefill_weight: float
) -> int | None:
    """The request that weighs about as much as wanted, of those whose prefill is won back: a sequence is expected to
    write about as much again as it has written, and every step of it relieves the source by its context."""
    best, distance = None, math.inf
    for progress in requests:
        weight = progress.context + SEQUENCE_WEIGHT
        if (
            least <= weight <= most
            and abs(weight - wanted) < distance
            and progress.written * progress.context >= prefill_weight * progress.computed
        ):
            best, distance = progress.id, abs(weight - wanted)
    return best
