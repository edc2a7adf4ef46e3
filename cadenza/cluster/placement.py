"""Device mapping: which worker of which role sits on which devices.

Invariant: a `DeviceMap` that exists can be run. Every device that a role names exists and is named once by it, every
role is a whole number of replicas, and no replica lies on two nodes. A mapping that cannot be run is refused when the
map is made; the error lists all problems and shows the map.
```
role   = replicas, one for each data-parallel rank
replica = `tensor_parallel` workers, on one node; they get the same rows
worker = one process with `devices_per_worker` devices
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations, pairwise
from typing import Protocol

from pydantic import Field, field_validator

from cadenza.config import Config

AUTO = "auto"
MAX_RANGE = 1 << 16
"""Devices that one range may name: more is a typing error."""


class PlacementError(ValueError):
    """A device mapping that cannot be run; the message ends with the map."""


class DeviceSharing(StrEnum):
    """How two roles share devices."""

    COLOCATED = "colocated"
    """The same devices: the roles use them alternately."""
    PARTIAL = "partial"
    """Some devices belong to both roles."""
    DISAGGREGATED = "disaggregated"
    """No device is shared: the roles run side by side."""


class RoleConfig(Config):
    """The devices of a role."""

    devices: str | tuple[int, ...]
    """A list, a range such as '0-7' or '0-3,8-11', or 'auto'. Ranks follow the order in which devices are named."""
    devices_per_worker: int = Field(default=1, gt=0)
    """Devices of one worker process."""
    tensor_parallel: int = Field(default=1, gt=0)
    """Workers, each in a process of its own, that hold one replica together."""

    @field_validator("devices", mode="before")
    @classmethod
    def _readable(cls, devices: object) -> str | tuple[int, ...]:
        if isinstance(devices, str | list | tuple | range):
            return AUTO if devices == AUTO else parse_devices(devices)
        raise ValueError(f"devices are a list, a range such as '0-7', or 'auto', got {devices!r}")

    @property
    def device_numbers(self) -> tuple[int, ...]:
        if isinstance(self.devices, str):
            raise PlacementError("devices 'auto' have no numbers before `cadenza plan` chooses them")
        return self.devices

    @property
    def devices_per_replica(self) -> int:
        return self.devices_per_worker * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Node:
    """A machine and its devices. Devices are numbered from 0 over all nodes of a run."""

    name: str
    devices: range
    id: str = ""
    """The id of the node in Ray; empty where devices are just numbers."""


class DeviceSource(Protocol):
    """The nodes and devices of a run: a `ResourceManager`."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def devices(self) -> Sequence[int]: ...

    @property
    def backend(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one worker sits, and which rank of its role it is."""

    role: str
    rank: int
    world_size: int
    """Workers of the role."""
    data_rank: int
    data_ranks: int
    tensor_rank: int
    """The worker's number inside its replica; number 0 answers for the replica."""
    tensor_ranks: int
    node: str
    devices: tuple[int, ...]
    """Device numbers in the map. On Ray the process of the worker sees only these devices, numbered from 0."""

    def __str__(self) -> str:
        detail = f" (data {self.data_rank}, tensor {self.tensor_rank})" if self.tensor_ranks > 1 else ""
        if self.world_size < self.data_ranks * self.tensor_ranks:
            detail = f" of replica {self.data_rank}"
        noun = "device" if len(self.devices) == 1 else "devices"
        return f"{self.role} rank {self.rank}{detail} on {self.node}, {noun} {format_devices(self.devices)}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of one role in a map: what a `Cluster` is made on."""

    role: str
    places: tuple[Place, ...]
    """By rank."""
    map: DeviceMap

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for place in self.places for device in place.devices)

    def replicas(self) -> list[Placement]:
        """One placement for each replica of the role, to make a cluster of: a replica that dies then costs itself."""
        size = self.places[0].tensor_ranks
        return [
            Placement(
                self.role,
                tuple(replace(place, rank=place.tensor_rank, world_size=size) for place in self.places[start:][:size]),
                self.map,
            )
            for start in range(0, len(self.places), size)
        ]


