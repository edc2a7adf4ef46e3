"""The backend 'embedded': workers in the controller's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cadenza.cluster.dispatch import RankCall
from cadenza.cluster.worker import WorkerHost
from cadenza.cluster.worker_group import BackgroundTasks, WorkerLaunch, gather_answers
from cadenza.cluster.worker_handle import LocalWorkerHandle, WorkerHandle
from cadenza.data import DataProto

CLOSE_SECONDS = 30.0


class EmbeddedWorkerGroup:
    """The workers of one cluster, all in this process."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self._launch = launch
        self._hosts = [WorkerHost(place) for place in launch.places]
        self._tasks = BackgroundTasks()

    async def open(self) -> None:
        launch = self._launch
        opened = [self._tasks.begin(host.open(launch.worker_class, launch.init)) for host in self._hosts]
        await gather_answers("start", launch.places, opened, seconds=launch.seconds, check_alive=self.check_alive)

    async def submit(self, method: str, calls: Sequence[RankCall]) -> list[asyncio.Task[Any]]:
        return [self._tasks.begin(self._call(method, call)) for call in calls]

    def worker_handles(self) -> list[WorkerHandle]:
        return [LocalWorkerHandle(str(host.place), host) for host in self._hosts]

    async def check_alive(self) -> None:
        """The workers live as long as this process."""

    async def close(self) -> None:
        closed = [self._tasks.begin(host.close()) for host in self._hosts]
        await gather_answers(
            "shutdown", self._launch.places, closed, seconds=CLOSE_SECONDS, check_alive=self.check_alive
        )

    async def _call(self, method: str, call: RankCall) -> Any:
        """Each worker gets copies of its batches, so that changes of columns stay in the worker, as on Ray."""
        args = [_shallow_copy(value) for value in call.args]
        return await self._hosts[call.rank].call(
            method, args, {k: _shallow_copy(value) for k, value in call.kwargs.items()}
        )


def _shallow_copy(value: Any) -> Any:
    return value.select() if isinstance(value, DataProto) else value
