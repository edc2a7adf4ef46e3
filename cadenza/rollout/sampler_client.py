"""The sampler, for whoever is in another process: same names, same meaning.

What is known here of the version and the gate may be a moment old; `refresh` asks. A scheduler refreshes before it
cuts a batch, so that a version which the controller has published before counts.

Invariant: calls about the gate are sent one after the other, in the order in which they were made, because calls to an
async actor may overtake each other. A scheduler is connected: no call of it waits longer than the wire, and when the
sampler is gone, or silent, all of them end with `NoReplicas`; and when the scheduler is gone, what it holds is given
back. A controller that only calls is not: it may have another loop for every call, and its hold stays until it resumes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cadenza.cluster.channel import Channel
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import PauseMode, ReplicaError, ReplicaStats
from cadenza.off_loop import within
from cadenza.rollout.failures import logger
from cadenza.rollout.grants import ReplicaAddress, GrantClient, make_replica_entries
from cadenza.rollout.model import Codec
from cadenza.rollout.router import RouteRequest, ReplicaEntry
from cadenza.rollout.sampler import NoReplicas, SamplerConfig, RequestOutcome
from cadenza.rollout.sampler_process import SamplerProcess, SamplerState

START_SECONDS = 600.0


class SamplerClient:
    """Stands for the sampler in this process."""

    def __init__(self, desk: WorkerHandle) -> None:
        self.name = f"sampler-client-{uuid.uuid4().hex[:12]}"
        self.version = 0
        self.opened = 0.0
        self.lost: Mapping[str, str] = {}
        self.devices: Mapping[int, str] = {}
        self.suspended = False
        self.is_open = False
        self.on_version: list[Callable[[int], None]] = []
        self.on_lost: list[Callable[[str, str], None]] = []
        self.addresses: Sequence[ReplicaAddress] = ()
        self._desk = desk
        self._namespace = uuid.uuid4().int % (1 << 19) << 43
        self._namespaces = 0
        self._holding: set[str] = set()
        self._granter: GrantClient
        self._wire: Channel | None = None
        self._turn = asyncio.Lock()
        self._end: asyncio.Future[str] | None = None
        """Why the sampler does not answer any more."""
        self._last: asyncio.Task[None] | None = None
        """The last call about the gate."""
        self._number = -1
        self._opened_there = 0.0
        self._counters: Mapping[str, float] = {}

    # -- grants ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[ReplicaEntry]:
        return self._granter.entries

    @property
    def epoch(self) -> int:
        return self._granter.epoch

    def next_id(self) -> int:
        return self._granter.next_id()

    def namespace(self) -> int:
        """A range of ids for one scheduler. Where it begins is drawn, so that processes need not agree on it."""
        self._namespaces += 1
        return self._namespace + (self._namespaces << 39)

    def grant_now(self, *about: Any) -> None:
        """It takes a question and an answer."""

    async def grant(self, route_request: RouteRequest, sticky: ReplicaEntry | None = None, cached: int = 0, moved_to: Any = None) -> ReplicaEntry:
        return await self._granter.grant(route_request, sticky, cached, moved_to)

    def leave(self, entry: ReplicaEntry, session: int) -> None:
        self._granter.leave(entry, session)

    def release(
        self,
        entry: ReplicaEntry,
        route_request: RouteRequest,
        request: int,
        verdict: RequestOutcome = RequestOutcome.UNSENT,
        error: ReplicaError | None = None,
        cached: int = 0,
    ) -> int:
        return self._granter.release(entry, route_request, request, verdict, error, cached)

    def learn(self, tokens: int) -> None:
        self._granter.learn(tokens)

    # -- control ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Know what the sampler knows now."""
        await self._connect()
        self._heed(await self._ask("state"))

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        key = self._key(holder)
        self._holding.add(key)
        await asyncio.shield(self._in_turn("suspend", mode, key))

    async def resume(self, holder: object = None) -> None:
        await asyncio.shield(self._resuming(holder))

    def let_go(self, holder: object = None) -> asyncio.Task[None] | None:
        if self.is_open and self._key(holder) not in self._holding:
            return None
        return self._resuming(holder)

    def held_by(self, holder: object) -> bool:
        return self._key(holder) in self._holding

    async def load_weights(self, version: int, weights: object = None) -> None:
        self._heed(await self._ask("load_weights", version, weights))

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("shrink", devices)
        return found

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("expand", devices, skip_load)
        return found

    async def stats(self) -> dict[str, ReplicaStats]:
        found: dict[str, ReplicaStats] = await self._ask("stats")
        return found

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    async def close(self) -> None:
        """Listen no more."""
        if self._wire is not None:
            self._wire.close()
            self._granter.lost("the client of the sampler was closed")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _key(self, holder: object) -> str:
        """Who holds the gate. With a '/' it is somebody whom the sampler watches."""
        return self.name if holder is None else f"{self.name}/{id(holder)}"

    def _resuming(self, holder: object) -> asyncio.Task[None]:
        key = self._key(holder)
        self._holding.discard(key)
        return self._in_turn("resume", key)

    def _in_turn(self, method: str, *args: Any) -> asyncio.Task[None]:
        """A call about the gate, after those before it, and to its end, whether somebody waits for it or not."""
        call = self._after(self._last, method, *args)
        self._last = task = asyncio.get_running_loop().create_task(call, name=f"sampler {method}")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # there may be nobody to hear it
        return task

    async def _after(self, before: asyncio.Task[None] | None, method: str, *args: Any) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        if "/" in args[-1]:
            await self._connect()
        self._heed(await self._ask(method, *args))

    async def _connect(self) -> None:
        async with self._turn:
            if self._wire is None:
                try:
                    self.addresses = await within(START_SECONDS, self._desk.about(), "start seconds")
                except InfrastructureError as error:
                    raise NoReplicas(f"the sampler does not answer: {error}") from error
                self._end = asyncio.get_running_loop().create_future()
                self._wire = wire = Channel(self._exchange, self._hear, self._gone)
                self._granter = GrantClient(make_replica_entries(self.addresses, self.name), self._namespace, wire.send)
                wire.open()

    async def _ask(self, method: str, *args: Any) -> Any:
        """What the sampler answers. It may take its time, but the wire, if there is one, must hear of it."""
        call = asyncio.ensure_future(self._desk.call(method, *args))
        either: list[asyncio.Future[Any]] = [call]
        if self._end is not None and self._end.get_loop() is asyncio.get_running_loop():
            either.append(self._end)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
        if self._end in either and self._end.done() and not call.done():
            raise NoReplicas(self._end.result())
        if call.cancelled():
            raise NoReplicas(f"the sampler broke '{method}' off")
        try:
            return call.result()
        except InfrastructureError as error:
            raise NoReplicas(f"the sampler does not answer: {error}") from error

    async def _exchange(self, number: int, messages: list[Any]) -> tuple[int, Sequence[Any]]:
        answer: tuple[int, Sequence[Any]] = await self._desk.call_small("exchange", self.name, number, messages)
        return answer

    def _hear(self, message: Any) -> None:
        if isinstance(message, SamplerState):
            self._heed(message)
        else:
            self._granter.hear(message)

    def _heed(self, state: SamplerState) -> None:
        if state.number <= self._number:
            return
        self._number = state.number
        if state.opened != self._opened_there:
            self._opened_there = state.opened
            self.opened = asyncio.get_running_loop().time()
        self.is_open, self.suspended = state.is_open, state.is_suspended
        self.devices, self._counters = state.devices, state.counters
        new = {name: cause for name, cause in state.lost.items() if name not in self.lost}
        self.lost = state.lost
        versions = range(self.version + 1, state.version + 1)
        self.version = state.version
        for version in versions:
            for heard in self.on_version:
                heard(version)
        for name, cause in new.items():
            for told in self.on_lost:
                told(name, cause)

    def _gone(self, error: Exception) -> None:
        logger.error("the sampler does not answer any more: %s", error)
        text = f"the sampler is gone: {error}"
        assert self._end is not None
        self._end.set_result(text)
        self._granter.lost(text)
        self.lost = dict(self.lost) | {"sampler": str(error)}
        self.devices = dict.fromkeys(self.devices, "lost")
        for told in self.on_lost:
            told("sampler", str(error))


class InferenceService:
    """An inference cluster whose sampler is a worker of its own: it pickles, and all processes that get it share the
    one gate and the one version."""

    def __init__(self, desk: WorkerHandle, codec: Codec) -> None:
        self.codec = codec
        self._desk = desk
        self._client: SamplerClient | None = None

    @classmethod
    async def start(
        cls,
        replicas: Sequence[WorkerHandle],
        codec: Codec,
        config: SamplerConfig | None = None,
        *,
        backend: str = "ray",
    ) -> InferenceService:
        """Over running replicas: the `peers` of a cluster of `ReplicaWorker`s."""
        init = {"replicas": list(replicas), "config": config}
        return cls(await start_worker(backend, "sampler", 0, SamplerProcess, init, seconds=START_SECONDS), codec)

    @property
    def sampler(self) -> SamplerClient:
        if self._client is None:
            self._client = SamplerClient(self._desk)
        return self._client

    async def shutdown(self) -> None:
        """End the sampler; the replicas belong to whoever started them."""
        if self._client is not None:
            await self._client.close()
        await self._desk.end()
        self._desk.kill()

    def __reduce__(self) -> tuple[Any, ...]:
        return InferenceService, (self._desk, self.codec)
