"""A replica in this process: the engine in a thread of its own, the protocol on the event loop.

Invariant: one thread owns the engine and steps it; it changes its mind only between two steps. Every token written is
returned to a client, discarded under a cause, or held by a request in flight, and every future that was handed out is
resolved, whatever happens to the thread.

    loop:    generate, abort, pause, ... --inbox--> thread: take what came, prepare, compute, advance, again
    thread:  what ended in a step --call_soon_threadsafe, once per step--> loop: the futures

The fence, the requests in flight and the account of what was returned belong to the loop, so they need no lock. What
`kill` reads of the engine is booked under a lock that is never held during a forward pass: death does not wait for the
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

from cadenza.inference import engine
from cadenza.inference.decoder import Decoder, absorb, decoder_for
from cadenza.inference.engine import Engine, NotNumbers
from cadenza.inference.kv_cache import joined
from cadenza.inference.meter import StepMeter
from cadenza.inference.replica import (
    Flight,
    Generation,
    PauseMode,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestRefused,
    StaleEpoch,
)
from cadenza.off_loop import as_async

T = TypeVar("T")
_FOREVER = 1 << 62
_PREFILL_WORK = 1 << 33
"""Weights times tokens that are filled in one go: about a second of one core."""
_KV_BYTES = 1 << 30
"""What the cache may take unless its size is given."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights that can be loaded at no cost."""

    module: nn.Module
    """That they were read from."""
    packed: object
    """As decoders of this model take them; nobody changes it."""


@dataclass(slots=True)
class _Flight:
    """A request that is not answered."""

    future: asyncio.Future[Generation]
    sequence: engine.Sequence
    cause: str = "unclaimed"
    """Why its tokens are discarded if nobody takes them."""


