"""A handle calls one worker, in this process or in a Ray actor; and workers that need no devices are started here.

Invariant: a call of a worker that is gone raises `WorkerLost`, also when the worker goes during the call.

A handle on Ray pickles: another process can use it to call the same worker. Methods are called by name, like those of
a cluster: `await handle.describe()`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

from cadenza.cluster.placement import Place
from cadenza.cluster.worker import Worker, WorkerHost, WorkerLost
from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.off_loop import done_before


class WorkerHandle(ABC):
    """Calls the methods of one worker, wherever it runs."""

    world_size = 1

    def __init__(self, role: str) -> None:
        self.role = role

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Returns what this method of the worker returns."""

    async def call_small(self, method: str, *args: Any) -> Any:
        """`call` for frequent calls with small arguments and results: it costs less CPU time on Ray."""
        return await self.call(method, *args)

    @abstractmethod
    async def call_with_bulk(self, method: str, *args: Any) -> tuple[Any, Any]:
        """Calls a method that returns a pair. Returns the first item, and a reference to the second, which stays where
        it is until `fetch` gets it."""

    async def fetch(self, handles: Sequence[Any]) -> list[Any]:
        """Returns the objects behind references from `call_with_bulk`."""
        return self.fetch_blocking(handles)

    @abstractmethod
    def fetch_blocking(self, handles: Sequence[Any]) -> list[Any]:
        """`fetch` that blocks the event loop."""

    async def shutdown(self) -> None:
        """Close the worker, then end it."""
        self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self.call, name)


class LocalWorkerHandle(WorkerHandle):
    """A worker in this process, on this loop."""

    def __init__(self, role: str, host: WorkerHost) -> None:
        super().__init__(role)
        self._worker_host = host
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks()

    async def call(self, method: str, *args: Any) -> Any:
        if self._ended.done():
            raise WorkerLost(f"the worker '{self.role}' was ended")
        call = self._tasks.begin(self._worker_host.call(method, args, {}))
        if not await done_before(self._ended, call) or call.cancelled():
            raise WorkerLost(f"the worker '{self.role}' was ended")
        return call.result()

    async def call_with_bulk(self, method: str, *args: Any) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = await self.call(method, *args)
        return answer

    def fetch_blocking(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)

    def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
            self._tasks.begin(self._worker_host.close())


async def start_worker(
    backend: str, role: str, number: int, worker_class: type[Worker], init: Mapping[str, Any], *, seconds: float
) -> WorkerHandle:
    """Starts a worker without devices, and returns its handle. `backend` is 'embedded' or 'ray'; `number` tells workers
    of one role apart in messages; `seconds` is how long the start may take."""
    place = Place(
        role=role,
        rank=number,
        world_size=1,
        data_rank=0,
        data_ranks=1,
        tensor_rank=0,
        tensor_ranks=1,
        node=backend,
        devices=(),
    )
    if backend == "ray":
        module = import_module("cadenza.cluster.ray_worker_handle")
        return cast("WorkerHandle", await module.start_worker(place, worker_class, init, seconds))
    if backend != "embedded":
        raise ValueError(f"backend must be 'embedded' or 'ray', got '{backend}'")
    host = WorkerHost(place)
    await host.open(worker_class, init)
    return LocalWorkerHandle(f"{role} {number}", host)
