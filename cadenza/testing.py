"""Fakes at the seams, for the tests of this library and of its users.

A fake is a function with a protocol around it: `FakeReplica(answer)` calls `answer(request)` for the tokens and takes
the time that `seconds(request)` says, on whatever clock the loop has.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from cadenza.cluster import ResourceManager
from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    Replica,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestProgress,
    Span,
    StaleEpoch,
    Tokens,
)
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.model import Codec
from cadenza.rollout.sampler import SamplerConfig

KEPT_REQUESTS = 1_000
"""A `FakeReplica` keeps so many requests, and at most twice as many: a program may run for days with it."""


class ByteCodec:
    """Text as its UTF-8 bytes."""

    def encode(self, observation: str | Sequence[dict[str, str]], *, first: bool, last: int | None = None) -> Tokens:
        text = observation if isinstance(observation, str) else "".join(m["content"] for m in observation)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens) -> str:
        return bytes(tokens.astype(np.uint8)).decode(errors="replace")


class FakeReplica:
    """A replica whose tokens come from a function. All requests run side by side, each at an even pace."""

    def __init__(
        self,
        answer: Callable[[Request], Sequence[int] | str] | None = None,
        *,
        seconds: Callable[[Request], float] | float = 0.0,
        name: str = "fake",
        devices: Sequence[int] = (0,),
        kv_capacity: int = 1 << 30,
    ) -> None:
        self.name = name
        self.devices = tuple(devices)
        self.kv_capacity = kv_capacity
        self.version = 0
        self.requests: list[Request] = []
        """What was asked, in order: the last `KEPT_REQUESTS` at least."""
        self.asked = 0
        """How many requests there were in all."""
        self.generated = 0
        self.discarded: Counter[str] = Counter()
        self._answer = answer or (lambda request: "ok")
        self._seconds = seconds if callable(seconds) else lambda request: seconds
        self._running: dict[int, _RunningRequest] = {}
        self._waiting: list[tuple[Request, asyncio.Future[Generation]]] = []
        self._min_epoch = 0
        self._paused = False
        self._drained: asyncio.Future[None] | None = None
        self._dead = ""

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self.asked += 1
        self.requests.append(request)
        if len(self.requests) > 2 * KEPT_REQUESTS:
            del self.requests[:-KEPT_REQUESTS]
        if self._dead:
            future.set_exception(ReplicaLost(self._dead))
        elif request.epoch < self._min_epoch:
            future.set_exception(StaleEpoch(f"epoch {request.epoch} is older than {self._min_epoch}"))
        elif self._paused:
            self._waiting.append((request, future))
        else:
            self._start(request, future)
        return future

    def abort(self, request_id: int, cause: str) -> None:
        for request, future in self._waiting:
            if request.id == request_id:
                self._waiting.remove((request, future))
                self._deliver(_RunningRequest(request, future, np.empty(0, np.int32), 0.0), 0, Finish.ABORT, cause)
                return
        running = self._running.pop(request_id, None)
        if running is not None:
            self._deliver(running, running.progress(), Finish.ABORT, cause)

    def requests_in_flight(self) -> list[RequestProgress]:
        running = [(one.request, one.progress(), 1) for one in self._running.values()]
        found = [*running, *((request, 0, 0) for request, _ in self._waiting)]
        return [
            RequestProgress(
                request.id, request.context + done, request.offset + done, computed * (request.context + done), done
            )
            for request, done, computed in found
        ]

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self._min_epoch = max(self._min_epoch, epoch)
        if mode is PauseMode.DRAIN and self._running:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        self._paused = True
        for running in list(self._running.values()):
            if mode is PauseMode.ABORT:
                self.abort(running.request.id, "pause")
            else:
                running.freeze()
        if mode is PauseMode.ABORT:
            for request, future in self._waiting:
                self._deliver(_RunningRequest(request, future, np.empty(0, np.int32), 0.0), 0, Finish.ABORT, "pause")
            self._waiting.clear()

    async def resume(self) -> None:
        self._paused = False
        for running in self._running.values():
            running.arm(self._finish)
        waiting, self._waiting = self._waiting, []
        for request, future in waiting:
            self._start(request, future)

    async def load_weights(self, version: int, weights: object) -> None:
        for running in self._running.values():
            running.mark(self.version)
        self.version = version

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        self._paused = False

    async def stats(self) -> ReplicaStats:
        done = sum(running.progress() for running in self._running.values())
        return ReplicaStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            progress=self.generated + done,
            paused=self._paused,
            kv_tokens=0,
            kv_capacity=self.kv_capacity,
            generated=self.generated + done,
            prefilled=0,
            discarded=dict(self.discarded),
        )

    def kill(self, cause: str) -> None:
        self._dead = self._dead or cause
        for running in self._running.values():
            running.freeze()
            self.discarded[cause] += running.progress()
            self.generated += running.progress()
            if not running.future.done():
                running.future.set_exception(ReplicaLost(cause))
        self._running.clear()
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ReplicaLost(cause))
        self._waiting.clear()

    def _start(self, request: Request, future: asyncio.Future[Generation]) -> None:
        answer = self._answer(request)
        tokens = list(answer.encode()) if isinstance(answer, str) else answer
        rest = np.array(tokens, np.int32)[request.offset :]
        whole = max(len(tokens), 1)
        seconds = self._seconds(request) * len(rest) / whole
        running = _RunningRequest(request, future, rest, seconds)
        self._running[request.id] = running
        running.arm(self._finish)

    def _finish(self, running: _RunningRequest) -> None:
        self._running.pop(running.request.id, None)
        limit = running.request.max_tokens
        length = min(len(running.tokens), limit)
        self._deliver(running, length, Finish.LENGTH if len(running.tokens) > limit else Finish.STOP, "unclaimed")

    def _deliver(self, running: _RunningRequest, length: int, finish: Finish, cause: str) -> None:
        running.freeze()
        running.mark(self.version, length)
        self.generated += length
        if self._drained is not None and not self._running and not self._drained.done():
            self._drained.set_result(None)
        if running.future.done():
            self.discarded[cause] += length
            return
        tokens = running.tokens[:length]
        logprobs = np.full(length, -1.0, np.float32)
        running.future.set_result(Generation(tokens, logprobs, tuple(running.spans), finish))


class _RunningRequest:
    """A request under way: its tokens come at an even pace."""

    def __init__(self, request: Request, future: asyncio.Future[Generation], tokens: Tokens, seconds: float) -> None:
        self.request = request
        self.future = future
        self.tokens = tokens
        self.spans: list[Span] = []
        self._seconds = seconds
        self._done_seconds = 0.0
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, finish: Callable[[_RunningRequest], None]) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self._seconds - self._done_seconds, finish, self)

    def freeze(self) -> None:
        if self._timer is not None and self._since is not None:
            self._timer.cancel()
            self._timer = None
            self._done_seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    def progress(self) -> int:
        seconds = self._done_seconds
        if self._since is not None:
            seconds += asyncio.get_running_loop().time() - self._since
        share = min(seconds / self._seconds, 1.0) if self._seconds > 0 else 1.0
        return min(int(share * len(self.tokens) + 1e-9), self.request.max_tokens)

    def mark(self, version: int, length: int | None = None) -> None:
        """All tokens up to now that have no version yet were written by this one."""
        length = self.progress() if length is None else length
        new = length - sum(span.length for span in self.spans)
        if new > 0:
            self.spans.append(Span(version, new))


class LocalCluster:
    """Replicas in this process, as the scheduler wants them."""

    def __init__(
        self, replicas: Sequence[Replica], codec: Codec | None = None, config: SamplerConfig | None = None
    ) -> None:
        self.sampler = LocalSampler(replicas, config)
        self.codec: Codec = codec or ByteCodec()
        self.resources = ResourceManager(1 + max(device for replica in replicas for device in replica.devices))
