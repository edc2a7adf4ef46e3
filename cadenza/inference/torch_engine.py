"""A replica in this process: the engine in a thread of its own, the protocol on the event loop.

Invariant: one thread owns the engine and steps it; it changes its mind only between two steps. Every token written is
returned to a client, discarded under a cause, or held by a request in flight, and every future that was handed out is
resolved, whatever happens to the thread.

    loop:    generate, abort, pause, ... --inbox--> thread: take what came, prepare, compute, advance, again
    thread:  what ended in a step --call_soon_threadsafe, once per step--> loop: the futures

The fence, the requests in flight and the account of what was returned belong to the loop, so they need no lock. What
`kill` reads of the engine is counted under a lock that is never held during a forward pass: death does not wait for the
step in progress, and the tokens of that step were never written.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from cadenza.inference.decoders import Decoder, copy_weights_into, decoder_for
from cadenza.inference.engine import Engine, NonFiniteLogits
from cadenza.inference.kv_cache import join_chunks
from cadenza.inference.meter import StepMeter
from cadenza.inference.replica import (
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
from cadenza.inference.sequence import EngineSequence
from cadenza.off_loop import COMPUTE_POOL, as_async

T = TypeVar("T")
_FOREVER = 1 << 62
_PREFILL_WORK = 1 << 33
"""Weights times tokens that are prefilled in one go: about a second of one core."""
_DEFAULT_KV_BYTES = 1 << 30
"""What the cache may take unless its size is given."""


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights that `prepare` has packed, so that loading them costs nothing."""

    module: nn.Module
    """That they were read from."""
    packed: object
    """In the form that decoders of this model take; never written to again."""


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
        self._meter = StepMeter()
        self._max_context = min(kv_tokens, decoder.max_positions)
        self._initial_module = self._last_module = model
        self._own_copy: nn.Module | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._stop_ids: dict[tuple[int, ...], frozenset[int]] = {(): self.eos_token_ids}
        self._arrivals = self._answered = 0
        self._asleep = False
        self._lost_reason: str | None = None
        # The thread's own, but for reading.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._token_lock = Lock()
        self._prepare_lock = Lock()
        self._paused = self._stopped = False
        self._drain_last_arrival: int | None = None
        self._pause_futures: list[asyncio.Future[None]] = []
        self._thread = Thread(target=self._run, args=(threads,), name=f"cadenza-{name}", daemon=True)
        self._thread.start()
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
            self._inbox.put(lambda: self._engine.add(sequence))
        return future

    def abort(self, request_id: int, cause: str) -> None:
        entry = self._in_flight.get(request_id)
        if entry is not None:
            entry.cause = cause
            self._inbox.put(lambda: self._abort(entry.sequence))

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
        await self._call_thread(lambda future: self._pause(mode, last_arrival, future))

    async def resume(self) -> None:
        self._check_alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        await self._run_in_thread(self._resume)

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
            await self._run_in_thread(self._resume)
            self._asleep = False

    async def stats(self) -> ReplicaStats:
        self._check_alive()
        running = len(self._engine.running)
        return ReplicaStats(
            version=self._engine.version,
            running=running,
            waiting=max(0, len(self._in_flight) - running),
            progress=self._engine.generated + self._engine.prefilled + self._answered,
            paused=self._paused,
            kv_tokens=self._engine.running_tokens,
            kv_capacity=self.kv_capacity,
            generated=self._engine.generated,
            prefilled=self._engine.prefilled,
            discarded=dict(self.discarded),
            costs=self._meter.costs(),
        )

    def kill(self, cause: str) -> None:
        self._die(cause, f"{self.name} was killed: {cause}")

    # -- around it -------------------------------------------------------------------------------------------------

    async def prepare(self, weights: object) -> PreparedWeights:
        """Make weights ready for `load_weights`, off the loop and beside the generation. One at a time."""
        self._check_alive()
        prepared: PreparedWeights = await as_async(self._prepare_weights, COMPUTE_POOL)(weights)
        return prepared

    def clone(self, **options: Any) -> TorchReplica:
        """Another replica of the same model, with these weights and a cache of its own."""
        return TorchReplica(self._initial_module, decoder=self._engine.decoder.clone(), **options)

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
        if request.id in self._in_flight:
            raise ReplicaError(f"{self.name}: request {request.id} is already in flight")
        if not 0 < request.context < self._max_context or request.max_tokens < 1:
            text = f"{self.name}: {request.context} tokens of context and {request.max_tokens} to write"
            raise RequestRefused(f"{text} do not fit: the context must have 1 to {self._max_context - 1} tokens")
        context, vocab = join_chunks(request.chunks), self._engine.decoder.vocab
        if len(context) != request.context or not 0 <= context.min() <= context.max() < vocab:
            text = f"{request.context} tokens of 0 to {vocab - 1}"
            raise RequestRefused(f"{self.name}: the chunks of request {request.id} are not {text}")
        stop_ids = self._stop_ids.get(request.sampling.stop)
        if stop_ids is None:
            stop_ids = self._stop_ids[request.sampling.stop] = self.eos_token_ids.union(request.sampling.stop)
        self._arrivals += 1
        max_new_tokens = min(request.max_tokens, self._max_context - request.context)
        return EngineSequence(request, context, stop_ids, max_new_tokens, self._arrivals)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, which gets the results. Waiters of a loop that is closed are gone."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for id, entry in list(self._in_flight.items()):
                if entry.future.get_loop().is_closed():
                    with contextlib.suppress(RuntimeError):  # the closed loop takes no callbacks
                        entry.future.cancel()
                    self.abort(id, "loop_closed")
        return loop

    def _check_alive(self) -> None:
        if self._lost_reason is not None:
            raise ReplicaLost(self._lost_reason)

    async def _run_in_thread(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps."""

        def acted(future: asyncio.Future[None]) -> None:
            act()
            self._call_on_loop(_resolve_future, future, None)

        await self._call_thread(acted)

    async def _call_thread(self, act: Callable[[asyncio.Future[None]], None]) -> None:
        """Have the thread do something that resolves a future; `kill` resolves it too."""
        self._check_alive()
        future: asyncio.Future[None] = self._bind_loop().create_future()

        def guarded() -> None:
            try:
                act(future)
            except Exception as error:  # noqa: BLE001 - it belongs to the waiter of the future
                self._call_on_loop(_resolve_future, future, error)

        self._calls.add(future)
        try:
            self._inbox.put(guarded)
            await future
        finally:
            self._calls.discard(future)

    def _resolve(self, sequences: list[EngineSequence], error: ReplicaError | None = None) -> None:
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
            _resolve_future(entry.future, error or sequence.generation())

    def _discard(self, cause: str, tokens: int) -> None:
        if tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + tokens

    def _die(self, cause: str, text: str) -> None:
        """Fail every call in flight; the thread ends after its step."""
        with self._token_lock:
            if self._lost_reason is not None:
                return
            self._lost_reason = text
            held = self._engine.generated - self.returned - sum(self.discarded.values())
        self._inbox.put(self._stop)
        self._discard(cause, held)
        for entry in self._in_flight.values():
            _resolve_future(entry.future, ReplicaLost(text))
        self._in_flight.clear()
        for future in self._calls:
            _resolve_future(future, ReplicaLost(text))

    # -- inside, in the thread -------------------------------------------------------------------------------------

    def _run(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopped:
                    self._run_once()
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread, its clients get it
            text = f"{self.name} failed: {type(error).__name__}: {error}"
            if not self._call_on_loop(self._die, "replica_lost", text):
                self._lost_reason = text

    def _run_once(self) -> None:
        """Take what came, then one step. Without anything to do, wait for something to come."""
        working = self._step()
        self._end_drain()
        while not self._inbox.empty() or not working:
            self._inbox.get()()
            working = True

    def _step(self) -> bool:
        if self._paused:
            return False
        began, before = perf_counter(), self._engine.prefilled
        if not self._engine.admit_and_prefill(
            _FOREVER if self._drain_last_arrival is None else self._drain_last_arrival
        ):
            if prefilled := self._engine.prefilled - before:
                self._meter.add(0, 0, prefilled, perf_counter() - began)
            return bool(self._engine.running)
        context = self._engine.running_tokens
        try:
            sampled = self._engine.compute()
        except NonFiniteLogits as error:
            self._call_on_loop(
                self._resolve, self._engine.abort_all_and_invalidate_kv(), ReplicaError(f"{self.name}: {error}")
            )
            return True
        with self._token_lock:
            done = [] if self._lost_reason is not None else self._engine.advance(sampled)
        if done:
            self._call_on_loop(self._resolve, done)
        self._meter.add(len(sampled.tokens), context, self._engine.prefilled - before, perf_counter() - began)
        return True

    def _abort(self, sequence: EngineSequence) -> None:
        self._engine.abort(sequence.request.id)
        # Also when it had ended: the answer may have gone to a closed loop.
        self._call_on_loop(self._resolve, [sequence])

    def _pause(self, mode: PauseMode, last_arrival: int, future: asyncio.Future[None]) -> None:
        self._pause_futures.append(future)
        self._drain_last_arrival = last_arrival if mode is PauseMode.DRAIN else None
        self._paused = mode is not PauseMode.DRAIN
        if mode is PauseMode.ABORT:
            self._call_on_loop(self._resolve, self._engine.abort_all())
        if self._paused:
            self._resolve_pauses(None)

    def _end_drain(self) -> None:
        """Ends a drain once every request that was there when it began has left."""
        if self._drain_last_arrival is not None and not self._engine.running:
            head = next(iter(self._engine.waiting.values()), None)
            if head is None or head.arrival > self._drain_last_arrival:
                self._drain_last_arrival = None
                self._paused = True
                self._resolve_pauses(None)

    def _resume(self) -> None:
        self._paused = False
        self._drain_last_arrival = None
        self._resolve_pauses(ReplicaError(f"{self.name}: resumed before the pause took effect"))

    def _resolve_pauses(self, error: ReplicaError | None) -> None:
        pausing, self._pause_futures = self._pause_futures, []
        for future in pausing:
            self._call_on_loop(_resolve_future, future, error)

    def _load(self, version: int, weights: object) -> None:
        try:
            prepared = weights if isinstance(weights, PreparedWeights) else self._prepare_weights(weights)
            self._engine.load(version, prepared.packed)
        except Exception as error:
            raise ReplicaError(f"{self.name} could not load version {version}: {error}") from error
        self._last_module = prepared.module
        if prepared.module is not self._own_copy:
            self._own_copy = None

    def _prepare_weights(self, weights: object) -> PreparedWeights:
        with self._prepare_lock, torch.no_grad():
            module = self._module_with(weights)
            return PreparedWeights(module, self._engine.decoder.pack(module))

    def _module_with(self, weights: object) -> nn.Module:
        """The given module, another one, or a copy of the last one with the state dict in it: the last one may be a
        trainer's. The copy is kept while state dicts follow one another."""
        if weights is None:
            return self._initial_module
        if isinstance(weights, nn.Module):
            return weights
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a module, a state dict or None, got {type(weights).__name__}")
        if self._own_copy is None:
            self._own_copy = copy.deepcopy(self._last_module)
        copy_weights_into(self._own_copy, weights)
        return self._own_copy

    def _free_cache(self) -> None:
        if not self._paused or self._engine.running or self._engine.waiting:
            raise RuntimeError(
                f"{self.name} must be paused and empty to sleep, but paused is {self._paused}, "
                f"{len(self._engine.running)} running, {len(self._engine.waiting)} waiting: "
                "pause it with PauseMode.ABORT"
            )
        self._engine.release_cache_memory()

    def _stop(self) -> None:
        self._stopped = True

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> bool:
        """Have the loop call something; False when there is no loop to do it."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *arguments)
                return True
        except RuntimeError:  # the loop is closed: nothing waits for results any more
            pass
        return False


def _resolve_future(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Resolve a future that may be resolved already, or belong to a loop that is gone."""
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _eos_token_ids(model: nn.Module) -> list[int]:
    """The end tokens that the model itself names."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []
