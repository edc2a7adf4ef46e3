"""A replica in this process: the protocol on the event loop, the engine in a thread of its own (engine_thread.py).

Invariant: every token written is returned to a client, discarded under a cause, or held by a request in flight, and
every future that was handed out is resolved, whatever happens to the thread.

The fence, the requests in flight and the account of what was returned belong to the loop, so they need no lock. Death
does not wait for the step in progress: the tokens of that step were never written.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from cadenza.inference.decoders import Decoder, decoder_for
from cadenza.inference.engine import Engine
from cadenza.inference.engine_thread import EngineThread
from cadenza.inference.prepared_weights import PreparedWeights, WeightPacker
from cadenza.inference.replica import (
    Generation,
    PauseMode,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestProgress,
    StaleEpoch,
)
from cadenza.inference.request_context import checked_context
from cadenza.inference.sequence import EngineSequence
from cadenza.off_loop import COMPUTE_POOL, as_async, resolve_future

_PREFILL_WORK = 1 << 33
"""Weights times tokens that are prefilled in one go: about a second of one core."""
_DEFAULT_KV_BYTES = 1 << 30
"""What the cache may take unless its size is given."""


@dataclass(slots=True)
class _InFlight:
    """A request that is not answered yet: its future, and its sequence in the engine."""

    future: asyncio.Future[Generation]
    sequence: EngineSequence
    cause: str = "unclaimed"
    """Why its tokens are discarded if its future has no waiter."""


class TorchReplica:
    """A `Replica` over a causal language model of transformers, on a CPU or a GPU.

    The replica copies the weights of `model` when it is made and at `load_weights`, and never writes to the module: a
    trainer may change it in place at any time but during these two. `load_weights(version, weights)` takes a module, a
    state dict (all of it, or what changed since the last load, adapters included), or None for the module the replica
    was made of; or what `prepare` made of one of these beside the generation, so that nothing is left to do but a swap.
    Replicas in one process may share their weights: `clone` makes another one, and what one prepared all may load.

    Without `keep_kv`, new weights drop the cache, and frozen requests are prefilled again before they go on; with it,
    they go on from keys and values of the old weights. `kv_tokens` is the size of the cache, a gigabyte at most by
    default: running contexts take as much each as the longest of them, and idle ones their own length of what is left.
    So it also bounds the length of a context. `prefill_tokens` bounds the tokens of prompts between two steps, and with
    them the time that a pause may take. `threads` sets the threads of torch, which are common to the process. A replica
    that is not needed any more is closed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decoder: Decoder | None = None,
        name: str = "torch",
        devices: Sequence[int] = (0,),
        eos_token_ids: Collection[int] | None = None,
        max_running: int = 64,
        kv_tokens: int | None = None,
        prefill_tokens: int | None = None,
        keep_kv: bool = False,
        version: int = 0,
        threads: int | None = None,
    ) -> None:
        bounds = (("max_running", max_running, 1), ("kv_tokens", kv_tokens, 2), ("prefill_tokens", prefill_tokens, 1))
        for what, value, least in (*bounds, ("threads", threads, 1)):
            if value is not None and value < least:
                raise ValueError(f"{what} must be at least {least}, got {value}")
        decoder = decoder or decoder_for(model)
        kv_tokens = kv_tokens or min(1 << 16, max(_DEFAULT_KV_BYTES // decoder.shape.bytes, decoder.max_positions))
        self.name = name
        self.devices = tuple(devices)
        self.kv_capacity = kv_tokens
        self.eos_token_ids = frozenset(_eos_token_ids(model) if eos_token_ids is None else eos_token_ids)
        self.fence = 0
        self.returned = 0
        self.discarded: dict[str, int] = {}
        size = max(sum(parameter.numel() for parameter in model.parameters()), 1)
        self._engine = Engine(
            decoder,
            max_running=max_running,
            kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens or max(256, min(8192, _PREFILL_WORK // size)),
            keep_kv=keep_kv,
            version=version,
        )
        self._max_context = min(kv_tokens, decoder.max_positions)
        self._in_flight: dict[int, _InFlight] = {}
        self._stop_ids: dict[tuple[int, ...], frozenset[int]] = {(): self.eos_token_ids}
        self._arrivals = self._answered = 0
        self._asleep = False
        self._weights = WeightPacker(model, decoder)
        self._thread = EngineThread(
            self._engine,
            name,
            threads=threads,
            on_ended=self._resolve,
            on_failure=lambda text: self._die("replica_lost", text),
        )
        atexit.register(self.close)

    # -- the replica protocol, on the loop -------------------------------------------------------------------------

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = self._bind_loop().create_future()
        try:
            sequence = self._validated(request)
        except ReplicaError as error:
            future.set_exception(error)
        else:
            self._in_flight[request.id] = _InFlight(future, sequence)
            self._thread.put(lambda: self._engine.add(sequence))
        return future

    def abort(self, request_id: int, cause: str) -> None:
        entry = self._in_flight.get(request_id)
        if entry is not None:
            entry.cause = cause
            self._thread.put(lambda: self._thread.abort(entry.sequence))

    def requests_in_flight(self) -> list[RequestProgress]:
        found = []
        for id, entry in self._in_flight.items():
            sequence, written = entry.sequence, len(entry.sequence.tokens)
            context = sequence.request.context + written
            computed = min(sequence.computed, context)
            found.append(RequestProgress(id, context, sequence.request.offset + written, computed, written))
        return found

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self.fence = max(self.fence, epoch)
        last_arrival = self._arrivals
        self._check_alive()
        self._bind_loop()
        await self._thread.call(lambda future: self._thread.pause(mode, last_arrival, future))

    async def resume(self) -> None:
        self._check_alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        await self._run_in_thread(self._thread.resume)

    async def load_weights(self, version: int, weights: object) -> None:
        self._check_alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it before loading weights")
        await self._run_in_thread(lambda: self._load(version, weights))

    async def sleep(self) -> None:
        self._check_alive()
        if not self._asleep:
            await self._run_in_thread(self._free_cache)
            self._asleep = True

    async def wake(self) -> None:
        self._check_alive()
        if self._asleep:
            await self._run_in_thread(self._thread.resume)
            self._asleep = False

    async def stats(self) -> ReplicaStats:
        self._check_alive()
        running = len(self._engine.running)
        return ReplicaStats(
            version=self._engine.version,
            running=running,
            waiting=max(0, len(self._in_flight) - running),
            progress=self._engine.generated + self._engine.prefilled + self._answered,
            paused=self._thread.paused,
            kv_tokens=self._engine.running_tokens,
            kv_capacity=self.kv_capacity,
            generated=self._engine.generated,
            prefilled=self._engine.prefilled,
            discarded=dict(self.discarded),
            costs=self._thread.meter.costs(),
        )

    def kill(self, cause: str) -> None:
        self._die(cause, f"{self.name} was killed: {cause}")

    # -- around it -------------------------------------------------------------------------------------------------

    async def prepare(self, weights: object) -> PreparedWeights:
        """Make weights ready for `load_weights`, off the loop and beside the generation. One at a time."""
        self._check_alive()
        prepared: PreparedWeights = await as_async(self._weights.prepare, COMPUTE_POOL)(weights)
        return prepared

    def clone(self, **options: Any) -> TorchReplica:
        """Another replica of the same model, with these weights and a cache of its own."""
        return TorchReplica(self._weights.initial_module, decoder=self._engine.decoder.clone(), **options)

    def close(self, seconds: float = 10.0) -> None:
        """End the thread, within `seconds`, or else with the process. What is in flight is lost."""
        atexit.unregister(self.close)
        self._die("closed", f"{self.name} is closed")
        self._thread.join(seconds)

    def check(self) -> None:
        """Assert what must hold while the replica is idle, paused or dead."""
        self._engine.check()
        held = sum(len(entry.sequence.tokens) for entry in self._in_flight.values())
        assert self.generated == self.returned + sum(self.discarded.values()) + held, (self.returned, held)

    @property
    def generated(self) -> int:
        """Tokens written since the start."""
        return self._engine.generated

    # -- inside, on the loop ---------------------------------------------------------------------------------------

    def _validated(self, request: Request) -> EngineSequence:
        """The request as the engine takes it, unless there is a reason not to."""
        self._check_alive()
        if request.epoch < self.fence:
            raise StaleEpoch(f"{self.name}: epoch {request.epoch} is behind fence {self.fence}")
        if self._asleep:
            raise ReplicaError(f"{self.name} is asleep")
        context = checked_context(
            request,
            replica=self.name,
            in_flight=self._in_flight,
            max_context=self._max_context,
            last_token=self._engine.decoder.vocab - 1,
        )
        stop_ids = self._stop_ids.get(request.sampling.stop)
        if stop_ids is None:
            stop_ids = self._stop_ids[request.sampling.stop] = self.eos_token_ids.union(request.sampling.stop)
        self._arrivals += 1
        max_new_tokens = min(request.max_tokens, self._max_context - request.context)
        return EngineSequence(request, context, stop_ids, max_new_tokens, self._arrivals)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, which gets the results. Waiters of a loop that is closed are gone."""
        loop = asyncio.get_running_loop()
        if loop is not self._thread.loop:
            self._thread.loop = loop
            for id, entry in list(self._in_flight.items()):
                if entry.future.get_loop().is_closed():
                    with contextlib.suppress(RuntimeError):  # the closed loop takes no callbacks
                        entry.future.cancel()
                    self.abort(id, "loop_closed")
        return loop

    def _check_alive(self) -> None:
        if self._thread.lost_reason is not None:
            raise ReplicaLost(self._thread.lost_reason)

    async def _run_in_thread(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps."""
        self._check_alive()
        self._bind_loop()
        await self._thread.run(act)

    def _resolve(self, sequences: list[EngineSequence], error: ReplicaError | None) -> None:
        """Resolve the futures of sequences that ended."""
        for sequence in sequences:
            entry = self._in_flight.get(sequence.request.id)
            if entry is None or entry.sequence is not sequence:
                continue  # the replica was killed meanwhile
            del self._in_flight[sequence.request.id]
            self._answered += 1
            if error is not None or entry.future.done():
                self._discard("failed" if error is not None else entry.cause, len(sequence.tokens))
            else:
                self.returned += len(sequence.tokens)
            resolve_future(entry.future, error or sequence.generation())

    def _discard(self, cause: str, tokens: int) -> None:
        if tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + tokens

    def _die(self, cause: str, text: str) -> None:
        """Fail every call in flight; the thread ends after its step."""
        if not self._thread.halt(text):
            return
        self._discard(cause, self._engine.generated - self.returned - sum(self.discarded.values()))
        for entry in self._in_flight.values():
            resolve_future(entry.future, ReplicaLost(text))
        self._in_flight.clear()
        self._thread.fail_calls(text)

    # -- inside, in the thread -------------------------------------------------------------------------------------

    def _load(self, version: int, weights: object) -> None:
        try:
            prepared = weights if isinstance(weights, PreparedWeights) else self._weights.prepare(weights)
            self._engine.load(version, prepared.packed)
        except Exception as error:
            raise ReplicaError(f"{self.name} could not load version {version}: {error}") from error
        self._weights.note_loaded(prepared)

    def _free_cache(self) -> None:
        if not self._thread.paused or self._engine.running or self._engine.waiting:
            raise RuntimeError(
                f"{self.name} must be paused and empty to sleep, but paused is {self._thread.paused}, "
                f"{len(self._engine.running)} running, {len(self._engine.waiting)} waiting: "
                "pause it with PauseMode.ABORT"
            )
        self._engine.release_cache_memory()


def _eos_token_ids(model: nn.Module) -> list[int]:
    """The end tokens that the model itself names."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []
