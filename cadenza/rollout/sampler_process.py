"""The sampler as a worker of its own, for schedulers in several processes.

Invariant: there is one gate and one version, here. A client that closes the gate and is silent for
FORGET_SECONDS does not keep it closed, and what was granted to it is given back.
```
scheduler, controller --suspend, resume, load_weights, shrink, expand, state--> Sampler
scheduler (sampler_client.py) --exchange: AskForGrant, ReleaseGrant--> GrantServer --> Granted
                              <-- SamplerState, whenever it changes --
```
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cadenza.cluster.channel import POLL_SECONDS, Mailbox
from cadenza.cluster.remote_replica import RemoteReplica
from cadenza.cluster.worker import Worker
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.inference.replica import PauseMode, Replica, ReplicaStats
from cadenza.rollout.failures import logger
from cadenza.rollout.grants import GrantServer
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.router import ReplicaEntry
from cadenza.rollout.sampler import ReplicaAddress, SamplerConfig

FORGET_SECONDS = 6 * POLL_SECONDS


class SamplerState(NamedTuple):
    """What clients know of the sampler."""

    number: int
    """Grows: an older state is no news."""
    version: int
    is_open: bool
    waits_for: str
    opened_at: float
    lost: dict[str, str]
    device_states: dict[int, str]
    counters: dict[str, float]


class _ConnectedClient:
    """A scheduler that is connected to this sampler: its mailbox and its grant server."""

    def __init__(self, sampler: LocalSampler, on_lost: Callable[[], None]) -> None:
        self.mailbox = Mailbox(self._on_message, on_lost, max_silence_seconds=FORGET_SECONDS)
        self.grant_server = GrantServer(sampler, self.mailbox.send)

    def _on_message(self, message: Any) -> None:
        self.grant_server.receive(message)


class SamplerProcess(Worker):
    """The worker whose process holds the sampler. Its replicas are worker handles, or replicas in the same process."""

    def __init__(self, replicas: Sequence[WorkerHandle | Replica], config: SamplerConfig | None) -> None:
        self._endpoints = tuple(replicas)
        self._config = config
        self._sampler: LocalSampler | None = None
        self._start_lock = asyncio.Lock()
        self._clients: dict[str, _ConnectedClient] = {}
        self._state_numbers = itertools.count()

    async def about(self) -> list[ReplicaAddress]:
        """Where the replicas are."""
        return (await self._get_sampler()).addresses

    async def exchange(self, client: str, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """See channel.py."""
        known = self._get_client(client, await self._get_sampler())
        return await known.mailbox.exchange(number, messages)

    async def state(self) -> SamplerState:
        return self._state(await self._get_sampler())

    async def suspend(self, mode: PauseMode, holder: str) -> SamplerState:
        """`holder` is the name of the client, and after a '/' the caller inside it, if the hold is to end when the
        client falls silent."""
        sampler = await self._get_sampler()
        client, is_watched, _ = holder.partition("/")
        if is_watched:
            self._get_client(client, sampler)  # it may never call again
        await sampler.suspend(mode, holder)
        return self._broadcast_state()

    async def resume(self, holder: str) -> SamplerState:
        sampler = await self._get_sampler()
        await sampler.resume(holder)
        return self._broadcast_state()

    async def load_weights(self, version: int, weights: object) -> SamplerState:
        sampler = await self._get_sampler()
        await sampler.load_weights(version, weights)
        return self._state(sampler)

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        found = await (await self._get_sampler()).shrink(devices)
        self._broadcast_state()
        return found

    async def expand(self, devices: Sequence[int], skip_load: bool) -> dict[str, Any]:
        found = await (await self._get_sampler()).expand(devices, skip_load)
        self._broadcast_state()
        return found

    async def stats(self) -> dict[str, ReplicaStats]:
        return await (await self._get_sampler()).stats()

    async def end(self) -> None:
        """End the health check, and wake all turns that wait."""
        self._clients.clear()
        if self._sampler is not None:
            await self._sampler.close()
            for entry in self._sampler.entries:
                if isinstance(entry.replica, RemoteReplica):
                    entry.replica.close()

    async def _get_sampler(self) -> LocalSampler:
        async with self._start_lock:
            if self._sampler is None:
                replicas = [
                    await RemoteReplica.connect(endpoint, client="sampler")
                    if isinstance(endpoint, WorkerHandle)
                    else endpoint
                    for endpoint in self._endpoints
                ]
                self._sampler = sampler = LocalSampler(replicas, self._config)
                await sampler.refresh()
                sampler.on_version.append(self._on_change)
                sampler.on_lost.append(self._on_change)
                sampler.has_live_client = self._has_live_client
            return self._sampler

    def _get_client(self, client: str, sampler: LocalSampler) -> _ConnectedClient:
        """A client calls."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _ConnectedClient(sampler, partial(self._forget, client))
        return known

    def _has_live_client(self, entry: ReplicaEntry, since: float) -> bool:
        """Whether a client that was heard of since then has a grant for this replica."""
        return any(
            client.mailbox.last_call >= since and client.grant_server.grants_for(entry)
            for client in self._clients.values()
        )

    def _state(self, sampler: LocalSampler) -> SamplerState:
        return SamplerState(
            number=next(self._state_numbers),
            version=sampler.version,
            is_open=sampler.is_open,
            waits_for=sampler.waits_for,
            opened_at=sampler.opened_at,
            lost=dict(sampler.lost),
            device_states=sampler.devices,
            counters=sampler.counters(),
        )

    def _broadcast_state(self) -> SamplerState:
        assert self._sampler is not None
        state = self._state(self._sampler)
        for client in self._clients.values():
            client.mailbox.send(state)
        return state

    def _on_change(self, *what: object) -> None:
        self._broadcast_state()

    def _forget(self, name: str) -> None:
        """A client is silent: give back what it holds."""
        client = self._clients.pop(name, None)
        if client is None or self._sampler is None:
            return
        logger.warning("the scheduler '%s' is silent; what it held is given back", name)
        client.grant_server.close("client_lost")
        for holder in self._sampler.holders:
            if isinstance(holder, str) and holder.startswith(f"{name}/"):
                opening = self._sampler.begin_resume(holder)
                if opening is not None:
                    opening.add_done_callback(self._on_opened)

    def _on_opened(self, opening: asyncio.Task[None]) -> None:
        if not opening.cancelled() and (error := opening.exception()) is not None:
            logger.error("the gate does not open: %s", error)
        self._broadcast_state()
