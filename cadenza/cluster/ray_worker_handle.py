"""Handles of workers in Ray actors, and the start of actors without devices.

The bulk of a `call_with_bulk` is a Ray object of its own. It belongs to the caller and outlives the worker: Ray keeps
it on its node until the caller drops the reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from cadenza.cluster import ray_tensors
from cadenza.cluster.placement import Place
from cadenza.cluster.ray_worker_group import (
    RayWorkerHost,
    answer_of,
    check_versions,
    fast_pickle,
    fast_unpickle,
    module_path,
    versions,
)
from cadenza.cluster.worker import Worker, WorkerLost
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.off_loop import with_deadline

ray: Any = import_module("ray")

CLOSE_SECONDS = 10.0


class RayWorkerHandle(WorkerHandle):
    """Calls a worker in a Ray actor. It pickles."""

    def __init__(self, role: str, actor: Any) -> None:
        super().__init__(role)
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        ray_tensors.register()
        return await answer_of(self._actor.call.remote(method, True, (), *args))

    async def call_small(self, method: str, *args: Any) -> Any:
        return fast_unpickle(await answer_of(self._actor.call_small.remote(method, fast_pickle(args))))

    async def call_with_bulk(self, method: str, *args: Any) -> tuple[Any, Any]:
        first, bulk = self._actor.call_with_bulk.options(num_returns=2).remote(method, fast_pickle(args))
        return fast_unpickle(await answer_of(first)), bulk

    async def fetch(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return list(await asyncio.gather(*handles))
        except ray.exceptions.RayError as error:
            raise _lost_with_node(error) from None

    def fetch_blocking(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(handles)))
        except ray.exceptions.RayError as error:
            raise _lost_with_node(error) from None

    async def shutdown(self) -> None:
        try:
            await with_deadline(CLOSE_SECONDS, answer_of(self._actor.close.remote()), "close seconds")
        finally:
            self.kill()

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayWorkerHandle, (self.role, self._actor)


def _lost_with_node(error: Exception) -> WorkerLost:
    return WorkerLost(f"what a worker stored is gone, with its node: {' '.join(str(error).split())}")


async def start_worker(
    place: Place, worker_class: type[Worker], init: Mapping[str, Any], seconds: float
) -> RayWorkerHandle:
    """Starts an actor on a node that Ray chooses. The actor ends with the process that started it."""
    actor = ray.remote(RayWorkerHost).options(num_cpus=0, scheduling_strategy="SPREAD").remote(place, "", module_path())
    handle = RayWorkerHandle(f"{place.role} {place.rank}", actor)
    try:
        _, theirs = await with_deadline(seconds, answer_of(actor.handshake.remote()), "start_seconds")
        check_versions(versions(), theirs, place)
        await with_deadline(seconds, answer_of(actor.open.remote(worker_class, dict(init))), "start_seconds")
    except BaseException:
        handle.kill()
        raise
    return handle
