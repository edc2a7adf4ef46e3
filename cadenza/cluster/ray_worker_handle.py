"""A worker as a Ray actor outside of the device map: it has a process, and no devices.

What a method returns as its bulk is an object of its own. It belongs to whoever asked, and outlives the worker: Ray
keeps it on its node until the handle is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from cadenza.cluster import ray_tensors
from cadenza.cluster.peer import Peer
from cadenza.cluster.placement import Place
from cadenza.cluster.ray_crew import RayHost, answer_of, check_versions, module_path, packed, unpacked, versions
from cadenza.cluster.worker import Worker, WorkerLost
from cadenza.off_loop import within

ray: Any = import_module("ray")

CLOSE_SECONDS = 10.0


class RayPeer(Peer):
    """The address of a Ray actor."""

    def __init__(self, role: str, actor: Any) -> None:
        super().__init__(role)
        self._actor = actor

    async def ask(self, method: str, *args: Any) -> Any:
        ray_tensors.register()
        return await answer_of(self._actor.call.remote(method, True, (), *args))

    async def talk(self, method: str, *args: Any) -> Any:
        return unpacked(await answer_of(self._actor.talk.remote(method, packed(args))))

    async def talk_for_bulk(self, method: str, *args: Any) -> tuple[Any, Any]:
        first, bulk = self._actor.talk_for_bulk.options(num_returns=2).remote(method, packed(args))
        return unpacked(await answer_of(first)), bulk

    async def fetch(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return list(await asyncio.gather(*handles))
        except ray.exceptions.RayError as error:
            raise _gone(error) from None

    def fetch_now(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(handles)))
        except ray.exceptions.RayError as error:
            raise _gone(error) from None

    async def shutdown(self) -> None:
        try:
            await within(CLOSE_SECONDS, answer_of(self._actor.close.remote()), "close seconds")
        finally:
            self.kill()

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayPeer, (self.role, self._actor)


def _gone(error: Exception) -> WorkerLost:
    return WorkerLost(f"what a worker left behind is gone, with its node: {' '.join(str(error).split())}")


async def start(place: Place, worker_class: type[Worker], init: Mapping[str, Any], seconds: float) -> RayPeer:
    """A new actor, wherever Ray finds room for it. It ends with the process that started it."""
    actor = ray.remote(RayHost).options(num_cpus=0, scheduling_strategy="SPREAD").remote(place, "", module_path())
    peer = RayPeer(f"{place.role} {place.rank}", actor)
    try:
        _, theirs = await within(seconds, answer_of(actor.hello.remote()), "start_seconds")
        check_versions(versions(), theirs, place)
        await within(seconds, answer_of(actor.open.remote(worker_class, dict(init))), "start_seconds")
    except BaseException:
        peer.kill()
        raise
    return peer
