"""The thread of an engine.

Invariant: one thread owns the engine and steps it; requests, aborts and pauses take effect only between steps. Every
future of a call is resolved, whatever happens to the thread.

    loop:    put(act), call(act) --inbox--> thread: take what came, admit_and_prefill, compute, advance
    thread:  what ended in a step --call_soon_threadsafe, once per step--> loop: `on_ended`, or the future of the call

`halt` does not wait for the step in progress: the tokens of a step count under a lock that is never held during a
forward pass, and after a halt none do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import torch

from cadenza.inference.engine import Engine, NonFiniteLogits
from cadenza.inference.meter import StepMeter
from cadenza.inference.replica import PauseMode, ReplicaError, ReplicaLost
from cadenza.inference.sequence import EngineSequence
from cadenza.off_loop import resolve_future

_FOREVER = 1 << 62


class EngineThread:
    """Steps an engine while it is neither paused nor idle.

    `abort`, `pause` and `resume` must run inside the thread: hand them to `put`, `run` or `call`. Everything else is
    called on the loop:

        thread.put(lambda: thread.abort(sequence))
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        threads: int | None,
        on_ended: Callable[[list[EngineSequence], ReplicaError | None], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_ended` gets sequences that ended, with an error if they failed; `on_failure` the error that ended the
        thread. Both are called on the loop. `threads` sets the threads of torch."""
        self.name = name
        self.meter = StepMeter()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that gets the results."""
        self.paused = False
        self.lost_reason: str | None = None
        """Why the engine was ended; None while it works. Once set, tokens that a step samples are discarded."""
        self._engine = engine
        self._on_ended, self._on_failure = on_ended, on_failure
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._calls: set[asyncio.Future[None]] = set()
        self._token_lock = Lock()
        self._stopped = False
        self._drain_last_arrival: int | None = None
        self._pause_futures: list[asyncio.Future[None]] = []
        self._thread = Thread(target=self._run, args=(threads,), name=f"cadenza-{name}", daemon=True)
        self._thread.start()

    # -- from the loop ---------------------------------------------------------------------------------------------

    def put(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps."""
        self._inbox.put(act)

    async def run(self, act: Callable[[], None]) -> None:
        """Have the thread do something between two steps, and wait for it."""

        def acted(future: asyncio.Future[None]) -> None:
            act()
            self._call_on_loop(resolve_future, future, None)

        await self.call(acted)

    async def call(self, act: Callable[[asyncio.Future[None]], None]) -> None:
        """Have the thread do something that resolves a future; `fail_calls` resolves it too."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def guarded() -> None:
            try:
                act(future)
            except Exception as error:  # noqa: BLE001 - it belongs to the waiter of the future
                self._call_on_loop(resolve_future, future, error)

        self._calls.add(future)
        try:
            self._inbox.put(guarded)
            await future
        finally:
            self._calls.discard(future)

    def halt(self, reason: str) -> bool:
        """Count no further token, and end after the step in progress. Returns whether this call did it."""
        with self._token_lock:
            if self.lost_reason is not None:
                return False
            self.lost_reason = reason
        self._inbox.put(self._stop)
        return True

    def fail_calls(self, reason: str) -> None:
        """Resolve the futures of all calls: the replica is lost."""
        for future in self._calls:
            resolve_future(future, ReplicaLost(reason))

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def abort(self, sequence: EngineSequence) -> None:
        """Abort the sequence between two steps. Must run inside the thread."""
        self._engine.abort(sequence.request.id)
        # Also when it had ended: the answer may have gone to a closed loop.
        self._call_on_loop(self._on_ended, [sequence], None)

    def pause(self, mode: PauseMode, last_arrival: int, future: asyncio.Future[None]) -> None:
        """Resolves the future when the pause takes effect: with `PauseMode.DRAIN`, when every sequence that arrived no
        later than `last_arrival` has ended. Must run inside the thread."""
        self._pause_futures.append(future)
        self._drain_last_arrival = last_arrival if mode is PauseMode.DRAIN else None
        self.paused = mode is not PauseMode.DRAIN
        if mode is PauseMode.ABORT:
            self._call_on_loop(self._on_ended, self._engine.abort_all(), None)
        if self.paused:
            self._resolve_pauses(None)

    def resume(self) -> None:
        """End a pause; one that has not taken effect fails. Must run inside the thread."""
        self.paused = False
        self._drain_last_arrival = None
        self._resolve_pauses(ReplicaError(f"{self.name}: resumed before the pause took effect"))

    def _run(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopped:
                    self._run_once()
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread, its clients get it
            text = f"{self.name} failed: {type(error).__name__}: {error}"
            if not self._call_on_loop(self._on_failure, text):
                self.lost_reason = text

    def _run_once(self) -> None:
        """Take what came, then one step. Without anything to do, wait for something to come."""
        working = self._step()
        self._end_drain()
        while not self._inbox.empty() or not working:
            self._inbox.get()()
            working = True

    def _step(self) -> bool:
        if self.paused:
            return False
        began, before = perf_counter(), self._engine.prefilled
        if not self._engine.admit_and_prefill(
            _FOREVER if self._drain_last_arrival is None else self._drain_last_arrival
        ):
            if prefilled := self._engine.prefilled - before:
                self.meter.add(0, 0, prefilled, perf_counter() - began)
            return bool(self._engine.running)
        context = self._engine.running_tokens
        try:
            sampled = self._engine.compute()
        except NonFiniteLogits as error:
            self._call_on_loop(
                self._on_ended, self._engine.abort_all_and_invalidate_kv(), ReplicaError(f"{self.name}: {error}")
            )
            return True
        with self._token_lock:
            done = [] if self.lost_reason is not None else self._engine.advance(sampled)
        if done:
            self._call_on_loop(self._on_ended, done, None)
        self.meter.add(len(sampled.tokens), context, self._engine.prefilled - before, perf_counter() - began)
        return True

    def _end_drain(self) -> None:
        """Ends a drain once every request that was there when it began has left."""
        if self._drain_last_arrival is not None and not self._engine.running:
            head = next(iter(self._engine.waiting.values()), None)
            if head is None or head.arrival > self._drain_last_arrival:
                self._drain_last_arrival = None
                self.paused = True
                self._resolve_pauses(None)

    def _resolve_pauses(self, error: ReplicaError | None) -> None:
        pausing, self._pause_futures = self._pause_futures, []
        for future in pausing:
            self._call_on_loop(resolve_future, future, error)

    def _stop(self) -> None:
        self._stopped = True

    def _call_on_loop(self, callback: Callable[..., None], *arguments: Any) -> bool:
        """Have the loop call something; False when there is no loop to do it."""
        try:
            if self.loop is not None:
                self.loop.call_soon_threadsafe(callback, *arguments)
                return True
        except RuntimeError:  # the loop is closed: nothing waits for results any more
            pass
        return False
