"""One schedule: a controller program, its scheduler and its faults, from start to shutdown under virtual time.

Invariant: a schedule is a function of its scenario. A recorded one is its scenario and all of its events, and a replay
that differs says where.

    controller: suspend -> update -> get_batch -> train, in the order of the scenario
    beside it:  a validation scheduler on the same sampler; devices that come and go; faults
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from cadenza.data import DataProto
from cadenza.inference.replica import PauseMode, Sampling
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import RolloutError, SchedulerClosed, Stalled
from cadenza.rollout.prefix_routing import PREFILL_WEIGHT
from cadenza.rollout.sampler import NoReplicas, SamplerConfig
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.demo.view import SchedulerView
from cadenza.simulation.fuzzing.monitor import Livelock, LoggedEvent, Monitor, Violation, invariant_of
from cadenza.simulation.fuzzing.scenario import (
    DEADLINES,
    DomainSpec,
    Resize,
    Scenario,
    ValidationSpec,
    hash64,
    length_of,
)
from cadenza.simulation.virtual_cluster.clock import Deadlock, VirtualTimeout
from cadenza.simulation.virtual_cluster.clock import run as run_virtual
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.envs import LengthCodec, SimEnv, SimTrainer, SimWorld, SyncSimEnv, executor_cost
from cadenza.simulation.virtual_cluster.faults import FaultInjector, FaultKind, FaultyReplica
from cadenza.testing import LocalCluster

MAX_CONTEXT = 256
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """What came of one schedule."""

    scenario: Scenario
    issued: int
    """Attempts, those of a validation included."""
    trained: int
    versions: int
    """Published."""
    max_staleness: int
    stale: int
    """Attempts dropped for their staleness."""
    injected: dict[FaultKind, int]
    violations: tuple[Violation, ...]
    seconds: float
    """Virtual."""
    events: list[LoggedEvent] = field(repr=False)

    def with_violations(self, problems: Sequence[tuple[int, str]]) -> ScheduleOutcome:
        """The same, with what else was found."""
        found = [Violation(self.scenario.seed, invariant, message) for invariant, message in problems]
        return replace(self, violations=(*self.violations, *found))


def run(scenario: Scenario) -> ScheduleOutcome:
    """Run one schedule and check it."""
    gc.collect(1)  # the schedule before. First of all: what is made before this survives it, and holds the rest.
    injector = FaultInjector(scenario.faults)
    world = SimWorld(scenario, injector)
    monitor = Monitor(scenario, world)
    driver = _Controller(scenario, world, monitor)
    seconds = 0.0
    with _quiet(), _gc_paused():
        try:
            seconds = run_virtual(
                driver.main, shuffle=scenario.shuffle, executor_cost=executor_cost, max_time=scenario.time_limit
            )
        except (Deadlock, VirtualTimeout, Livelock) as error:
            monitor.violate(5, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever ends a schedule is a finding
            monitor.violate(invariant_of(error), _describe(error))
        gc.collect(0)  # a future that failed unheard complains when it is collected
    train = monitor.views[0]
    return ScheduleOutcome(
        scenario=scenario,
        issued=sum(view.issued for view in monitor.views),
        trained=train.fates["trained"],
        versions=monitor.version,
        max_staleness=train.max_staleness,
        stale=train.fates["stale"],
        injected=dict(injector.injected),
        violations=tuple(monitor.violations),
        seconds=seconds,
        events=monitor.log,
    )


def _describe(error: BaseException) -> str:
    """What an error says, those inside of it included."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_describe(inner) for inner in error.exceptions)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"


@contextmanager
def _gc_paused() -> Iterator[None]:
    """A schedule is garbage as a whole, and collected when it is over: cheaper than all the time, and always alike."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Faults are meant here: nobody needs to read of them."""
    logger = logging.getLogger("cadenza")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Controller:
    """The controller of one schedule."""

    def __init__(self, scenario: Scenario, world: SimWorld, monitor: Monitor) -> None:
        self.scenario = scenario
        self.world = world
        self.monitor = monitor
        self.trainer = SimTrainer(scenario.train_seconds)
        self._triggers: list[tuple[int, asyncio.Future[bool]]] = []
        self._validation: asyncio.Task[None] | None = None

    async def main(self) -> float:
        scenario, monitor = self.scenario, self.monitor
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(monitor.on_loop_exception)
        self._build()
        for resize in scenario.resizes:
            self._triggers.append((resize.after, loop.create_future()))
        monitor.on_issued = self._tell_issued
        async with asyncio.TaskGroup() as background:
            for resize, (_, trigger) in zip(scenario.resizes, list(self._triggers), strict=True):
                background.create_task(self._resize(resize, trigger), name="resize")
            try:
                prefetch = scenario.order == "prefetch"
                await (self._prefetching_steps(background) if prefetch else self._steps(background))
            except NoReplicas as error:
                if not scenario.doomed:
                    monitor.violate(5, f"NoReplicas, although replica {scenario.protected} is well: {error}")
                monitor.controller_failed = True
            except Stalled as error:
                asleep = any(replica.asleep for replica in monitor.replicas)
                if not (scenario.doomed and asleep):  # else somebody might still have brought one back
                    monitor.violate(5, f"Stalled: {error}")
                monitor.controller_failed = True
            except RolloutError as error:
                monitor.violate(invariant_of(error), f"{type(error).__name__}: {error}")
                monitor.controller_failed = True
            for _, trigger in self._triggers:
                if not trigger.done():
                    trigger.set_result(False)
            await self._shut_down()
        await self.cluster.sampler.close()
        monitor.finish()
        return loop.time()

    # -- the program ---------------------------------------------------------------------------------------------------

    async def _steps(self, background: asyncio.TaskGroup) -> None:
        scenario = self.scenario
        for step in range(scenario.steps):
            if scenario.order not in ("rolling", "colocated"):
                await self._suspend()
            await self._publish(step + 1)
            if scenario.order == "resume_first":
                await self._resume()
            self._validate(background, step)
            for number, groups in enumerate(self._batch_sizes(step)):
                if number and scenario.parts > 1:
                    await asyncio.sleep(scenario.train_seconds / scenario.parts)
                batch = await self._get_batch(self.train, self.train_view, groups, step)
                if batch is None:
                    return
            if scenario.order == "colocated":
                await self._suspend()
            await self.trainer.train(batch)
            if scenario.order == "resume_last":
                await self._resume()
        if scenario.take_all:
            await self._get_batch(self.train, self.train_view, None, scenario.steps)
            await self._get_batch(self.train, self.train_view, scenario.groups, scenario.steps)

    async def _prefetching_steps(self, background: asyncio.TaskGroup) -> None:
        """Training, and beside it the wait for the next batches, as many as the bound allows."""
        scenario = self.scenario
        # `get_batch` opens the gate: it must have begun before the gate is closed.
        suspends = scenario.suspend_mode != "keep" and scenario.train_seconds > 0 and scenario.prefetch == 1
        await self._publish(1)
        prefetch_slots = asyncio.Semaphore(scenario.prefetch)
        batches: asyncio.Queue[DataProto | None] = asyncio.Queue()
        loader = asyncio.create_task(self._prefetch(prefetch_slots, batches))
        try:
            for step in range(scenario.steps):
                batch = await self._next(batches, loader)
                if batch is None or step == scenario.steps - 1:
                    return
                self._validate(background, step)
                prefetch_slots.release()
                self._check_staleness(batch)
                await self.trainer.train(batch)
                if suspends:
                    await self._suspend()
                await self._publish(step + 2)
                if suspends:
                    await self._resume()
        finally:
            loader.cancel()
            await asyncio.wait([loader])
            if not loader.cancelled():
                loader.exception()  # the controller has one to tell of already

    async def _prefetch(self, prefetch_slots: asyncio.Semaphore, batches: asyncio.Queue[DataProto | None]) -> None:
        for step in range(self.scenario.steps):
            await prefetch_slots.acquire()
            await batches.put(await self._get_batch(self.train, self.train_view, self.scenario.groups, step))

    async def _next(self, batches: asyncio.Queue[DataProto | None], loader: asyncio.Task[None]) -> DataProto | None:
        """The next batch, or what ended the wait for it."""
        getting = asyncio.ensure_future(batches.get())
        await asyncio.wait([getting, loader], return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and batches.empty():
            getting.cancel()
            loader.result()
        return await getting

    def _check_staleness(self, batch: DataProto) -> None:
        """The bound holds when a batch is trained, also if it was taken ahead."""
        versions = batch.batch.ragged("versions").values
        written = versions[versions >= 0]
        staleness = self.monitor.version - int(written.min()) if len(written) else 0
        if staleness > self.scenario.bound:
            self.monitor.violate(3, f"a batch is trained at staleness {staleness}, above {self.scenario.bound}")

    def _batch_sizes(self, step: int) -> tuple[int, ...]:
        groups = self.scenario.groups
        if step != self.scenario.odd_step:
            rng = Random(hash64(self.scenario.seed, step))
            ends = sorted(rng.sample(range(1, groups), min(self.scenario.parts, groups) - 1))
            return tuple(end - start for start, end in pairwise((0, *ends, groups)))
        match self.scenario.odd_size:
            case "double":
                return (2 * groups,)
            case "twice":
                return (groups, groups)
            case "halves" if groups > 1:
                return (groups // 2, groups - groups // 2)
        return (groups,)

    async def _suspend(self) -> None:
        self.monitor.suspending()
        self.world.injector.on_moment("suspend")
        await self.train.suspend()
        self.monitor.suspended()
        if self.scenario.repeated:
            await self.train.suspend()

    async def _resume(self) -> None:
        self.monitor.gate_may_open()
        self.world.injector.on_moment("resume")
        await self.train.resume()
        if self.scenario.repeated:
            await self.train.resume()

    async def _publish(self, version: int) -> None:
        self.world.injector.on_moment("publish")
        await self.cluster.sampler.load_weights(version)

    async def _get_batch(
        self, scheduler: RolloutScheduler, view: SchedulerView, groups: int | None, step: int
    ) -> DataProto | None:
        """A batch. An impatient controller takes its call back and asks again."""
        size = -1 if groups is None else groups * view.group_size
        data = DataProto(meta_info={"global_step": step})
        # Asking again opens the gate, which whoever prefetches may just have closed.
        patience = None if self.scenario.order == "prefetch" else self.scenario.patience or None
        while True:
            if scheduler is self.train:  # the other one does not hold the gate
                self.monitor.gate_may_open()
                self.world.injector.on_moment("resume")
            view.ask(groups)
            try:
                async with asyncio.timeout(patience):
                    batch = await scheduler.get_batch(data, size)
            except TimeoutError:
                view.withdraw()
                continue
            view.returned(batch)
            return batch

    async def _shut_down(self) -> None:
        """Shut everything down, validation first or in the middle of its batch."""
        validation = self.scenario.validation
        if self._validation is not None and validation is not None and not validation.abrupt:
            if not self.monitor.controller_failed:
                await self._resume()
            await asyncio.wait([self._validation])
        for scheduler, view in zip(self.schedulers, self.monitor.views, strict=True):
            view.closing = True
            if scheduler is self.train:  # it lets go of the gate
                self.monitor.gate_may_open()
            await scheduler.shutdown()

    # -- beside it -----------------------------------------------------------------------------------------------------

    def _validate(self, background: asyncio.TaskGroup, step: int) -> None:
        spec = self.scenario.validation
        if spec is None or step % spec.every or (self._validation is not None and not self._validation.done()):
            return
        self._validation = background.create_task(self._validation_batch(spec, step), name="validation")

    async def _validation_batch(self, spec: ValidationSpec, step: int) -> None:
        try:
            await self._get_batch(self.schedulers[1], self.monitor.views[1], spec.groups, step)
        except SchedulerClosed:
            if not self.monitor.views[1].closing:
                raise
        except NoReplicas as error:
            if not self.scenario.doomed:
                self.monitor.violate(5, f"validation: NoReplicas: {error}")

    async def _resize(self, resize: Resize, trigger: asyncio.Future[bool]) -> None:
        if not await trigger:
            return
        await asyncio.sleep(resize.delay)
        devices, scheduler = resize.devices, self.train
        self.monitor.leaving(devices)
        self.world.injector.on_moment("resize")
        try:
            await scheduler.shrink_sampler(devices)
        except ValueError:
            return  # some of them are lost
        finally:
            self.monitor.left(devices)
        await asyncio.sleep(resize.away)
        self.world.injector.on_moment("resize")
        for skip_load in (True, False) if resize.skip_load else (False,):
            states = self.cluster.sampler.devices
            back = [device for device in devices if states[device] == "asleep"]
            try:
                if back:
                    await scheduler.expand_sampler(back, skip_load)
            except ValueError:
                continue  # it was behind, or is lost
            except NoReplicas:
                if not self.scenario.doomed:
                    raise
            return

    def _tell_issued(self, issued: int) -> None:
        for after, trigger in self._triggers:
            if issued >= after and not trigger.done():
                trigger.set_result(True)

    # -- building ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        scenario, monitor = self.scenario, self.monitor
        injector = self.world.injector
        share = scenario.load_cost
        cost = CostModel(
            scenario.step_seconds, 1e-4 * share, 1e-6 * share, 1e-4 * share, scenario.kv_capacity, scenario.max_running
        )
        length, delay = length_of(scenario), scenario.arrival_delay
        replicas = [
            FaultyReplica(
                injector, monitor.on_request, f"r{index}", cost, length, devices=(index,),
                load_seconds=scenario.load_seconds, wake_seconds=scenario.wake_seconds, keep_kv=scenario.keep_kv,
                on_event=monitor.replica_sink(index),
                arrival_delay=(lambda request: delay * (request.id % 3) / 2) if delay else 0.0,
            )
            for index in range(scenario.replicas)
        ]  # fmt: skip
        injector.replicas = monitor.replicas = replicas
        self.cluster = LocalCluster(
            replicas,
            LengthCodec(),
            SamplerConfig(
                control_seconds=DEADLINES.control,
                load_seconds=DEADLINES.load,
                heartbeat_seconds=DEADLINES.heartbeat,
                max_strikes=DEADLINES.strikes,
                balance_seconds=scenario.balance_seconds,
                prefill_weight=1.0 if scenario.balance_seconds else PREFILL_WEIGHT,
            ),
        )
        self.cluster.sampler.events = monitor.on_sampler_event
        self.cluster.sampler.on_version.append(monitor.published)
        self.train_view = SchedulerView(
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
        self.world.on_verdict = self.train_view.filter_decided
        self.train = self._scheduler(
            self.train_view,
            RolloutConfig(
                batch_size=scenario.batch_size,
                group_size=scenario.group_size,
                alpha=scenario.alpha,
                slice_tokens=scenario.slice_tokens,
                staleness=scenario.staleness,
                extra_members=scenario.extra_members,
                extra_after=scenario.extra_after,
                extra_groups=scenario.extra_groups,
                group_filter=self.world.group_filter(),
                max_attempts=scenario.max_attempts,
                suspend_mode=PauseMode(scenario.suspend_mode),
                stall_seconds=DEADLINES.stall,
                seed=scenario.seed,
            ),
            scenario.domains,
            scenario.slots,
        )
        self.schedulers = [self.train]
        if (validation := scenario.validation) is not None:
            self.schedulers.append(self._validation_scheduler(validation))

    def _validation_scheduler(self, spec: ValidationSpec) -> RolloutScheduler:
        view = SchedulerView(
            self.monitor,
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
            slice_tokens=self.scenario.slice_tokens,
            stall_seconds=DEADLINES.stall,
            seed=self.scenario.seed + 1,
        )
        return self._scheduler(view, config, (spec.domain,), spec.slots)

    def _scheduler(
        self, view: SchedulerView, config: RolloutConfig, domains: tuple[DomainSpec, ...], slots: int
    ) -> RolloutScheduler:
        scenario = self.scenario
        manager = EnvManagerConfig(
            domains={
                spec.name: DomainConfig(
                    env=SyncSimEnv if spec.sync else SimEnv,
                    env_args={"world": self.world, "domain": spec, "scheduler": view.name},
                    tasks=spec.tasks,
                    weight=spec.weight,
                    max_envs=spec.max_envs,
                    reward=self.world.reward(spec, view.name),
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
        mode: Any = view.name
        scheduler = RolloutScheduler(config, manager, self.cluster.resources, self.cluster, mode, events=view)
        view.ledger, view.metrics = scheduler.ledger, scheduler.metrics
        self.monitor.views.append(view)
        return scheduler
