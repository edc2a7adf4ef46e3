"""The sampler as other processes see it: same names, same meaning.

What is known here of the version and the gate may be a moment old; `refresh` asks. A scheduler refreshes before it
cuts a batch, so that a version which the controller has published before counts.

Invariant: calls about the gate are sent one after the other, in the order in which they were made, because calls to an
async actor may overtake each other. A scheduler is connected: no call of it waits longer than the channel, and when the
sampler is gone, or silent, all of them end with `NoReplicas`; and when the scheduler is gone, what it holds is given
back. A controller that only calls is not: it may have another loop for every call, and its hold stays until it resumes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cadenza.cluster.channel import Channel
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import PauseMode, ReplicaError, ReplicaStats
from cadenza.off_loop import done_before, with_deadline
from cadenza.rollout.failures import logger
from cadenza.rollout.grants import GrantClient, make_replica_entries
from cadenza.rollout.model import Codec
from cadenza.rollout.router import ReplicaEntry
from cadenza.rollout.sampler import (
    Grant,
    GrantRequest,
    NoReplicas,
    ReplicaAddress,
    RequestOutcome,
    Sampler,
    SamplerConfig,
)
from cadenza.rollout.sampler_process import SamplerProcess, SamplerState

START_SECONDS = 600.0
CLOSE_SECONDS = 10.0


class SamplerClient:
    """Stands for the sampler in this process."""

    def __init__(self, process: WorkerHandle) -> None:
        self.name = f"sampler-client-{uuid.uuid4().hex[:12]}"
        self.version = 0
        self.opened_at = 0.0
        self.lost: Mapping[str, str] = {}
        self.devices: Mapping[int, str] = {}
        self.waits_for = ""
        self.is_open = False
        self.on_version: list[Callable[[int], None]] = []
        self.on_lost: list[Callable[[str, str], None]] = []
        self.on_all_shrunk: list[Callable[[], None]] = []
        self.addresses: Sequence[ReplicaAddress] = ()
        self._process = process
        self._namespace = uuid.uuid4().int % (1 << 19) << 43
        self._namespaces = 0
        self._holding: set[str] = set()
        self._grant_client: GrantClient
        self._channel: Channel | None = None
        self._connect_lock = asyncio.Lock()
        self._lost_because: asyncio.Future[str] | None = None
        """Why the sampler does not answer any more."""
        self._last: asyncio.Task[None] | None = None
        """The last call about the gate."""
        self._state_number = -1
        self._remote_opened_at = 0.0
        self._counters: Mapping[str, float] = {}

    # -- grants ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[ReplicaEntry]:
        return self._grant_client.entries

    def allocate_ids(self) -> int:
        """Where the range begins is drawn at random, so that processes need not agree on it."""
        self._namespaces += 1
        return self._namespace + (self._namespaces << 39)

    def grant_now(self, grant_request: GrantRequest) -> None:
        """Always None: a grant from another process takes a message and its answer."""

    async def grant(self, grant_request: GrantRequest) -> Grant:
        return await self._grant_client.grant(grant_request)

    def end_session(self, entry: ReplicaEntry, session: int) -> None:
        self._grant_client.end_session(entry, session)

    def release(
        self,
        grant: Grant,
        outcome: RequestOutcome = RequestOutcome.UNSENT,
        error: ReplicaError | None = None,
        cached: int = 0,
    ) -> None:
        self._grant_client.release(grant, outcome, error, cached)

    def observe_answer_length(self, tokens: int) -> None:
        self._grant_client.observe_answer_length(tokens)

    @property
    def is_held(self) -> bool:
        return self.waits_for == "resume"

    # -- control ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Know what the sampler knows now."""
        await self._connect()
        self._apply_state(await self._call("state"))

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        key = self._key(holder)
        self._holding.add(key)
        await asyncio.shield(self._in_order("suspend", mode, key))

    async def resume(self, holder: object = None) -> None:
        await asyncio.shield(self._start_resume(holder))

    def begin_resume(self, holder: object = None) -> asyncio.Task[None] | None:
        if self.is_open and self._key(holder) not in self._holding:
            return None
        return self._start_resume(holder)

    def is_held_by(self, holder: object) -> bool:
        return self._key(holder) in self._holding

    async def load_weights(self, version: int, weights: object = None) -> None:
        self._apply_state(await self._call("load_weights", version, weights))

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = await self._call("shrink", devices)
        return found

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = await self._call("expand", devices, skip_load)
        return found

    async def stats(self) -> dict[str, ReplicaStats]:
        found: dict[str, ReplicaStats] = await self._call("stats")
        return found

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    async def close(self) -> None:
        """Listen no more."""
        if self._channel is not None:
            self._channel.close()
            self._grant_client.close("the client of the sampler was closed")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _key(self, holder: object) -> str:
        """The name under which a caller holds the gate. With a '/' the sampler gives the hold up when this client falls
        silent."""
        return self.name if holder is None else f"{self.name}/{id(holder)}"

    def _start_resume(self, holder: object) -> asyncio.Task[None]:
        key = self._key(holder)
        self._holding.discard(key)
        return self._in_order("resume", key)

    def _in_order(self, method: str, *args: Any) -> asyncio.Task[None]:
        """A call about the gate, after the calls before it, and to its end, also when its caller stops waiting."""
        call = self._call_after(self._last, method, *args)
        self._last = task = asyncio.get_running_loop().create_task(call, name=f"sampler {method}")
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its caller may be gone
        return task

    async def _call_after(self, before: asyncio.Task[None] | None, method: str, *args: Any) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        if "/" in args[-1]:
            await self._connect()
        self._apply_state(await self._call(method, *args))

    async def _connect(self) -> None:
        async with self._connect_lock:
            if self._channel is None:
                try:
                    self.addresses = await with_deadline(START_SECONDS, self._process.about(), "start seconds")
                except InfrastructureError as error:
                    raise NoReplicas(f"the sampler does not answer: {error}") from error
                self._lost_because = asyncio.get_running_loop().create_future()
                self._channel = channel = Channel(self._exchange, self._on_message, self._on_sampler_lost)
                self._grant_client = GrantClient(
                    make_replica_entries(self.addresses, self.name), self._namespace, channel.send
                )
                channel.open()

    async def _call(self, method: str, *args: Any) -> Any:
        """What the sampler answers. It may take its time, but the channel, if there is one, must stay alive."""
        call = asyncio.ensure_future(self._process.call(method, *args))
        lost = self._lost_because
        if lost is None or lost.get_loop() is not asyncio.get_running_loop():
            lost = asyncio.get_running_loop().create_future()  # it never comes
        if not await done_before(lost, call):
            raise NoReplicas(lost.result())
        if call.cancelled():
            raise NoReplicas(f"the sampler broke '{method}' off")
        try:
            return call.result()
        except InfrastructureError as error:
            raise NoReplicas(f"the sampler does not answer: {error}") from error

    async def _exchange(self, number: int, messages: list[Any]) -> tuple[int, Sequence[Any]]:
        answer: tuple[int, Sequence[Any]] = await self._process.call_small("exchange", self.name, number, messages)
        return answer

    def _on_message(self, message: Any) -> None:
        if isinstance(message, SamplerState):
            self._apply_state(message)
        else:
            self._grant_client.receive(message)

    def _apply_state(self, state: SamplerState) -> None:
        if state.number <= self._state_number:
            return
        self._state_number = state.number
        if state.opened_at != self._remote_opened_at:
            self._remote_opened_at = state.opened_at
            self.opened_at = asyncio.get_running_loop().time()
        was_shrunk = self.waits_for == "expand"
        self.is_open, self.waits_for = state.is_open, state.waits_for
        self.devices, self._counters = state.device_states, state.counters
        new = {name: cause for name, cause in state.lost.items() if name not in self.lost}
        self.lost = state.lost
        versions = range(self.version + 1, state.version + 1)
        self.version = state.version
        for version in versions:
            for on_version in self.on_version:
                on_version(version)
        for name, cause in new.items():
            for on_lost in self.on_lost:
                on_lost(name, cause)
        if self.waits_for == "expand" and not was_shrunk:
            for on_all_shrunk in self.on_all_shrunk:
                on_all_shrunk()

    def _on_sampler_lost(self, error: Exception) -> None:
        logger.error("the sampler does not answer any more: %s", error)
        text = f"the sampler is gone: {error}"
        assert self._lost_because is not None
        self._lost_because.set_result(text)
        self._grant_client.close(text)
        self.lost = dict(self.lost) | {"sampler": str(error)}
        self.devices = dict.fromkeys(self.devices, "lost")
        for on_lost in self.on_lost:
            on_lost("sampler", str(error))


class InferenceService:
    """The inference cluster of a run on Ray: replicas, and the sampler in a process of its own. It pickles, and all
    processes that get it share the one gate and the one version."""

    def __init__(self, process: WorkerHandle, codec: Codec) -> None:
        self.codec = codec
        self._process = process
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
        """Start the sampler over running replicas: the `worker_handles` of clusters of `ReplicaWorker`s."""
        init = {"replicas": list(replicas), "config": config}
        return cls(await start_worker(backend, "sampler", 0, SamplerProcess, init, seconds=START_SECONDS), codec)

    @property
    def sampler(self) -> Sampler:
        if self._client is None:
            self._client = SamplerClient(self._process)
        return self._client

    async def shutdown(self) -> None:
        """End the sampler, also one that does not answer any more. The program that started the replicas ends them."""
        if self._client is not None:
            await self._client.close()
        with suppress(InfrastructureError):
            await with_deadline(CLOSE_SECONDS, self._process.end(), "close seconds")
        self._process.kill()

    def __reduce__(self) -> tuple[Any, ...]:
        return InferenceService, (self._process, self.codec)
