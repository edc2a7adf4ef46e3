"""`cadenza plan CONFIG`: which role has which devices when, and where the config leaves that open, the best choice.

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
from cadenza.config import import_from_working_directory
from cadenza.run.config import ConfigError
from cadenza.run.config_file import read_config
from cadenza.run.role_names import ACTOR, INFERENCE, REWARD
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.simulation.comparison import cli_args
from cadenza.simulation.comparison.cli_args import InvalidArgument
from cadenza.simulation.comparison.experiment import TrialPool, trial_pool
from cadenza.simulation.comparison.workloads import Workload
from cadenza.simulation.planning import plan_command
from cadenza.simulation.planning.plan import Plan, make_plan, predict

DEFAULT_WORKLOAD = "W2"
"""The workload whose lengths and costs are taken where a run has none and nothing else is named."""


@dataclass(frozen=True, slots=True)
class PlanArgs:
    """What the command line says besides the config."""

    gpus: int | None
    nodes: int
    workload: str | None
    alpha: str | None
    model_cost: str | None
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The roles of a run on their devices, and what was predicted of it."""

    map: DeviceMap
    plan: Plan | None
    """None where nothing could be simulated."""
    why: str

    def mode(self, role: str) -> DeviceSharing:
        """What it has to do with generation, or generation with training."""
        return self.map.sharing(role, INFERENCE if role != INFERENCE else ACTOR)

    def when(self, role: str) -> str:
        """When it has its devices."""
        if role == REWARD:
            return "whenever an answer is finished"
        other = "generation" if role != INFERENCE else "training"
        if self.mode(role) is DeviceSharing.DISAGGREGATED:
            return f"all the time, beside {other}"
        shared = set(self.map.roles[role].device_numbers) & set(
            self.map.roles[INFERENCE if role != INFERENCE else ACTOR].device_numbers
        )
        which = "" if self.mode(role) is DeviceSharing.COLOCATED else f" on {format_devices(sorted(shared))}"
        return f"in turn with {other}{which}"

    def to_json(self) -> dict[str, Any]:
        plan = self.plan.to_json() if self.plan is not None else {"predicted": [], "chosen": None}
        return {
            "roles": {
                role: {
                    "devices": format_devices(config.device_numbers),
                    "mode": self.mode(role).value,
                    "when": self.when(role),
                    "workers": len(self.map[role].places),
                }
                for role, config in self.map.roles.items()
            },
            **plan,
            "why": self.why,
        }


def plan(path: Path, overrides: Sequence[str], args: PlanArgs, *, as_json: bool) -> int:
    """Lay out a run and show it; returns the exit code."""
    import_from_working_directory()
    config = read_config(path, overrides)
    if not isinstance(config, RolloutRunConfig):
        raise ConfigError(
            f"{path}: pipeline '{config.pipeline}' has no rollouts to plan: only runs with envs have them"
        )
    with trial_pool() as pool:
        layout = lay_out(config, args, pool)
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


def lay_out(config: RolloutRunConfig, args: PlanArgs, pool: TrialPool) -> RunLayout:
    """The devices of all roles, chosen where the config says 'auto', and what a step will take."""
    resources = _resources(config, args)
    roles = {role: config.devices.get(role) or RoleConfig(devices=(0,)) for role in config.role_names}
    is_open = {role: roles[role].devices == AUTO for role in (ACTOR, INFERENCE)}
    if any(role.devices == AUTO for role in roles.values()) and not all(is_open.values()):
        raise ConfigError("devices: 'auto' is for actor and inference together: say it of both, or 'devices: auto'")
    alphas = cli_args.alphas(args.alpha) if args.alpha is not None else [config.rollout.alpha]
    workload, source = _workload(config, args, len(resources.devices))
    try:
        if all(is_open.values()):
            return _chosen_layout(resources, roles, pool, workload, source, alphas, shared=args.shared)
        return _named_layout(resources.place(roles), pool, workload, source, alphas)
    except PlacementError as error:
        raise ConfigError(f"devices: {error}") from error


