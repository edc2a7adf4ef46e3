"""A simulated inference engine: continuous batching under the cost model.

Invariant: every token written is returned to a client, discarded under a cause, or held by a request in flight
(`generated == returned + sum(discarded) + held`). The engine changes its batch only at a boundary: between two decode
steps, during prefill (all sequences wait for it), or when it is idle. A call that arrives in the middle of a step
takes effect at its end. Only death does not wait: the step in progress is lost, and its tokens were never written.

    waiting --> running --> Generation
       ^           |
       +-preempted-+      (its tokens are kept, its context is prefilled again)

One timer stands at the next completion, the next overflow of the KV cache, or the next boundary if a call asked for
it. The engine counts the steps in between without taking them: a request costs O(log B), however long it is.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

from cadenza.inference.replica import Finish, Generation, PauseMode, Request, Span
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.prefix_cache import PrefixCache
from cadenza.simulation.virtual_cluster.tokens import seeded_tokens
from cadenza.simulation.virtual_cluster.waiters import Waiters

OnEvent = Callable[[float, str, object], None]


class SimSequence:
    """A request in flight: on its way, waiting, or running."""

    __slots__ = (
        "arrival", "finish", "future", "held", "join_number", "joined_step", "prefill_mark",
        "request", "spans", "target", "to_prefill",
    )  # fmt: skip

    def __init__(self, request: Request, future: asyncio.Future[Generation]) -> None:
        self.request = request
        self.future = future
        self.arrival = 0  # its number in the order of arrival; 0 while on its way
        self.target = 0  # tokens to write for this request
        self.finish = Finish.STOP  # the finish reason once they are written
        self.held = 0  # tokens written before the last join
        self.spans: tuple[Span, ...] = ()  # the versions that wrote them
        self.join_number = 0  # number of the last join while running, else 0
        self.joined_step = 0  # step of the last join
        self.to_prefill = 0  # tokens the last join had to prefill
        self.prefill_mark = 0  # the engine's count of prefilled tokens that completes them


class SimEngine:
    """Decodes requests in batches and keeps the account of their tokens; `SimReplica` drives it.

    The subclass fills `_in_flight` and `_waiting` and calls `_act_at_boundary` after every change.
    """

    def __init__(
        self,
        name: str,
        cost: CostModel,
        *,
        version: int,
        vocab: int,
        keep_kv: bool,
        on_event: OnEvent | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.name = name
        self.cost = cost
        self.kv_capacity = cost.kv_capacity
        self.vocab = vocab
        self.keep_kv = keep_kv
        self.on_event = on_event
        self.generated = 0
        self.returned = 0
        self.discarded: dict[str, int] = {}
        self._loop = loop or asyncio.get_running_loop()
        self._in_flight: dict[int, SimSequence] = {}  # every unanswered request
        self._waiting: OrderedDict[int, SimSequence] = OrderedDict()
        self._running: dict[int, SimSequence] = {}  # in the order of joining
        self._completions: list[tuple[int, int, SimSequence]] = []  # a heap; a later join voids an entry
        self._aborts: dict[int, str] = {}  # running requests to end at the next boundary, with their cause
        self._joins = self._answered = 0
        self._prefilled = 0  # prefill ordered so far; `_prefill_left` of it is still to be computed
        self._kv = 0  # tokens of the running sequences
        self._prefix_cache = PrefixCache()
        self.version = version
        self._version_starts = [(0, version)]  # (first step, version)
        self._kv_outdated = False  # new weights arrived, and the running sequences must be prefilled again
        self._start_timeline()

    def _start_timeline(self) -> None:
        """Set the state of time: `_steps` are complete, the next starts at `_next_step_at`."""
        self._steps = 0
        self._next_step_at = 0.0
        self._prefill_debt = 0.0  # prefill seconds that were left when the engine was frozen
        self._factor = self._next_factor = 1.0
        self._last_token = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._timer_step = 0  # the step that ends when the timer fires
        self._boundary_requested = False  # the timer stands at the next boundary
        self._pending: PauseMode | None = None  # a pause that has not taken effect
        self._drain_until = 0  # the last arrival that a drain waits for
        self._paused = self._frozen = False
        self._loading = 0
        self._waiters = Waiters(self._loop)
        self._lost: str | None = None
        self._hung_at: float | None = None
        self._deferred: list[Callable[[], None]] = []  # calls that reached a hung engine

    # One boundary, in the order in which things happen at it.

    def _at_boundary(self, now: float) -> None:
        self._boundary_requested = False
        if self._completions and self._completions[0][0] <= self._steps:
            self._complete()
        if self._aborts or self._pending is PauseMode.ABORT:
            self._end_aborted(self._prefill_left(now))
        if not self._running:
            self._drop_prefill(now)
        if self._next_factor != self._factor:
            self._change_speed(now)
        if self._pending is not None or self._loading:
            self._freeze_if_due(now)
        if not self._frozen:
            if self._kv + len(self._running) + self._prefix_cache.tokens > self.kv_capacity:
                self._free_kv_cache()
            if self._waiting:
                self._admit()
        self._set_timer()

    def _complete(self) -> None:
        ends, steps = self._completions, self._steps
        while ends and ends[0][0] <= steps:
            _, join_number, sequence = heappop(ends)
            if sequence.join_number == join_number:
                self._answer(sequence, sequence.finish)

    def _end_aborted(self, prefill_left: int) -> None:
        """Answer the aborted requests; of a prefill in progress only the computed tokens stay cached."""
        computed = self._prefilled - prefill_left
        if self._pending is PauseMode.ABORT:
            leaving = [*self._running.values(), *self._waiting.values()]
        else:
            leaving = [self._running[request_id] for request_id in self._aborts]
        for sequence in leaving:
            missing = min(max(sequence.prefill_mark - computed, 0), sequence.to_prefill)
            self._answer(sequence, Finish.ABORT, missing=missing)

    def _drop_prefill(self, now: float) -> None:
        """Cancel the rest of the prefill: no sequence is left that needs it."""
        self._prefilled -= self._prefill_left(now)
        self._next_step_at = now
        self._prefill_debt = 0.0
        self._completions.clear()

    def _change_speed(self, now: float) -> None:
        ratio = self._next_factor / self._factor
        self._factor = self._next_factor
        self._prefill_debt *= ratio
        if self._next_step_at > now:
            self._next_step_at = now + (self._next_step_at - now) * ratio

    def _freeze_if_due(self, now: float) -> None:
        """Freeze the engine if a pause takes effect at this boundary, or weights are loading."""
        if self._pending is not None and (self._pending is not PauseMode.DRAIN or self._drained()):
            self._pending = None
            self._paused = True
        if (self._paused or self._loading) and not self._frozen:
            self._frozen = True
            self._prefill_debt = max(0.0, self._next_step_at - now)
        if self._paused:
            self._waiters.notify("paused")
        if self._frozen:
            self._waiters.notify("frozen")

    def _free_kv_cache(self) -> None:
        """Free capacity for the next step, one token per sequence: evict idle contexts, then preempt the last joins."""
        self._prefix_cache.shrink(self.kv_capacity - self._kv - len(self._running))
        while self._kv + len(self._running) > self.kv_capacity:
            self._preempt()

    def _preempt(self) -> None:
        """Move the last sequence to the head of the queue: it keeps its tokens and is prefilled again."""
        _, sequence = self._running.popitem()
        sequence.spans = self._spans(sequence)
        sequence.held += self._steps - sequence.joined_step
        self._kv -= sequence.request.context + sequence.held
        sequence.join_number = 0
        self._prefix_cache.release(sequence.request, 0)
        self._waiting[sequence.request.id] = sequence
        self._waiting.move_to_end(sequence.request.id, last=False)
        self._emit("preempt", sequence)

    def _admit(self) -> None:
        """Let sequences join in the order of arrival, while their context and one more token of each fit."""
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self.cost.max_running:
            sequence = next(iter(waiting.values()))
            request = sequence.request
            context = request.context + sequence.held
            free_tokens = self.kv_capacity - self._kv - context - len(running) - 1
            if free_tokens < 0 or (self._pending is PauseMode.DRAIN and sequence.arrival > self._drain_until):
                break
            del waiting[request.id]
            running[request.id] = sequence
            sequence.to_prefill = context - self._prefix_cache.reuse(request, context)
            self._kv += context
            if self._prefix_cache.tokens > free_tokens:
                self._prefix_cache.shrink(free_tokens)
            self._prefilled += sequence.to_prefill
            self._next_step_at += self.cost.p * self._factor * sequence.to_prefill
            self._joins += 1
            sequence.prefill_mark = self._prefilled
            sequence.join_number = self._joins
            sequence.joined_step = self._steps
            heappush(self._completions, (self._steps + sequence.target - sequence.held, self._joins, sequence))
            if self.on_event is not None:
                self._emit("join", sequence)

    def _answer(self, sequence: SimSequence, finish: Finish, cause: str = "unclaimed", missing: int = 0) -> None:
        """Answer a request. Its context stays cached, except the last `missing` tokens."""
        request = sequence.request
        written = sequence.held
        spans = sequence.spans
        if sequence.join_number:
            spans = self._spans(sequence)
            written += self._steps - sequence.joined_step
            context = request.context + written
            self._kv -= context
            del self._running[request.id]
            sequence.join_number = 0
            computed = 0 if self._kv_outdated else context - missing
            self._prefix_cache.release(request, computed)
        else:
            self._waiting.pop(request.id, None)
        if self._aborts:
            cause = self._aborts.pop(request.id, cause)
        del self._in_flight[request.id]
        self._answered += 1
        if sequence.future.done():
            self._discard(cause, written)
        else:
            self.returned += written
            tokens, logprobs = seeded_tokens(request.seed, request.offset, written, self.vocab)
            sequence.future.set_result(Generation(tokens, logprobs, spans, finish))
        if self.on_event is not None:
            self._emit("abort" if finish is Finish.ABORT else "finish", sequence)

    # The timeline.

    def _act_at_boundary(self) -> None:
        """Act at the end of the step in progress, or now if there is none."""
        if self._boundary_requested or self._lost is not None:
            return
        if self._hung_at is not None:
            self._deferred.append(self._act_at_boundary)
            return
        now = self._loop.time()
        self._advance(now)
        if not self._running or self._frozen or now <= self._next_step_at:
            self._at_boundary(now)
            return
        self._boundary_requested = True
        if self._steps + 1 < self._timer_step:  # otherwise the timer stands there already, or is due
            self._arm_timer(self._next_step_at + self._seconds(1), self._steps + 1)

    def _set_timer(self) -> None:
        """Set the timer to the next completion or overflow of the KV cache."""
        if self._frozen or not self._running:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        running = len(self._running)
        steps = min(self._completions[0][0] - self._steps, (self.kv_capacity - self._kv) // running)
        self._arm_timer(
            self._next_step_at + self._factor * self.cost.decode(steps, running, self._kv), self._steps + steps
        )

    def _arm_timer(self, when: float, step: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer_step = step
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._count_steps(self._timer_step - self._steps, self._timer_at)
        self._at_boundary(self._timer_at)

    def _advance(self, now: float) -> None:
        """Count the steps that are complete by `now`, up to the step of the timer."""
        if self._timer is None or now <= self._next_step_at or self._frozen or not self._running:
            return
        if self._timer_at <= now:
            self._count_steps(self._timer_step - self._steps, self._timer_at)
            return
        within = self.cost.steps_within((now - self._next_step_at) / self._factor, len(self._running), self._kv)
        steps = min(within, self._timer_step - self._steps - 1)
        self._count_steps(steps, self._next_step_at + self._seconds(steps))

    def _count_steps(self, steps: int, when: float) -> None:
        if steps > 0:
            tokens = steps * len(self._running)
            self._steps += steps
            self._kv += tokens
            self.generated += tokens
            self._next_step_at = self._last_token = when

    def _seconds(self, steps: int) -> float:
        return self._factor * self.cost.decode(steps, len(self._running), self._kv)

    def _now(self) -> float:
        return self._loop.time() if self._hung_at is None else self._hung_at

    def _prefill_left(self, now: float) -> int:
        """Return the tokens of prefill that were ordered and are not computed yet."""
        seconds = self._prefill_debt if self._frozen else self._next_step_at - now
        rate = self.cost.p * self._factor
        return min(math.ceil(seconds / rate - 1e-6), self._prefilled) if seconds > 0 < rate else 0

    def _thaw(self) -> None:
        """Continue after a pause or a load, unless another reason keeps the engine frozen."""
        if self._hung_at is not None:
            self._deferred.append(self._thaw)
        elif self._frozen and not self._paused and not self._loading and self._lost is None:
            now = self._loop.time()
            if self._kv_outdated:
                self._prefilled -= self._prefill_left(now)
                self._prefill_debt = self.cost.p * self._factor * self._kv
                for sequence in self._running.values():
                    sequence.to_prefill = sequence.request.context + sequence.held + self._written_since_join(sequence)
                    self._prefilled += sequence.to_prefill
                    sequence.prefill_mark = self._prefilled
                self._kv_outdated = False
            self._frozen = False
            self._next_step_at = now + self._prefill_debt
            self._at_boundary(now)

    # Tokens and versions.

    def _discard(self, cause: str, tokens: int) -> None:
        if tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + tokens

    def _drained(self) -> bool:
        head = next(iter(self._waiting.values()), None)
        return not self._running and (head is None or head.arrival > self._drain_until)

    def _written_since_join(self, sequence: SimSequence) -> int:
        """Return the tokens written since the last join."""
        return self._steps - sequence.joined_step if sequence.join_number else 0

    def _spans(self, sequence: SimSequence) -> tuple[Span, ...]:
        """Return the versions that wrote the tokens of a running sequence, with their counts."""
        start = sequence.joined_step
        if start >= self._version_starts[-1][0] and not sequence.spans:
            return (Span(self.version, self._steps - start),) if self._steps > start else ()
        spans = list(sequence.spans)
        for index in range(bisect_right(self._version_starts, (start, math.inf)) - 1, len(self._version_starts)):
            version = self._version_starts[index][1]
            until = self._version_starts[index + 1][0] if index + 1 < len(self._version_starts) else self._steps
            if spans and spans[-1].version == version:
                spans[-1] = Span(version, spans[-1].length + until - start)
            elif until > start:
                spans.append(Span(version, until - start))
            start = until
        return tuple(spans)

    def _set_version(self, version: int) -> None:
        self._version_starts.append((self._steps, version))
        self.version = version
        if not self.keep_kv:
            self._prefix_cache.clear()
            self._kv_outdated = bool(self._running)

    def _emit(self, kind: str, sequence: SimSequence) -> None:
        if self.on_event is not None:
            self.on_event(self._loop.time(), kind, sequence.request)
