"""An inference replica made of the cost model: it costs no GPU, and under virtual time no time either.

    generate --(transport)--> fence --> SimEngine: waiting --> running --> Generation

`SimReplica` adds to the engine what a client and the sampler see: the replica protocol, the fence, the way of a request
to the engine, and the faults that a test or a simulation switches on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

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
    StaleEpoch,
)
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.engine import OnEvent, SimEngine, SimSequence
from cadenza.simulation.virtual_cluster.prefix_cache import PrefixCache


class SimReplica(SimEngine):
    """A `Replica` under the cost model, with faults that a test or a simulation switches on.

    `length(request)` is the length of the whole turn, the `offset` tokens already there included. At least one token
    is written; `max_tokens`, or a KV cache that the request fills alone, ends a response with `Finish.LENGTH`.
    `arrival_delay` is the time from `generate` to the engine; the fence refuses a request when it arrives. Without
    `keep_kv`, new weights drop the cache, and frozen requests are prefilled again before they continue.
    `on_event(time, kind, request)` receives "start", "join", "preempt", "finish" and "abort".
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
        on_event: OnEvent | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(name, cost, version=version, vocab=vocab, keep_kv=keep_kv, on_event=on_event, loop=loop)
        self.length = length
        self.devices = devices
        self.load_seconds = load_seconds
        self.wake_seconds = wake_seconds
        self.arrival_delay = arrival_delay
        self.fence = 0
        self._arrivals = 0
        self._asleep = False
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
            sequence = self._in_flight[request.id] = SimSequence(request, future)
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
        """Return the progress of every request that reached the engine.

        A thousand replicas make millions of these records: `tuple.__new__` skips the Python call of a named tuple.
        """
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
            await self._waiters.wait("never")
        self.fence = max(self.fence, epoch)
        if self._abort_delay > 0:
            await self._waiters.wait("elapsed", self._abort_delay)
            await self._reach_engine()
        self._pending = mode
        self._drain_until = self._arrivals
        if mode is PauseMode.DRAIN and (self._running or self._waiting):
            self._paused = False
            self._thaw()
        self._act_at_boundary()
        if self._pending is not None:
            await self._waiters.wait("paused")

    async def resume(self) -> None:
        await self._reach_engine()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        self._pending = None
        self._paused = False
        self._waiters.notify("paused", ReplicaError(f"{self.name}: resumed before the pause took effect"))
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
                await self._waiters.wait("frozen")
            await self._waiters.wait("elapsed", self.load_seconds)
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
        await self._waiters.wait("elapsed", self.wake_seconds)
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

    # Faults.

    def hang(self) -> None:
        """Stop time in the engine; only `stats` answers."""
        if self._hung_at is None and self._lost is None:
            self._hung_at = self._loop.time()
            if self._timer is not None:
                self._timer.cancel()

    def unhang(self) -> None:
        """Continue where the engine stopped; calls made in the meantime arrive now."""
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
        self._waiters.notify("unhung")

    def crash(self) -> None:
        """Let the process die without a `kill`."""
        self._die("replica_lost", f"{self.name} crashed")

    def slow(self, factor: float) -> None:
        """Multiply every cost by `factor` from the next boundary on; 1 is the healthy speed."""
        if not factor > 0:
            raise ValueError(f"factor must be > 0, got {factor}")
        self._next_factor = factor
        self._act_at_boundary()

    def flaky(self, calls: int) -> None:
        """Let the next `calls` calls of `generate` fail with `ReplicaError`."""
        self._flaky = calls

    def late_abort(self, seconds: float) -> None:
        """Delay the effect of `abort` and `pause` by `seconds` from now on; the fence still rises at once."""
        self._abort_delay = seconds

    def lost_abort(self) -> None:
        """Lose the next `abort` or `pause(ABORT)`, its fence included, on the way to the engine."""
        self._lost_aborts += 1

    def fail_load(self, calls: int) -> None:
        """Let the next `calls` calls of `load_weights` fail with `ReplicaError`."""
        self._failing_loads = calls

    # The truth, for monitors.

    @property
    def generating(self) -> bool:
        """Whether requests are being decoded or prefilled now."""
        return bool(self._running) and not self._frozen and self._hung_at is None

    @property
    def last_generation_time(self) -> float:
        """Time at which the last token was written; minus infinity before the first."""
        self._advance(self._now())
        return self._last_token

    def check(self) -> None:
        """Assert what must hold between two calls."""
        held = sum(sequence.held + self._written_since_join(sequence) for sequence in self._in_flight.values())
        discarded = sum(self.discarded.values())
        assert self.generated == self.returned + discarded + held, (self.generated, self.returned, held)
        running = self._running.values()
        contexts = sum(
            sequence.request.context + sequence.held + self._written_since_join(sequence) for sequence in running
        )
        assert self._kv == contexts <= self.kv_capacity
        self._prefix_cache.check(sequence.request for sequence in running)
        assert len(self._running) <= self.cost.max_running
        assert not self._running.keys() & self._waiting.keys()
        assert self._running.keys() | self._waiting.keys() <= self._in_flight.keys()
        assert self._aborts.keys() <= self._running.keys()
        live = {(end, s.request.id) for end, join_number, s in self._completions if s.join_number == join_number}
        assert live == {(s.joined_step + s.target - s.held, s.request.id) for s in running}
        assert all(self._steps < end or self._timer_at <= self._now() for end, _ in live)
        assert 0 <= self._prefill_left(self._now()) <= self._prefilled
        assert (self._timer is not None) >= (bool(self._running) and not self._frozen)
        assert self._boundary_requested <= (self._timer is not None)

    # Calls on their way to the engine.

    def _arrive(self, sequence: SimSequence) -> None:
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
            # Behind other requests there is nothing to do: the head is blocked, or a boundary is requested already.
            if len(self._waiting) == 1 and not self._frozen:
                self._act_at_boundary()

    def _refuse(self, sequence: SimSequence, error: ReplicaError) -> None:
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
        self._deferred.clear()
        self._kv = 0
        self._boundary_requested = False
        self._prefix_cache = PrefixCache()
        self._drop_prefill(self._loop.time())
        self._waiters.fail_all(lambda: ReplicaLost(text))

    async def _reach_engine(self) -> None:
        """Wait while the engine hangs; raises `ReplicaLost` when it is dead."""
        while self._hung_at is not None:
            await self._waiters.wait("unhung")
        if self._lost is not None:
            raise ReplicaLost(self._lost)
