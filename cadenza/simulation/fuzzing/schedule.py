"""One random schedule: a controller program, its scheduler and its faults, from start to shutdown in virtual time.

Invariant: a schedule is a function of its scenario: the same scenario gives the same events.

    controller: suspend -> update -> get_batch -> train, in the order of the scenario
    beside it:  a validation scheduler on the same sampler; devices that come and go; faults
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

from cadenza.data import DataProto
from cadenza.rollout.failures import RolloutError, SchedulerClosed, Stalled
from cadenza.rollout.sampler import NoReplicas
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.fuzzing.keyed_random import hash64
from cadenza.simulation.fuzzing.monitor import Livelock, LoggedEvent, Monitor, Violation, invariant_of
from cadenza.simulation.fuzzing.scenario import Resize, Scenario, ValidationSpec
from cadenza.simulation.fuzzing.scheduler_view import SchedulerView
from cadenza.simulation.fuzzing.setup import build_cluster, train_scheduler, validation_scheduler
from cadenza.simulation.fuzzing.world import SimTrainer, SimWorld, executor_cost
from cadenza.simulation.quiet import quiet_log
from cadenza.simulation.virtual_cluster.clock import Deadlock, VirtualTimeout
from cadenza.simulation.virtual_cluster.clock import run as run_virtual
from cadenza.simulation.virtual_cluster.faults import FaultInjector, FaultKind


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """The result of one schedule: what it trained, which faults took effect, which invariants failed."""

    scenario: Scenario
    issued: int
    """Attempts issued, those of a validation included."""
    trained: int
    """Attempts trained."""
    versions: int
    """Versions published."""
    max_staleness: int
    stale: int
    """Attempts dropped for their staleness."""
    injected: dict[FaultKind, int]
    violations: tuple[Violation, ...]
    seconds: float
    """Virtual seconds from start to shutdown."""
    events: list[LoggedEvent] = field(repr=False)

    def with_violations(self, problems: Sequence[tuple[int, str]]) -> ScheduleOutcome:
        """Return the same outcome with more violations: pairs of invariant and message."""
        found = [Violation(self.scenario.seed, invariant, message) for invariant, message in problems]
        return replace(self, violations=(*self.violations, *found))


def run(scenario: Scenario) -> ScheduleOutcome:
    """Run one schedule under the virtual clock, with a monitor that checks the invariants."""
    gc.collect(1)  # frees the previous schedule; objects made before this call would survive it and hold the rest
    injector = FaultInjector(scenario.faults)
    world = SimWorld(scenario, injector)
    monitor = Monitor(scenario, world)
    controller = _Controller(scenario, world, monitor)
    seconds = 0.0
    with quiet_log(), _gc_paused():
        try:
            seconds = run_virtual(
                controller.main, shuffle=scenario.shuffle, executor_cost=executor_cost, max_time=scenario.time_limit
            )
        except (Deadlock, VirtualTimeout, Livelock) as error:
            monitor.violate(5, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever ends a schedule is a finding
            monitor.violate(invariant_of(error), _describe(error))
        gc.collect(0)  # a future whose error was never read reports it when it is collected
    train = monitor.views[0]
    return ScheduleOutcome(
        scenario=scenario,
        issued=sum(view.issued for view in monitor.views),
        trained=train.fates["trained"],
        versions=monitor.version,
        max_staleness=train.batches.max_staleness,
        stale=train.fates["stale"],
        injected=dict(injector.injected),
        violations=tuple(monitor.violations),
        seconds=seconds,
        events=monitor.log,
    )


def _describe(error: BaseException) -> str:
    """Return the text of an error, of a group the texts of its members, with the source line."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_describe(inner) for inner in error.exceptions)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Switch the collector off: a schedule is collected as a whole when it is over, which is cheaper and repeatable."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Fetched = DataProto | RolloutError | None
"""A batch that was fetched ahead, None when the tasks have run out, or the error that ended the fetching."""