class DeviceMap:
    """The devices of all roles of a run."""

    def __init__(self, resources: DeviceSource, roles: Mapping[str, RoleConfig]) -> None:
        self.resources = resources
        self.nodes = tuple(resources.nodes)
        self.roles = dict(roles)
        self._node_of = {device: node for node in self.nodes for device in node.devices}
        problems = [f"{role}: {problem}" for role in self.roles for problem in self._problems(self.roles[role])]
        if not self.roles:
            problems = ["no role has devices"]
        if problems:
            raise PlacementError("\n".join(["impossible device mapping", *problems, "", self._table()]))

    def __getitem__(self, role: str) -> Placement:
        if role not in self.roles:
            raise KeyError(f"no role '{role}' in the device mapping, there are: {', '.join(self.roles)}")
        return Placement(role, tuple(self._places(role)), self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.roles)

    def node_of(self, device: int) -> Node:
        return self._node_of[device]

    def roles_on(self, device: int) -> list[str]:
        """The roles that share a device."""
        return [role for role, config in self.roles.items() if device in config.device_numbers]

    def sharing(self, one: str, other: str) -> DeviceSharing:
        """How two roles share devices."""
        mine, theirs = set(self.roles[one].device_numbers), set(self.roles[other].device_numbers)
        if mine == theirs:
            return DeviceSharing.COLOCATED
        return DeviceSharing.PARTIAL if mine & theirs else DeviceSharing.DISAGGREGATED

    def describe(self) -> str:
        """A table of nodes, devices and roles with the rank of the worker in each cell, then how each pair of roles
        shares devices."""
        lines = [self._table()]
        for one, other in combinations(self.roles, 2):
            sharing = self.sharing(one, other)
            shared = sorted(set(self.roles[one].device_numbers) & set(self.roles[other].device_numbers))
            both = f", both on {format_devices(shared)}" if sharing is DeviceSharing.PARTIAL else ""
            lines.append(f"{one} and {other}: {sharing}{both}")
        return "\n".join(lines)

    def _places(self, role: str) -> Iterator[Place]:
        config = self.roles[role]
        size, ranks = config.devices_per_worker, len(config.device_numbers) // config.devices_per_worker
        for rank in range(ranks):
            devices = config.device_numbers[rank * size : (rank + 1) * size]
            data_rank, tensor_rank = divmod(rank, config.tensor_parallel)
            yield Place(
                role=role,
                rank=rank,
                world_size=ranks,
                data_rank=data_rank,
                data_ranks=ranks // config.tensor_parallel,
                tensor_rank=tensor_rank,
                tensor_ranks=config.tensor_parallel,
                node=self._node_of[devices[0]].name,
                devices=devices,
            )

    def _problems(self, config: RoleConfig) -> Iterator[str]:
        numbers, size = config.device_numbers, config.devices_per_replica
        if unknown := sorted({device for device in numbers if device not in self._node_of}):
            count = len(self._node_of)
            yield f"devices {format_devices(unknown)} do not exist: there are {count}, numbered 0-{count - 1}"
        if twice := sorted({device for device in numbers if numbers.count(device) > 1}):
            yield f"devices {format_devices(twice)} are named more than once"
        if len(numbers) % size:
            below = len(numbers) // size * size
            counts = f"{below} or {below + size}" if below else f"{size}"
            yield (
                f"{len(numbers)} devices are not a whole number of replicas of {size} (devices_per_worker "
                f"{config.devices_per_worker} x tensor_parallel {config.tensor_parallel}): use {counts}"
            )
            return
        for replica, start in enumerate(range(0, len(numbers), size)):
            devices = numbers[start : start + size]
            nodes = dict.fromkeys(self._node_of[device].name for device in devices if device in self._node_of)
            if len(nodes) > 1:
                yield (
                    f"replica {replica} on devices {format_devices(devices)} lies on the nodes {', '.join(nodes)}: "
                    "its devices must be those of one node"
                )

    def _table(self) -> str:
        ranks = {
            role: {device: str(i // config.devices_per_worker) for i, device in enumerate(config.device_numbers)}
            for role, config in self.roles.items()
        }
        blocks = [(node.name, list(node.devices)) for node in self.nodes]
        if missing := sorted({d for cells in ranks.values() for d in cells if d not in self._node_of}):
            blocks.append(("no such device", missing[:32]))
        left = max(len(name) for name in [*(name for name, _ in blocks), *(f"  {role}" for role in ranks)])
        width = max(len(str(device)) for _, devices in blocks for device in devices)

        def row(name: str, cells: Iterable[object]) -> str:
            return "  ".join([name.ljust(left), *(str(cell).rjust(width) for cell in cells)])

        lines = []
        for name, devices in blocks:
            here = {role: cells for role, cells in ranks.items() if cells.keys() & set(devices)}
            lines.append(row(name, devices) + ("" if here else "  idle"))
            lines += [row(f"  {role}", (cells.get(d, ".") for d in devices)) for role, cells in here.items()]
        return "\n".join(lines)


def parse_devices(devices: str | Sequence[int]) -> tuple[int, ...]:
    """The numbers that a list or a range string means."""
    if not isinstance(devices, str):
        numbers = tuple(devices)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"a device is a number from 0 on, got {number!r}")
    else:
        numbers = tuple(number for item in devices.split(",") for number in _range(item.strip(), devices))
    if not numbers:
        raise ValueError("no devices: name at least one")
    return numbers


def format_devices(devices: Sequence[int]) -> str:
    """The shortest text that `parse_devices` reads back to the same numbers."""
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(devices), 1) if b != a + 1), len(devices)]
    runs = [devices[a:b] for a, b in pairwise(starts) if a < b]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _range(item: str, whole: str) -> range:
    found = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", item, re.ASCII)
    if found is None:
        raise ValueError(f"devices {whole!r}: {item!r} is neither a number nor a range; write them as in '0-3,8-11'")
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if last < first:
        raise ValueError(f"devices {whole!r}: the range {item!r} runs backwards; write '{last}-{first}'")
    if last - first >= MAX_RANGE:
        raise ValueError(f"devices {whole!r}: the range {item!r} names {last - first + 1} devices, above {MAX_RANGE}")
    return range(first, last + 1)
