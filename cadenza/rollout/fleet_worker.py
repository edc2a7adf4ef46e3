"""One env worker in another process, as its scheduler sees it: its slots, its attempts, its channel.

Invariant: a slot of it is in `free`, or an attempt in `attempts` holds it (`is_slot_free` is false). Which attempt goes
where, and what a message means for the queue, is decided in fleet.py.

    start(): process -> rewards open -> channel and grant server; what a record needs of its bundle is joined on receipt
    close(): the channel is silent, what was granted is given back, the process is killed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from cadenza.cluster.channel import Channel
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.off_loop import with_deadline
from cadenza.rollout.env_worker_process import EnvWorkerCounters, EnvWorkerProcess, EnvWorkerSpec
from cadenza.rollout.grants import GrantServer
from cadenza.rollout.ledger import Attempt
from cadenza.rollout.sampler import Sampler
from cadenza.rollout.token_bundles import TokenBundle, TrajectoryRecord

START_SECONDS = 600.0


class ReceivedRecord(NamedTuple):
    """A record as it came, and the bundle with its tokens."""

    record: TrajectoryRecord
    bundle: TokenBundle


class RemoteAttempt:
    """An attempt on its worker."""

    __slots__ = ("attempt", "is_slot_free")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.is_slot_free = False


class FleetWorker:
    """One env worker of a fleet. It has neither process nor channel before `start`."""

    def __init__(self, number: int, slots: list[int]) -> None:
        self.number = number
        self.free = slots
        """Free slots; the last one is taken first."""
        self.attempts: dict[int, RemoteAttempt] = {}
        self.counters = EnvWorkerCounters()
        self.handle: WorkerHandle | None = None
        self.channel: Channel
        self.grant_server: GrantServer

    async def start(
        self,
        spec: EnvWorkerSpec,
        sampler: Sampler,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """Start the process and open its rewards, or raise what prevents it. The channel is silent until it is
        opened."""
        handle = await start_worker(
            spec.settings.backend, "env worker", self.number, EnvWorkerProcess, {"spec": spec}, seconds=START_SECONDS
        )
        try:
            await with_deadline(START_SECONDS, handle.call("open_rewards"), "start_seconds")
        except BaseException:
            handle.kill()
            raise

        async def call(number: int, messages: list[Any]) -> tuple[int, list[Any]]:
            (number, said, remote_time), bulk = await handle.call_with_bulk("exchange", number, messages)
            bundle: TokenBundle | None = None
            for index, message in enumerate(said):
                if isinstance(message, TrajectoryRecord):
                    if bundle is None:
                        bundle = TokenBundle(handle, bulk, asyncio.get_running_loop().time() - remote_time)
                    said[index] = ReceivedRecord(message, bundle)
            return number, said

        self.handle = handle
        self.channel = Channel(call, on_message, on_lost)
        self.grant_server = GrantServer(sampler, self.channel.send)

    def close(self) -> None:
        """The worker is gone, or not needed any more."""
        self.channel.close()
        self.grant_server.close("env_worker_lost")
        if self.handle is not None:
            self.handle.kill()