class _Controller:
    """The training program of one schedule, and what runs beside it: validation and resizes."""

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
        self._set_up()
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
                if not (scenario.doomed and asleep):  # otherwise a resize might still have woken one
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

    def _set_up(self) -> None:
        self.cluster = build_cluster(self.scenario, self.world, self.monitor)
        self.train, self.train_view = train_scheduler(self.scenario, self.world, self.monitor, self.cluster)
        self.schedulers = [self.train]
        if (spec := self.scenario.validation) is not None:
            self.schedulers.append(validation_scheduler(spec, self.scenario, self.world, self.monitor, self.cluster))

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
                if number and scenario.chunks > 1:
                    await asyncio.sleep(scenario.train_seconds / scenario.chunks)
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
        """Train while the next batches are fetched, as many ahead as the scenario says."""
        await self._publish(1)
        prefetch_slots = asyncio.Semaphore(self.scenario.prefetch)
        batches: asyncio.Queue[_Fetched] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as tasks:
                loader = tasks.create_task(self._prefetch(prefetch_slots, batches), name="prefetch")
                await self._train_prefetched(background, prefetch_slots, batches)
                loader.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _train_prefetched(
        self, background: asyncio.TaskGroup, prefetch_slots: asyncio.Semaphore, batches: asyncio.Queue[_Fetched]
    ) -> None:
        scenario = self.scenario
        # `get_batch` opens the gate: it must have begun before the gate is closed.
        suspends = scenario.suspend_mode != "keep" and scenario.train_seconds > 0 and scenario.prefetch == 1
        for step in range(scenario.steps):
            batch = await batches.get()
            if isinstance(batch, RolloutError):
                raise batch
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

    async def _prefetch(self, prefetch_slots: asyncio.Semaphore, batches: asyncio.Queue[_Fetched]) -> None:
        """Fetch one batch per step. An error follows the batches before it, so it never interrupts an update."""
        try:
            for step in range(self.scenario.steps):
                await prefetch_slots.acquire()
                await batches.put(await self._get_batch(self.train, self.train_view, self.scenario.groups, step))
        except RolloutError as error:
            await batches.put(error)

    def _check_staleness(self, batch: DataProto) -> None:
        """Check the bound at the time of training: a batch that was fetched ahead has grown older."""
        versions = batch.batch.ragged("versions").values
        written = versions[versions >= 0]
        staleness = self.monitor.version - int(written.min()) if len(written) else 0
        if staleness > self.scenario.bound:
            self.monitor.violate(3, f"a batch is trained at staleness {staleness}, above {self.scenario.bound}")

    def _batch_sizes(self, step: int) -> tuple[int, ...]:
        groups = self.scenario.groups
        if step != self.scenario.odd_step:
            rng = Random(hash64(self.scenario.seed, step))
            ends = sorted(rng.sample(range(1, groups), min(self.scenario.chunks, groups) - 1))
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
        """Return a batch. After `patience` seconds the controller withdraws its call and asks again."""
        size = -1 if groups is None else groups * view.group_size
        data = DataProto(meta_info={"global_step": step})
        # A second call opens the gate, which a prefetching program may just have closed.
        patience = None if self.scenario.order == "prefetch" else self.scenario.patience or None
        while True:
            if scheduler is self.train:  # the validation scheduler does not hold the gate
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
        """Shut everything down: after the validation is done, or in the middle of its batch."""
        validation = self.scenario.validation
        if self._validation is not None and validation is not None and not validation.abrupt:
            if not self.monitor.controller_failed:
                await self._resume()
            await asyncio.wait([self._validation])
        for scheduler, view in zip(self.schedulers, self.monitor.views, strict=True):
            view.closing = True
            if scheduler is self.train:  # its shutdown opens the gate
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
            return  # some of the devices are lost
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
                continue  # the replica lacks the version, or is lost
            except NoReplicas:
                if not self.scenario.doomed:
                    raise
            return

    def _tell_issued(self, issued: int) -> None:
        for after, trigger in self._triggers:
            if issued >= after and not trigger.done():
                trigger.set_result(True)
