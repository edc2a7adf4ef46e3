"""An inference replica made of the cost model: it costs no GPU, and under virtual time no time either.

Invariant: every token written is returned to a client, discarded under a cause, or held by a request in flight
(`generated == returned + sum(discarded) + held`), and the engine changes its mind only at a boundary: between two
decode steps, during prefill (all sequences wait for it), or when idle. What is asked in the middle of a step takes
effect at its end. Only death does not wait: the step in progress is then lost, and its tokens were never written.

    generate --(transport)--> fence --> waiting --> running --> Generation
                                           ^            |
                                           +- preempted +      (recompute; its tokens are kept)

One timer stands at the next completion, the next overflow of the KV cache, or the next boundary if something asks
for it. The steps in between are counted, not taken: a request costs O(log B), however long it is.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestProgress,
    RequestRefused,
    Span,
    StaleEpoch,
)
from cadenza.simulation.virtual_cluster.cost import CostModel, seeded_tokens
from cadenza.simulation.virtual_cluster.prefix_cache import PrefixCache


class _SimSequence:
    """A request in flight: on its way, waiting, or running."""

    __slots__ = (
        "arrival", "finish", "future", "held", "join_number", "joined_step", "prefill_mark",
        "prompt", "request", "spans", "target", "to_prefill",
    )  # fmt: skip

    def __init__(self, request: Request, future: asyncio.Future[Generation]) -> None:
        self.request = request
        self.future = future
        self.arrival = 0  # its number in the order of arrival; 0 while on its way
        self.target = 0  # tokens to write for this request
        self.finish = Finish.STOP  # how it ends when it has written them
        self.held = 0  # tokens written before the last join
        self.spans: tuple[Span, ...] = ()  # who wrote them
        self.join_number = 0  # number of the last join while running, else 0
        self.joined_step = 0  # step of the last join
        self.prompt = 0  # tokens shared with its group
        self.to_prefill = 0  # tokens the last join had to prefill
        self.prefill_mark = 0  # the replica's count of prefilled tokens that completes them


class SimReplica:
    """A `Replica` under the cost model, with faults that a test or a simulation switches on.

    `length(request)` is the length of the whole turn, the `offset` tokens already there included. At least one token
    is written; `max_tokens`, or a KV cache that the request fills alone, ends a response with `Finish.LENGTH`.
    `arrival_delay` is the way from `generate` to the engine; the fence stands at its end. Without `keep_kv`, new
    weights drop the cache, and frozen requests are prefilled again before they go on.
    `on_event(time, kind, request)` hears of "start", "join", "preempt", "finish" and "abort".
    """

    def __init__(
        self,
        name: str,
        cost: CostModel,
        length: Callable[[Request], int],
        *,
        devices: tuple[int, ...] = (0,),
        version: int = 0,
        vocab: int = 32_768,
        load_seconds: float = 0.0,
        wake_seconds: float = 0.0,
        arrival_delay: float | Callable[[Request], float] = 0.0,
        keep_kv: bool = True,
        on_event: Callable[[float, str, object], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.name = name
        self.cost = cost
        self.length = length
        self.devices = devices
        self.kv_capacity = cost.kv_capacity
        self.vocab = vocab
        self.load_seconds = load_seconds
        self.wake_seconds = wake_seconds
        self.arrival_delay = arrival_delay
        self.keep_kv = keep_kv
        self.on_event = on_event
        self.fence = 0
        self.generated = 0
        self.returned = 0
        self.discarded: dict[str, int] = {}
        self._loop = loop or asyncio.get_running_loop()
        self._in_flight: dict[int, _SimSequence] = {}  # every unanswered request
        self._waiting: OrderedDict[int, _SimSequence] = OrderedDict()
        self._running: dict[int, _SimSequence] = {}  # in the order of joining
        self._completions: list[tuple[int, int, _SimSequence]] = []  # a heap; a later join voids an entry
        self._aborts: dict[int, str] = {}  # running requests to end at the next boundary, with their cause
        self._arrivals = self._joins = self._answered = 0
        self._prefilled = 0  # prefill ordered so far; `_prefill_left` of it is still to be computed
        # The timeline: `_steps` are complete, the next starts at `_next_step_at`, the timer is set to `_timer_step`.
        self._steps = 0
        self._next_step_at = 0.0
        self._prefill_debt = 0.0  # prefill seconds that were left when the engine was frozen
        self._factor = self._next_factor = 1.0
        self._last_token = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._timer_step = 0
        self._boundary_requested = False  # the timer stands at the next boundary
        self._kv = 0  # tokens of the running
        self._prefix_cache = PrefixCache()  # contexts under 2 * session, prompts under 2 * group + 1
        self._running_members: dict[int, int] = {}  # running members by group: they hold its prompt
        self.version = version
        self._version_starts = [(0, version)]  # (first step, version)
        self._kv_outdated = False
        self._pending: PauseMode | None = None
        self._drain_until = 0  # the last arrival that a drain waits for
        self._paused = self._frozen = self._asleep = False
        self._loading = 0
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._lost: str | None = None
        self._hung_at: float | None = None
        self._deferred: list[Callable[[], None]] = []  # what reached a hung engine
        self._flaky = self._lost_aborts = self._failing_loads = 0
        self._abort_delay = 0.0

    # The replica protocol.

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(ReplicaLost(self._lost))
        elif self._flaky:
            self._flaky -= 1
            future.set_exception(ReplicaError(f"{self.name}: could not take request {request.id}"))
        elif request.id in self._in_flight:
            future.set_exception(ReplicaError(f"{self.name}: request {request.id} is already in flight"))
        else:
            sequence = self._in_flight[request.id] = _SimSequence(request, future)
            delay = self.arrival_delay(request) if callable(self.arrival_delay) else self.arrival_delay
            if delay > 0:
                self._loop.call_later(delay, self._arrive, sequence)
            else:
                self._arrive(sequence)
        return future

    def abort(self, request_id: int, cause: str) -> None:
        if self._hung_at is not None:
            self._deferred.append(partial(self.abort, request_id, cause))
        elif self._lost_aborts:
            self._lost_aborts -= 1
        elif self._abort_delay > 0:
            self._loop.call_later(self._abort_delay, self._abort, request_id, cause)
        else:
            self._abort(request_id, cause)

    def requests_in_flight(self) -> list[RequestProgress]:
        """Of a thousand replicas these are millions: they are made without the call that a named tuple makes."""
        self._advance(self._now())
        new, steps, found = tuple.__new__, self._steps, []
        for sequence in self._running.values():
            request, written = sequence.request, sequence.held + steps - sequence.joined_step
            context = request.context + written
            found.append(new(RequestProgress, (request.id, context, request.offset + written, context, written)))
        for sequence in self._waiting.values():
            request, written = sequence.request, sequence.held
            found.append(RequestProgress(request.id, request.context + written, request.offset + written, 0, written))
        return found

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._reach_engine()
        if mode is PauseMode.ABORT and self._lost_aborts:
            self._lost_aborts -= 1
            await self._until("never")
        self.fence = max(self.fence, epoch)
        if self._abort_delay > 0:
            await self._until("elapsed", self._abort_delay)
            await self._reach_engine()
        self._pending = mode
        self._drain_until = self._arrivals
        if mode is PauseMode.DRAIN and (self._running or self._waiting):
            self._paused = False
            self._thaw()
        self._act_at_boundary()
        if self._pending is not None:
            await self._until("paused")

    async def resume(self) -> None:
        await self._reach_engine()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        self._pending = None
        self._paused = False
        self._notify("paused", ReplicaError(f"{self.name}: resumed before the pause took effect"))
        self._thaw()
        self._act_at_boundary()

    async def load_weights(self, version: int, weights: object) -> None:
        await self._reach_engine()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it before loading weights")
        if self._failing_loads:
            self._failing_loads -= 1
            raise ReplicaError(f"{self.name}: could not load version {version}")
        self._loading += 1
        try:
            self._act_at_boundary()
            if not self._frozen:
                await self._until("frozen")
            await self._until("elapsed", self.load_seconds)
            await self._reach_engine()
            self._set_version(version)
        finally:
            self._loading -= 1
            self._thaw()

    async def sleep(self) -> None:
        await self._reach_engine()
        if self._asleep:
            return
        if not self._paused or self._running or self._waiting:
            raise RuntimeError(
                f"{self.name} must be paused and empty to sleep, but paused is {self._paused}, "
                f"{len(self._running)} running, {len(self._waiting)} waiting: pause it with PauseMode.ABORT"
            )
        self._asleep = True
        self._prefix_cache.clear()

    async def wake(self) -> None:
        await self._reach_engine()
        if not self._asleep:
            return
        await self._until("elapsed", self.wake_seconds)
        await self._reach_engine()
        self._asleep = self._paused = False
        self._thaw()

    async def stats(self) -> ReplicaStats:
        if self._lost is not None:
            raise ReplicaLost(self._lost)
        now = self._now()
        self._advance(now)
        prefilled = self._prefilled - self._prefill_left(now)
        return ReplicaStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            progress=self.generated + prefilled + self._answered,
            paused=self._paused,
            kv_tokens=self._kv,
            kv_capacity=self.kv_capacity,
            generated=self.generated,
            prefilled=prefilled,
            discarded=dict(self.discarded),
        )

    def kill(self, cause: str) -> None:
        self._die(cause, f"{self.name} was killed: {cause}")

    # Faults, and the truth for monitors.

    def hang(self) -> None:
        """Time stands still in the engine; only `stats` answers."""
        if self._hung_at is None and self._lost is None:
            self._hung_at = self._loop.time()
            if self._timer is not None:
                self._timer.cancel()

    def unhang(self) -> None:
        """Go on where it stopped; what was asked in the meantime arrives now."""
        if self._hung_at is None:
            return
        stood, self._hung_at = self._loop.time() - self._hung_at, None
        if not self._frozen:
            self._next_step_at += stood
        if self._timer is not None:
            self._arm_timer(self._timer_at + stood, self._timer_step)
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            message()
        self._notify("unhung")

    def crash(self) -> None:
        """The process dies unasked."""
        self._die("replica_lost", f"{self.name} crashed")

    def slow(self, factor: float) -> None:
        """Every cost is multiplied by `factor` from the next boundary on; 1 is the healthy speed."""
        if not factor > 0:
            raise ValueError(f"factor must be > 0, got {factor}")
        self._next_factor = factor
        self._act_at_boundary()

    def flaky(self, calls: int) -> None:
        """The next `calls` calls of `generate` fail with `ReplicaError`."""
        self._flaky = calls

    def late_abort(self, seconds: float) -> None:
        """From now on `abort` and `pause` take effect that much later; the fence rises at once all the same."""
        self._abort_delay = seconds

    def lost_abort(self) -> None:
        """The next `abort` or `pause(ABORT)` never reaches the engine, its fence included."""
        self._lost_aborts += 1

    def fail_load(self, calls: int) -> None:
        """The next `calls` calls of `load_weights` fail with `ReplicaError`."""
        self._failing_loads = calls

    @property
    def generating(self) -> bool:
        """Requests are being decoded, or prefilled, right now."""
        return bool(self._running) and not self._frozen and self._hung_at is None

    @property
    def last_generation_time(self) -> float:
        """When the last token was written; minus infinity before the first."""
        self._advance(self._now())
        return self._last_token

    def check(self) -> None:
        """Assert everything that must hold between two calls."""
        held = sum(sequence.held + self._written_since_join(sequence) for sequence in self._in_flight.values())
        discarded = sum(self.discarded.values())
        assert self.generated == self.returned + discarded + held, (self.generated, self.returned, held)
        running = self._running.values()
        contexts = sum(
            sequence.request.context + sequence.held + self._written_since_join(sequence) for sequence in running
        )
        assert self._kv == contexts <= self.kv_capacity
        self._prefix_cache.check()
        assert len(self._running) <= self.cost.max_running
        assert not self._running.keys() & self._waiting.keys()
        assert self._running.keys() | self._waiting.keys() <= self._in_flight.keys()
        assert self._aborts.keys() <= self._running.keys()
        assert sum(self._running_members.values()) == sum(1 for s in running if s.prompt)
        live = {(end, s.request.id) for end, join_number, s in self._completions if s.join_number == join_number}
        assert live == {(s.joined_step + s.target - s.held, s.request.id) for s in running}
        assert all(self._steps < end or self._timer_at <= self._now() for end, _ in live)
        assert 0 <= self._prefill_left(self._now()) <= self._prefilled
        assert (self._timer is not None) >= (bool(self._running) and not self._frozen)
        assert self._boundary_requested <= (self._timer is not None)

    # The engine: one boundary, in the order in which things happen at it.

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
        """End the requests that were called back; of a prefill in progress only what is computed stays cached."""
        computed = self._prefilled - prefill_left
        if self._pending is PauseMode.ABORT:
            leaving = [*self._running.values(), *self._waiting.values()]
        else:
            leaving = [self._running[request_id] for request_id in self._aborts]
        for sequence in leaving:
            missing = min(max(sequence.prefill_mark - computed, 0), sequence.to_prefill)
            self._answer(sequence, Finish.ABORT, missing=missing)

    def _drop_prefill(self, now: float) -> None:
        """Nobody is left who needs the rest of the prefill."""
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
        """Freeze the engine for a pause or for new weights, if this is the time to."""
        if self._pending is not None and (self._pending is not PauseMode.DRAIN or self._drained()):
            self._pending = None
            self._paused = True
        if (self._paused or self._loading) and not self._frozen:
            self._frozen = True
            self._prefill_debt = max(0.0, self._next_step_at - now)
        if self._paused:
            self._notify("paused")
        if self._frozen:
            self._notify("frozen")

    def _free_kv_cache(self) -> None:
        """The next step writes a token per sequence: idle contexts give way first, then whoever joined last."""
        self._prefix_cache.shrink(self.kv_capacity - self._kv - len(self._running))
        while self._kv + len(self._running) > self.kv_capacity:
            self._preempt()

    def _preempt(self) -> None:
        """Send the last one back to the head of the queue, with its tokens, to be prefilled again."""
        _, sequence = self._running.popitem()
        sequence.spans = self._spans(sequence)
        sequence.held += self._steps - sequence.joined_step
        self._kv -= sequence.request.context + sequence.held
        sequence.join_number = 0
        self._release_prompt(sequence, 0)
        self._waiting[sequence.request.id] = sequence
        self._waiting.move_to_end(sequence.request.id, last=False)
        self._emit("preempt", sequence)

    def _admit(self) -> None:
        """First come, first served, while the context and one more token of everybody fit."""
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
            sequence.to_prefill = context - self._reuse(sequence, context)
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

    def _answer(self, sequence: _SimSequence, finish: Finish, cause: str = "unclaimed", missing: int = 0) -> None:
        """Answer a request. Its context stays cached, but for the last `missing` tokens."""
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
            self._release_prompt(sequence, computed)
            self._prefix_cache.put(2 * request.session, computed)
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
        """Act at the next boundary: at the end of the step in progress, or now if there is none."""
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
        if self._steps + 1 < self._timer_step:  # otherwise the timer stands there, or is about to fire
            self._arm_timer(self._next_step_at + self._seconds(1), self._steps + 1)

    def _set_timer(self) -> None:
        """Sleep until the next completion or overflow."""
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
        """Count the steps complete by `now`, up to the one for which the timer stands."""
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
        """Tokens of prefill that were ordered and are not computed yet."""
        seconds = self._prefill_debt if self._frozen else self._next_step_at - now
        rate = self.cost.p * self._factor
        return min(math.ceil(seconds / rate - 1e-6), self._prefilled) if seconds > 0 < rate else 0

    def _thaw(self) -> None:
        """Go on after a pause or a load, unless there is another reason to stand still."""
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

    # Requests, versions, the cache.

    def _arrive(self, sequence: _SimSequence) -> None:
        request = sequence.request
        if self._hung_at is not None:
            self._deferred.append(partial(self._arrive, sequence))
        elif self._in_flight.get(request.id) is not sequence:
            return  # aborted on the way, or the replica is dead
        elif request.epoch < self.fence:
            text = f"{self.name}: epoch {request.epoch} is behind fence {self.fence}"
            self._refuse(sequence, StaleEpoch(text))
        elif self._asleep:
            self._refuse(sequence, ReplicaError(f"{self.name} is asleep"))
        elif request.context >= self.kv_capacity or request.max_tokens < 1:
            text = f"{self.name}: {request.context} tokens of context and {request.max_tokens} to write"
            self._refuse(sequence, RequestRefused(f"{text} do not fit a KV cache of {self.kv_capacity}"))
        else:
            remaining = max(1, self.length(request) - request.offset)
            sequence.target = min(remaining, request.max_tokens, self.kv_capacity - request.context)
            sequence.finish = Finish.STOP if sequence.target == remaining else Finish.LENGTH
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._waiting[request.id] = sequence
            if self.on_event is not None:
                self._emit("start", sequence)
            # Behind others there is nothing to do: the head is blocked, or a boundary is asked for already.
            if len(self._waiting) == 1 and not self._frozen:
                self._act_at_boundary()

    def _refuse(self, sequence: _SimSequence, error: ReplicaError) -> None:
        del self._in_flight[sequence.request.id]
        if not sequence.future.done():
            sequence.future.set_exception(error)

    def _abort(self, request_id: int, cause: str) -> None:
        if self._hung_at is not None:
            self._deferred.append(partial(self._abort, request_id, cause))
        elif request_id in self._running:
            self._aborts[request_id] = cause
            self._act_at_boundary()
        elif request_id in self._in_flight:
            self._answer(self._in_flight[request_id], Finish.ABORT, cause)
            self._act_at_boundary()

    def _die(self, cause: str, text: str) -> None:
        if self._lost is not None:
            return
        self._advance(self._now())
        self._lost = text
        self._hung_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sequence in self._in_flight.values():
            self._discard(cause, sequence.held + self._written_since_join(sequence))
            sequence.join_number = 0
            if not sequence.future.done():
                sequence.future.set_exception(ReplicaLost(text))
        for requests in (self._in_flight, self._waiting, self._running):
            requests.clear()
        self._aborts.clear()
        self._running_members.clear()
        self._deferred.clear()
        self._kv = 0
        self._boundary_requested = False
        self._prefix_cache.clear()
        self._drop_prefill(self._loop.time())
        for event in list(self._waiters):
            self._notify(event, ReplicaLost(text))

    def _discard(self, cause: str, tokens: int) -> None:
        if tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + tokens

    def _drained(self) -> bool:
        head = next(iter(self._waiting.values()), None)
        return not self._running and (head is None or head.arrival > self._drain_until)

    def _written_since_join(self, sequence: _SimSequence) -> int:
        """Tokens written since the last join."""
        return self._steps - sequence.joined_step if sequence.join_number else 0

    def _spans(self, sequence: _SimSequence) -> tuple[Span, ...]:
        """Who wrote the tokens of a running sequence."""
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

    def _reuse(self, sequence: _SimSequence, context: int) -> int:
        """Take what the cache holds of a context; its last token is always computed, for the next comes from it."""
        request = sequence.request
        cached = self._prefix_cache.take(2 * request.session)
        sequence.prompt = len(request.chunks[0]) if request.chunks else 0
        if sequence.prompt:
            members = self._running_members.get(request.group, 0)
            self._running_members[request.group] = members + 1
            prompt = sequence.prompt if members else self._prefix_cache.take(2 * request.group + 1)
            cached = max(cached, min(prompt, sequence.prompt))
        return min(cached, max(0, context - 1))

    def _release_prompt(self, sequence: _SimSequence, computed: int) -> None:
        """The last running member leaves the prompt of its group to the cache."""
        if sequence.prompt:
            members = self._running_members.pop(sequence.request.group) - 1
            if members:
                self._running_members[sequence.request.group] = members
            else:
                self._prefix_cache.put(2 * sequence.request.group + 1, min(sequence.prompt, computed))

    def _emit(self, kind: str, sequence: _SimSequence) -> None:
        if self.on_event is not None:
            self.on_event(self._loop.time(), kind, sequence.request)

    async def _reach_engine(self) -> None:
        """A call reaches the engine: at once, when it stops hanging, or never because it is dead."""
        while self._hung_at is not None:
            await self._until("unhung")
        if self._lost is not None:
            raise ReplicaLost(self._lost)

    async def _until(self, event: str, seconds: float | None = None) -> None:
        """Wait for an event, or for a time; `kill` ends every wait with `ReplicaLost`."""
        future: asyncio.Future[None] = self._loop.create_future()
        waiters = self._waiters.setdefault(event, [])
        waiters.append(future)
        timer = None if seconds is None else self._loop.call_later(seconds, _settled, future)
        try:
            await future
        finally:
            waiters.remove(future)
            if timer is not None:
                timer.cancel()

    def _notify(self, event: str, error: ReplicaError | None = None) -> None:
        for future in self._waiters.pop(event, ()):
            _settled(future, error)


def _settled(future: asyncio.Future[None], error: ReplicaError | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