class TorchReplica:
    """A `Replica` over a causal language model of transformers, on a CPU or a GPU.

    The replica copies the weights of `model` when it is made and at `load_weights`, and never writes to the module: a
    trainer may change it in place at any time but during these two. `load_weights(version, weights)` takes a module, a
    state dict (all of it, or what changed since the last load, adapters included), or None for the module the replica
    was made of; or what `prepare` made of one of these beside the generation, so that nothing is left to do but a swap.
    Replicas in one process may share their weights: `twin` makes another one, and what one prepared all may load.

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
        kv_tokens = kv_tokens or min(1 << 16, max(_KV_BYTES // decoder.shape.bytes, decoder.max_positions))
        self.name = name
        self.devices = tuple(devices)
        self.kv_capacity = kv_tokens
        self.eos_token_ids = frozenset(_eos(model) if eos_token_ids is None else eos_token_ids)
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
        self._longest = min(kv_tokens, decoder.max_positions)
        self._given = self._last = model
        self._own: nn.Module | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flight: dict[int, _Flight] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._stops: dict[tuple[int, ...], frozenset[int]] = {(): self.eos_token_ids}
        self._arrivals = self._answered = 0
        self._asleep = False
        self._lost: str | None = None
        # The thread's own, but for reading.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._books = Lock()
        self._preparing = Lock()
        self._paused = self._stopped = False
        self._drain_until: int | None = None
        self._pausing: list[asyncio.Future[None]] = []
        self._thread = Thread(target=self._run, args=(threads,), name=f"cadenza-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- the replica protocol, on the loop -------------------------------------------------------------------------

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = self._bound().create_future()
        try:
            sequence = self._accepted(request)
        except ReplicaError as error:
            future.set_exception(error)
        else:
            self._flight[request.id] = _Flight(future, sequence)
            self._inbox.put(lambda: self._engine.add(sequence))
        return future

    def abort(self, request_id: int, cause: str) -> None:
        flight = self._flight.get(request_id)
        if flight is not None:
            flight.cause = cause
            self._inbox.put(lambda: self._abort(flight.sequence))

    def flights(self) -> list[Flight]:
        found = []
        for id, flight in self._flight.items():
            sequence, written = flight.sequence, len(flight.sequence.tokens)
            context = sequence.request.context + written
            computed = min(sequence.computed, context)
            found.append(Flight(id, context, sequence.request.offset + written, computed, written))
        return found

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self.fence = max(self.fence, epoch)
        until = self._arrivals
        await self._call(lambda future: self._pause(mode, until, future))

    async def resume(self) -> None:
        self._alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it instead of resuming it")
        await self._ask(self._resume)

    async def load_weights(self, version: int, weights: object) -> None:
        self._alive()
        if self._asleep:
            raise RuntimeError(f"{self.name} is asleep: wake it before loading weights")
        await self._ask(lambda: self._load(version, weights))

    async def sleep(self) -> None:
        self._alive()
        if not self._asleep:
            await self._ask(self._release)
            self._asleep = True

    async def wake(self) -> None:
        self._alive()
        if self._asleep:
            await self._ask(self._resume)
            self._asleep = False

    async def stats(self) -> ReplicaStats:
        self._alive()
        running = len(self._engine.seated)
        return ReplicaStats(
            version=self._engine.version,
            running=running,
            waiting=max(0, len(self._flight) - running),
            progress=self._engine.generated + self._engine.prefilled + self._answered,
            paused=self._paused,
            kv_tokens=self._engine.kv,
            kv_capacity=self.kv_capacity,
            generated=self._engine.generated,
            prefilled=self._engine.prefilled,
            discarded=dict(self.discarded),
            costs=self._meter.costs(),
        )

    def kill(self, cause: str) -> None:
        self._die(cause, f"{self.name} was killed: {cause}")

    # -- around it -------------------------------------------------------------------------------------------------

    async def prepare(self, weights: object) -> Prepared:
        """Make weights ready for `load_weights`, off the loop and beside the generation. One at a time."""
        self._alive()
        prepared: Prepared = await as_async(self._prepared)(weights)
        return prepared

    def twin(self, **options: Any) -> TorchReplica:
        """Another replica of the same model, with these weights and a cache of its own."""
        return TorchReplica(self._given, decoder=self._engine.decoder.twin(), **options)

    def close(self, seconds: float = 10.0) -> None:
        """End the thread, within `seconds`, or else with the process. What is in flight is lost."""
        atexit.unregister(self.close)
        self._die("closed", f"{self.name} is closed")
        self._thread.join(seconds)

    def check(self) -> None:
        """Assert what must hold while the replica is idle, paused or dead."""
        self._engine.check()
        held = sum(len(flight.sequence.tokens) for flight in self._flight.values())
        assert self.generated == self.returned + sum(self.discarded.values()) + held, (self.returned, held)

    @property
    def generated(self) -> int:
        """Tokens written since the start."""
        return self._engine.generated

    # -- inside, on the loop ---------------------------------------------------------------------------------------

    def _accepted(self, request: Request) -> engine.Sequence:
        """The request as the engine takes it, unless there is a reason not to."""
        self._alive()
        if request.epoch < self.fence:
            raise StaleEpoch(f"{self.name}: epoch {request.epoch} is behind fence {self.fence}")
        if self._asleep:
            raise ReplicaError(f"{self.name} is asleep")
        if request.id in self._flight:
            raise ReplicaError(f"{self.name}: request {request.id} is already in flight")
        if not 0 < request.context < self._longest or request.max_tokens < 1:
            text = f"{self.name}: {request.context} tokens of context and {request.max_tokens} to write"
            raise RequestRefused(f"{text} do not fit: the context must have 1 to {self._longest - 1} tokens")
        context, vocab = joined(request.chunks), self._engine.decoder.vocab
        if len(context) != request.context or not 0 <= context.min() <= context.max() < vocab:
            text = f"{request.context} tokens of 0 to {vocab - 1}"
            raise RequestRefused(f"{self.name}: the chunks of request {request.id} are not {text}")
        stops = self._stops.get(request.sampling.stop)
        if stops is None:
            stops = self._stops[request.sampling.stop] = self.eos_token_ids.union(request.sampling.stop)
        self._arrivals += 1
        target = min(request.max_tokens, self._longest - request.context)
        return engine.Sequence(request, context, stops, target, self._arrivals)

    def _bound(self) -> asyncio.AbstractEventLoop:
        """The loop that hears of what happens: the running one. Whoever waited on one that is closed is gone."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for id, flight in list(self._flight.items()):
                if flight.future.get_loop().is_closed():
                    with contextlib.suppress(RuntimeError):  # it cannot tell anybody any more
                        flight.future.cancel()
                    self.abort(id, "loop_closed")
        return loop

    def _alive(self) -> None:
        if self._lost is not None:
            raise ReplicaLost(self._lost)

    async def _ask(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps."""

        def acted(future: asyncio.Future[None]) -> None:
            act()
            self._tell(_settle, future, None)

        await self._call(acted)

    async def _call(self, act: Callable[[asyncio.Future[None]], None]) -> None:
        """Have the thread do something that resolves a future; `kill` resolves it too."""
        self._alive()
        future: asyncio.Future[None] = self._bound().create_future()

        def guarded() -> None:
            try:
                act(future)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
                self._tell(_settle, future, error)

        self._calls.add(future)
        try:
            self._inbox.put(guarded)
            await future
        finally:
            self._calls.discard(future)

    def _answer(self, sequences: list[engine.Sequence], error: ReplicaError | None = None) -> None:
        """Resolve the futures of sequences that ended."""
        for sequence in sequences:
            flight = self._flight.get(sequence.request.id)
            if flight is None or flight.sequence is not sequence:
                continue  # the replica was killed meanwhile
            del self._flight[sequence.request.id]
            self._answered += 1
            if error is not None or flight.future.done():
                self._discard("failed" if error is not None else flight.cause, len(sequence.tokens))
            else:
                self.returned += len(sequence.tokens)
            _settle(flight.future, error or sequence.answer())

    def _discard(self, cause: str, tokens: int) -> None:
        if tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + tokens

    def _die(self, cause: str, text: str) -> None:
        """Fail every call in flight; the thread ends after its step."""
        with self._books:
            if self._lost is not None:
                return
            self._lost = text
            held = self._engine.generated - self.returned - sum(self.discarded.values())
        self._inbox.put(self._stop)
        self._discard(cause, held)
        for flight in self._flight.values():
            _settle(flight.future, ReplicaLost(text))
        self._flight.clear()
        for future in self._calls:
            _settle(future, ReplicaLost(text))

    # -- inside, in the thread -------------------------------------------------------------------------------------

    def _run(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopped:
                    self._beat()
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread, its clients must hear of it
            text = f"{self.name} failed: {type(error).__name__}: {error}"
            if not self._tell(self._die, "replica_lost", text):
                self._lost = text

    def _beat(self) -> None:
        """Take what came, then one step. Without anything to do, wait for something to come."""
        working = self._step()
        self._drained()
        while not self._inbox.empty() or not working:
            self._inbox.get()()
            working = True

    def _step(self) -> bool:
        if self._paused:
            return False
        began, before = perf_counter(), self._engine.prefilled
        if not self._engine.prepare(_FOREVER if self._drain_until is None else self._drain_until):
            if prefilled := self._engine.prefilled - before:
                self._meter.add(0, 0, prefilled, perf_counter() - began)
            return bool(self._engine.seated)
        context = self._engine.kv
        try:
            drawn = self._engine.compute()
        except NotNumbers as error:
            self._tell(self._answer, self._engine.drop_all(), ReplicaError(f"{self.name}: {error}"))
            return True
        with self._books:
            done = [] if self._lost is not None else self._engine.advance(drawn)
        if done:
            self._tell(self._answer, done)
        self._meter.add(len(drawn.tokens), context, self._engine.prefilled - before, perf_counter() - began)
        return True

    def _abort(self, sequence: engine.Sequence) -> None:
        self._engine.abort(sequence.request.id)
        self._tell(self._answer, [sequence])  # also when it had ended: the answer may have gone to a closed loop

    def _pause(self, mode: PauseMode, until: int, future: asyncio.Future[None]) -> None:
        self._pausing.append(future)
        self._drain_until = until if mode is PauseMode.DRAIN else None
        self._paused = mode is not PauseMode.DRAIN
        if mode is PauseMode.ABORT:
            self._tell(self._answer, self._engine.abort_all())
        if self._paused:
            self._settle_pauses(None)

    def _drained(self) -> None:
        """The end of a drain: everybody who was there has left."""
        if self._drain_until is not None and not self._engine.seated:
            head = next(iter(self._engine.waiting.values()), None)
            if head is None or head.arrival > self._drain_until:
                self._drain_until = None
                self._paused = True
                self._settle_pauses(None)

    def _resume(self) -> None:
        self._paused = False
        self._drain_until = None
        self._settle_pauses(ReplicaError(f"{self.name}: resumed before the pause took effect"))

    def _settle_pauses(self, error: ReplicaError | None) -> None:
        pausing, self._pausing = self._pausing, []
        for future in pausing:
            self._tell(_settle, future, error)

    def _load(self, version: int, weights: object) -> None:
        try:
            prepared = weights if isinstance(weights, Prepared) else self._prepared(weights)
            self._engine.load(version, prepared.packed)
        except Exception as error:
            raise ReplicaError(f"{self.name} could not load version {version}: {error}") from error
        self._last = prepared.module
        if prepared.module is not self._own:
            self._own = None

    def _prepared(self, weights: object) -> Prepared:
        with self._preparing, torch.no_grad():
            module = self._module_with(weights)
            return Prepared(module, self._engine.decoder.pack(module))

    def _module_with(self, weights: object) -> nn.Module:
        """The given module, another one, or a copy of the last one with the state dict in it: the last one may be a
        trainer's. The copy is kept while state dicts follow one another."""
        if weights is None:
            return self._given
        if isinstance(weights, nn.Module):
            return weights
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a module, a state dict or None, got {type(weights).__name__}")
        if self._own is None:
            self._own = copy.deepcopy(self._last)
        absorb(self._own, weights)
        return self._own

    def _release(self) -> None:
        if not self._paused or self._engine.seated or self._engine.waiting:
            raise RuntimeError(
                f"{self.name} must be paused and empty to sleep, but paused is {self._paused}, "
                f"{len(self._engine.seated)} running, {len(self._engine.waiting)} waiting: "
                "pause it with PauseMode.ABORT"
            )
        self._engine.release()

    def _stop(self) -> None:
        self._stopped = True

    def _tell(self, callback: Callable[..., None], *arguments: object) -> bool:
        """Have the loop call something; False when there is no loop to do it."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *arguments)
                return True
        except RuntimeError:  # the loop is closed: nobody waits for anything any more
            pass
        return False


def _settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Resolve a future that may be resolved already, or belong to a loop that is gone."""
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _eos(model: nn.Module) -> list[int]:
    """The end tokens that the model itself names."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []
