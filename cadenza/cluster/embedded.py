"""Workers in the controller's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar


class ResourceManager:
    """The devices of a run, numbered through over all nodes. Without GPUs a device is just a number."""

    def __init__(self, num_gpus_per_node: int, num_nodes: int = 1) -> None:
        for name, value in (("num_gpus_per_node", num_gpus_per_node), ("num_nodes", num_nodes)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.num_gpus_per_node = num_gpus_per_node
        self.num_nodes = num_nodes

    @property
    def devices(self) -> range:
        return range(self.num_gpus_per_node * self.num_nodes)

    def node_of(self, device: int) -> int:
        """The node on which a device sits."""
        if device not in self.devices:
            raise ValueError(f"device {device} does not exist; there are {list(self.devices)}")
        return device // self.num_gpus_per_node


class Worker:
    """One member of a cluster, on its devices."""

    def __init__(self, name: str, devices: Sequence[int] = ()) -> None:
        self.name = name
        self.devices = tuple(devices)


W = TypeVar("W", bound=Worker)


class Cluster(Generic[W]):
    """Workers of one role."""

    def __init__(self, name: str, workers: Sequence[W]) -> None:
        if not workers:
            raise ValueError(f"cluster '{name}' needs at least one worker, got none")
        self.name = name
        self.workers = list(workers)

    @property
    def devices(self) -> list[int]:
        return sorted({device for worker in self.workers for device in worker.devices})
