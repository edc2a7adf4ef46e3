"""The sampler, for whoever is in another process: same names, same meaning.

What is known here of the version and the gate may be a moment old; `refresh` asks. A scheduler refreshes before it
cuts a batch, so that a version which the controller has published before counts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cadenza.cluster.peer import Peer, start
from cadenza.cluster.wire import Wire
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import PauseMode, ReplicaError, ReplicaStats
from cadenza.rollout.failures import logger
from cadenza.rollout.grants import Address, Granter, seats_of
from cadenza.rollout.model import Codec
from cadenza.rollout.router import Seat
from cadenza.rollout.sampler import NoReplicas, SamplerConfig, Verdict
from cadenza.rollout.sampler_desk import SamplerDesk, State

START_SECONDS = 600.0


class SamplerClient:
    """Stands for the sampler in this process."""

    def __init__(self, desk: Peer) -> None:
        self.name = f"sampler-client-{uuid.uuid4().hex[:12]}"
        self.version = 0
        self.opened = 0.0
        self.lost: Mapping[str, str] = {}
        self.devices: Mapping[int, str] = {}
        self.suspended = False
        self.is_open = False
        self.on_version: list[Callable[[int], None]] = []
        self.on_lost: list[Callable[[str, str], None]] = []
        self.addresses: Sequence[Address] = ()
        self._desk = desk
        self._namespace = uuid.uuid4().int % (1 << 19) << 43
        self._namespaces = 0
        self._holding: set[str] = set()
        self._granter: Granter
        self._wire: Wire | None = None
        self._turn = asyncio.Lock()
        self._number = -1
        self._opened_there = 0.0
        self._counters: Mapping[str, float] = {}
        self._resumes: set[asyncio.Task[None]] = set()
        """That are on their way."""

    # -- grants ----------------------------------------------------------------------------------------------------

    @property
    def seats(self) -> Sequence[Seat]:
        return self._granter.seats

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

    async def grant(
        self,
        session: int,
        group: int,
        context: int,
        age: int = 0,
        sticky: Seat | None = None,
        cached: int = 0,
        moved_to: Any = None,
    ) -> Seat:
        return await self._granter.grant(session, group, context, age, sticky, cached, moved_to)

    def leave(self, seat: Seat, session: int) -> None:
        self._granter.leave(seat, session)

    def release(
        self,
        seat: Seat,
        context: int,
        request: int,
        verdict: Verdict = Verdict.UNSENT,
        error: ReplicaError | None = None,
        session: int = -1,
        cached: int = 0,
        age: int = 0,
    ) -> int:
        return self._granter.release(seat, context, request, verdict, error, session, cached, age)

    def learn(self, tokens: int) -> None:
        self._granter.learn(tokens)

    # -- control ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Know what the sampler knows now."""
        try:
            async with self._turn:
                if self._wire is None:
                    self.addresses = await self._desk.about()
                    self._wire = wire = Wire(self._exchange, self._hear, self._gone)
                    self._granter = Granter(seats_of(self.addresses, self.name), self._namespace, wire.say)
                    wire.open()
            state = await self._desk.state()
        except InfrastructureError as error:
            raise NoReplicas(f"the sampler does not answer: {error}") from error
        self._heed(state)

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        if self._resumes:  # calls may overtake each other: a resume that is on its way would undo this one
            await asyncio.wait(self._resumes)
        self._holding.add(self._key(holder))
        self._heed(await self._desk.suspend(mode, self._key(holder)))

    async def resume(self, holder: object = None) -> None:
        await self._resuming(self._key(holder))

    def let_go(self, holder: object = None) -> asyncio.Task[None] | None:
        if self.is_open and self._key(holder) not in self._holding:
            return None
        return self._resuming(self._key(holder))

    def held_by(self, holder: object) -> bool:
        return self._key(holder) in self._holding

    async def load_weights(self, version: int, weights: object = None) -> None:
        self._heed(await self._desk.load_weights(version, weights))

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = await self._desk.shrink(devices)
        return found

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = await self._desk.expand(devices, skip_load)
        return found

    async def stats(self) -> dict[str, ReplicaStats]:
        found: dict[str, ReplicaStats] = await self._desk.stats()
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
        return f"{self.name}/{id(holder)}"

    def _resuming(self, key: str) -> asyncio.Task[None]:
        self._holding.discard(key)
        task = asyncio.get_running_loop().create_task(self._resume(key), name="sampler resume")
        self._resumes.add(task)
        task.add_done_callback(self._resumes.discard)
        return task

    async def _resume(self, key: str) -> None:
        self._heed(await self._desk.resume(key))

    async def _exchange(self, number: int, messages: list[Any]) -> tuple[int, Sequence[Any]]:
        answer: tuple[int, Sequence[Any]] = await self._desk.talk("exchange", self.name, number, messages)
        return answer

    def _hear(self, message: Any) -> None:
        if isinstance(message, State):
            self._heed(message)
        else:
            self._granter.hear(message)

    def _heed(self, state: State) -> None:
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
        self._granter.lost(text)
        self.lost = dict(self.lost) | {"sampler": str(error)}
        self.devices = dict.fromkeys(self.devices, "lost")
        for told in self.on_lost:
            told("sampler", str(error))


class InferenceService:
    """An inference cluster whose sampler is a worker of its own: it pickles, and all processes that get it share the
    one gate and the one version."""

    def __init__(self, desk: Peer, codec: Codec) -> None:
        self.codec = codec
        self._desk = desk
        self._client: SamplerClient | None = None

    @classmethod
    async def start(
        cls, replicas: Sequence[Peer], codec: Codec, config: SamplerConfig | None = None, *, backend: str = "ray"
    ) -> InferenceService:
        """Over running replicas: the `peers` of a cluster of `ReplicaWorker`s."""
        init = {"replicas": list(replicas), "config": config}
        return cls(await start(backend, "sampler", 0, SamplerDesk, init, seconds=START_SECONDS), codec)

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
