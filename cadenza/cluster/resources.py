"""The devices of a run, and who gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, TypeAlias, cast

from pydantic import ValidationError

from cadenza.cluster.placement import AUTO, DeviceMap, Node, PlacementError, RoleConfig

RoleLike: TypeAlias = "RoleConfig | Mapping[str, Any] | str | Sequence[int]"
"""A config, the values of one, or its devices alone."""

DeviceChooser: TypeAlias = "Callable[[ResourceManager, Mapping[str, RoleConfig]], Mapping[str, str | Sequence[int]]]"
"""From the devices and all roles: devices for each role that says 'auto'."""


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
        `shutdown` ends a connection that was made here, and with it a cluster that was started here."""
        return cast("ResourceManager", import_module("cadenza.cluster.ray_resources").connect(address))

    @property
    def devices(self) -> range:
        return range(self.nodes[-1].devices.stop)

    def node_of(self, device: int) -> int:
        """The number of the node on which a device sits."""
        for number, node in enumerate(self.nodes):
            if device in node.devices:
                return number
        raise ValueError(f"device {device} does not exist; there are {list(self.devices)}")

    def place(self, roles: Mapping[str, RoleLike], *, choose: DeviceChooser | None = None) -> DeviceMap:
        """The map of all roles of a run. `choose` finds the devices of those that say 'auto'."""
        configs = {role: _config(role, given) for role, given in roles.items()}
        if open_roles := [role for role, config in configs.items() if config.devices == AUTO]:
            if choose is None:
                raise PlacementError(
                    f"devices 'auto' of {', '.join(open_roles)}: nothing here chooses them; pass choose=, or name the "
                    f"devices, of which there are {len(self.devices)}"
                )
            chosen = choose(self, configs)
            for role in open_roles:
                if role not in chosen or chosen[role] == AUTO:
                    raise PlacementError(f"{role}: devices 'auto', and choose= named none")
                configs[role] = _config(role, configs[role].model_dump() | {"devices": chosen[role]})
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
