"""A private Ray for a measurement, and replicas on it that take the times of a cost model on the wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any

from cadenza.cluster import Cluster, ResourceManager, dispatch
from cadenza.cluster.remote_replica import RemoteReplica, ReplicaWorker
from cadenza.inference.replica import Request
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.replica import SimReplica

VOCAB = 1000


@contextmanager
def own_ray(cpus: int) -> Iterator[Any]:
    """Start a Ray for this process, and stop it at the end."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ImportError("this measurement needs Ray: pip install 'cadenza[ray]'") from error
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()


class PacedWorker(ReplicaWorker):
    """A worker whose replica takes its times from the cost model; `describe` makes it on the loop that it runs on."""

    def __init__(self, cost: CostModel, length: Callable[[Request], int], load_seconds: float) -> None:
        """Keep the arguments: no other call works before `describe`."""
        self._replica_args = cost, length, load_seconds

    @dispatch("rank_zero")
    async def describe(self) -> tuple[str, tuple[int, ...], int]:
        cost, length, load_seconds = self._replica_args
        name, devices = f"paced-{self.place.data_rank}", self.place.devices
        super().__init__(SimReplica(name, cost, length, devices=devices, vocab=VOCAB, load_seconds=load_seconds))
        return name, devices, cost.kv_capacity


@asynccontextmanager
async def paced_replicas(
    count: int, cost: CostModel, length: Callable[[Request], int], *, load_seconds: float = 0.0
) -> AsyncIterator[list[RemoteReplica]]:
    """Start `count` replicas, each in a process of its own. `length` is that of `SimReplica`, and must pickle."""
    resources = ResourceManager.on_ray()
    placements = resources.place({"inference": f"0-{count - 1}"})["inference"].replicas()
    init: dict[str, Any] = {"cost": cost, "length": length, "load_seconds": load_seconds}
    clusters = [Cluster("inference", PacedWorker, placement, **init) for placement in placements]
    try:
        await asyncio.gather(*(cluster.start() for cluster in clusters))
        yield [await RemoteReplica.of_single_worker(cluster) for cluster in clusters]
    finally:
        await asyncio.gather(*(cluster.shutdown() for cluster in clusters))
        await resources.shutdown()
