"""Workers in the controller's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cadenza.cluster.crew import Launch, Tasks, answers
from cadenza.cluster.dispatch import Call
from cadenza.cluster.peer import LocalPeer, Peer
from cadenza.cluster.worker import Host
from cadenza.data import DataProto

CLOSE_SECONDS = 30.0


class EmbeddedCrew:
    """The workers of one cluster, side by side in one process."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._hosts = [Host(place) for place in launch.places]
        self._tasks = Tasks()

    async def open(self) -> None:
        launch = self._launch
        opened = [self._tasks.begin(host.open(launch.worker_class, launch.init)) for host in self._hosts]
        await answers("start", launch.places, opened, seconds=launch.seconds, look=self.look)

    async def begin(self, method: str, calls: Sequence[Call]) -> list[asyncio.Task[Any]]:
        return [self._tasks.begin(self._call(method, call)) for call in calls]

    def peers(self) -> list[Peer]:
        return [LocalPeer(str(host.place), host) for host in self._hosts]

    async def look(self) -> None:
        """Nothing carries the workers that could be gone."""

    async def close(self) -> None:
        closed = [self._tasks.begin(host.close()) for host in self._hosts]
        await answers("shutdown", self._launch.places, closed, seconds=CLOSE_SECONDS, look=self.look)

    async def _call(self, method: str, call: Call) -> Any:
        """What a worker does to the columns of its batch is not seen elsewhere, as little as in another process."""
        args = [_own(value) for value in call.args]
        return await self._hosts[call.rank].call(method, args, {k: _own(value) for k, value in call.kwargs.items()})


def _own(value: Any) -> Any:
    return value.select() if isinstance(value, DataProto) else value
