"""The devices of a run, and which role gets which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, TypeAlias, cast

from pydantic import ValidationError

from cadenza.cluster.placement import AUTO, DeviceMap, Node, PlacementError, RoleConfig

RoleLike: TypeAlias = "RoleConfig | Mapping[str, Any] | str | Sequence[int]"
"""A config, the values of one, or its devices alone."""


class ResourceManager:
    """The devices of a run, numbered through over all nodes. Without GPUs a device is just a number."""

    backend: ClassVar[str] = "embedded"
    """The backend of clusters on these devices, unless they say another."""

    def __init__(self, num_gpus_per_node: int | Sequence[int], num_nodes: int = 1) -> None:
        """One count for all nodes, or a list with the count of each."""
        counts = [num_gpus_per_node] * num_nodes if isinstance(num_gpus_per_node, int) else list(num_gpus_per_node)
        for name, value in (("num_nodes", len(counts) or num_nodes), *(("num_gpus_per_node", n) for n in counts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self.nodes: tuple[Node, ...] = tuple(
            Node(f"node-{i}", range(start, start + count))
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        )

    @staticmethod
    def on_ray(address: str | None = None) -> ResourceManager:
        """The GPUs that the nodes of a Ray cluster declare, or if none of them does, their CPUs. Without an address it
        is the cluster that this process is connected to, or that RAY_ADDRESS names, or a new one on this machine.
        `shutdown` ends the connection if this call made it, and a Ray that this call started."""
        return cast("ResourceManager", import_module("cadenza.cluster.ray_resources").connect(address))

    @property
    def devices(self) -> range:
        return range(self.nodes[-1].devices.stop)

    def place(self, roles: Mapping[str, RoleLike]) -> DeviceMap:
        """The map of all roles of a run. Every role names its devices: 'auto' is for `cadenza plan`."""
        configs = {role: _config(role, given) for role, given in roles.items()}
        if open_roles := [role for role, config in configs.items() if config.devices == AUTO]:
            raise PlacementError(
                f"devices 'auto' of {', '.join(open_roles)}: `cadenza plan` chooses them; name the devices here, of "
                f"which there are {len(self.devices)}"
            )
        return DeviceMap(self, configs)

    async def shutdown(self) -> None:
        """Give the devices back."""


def _config(role: str, given: RoleLike) -> RoleConfig:
    if isinstance(given, RoleConfig):
        return given
    values = dict(given) if isinstance(given, Mapping) else {"devices": given}
    try:
        return RoleConfig.model_validate(values)
    except ValidationError as error:
        messages = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        raise PlacementError(f"{role}: {messages} (got {given!r})") from error
