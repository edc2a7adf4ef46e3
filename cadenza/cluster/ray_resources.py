"""The devices of a Ray cluster, reserved as placement groups.

One group for each node that a map uses, with one bundle for each device on it. A bundle belongs to all roles on its
device. Each role gets an equal share of it, so that Ray accounts for colocated roles and never hands out too much.
```
node ---- placement group (STRICT_PACK, bound to the node)
device -- bundle {GPU: 1} -- shares of 1/k for k roles
worker -- actor in the bundle of its first device
```
Invariant: one map at a time. Its devices are reserved when the first cluster starts, and freed by `shutdown`, which
also ends the connection to Ray if `connect` made it, and a Ray that `connect` started.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any, ClassVar

from cadenza.cluster.placement import DeviceMap, Node, PlacementError, format_devices
from cadenza.cluster.ray_address import check_ray_address, token_message
from cadenza.cluster.resources import ResourceManager
from cadenza.cluster.worker import HeadLost
from cadenza.off_loop import as_async, with_deadline

try:
    ray: Any = import_module("ray")  # as Any: how much of it has types depends on its version
    scheduling: Any = import_module("ray.util.scheduling_strategies")
except ImportError as error:
    raise ImportError("the backend 'ray' needs Ray: pip install 'cadenza[ray]'") from error

HEAD_CHECK_SECONDS = 3.0
HEAD_CHECKS = 3
"""After so many checks in a row without an answer the head counts as gone."""
SHUTDOWN_SECONDS = 30.0
SLACK_SECONDS = 30.0
"""Ray may overrun the deadlines that it is given."""


@dataclass(frozen=True, slots=True)
class ReservedDevice:
    """A reserved device: a bundle of a Ray placement group."""

    group: Any
    """The placement group of the bundle."""
    index: int
    share: float
    """The share of each role on this device."""
    accelerator_id: str
    """The id of the accelerator on its node, where a worker must be told; else empty."""

    def options(self, kind: str) -> dict[str, Any]:
        """Ray options for an actor or task on this device."""
        strategy = scheduling.PlacementGroupSchedulingStrategy(self.group, self.index)
        share = {"num_cpus": 0, "num_gpus": self.share} if kind == "GPU" else {"num_cpus": self.share}
        return {"scheduling_strategy": strategy, **share}


class RayResources(ResourceManager):
    """The devices that the nodes of a Ray cluster declare."""

    backend: ClassVar[str] = "ray"

    def __init__(self, nodes: Sequence[Node], kind: str, address: str, *, owns_connection: bool = False) -> None:
        """With `owns_connection`, `shutdown` ends the connection to Ray."""
        self.nodes = tuple(nodes)
        self.kind = kind
        """'GPU', or 'CPU' where no node has GPUs."""
        self.address = address
        """The address of the head."""
        self._owns_connection = owns_connection
        self._map: DeviceMap | None = None
        self._bundles: dict[int, ReservedDevice] = {}
        self._placement_groups: list[Any] = []
        self._lock = asyncio.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process knows the devices, and has reserved none of them."""
        return RayResources, (self.nodes, self.kind, self.address)

    async def reserve(self, map: DeviceMap, seconds: float) -> Mapping[int, ReservedDevice]:
        """Reserves the devices of a map, and returns them. Further calls with the same map return the same."""
        async with self._lock:
            if self._map is not None and self._map is not map:
                raise PlacementError(
                    "the devices are set aside for another mapping; shutdown() of the resources gives them back\n\n"
                    + self._map.describe()
                )
            if self._map is None:
                self._map = map
                try:
                    work = as_async(self._create_placement_groups)(map, seconds)
                    self._bundles = await with_deadline(seconds + SLACK_SECONDS, work, "start seconds")
                except BaseException:
                    await self._remove_placement_groups()
                    raise
            return self._bundles

    async def check_head(self) -> None:
        """Raise if the head of the cluster does not answer."""
        host, _, port = self.address.rpartition(":")
        for _ in range(HEAD_CHECKS):
            try:
                async with asyncio.timeout(HEAD_CHECK_SECONDS):
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.close()
            except OSError:  # a time-out is one
                await asyncio.sleep(HEAD_CHECK_SECONDS / HEAD_CHECKS)
            else:
                return
        raise HeadLost(f"the Ray head at {self.address} does not answer: is the machine, or its 'ray start', gone?")

    async def shutdown(self) -> None:
        """Free the devices, and end the connection to Ray if these resources own it."""
        async with self._lock:
            try:
                await self._remove_placement_groups()
            finally:
                if self._owns_connection:
                    self._owns_connection = False
                    await with_deadline(SHUTDOWN_SECONDS, as_async(ray.shutdown)(), "shutdown seconds")

    async def _remove_placement_groups(self) -> None:
        groups, self._placement_groups, self._bundles, self._map = self._placement_groups, [], {}, None
        if groups and ray.is_initialized():
            try:
                await self.check_head()
            except HeadLost:
                return  # the reservations are gone with it
            await with_deadline(SHUTDOWN_SECONDS, as_async(_remove_all)(groups), "shutdown seconds")

    def _create_placement_groups(self, map: DeviceMap, seconds: float) -> dict[int, ReservedDevice]:
        used = sorted({device for config in map.roles.values() for device in config.device_numbers})
        several = self.kind == "GPU" and any(config.devices_per_worker > 1 for config in map.roles.values())
        by_node = {node: [device for device in used if device in node.devices] for node in map.nodes}
        groups = {
            node: self._create_placement_group(node, len(devices)) for node, devices in by_node.items() if devices
        }
        for node, group in groups.items():
            if not group.wait(seconds):
                free = ray.available_resources().get(self.kind, 0.0)
                raise PlacementError(
                    f"Ray could not set aside devices {format_devices(by_node[node])} of {node.name} within "
                    f"{seconds:g} s: something else holds them ({free:g} {self.kind} free in the cluster)\n\n"
                    + map.describe()
                )
        bundles = {}
        for node, group in groups.items():
            for index, device in enumerate(by_node[node]):
                share = 10_000 // len(map.roles_on(device)) / 10_000  # Ray counts in ten-thousandths
                bundle = ReservedDevice(group, index, share, "")
                name = _accelerator_id_of(bundle, seconds) if several else ""
                bundles[device] = ReservedDevice(group, index, share, name)
        return bundles

    def _create_placement_group(self, node: Node, devices: int) -> Any:
        bundles = [{self.kind: 1.0}] * devices
        on_node = [{"ray.io/node-id": node.id}] * devices
        group = ray.util.placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=on_node)
        self._placement_groups.append(group)
        return group


def connect(address: str | None) -> RayResources:
    """Join a Ray cluster, or start one on this machine; see `ResourceManager.on_ray`."""
    owns_connection = not ray.is_initialized()
    if owns_connection:
        address = address or os.environ.get("RAY_ADDRESS")
        wants_token = check_ray_address(address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address or "local", log_to_driver=True)  # without "local" it joins any Ray that is here
        except ray.exceptions.AuthenticationError as error:
            raise HeadLost(token_message(address)) from error
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            if wants_token:
                raise HeadLost(token_message(address)) from error
            raise HeadLost(f"there is no Ray cluster at {address or 'this machine'}: {error}") from error
        finally:
            if current_thread() is main_thread():  # Ray takes the signal for itself, and exits on it
                signal.signal(signal.SIGTERM, handler)
    try:
        return _declared_resources(owns_connection)
    except BaseException:
        if owns_connection:
            ray.shutdown()
        raise


def _declared_resources(owns_connection: bool) -> RayResources:
    """The devices of the cluster that this process is connected to."""
    context = ray.get_runtime_context()
    alive = [node for node in ray.nodes() if node["Alive"]]
    kind = "GPU" if any(node["Resources"].get("GPU", 0) >= 1 for node in alive) else "CPU"
    counts = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in alive}
    # The head first, then by address, so that a restarted cluster numbers its devices in the same order.
    alive.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeManagerAddress"], n["NodeID"]))
    addresses = Counter(node["NodeManagerAddress"] for node in alive)
    nodes: list[Node] = []
    first = 0
    for node in alive:
        name, id, count = node["NodeManagerAddress"], node["NodeID"], counts[node["NodeID"]]
        if not count:
            continue
        nodes.append(Node(name if addresses[name] == 1 else f"{name}/{id[:6]}", range(first, first + count), id))
        first += count
    if not nodes:
        raise PlacementError("no node of the Ray cluster declares a GPU or a CPU: start them with --num-gpus=N")
    return RayResources(nodes, kind, context.gcs_address, owns_connection=owns_connection)


def _accelerator_id_of(bundle: ReservedDevice, seconds: float) -> str:
    """The id of a bundle's accelerator. Bundles are asked one after the other, so that one process answers for all."""

    def accelerator_id() -> str:
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    task = ray.remote(max_retries=0)(accelerator_id).options(**bundle.options("GPU"))
    return str(ray.get(task.remote(), timeout=seconds))


def _remove_all(groups: Sequence[Any]) -> None:
    for group in groups:
        ray.util.remove_placement_group(group)
