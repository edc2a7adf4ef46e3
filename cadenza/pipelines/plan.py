"""`cadenza plan CONFIG`: who sits where and when, and where the config leaves that open, what is best.

Devices that are named are checked and shown. With `devices: auto` the splits of the devices are simulated, with the
production scheduler and costs that were measured (the trace of a run) or stated, and the best one is taken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza.cluster import DeviceMap, DeviceSharing, PlacementError, ResourceManager, RoleConfig
from cadenza.cluster.placement import AUTO, format_devices
from cadenza.pipelines.config import ConfigError, RunConfig, read
from cadenza.simulation import cli_args, plan_command
from cadenza.simulation.cli_args import InvalidArgument
from cadenza.simulation.experiment import TrialPool, workers
from cadenza.simulation.plan import Plan, make_plan, predict
from cadenza.simulation.workloads import Workload

STATED = "W2"
"""The workload whose lengths and costs are taken where a run has none and nothing else is named."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says besides the config."""

    gpus: int | None
    nodes: int
    workload: str | None
    alpha: str | None
    model_cost: str | None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The roles of a run on their devices, and what was predicted of it."""

    map: DeviceMap
    plan: Plan | None
    """None where nothing could be simulated."""
    why: str

    def mode(self, role: str) -> DeviceSharing:
        """What it has to do with generation, or generation with training."""
        return self.map.sharing(role, "inference" if role != "inference" else "actor")

    def when(self, role: str) -> str:
        """When it has its devices."""
        other = "generation" if role != "inference" else "training"
        if self.mode(role) is DeviceSharing.DISAGGREGATED:
            return f"all the time, beside {other}"
        shared = set(self.map.roles[role].numbers) & set(
            self.map.roles["inference" if role != "inference" else "actor"].numbers
        )
        which = "" if self.mode(role) is DeviceSharing.COLOCATED else f" on {format_devices(sorted(shared))}"
        return f"in turn with {other}{which}"

    def to_json(self) -> dict[str, Any]:
        plan = self.plan.to_json() if self.plan is not None else {"predicted": [], "chosen": None}
        return {
            "roles": {
                role: {
                    "devices": format_devices(config.numbers),
                    "mode": self.mode(role).value,
                    "when": self.when(role),
                    "workers": len(self.map[role].places),
                }
                for role, config in self.map.roles.items()
            },
            **plan,
            "why": self.why,
        }


def plan(path: Path, overrides: Sequence[str], given: Asked, *, as_json: bool) -> int:
    """Lay out a run and show it; returns the exit code."""
    config = read(path, overrides)
    with workers() as crew:
        layout = lay_out(config, given, crew)
    if as_json:
        print(json.dumps({"config": str(path), **layout.to_json()}, indent=2))
        return 0
    print(layout.map.describe())
    print()
    for role in layout.map.roles:
        print(f"{role}: {layout.when(role)}")
    print()
    if layout.plan is not None:
        plan_command.show(layout.plan, layout.why)
    else:
        print(layout.why)
    return 0


def lay_out(config: RunConfig, given: Asked, crew: TrialPool) -> Layout:
    """The devices of all roles, chosen where the config says 'auto', and what a step will take."""
    resources = _resources(config, given)
    roles = {role: config.devices.get(role) or RoleConfig(devices=(0,)) for role in config.roles}
    is_open = {role: roles[role].devices == AUTO for role in ("actor", "inference")}
    if any(role.devices == AUTO for role in roles.values()) and not all(is_open.values()):
        raise ConfigError("devices: 'auto' is for actor and inference together: say it of both, or 'devices: auto'")
    alphas = cli_args.alphas(given.alpha) if given.alpha is not None else [config.rollout.alpha]
    workload, source = _workload(config, given, len(resources.devices))
    try:
        if all(is_open.values()):
            return _chosen(resources, roles, crew, workload, source, alphas, shared=given.shared)
        return _given(resources.place(roles), crew, workload, source, alphas)
    except PlacementError as error:
        raise ConfigError(f"devices: {error}") from error


def _chosen(
    resources: ResourceManager,
    roles: Mapping[str, RoleConfig],
    crew: TrialPool,
    workload: Workload,
    source: str,
    alphas: Sequence[float],
    *,
    shared: bool,
) -> Layout:
    """The best of the splits that can be placed."""

    def placed(train_gpus: int, shared_gpus: int = 0) -> DeviceMap:
        return resources.place({**roles, **_split(roles, train_gpus, shared_gpus, workload.gpus)})

    def fits(train_gpus: int, shared_gpus: int) -> bool:
        try:
            placed(train_gpus, shared_gpus)
        except PlacementError:
            return False
        return True

    splits = [0, *range(1, workload.gpus)]
    if not any(fits(gpus, 0) for gpus in splits if bool(gpus) == bool(max(alphas))):
        placed(1 if max(alphas) else 0)  # says what is wrong with it
    made = make_plan(crew, workload, alphas, fits, shared=shared)
    return Layout(
        placed(made.chosen.train_gpus, made.chosen.shared_gpus), made, f"{made.why} Costs and lengths: {source}."
    )


def _given(places: DeviceMap, crew: TrialPool, workload: Workload, source: str, alphas: Sequence[float]) -> Layout:
    """What the devices that are named make of a step."""
    sharing = places.sharing("actor", "inference")
    trains, generates = (set(places.roles[role].numbers) for role in ("actor", "inference"))
    train_gpus, shared_gpus = len(trains), len(trains & generates)
    if sharing is DeviceSharing.COLOCATED:
        train_gpus = shared_gpus = 0
    wanted = [alpha for alpha in alphas if bool(alpha) == bool(train_gpus) or sharing is DeviceSharing.PARTIAL]
    if not wanted or (train_gpus and generates <= trains):
        told = ", ".join(f"{alpha:g}" for alpha in alphas)
        return Layout(places, None, f"{sharing} devices at alpha {told} are not simulated: nothing is predicted.")
    made = predict(crew, replace(workload, gpus=len(trains | generates)), wanted, train_gpus, shared_gpus)
    return Layout(places, made, f"the devices are those of the config: {made.why} Costs and lengths: {source}.")


def _split(roles: Mapping[str, RoleConfig], train_gpus: int, shared_gpus: int, gpus: int) -> dict[str, RoleConfig]:
    """The first devices train and the others generate, with those that are shared; with none that only trains, all do
    both in turn."""
    train = tuple(range(train_gpus or gpus))
    generate = tuple(range(train_gpus - shared_gpus, gpus))
    return {
        "actor": roles["actor"].model_copy(update={"devices": train}),
        "inference": roles["inference"].model_copy(update={"devices": generate}),
    }


def _resources(config: RunConfig, given: Asked) -> ResourceManager:
    gpus = given.gpus or config.device_count
    if gpus % given.nodes:
        raise InvalidArgument(
            f"{given.nodes} nodes cannot have equally many of all {gpus} devices: give a --gpus that --nodes divides"
        )
    return ResourceManager(gpus // given.nodes, given.nodes)


def _workload(config: RunConfig, given: Asked, gpus: int) -> tuple[Workload, str]:
    """What the run asks of its devices, and how that is known."""
    run, needs_costs = config.out / config.name, given.model_cost is None
    if given.workload is not None:
        found = cli_args.workload(given.workload, needs_costs=needs_costs)
        source = f"{given.workload}, as --workload says"
    elif (run / "trace.jsonl").is_file():
        found, source = cli_args.workload(str(run), needs_costs=needs_costs), f"measured in {run}"
    else:
        found = cli_args.workload(STATED)
        source = f"stated, those of {STATED}: {run} has measured none yet, and --workload names no other"
    if given.model_cost is not None:
        found, source = cli_args.with_cost(found, given.model_cost), f"{source}, with --model-cost {given.model_cost}"
    groups = max(1, config.rollout.batch_size // config.rollout.group_size)
    size = config.rollout.group_size
    if found.recorded:
        size = min(size, found.group_size)
    return replace(found, gpus=gpus, groups=groups, group_size=size), source
