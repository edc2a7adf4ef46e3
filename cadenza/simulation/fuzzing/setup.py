"""Builds what one random schedule drives: replicas, sampler, schedulers, and the monitor's view of each scheduler."""

from __future__ import annotations

from typing import Any

from cadenza.inference.replica import PauseMode, Request, Sampling
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.prefix_routing import PREFILL_WEIGHT
from cadenza.rollout.sampler import SamplerConfig
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.fuzzing.deadlines import DEADLINES
from cadenza.simulation.fuzzing.keyed_random import exponential
from cadenza.simulation.fuzzing.monitor import Monitor
from cadenza.simulation.fuzzing.scenario import DomainSpec, Scenario, ValidationSpec
from cadenza.simulation.fuzzing.scheduler_view import SchedulerView
from cadenza.simulation.fuzzing.world import SimEnv, SimWorld, SyncSimEnv
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.faults import FaultyReplica
from cadenza.simulation.virtual_cluster.tokens import LengthCodec
from cadenza.testing import LocalCluster

MAX_CONTEXT = 256
MAX_TOKENS = 48


def build_cluster(scenario: Scenario, world: SimWorld, monitor: Monitor) -> LocalCluster:
    """Make the replicas and the sampler of a scenario, on the running loop; the monitor hears their events."""
    share = scenario.load_cost
    cost = CostModel(
        a=scenario.step_seconds,
        b=1e-4 * share,
        c=1e-6 * share,
        p=1e-4 * share,
        kv_capacity=scenario.kv_capacity,
        max_running=scenario.max_running,
    )
    delay = scenario.arrival_delay

    def length(request: Request) -> int:
        return 1 + int(exponential(scenario.length, request.seed))

    replicas = [
        FaultyReplica(
            world.injector, monitor.on_request, f"r{index}", cost, length, devices=(index,),
            load_seconds=scenario.load_seconds, wake_seconds=scenario.wake_seconds, keep_kv=scenario.keep_kv,
            on_event=monitor.replica_sink(index),
            arrival_delay=(lambda request: delay * (request.id % 3) / 2) if delay else 0.0,
        )
        for index in range(scenario.replicas)
    ]  # fmt: skip
    world.injector.replicas = monitor.replicas = replicas
    config = SamplerConfig(
        control_seconds=DEADLINES.control,
        load_seconds=DEADLINES.load,
        heartbeat_seconds=DEADLINES.heartbeat,
        max_strikes=DEADLINES.strikes,
        balance_seconds=scenario.balance_seconds,
        prefill_weight=1.0 if scenario.balance_seconds else PREFILL_WEIGHT,
    )
    cluster = LocalCluster(replicas, LengthCodec(), config)
    cluster.sampler.events = monitor.on_sampler_event
    cluster.sampler.on_version.append(monitor.published)
    return cluster


def train_scheduler(
    scenario: Scenario, world: SimWorld, monitor: Monitor, cluster: LocalCluster
) -> tuple[RolloutScheduler, SchedulerView]:
    """Make the scheduler that is trained from, and the view that checks it."""
    view = SchedulerView(
        monitor,
        "train",
        group_size=scenario.group_size,
        per_batch=scenario.groups,
        bound=scenario.bound,
        extra_groups=scenario.extra_groups,
        staleness=scenario.staleness,
        tasks=scenario.tasks,
        filtered=scenario.filter != "none",
    )
    world.on_verdict = view.filter_decided
    config = RolloutConfig(
        batch_size=scenario.batch_size,
        group_size=scenario.group_size,
        alpha=scenario.alpha,
        slice_tokens=scenario.slice_tokens,
        staleness=scenario.staleness,
        extra_members=scenario.extra_members,
        extra_after=scenario.extra_after,
        extra_groups=scenario.extra_groups,
        group_filter=world.group_filter(),
        max_attempts=scenario.max_attempts,
        suspend_mode=PauseMode(scenario.suspend_mode),
        stall_seconds=DEADLINES.stall,
        seed=scenario.seed,
    )
    envs = _env_config(scenario, world, view.name, scenario.domains, scenario.slots)
    return _scheduler(config, envs, view, cluster), view


def validation_scheduler(
    spec: ValidationSpec, scenario: Scenario, world: SimWorld, monitor: Monitor, cluster: LocalCluster
) -> RolloutScheduler:
    """Make the second scheduler on the same sampler; its view is the last of the monitor's."""
    view = SchedulerView(
        monitor,
        "val",
        group_size=spec.group_size,
        per_batch=spec.groups or 1,
        bound=0,
        extra_groups=0,
        staleness="wait",
        tasks=spec.domain.tasks,
        filtered=False,
    )
    config = RolloutConfig(
        batch_size=spec.group_size * (spec.groups or 1),
        group_size=spec.group_size,
        slice_tokens=scenario.slice_tokens,
        stall_seconds=DEADLINES.stall,
        seed=scenario.seed + 1,
    )
    return _scheduler(config, _env_config(scenario, world, view.name, (spec.domain,), spec.slots), view, cluster)


def _env_config(
    scenario: Scenario, world: SimWorld, scheduler: str, domains: tuple[DomainSpec, ...], slots: int
) -> EnvManagerConfig:
    return EnvManagerConfig(
        domains={
            spec.name: DomainConfig(
                env=SyncSimEnv if spec.sync else SimEnv,
                env_args={"world": world, "domain": spec, "scheduler": scheduler},
                tasks=spec.tasks,
                weight=spec.weight,
                max_envs=spec.max_envs,
                reward=world.reward(spec, scheduler),
            )
            for spec in domains
        },
        slots=slots,
        workers=min(scenario.workers, slots),
        rollout=scenario.play,
        sampling=Sampling(max_tokens=MAX_TOKENS),
        max_context=MAX_CONTEXT,
        lease_seconds=DEADLINES.lease,
        reward_seconds=DEADLINES.reward,
        close_seconds=DEADLINES.close,
    )


def _scheduler(
    config: RolloutConfig, envs: EnvManagerConfig, view: SchedulerView, cluster: LocalCluster
) -> RolloutScheduler:
    mode: Any = view.name
    scheduler = RolloutScheduler(config, envs, cluster.resources, cluster, mode, events=view)
    view.ledger, view.metrics = scheduler.ledger, scheduler.metrics
    view.monitor.views.append(view)
    return scheduler