def _chosen_layout(
    resources: ResourceManager,
    roles: Mapping[str, RoleConfig],
    pool: TrialPool,
    workload: Workload,
    source: str,
    alphas: Sequence[float],
    *,
    shared: bool,
) -> RunLayout:
    """The best of the splits that can be placed."""

    def placed(train_gpus: int, shared_gpus: int = 0) -> DeviceMap:
        return resources.place({**roles, **_split_devices(roles, train_gpus, shared_gpus, workload.gpus)})

    def fits(train_gpus: int, shared_gpus: int) -> bool:
        try:
            placed(train_gpus, shared_gpus)
        except PlacementError:
            return False
        return True

    splits = [0, *range(1, workload.gpus)]
    if not any(fits(gpus, 0) for gpus in splits if bool(gpus) == bool(max(alphas))):
        placed(1 if max(alphas) else 0)  # says what is wrong with it
    made = make_plan(pool, workload, alphas, fits, shared=shared)
    return RunLayout(
        placed(made.chosen.train_gpus, made.chosen.shared_gpus), made, f"{made.why} Costs and lengths: {source}."
    )


def _named_layout(
    device_map: DeviceMap, pool: TrialPool, workload: Workload, source: str, alphas: Sequence[float]
) -> RunLayout:
    """What the devices that are named make of a step."""
    sharing = device_map.sharing(ACTOR, INFERENCE)
    trains, generates = (set(device_map.roles[role].device_numbers) for role in (ACTOR, INFERENCE))
    train_gpus, shared_gpus = len(trains), len(trains & generates)
    if sharing is DeviceSharing.COLOCATED:
        train_gpus = shared_gpus = 0
    wanted = [alpha for alpha in alphas if bool(alpha) == bool(train_gpus) or sharing is DeviceSharing.PARTIAL]
    if not wanted or (train_gpus and generates <= trains):
        listed = ", ".join(f"{alpha:g}" for alpha in alphas)
        return RunLayout(
            device_map, None, f"{sharing} devices at alpha {listed} are not simulated: nothing is predicted."
        )
    made = predict(pool, replace(workload, gpus=len(trains | generates)), wanted, train_gpus, shared_gpus)
    return RunLayout(device_map, made, f"the devices are those of the config: {made.why} Costs and lengths: {source}.")


def _split_devices(
    roles: Mapping[str, RoleConfig], train_gpus: int, shared_gpus: int, gpus: int
) -> dict[str, RoleConfig]:
    """The first devices train and the others generate, with those that are shared; with none that only trains, all do
    both alternately."""
    train = tuple(range(train_gpus or gpus))
    generate = tuple(range(train_gpus - shared_gpus, gpus))
    return {
        ACTOR: roles[ACTOR].model_copy(update={"devices": train}),
        INFERENCE: roles[INFERENCE].model_copy(update={"devices": generate}),
    }


def _resources(config: RolloutRunConfig, args: PlanArgs) -> ResourceManager:
    gpus = args.gpus or config.device_count
    if gpus % args.nodes:
        raise InvalidArgument(
            f"{args.nodes} nodes cannot have equally many of all {gpus} devices: give a --gpus that --nodes divides"
        )
    return ResourceManager(gpus // args.nodes, args.nodes)


def _workload(config: RolloutRunConfig, args: PlanArgs, gpus: int) -> tuple[Workload, str]:
    """What the run asks of its devices, and how that is known."""
    run, needs_costs = config.out / config.name, args.model_cost is None
    if args.workload is not None:
        found = cli_args.workload(args.workload, needs_costs=needs_costs)
        source = f"{args.workload}, as --workload says"
    else:
        try:
            found, source = cli_args.workload(str(run), needs_costs=needs_costs), f"measured in {run}"
        except InvalidArgument:  # there is no run yet, or it was too short
            found = cli_args.workload(DEFAULT_WORKLOAD)
            source = f"stated, those of {DEFAULT_WORKLOAD}: {run} has measured none yet, and --workload names no other"
    if args.model_cost is not None:
        found, source = cli_args.with_cost(found, args.model_cost), f"{source}, with --model-cost {args.model_cost}"
    groups = max(1, config.rollout.batch_size // config.rollout.group_size)
    size = config.rollout.group_size
    if found.recorded:
        size = min(size, found.group_size)
    return replace(found, gpus=gpus, groups=groups, group_size=size), source
