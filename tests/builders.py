"""Small builders for the contract tests: an env, a scheduler with its cluster, a virtual clock.

    async def main() -> None:
        async with playing(group_size=2, batch_size=4, slots=4) as scheduler:
            batch = await get(scheduler, 4)

    simulate(main)

`playing` shuts the scheduler down and checks what must hold after every run: the ledger adds up, nothing is live, no
slot is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np

from cadenza import DataProto, ResourceManager, RolloutScheduler
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.inference.replica import Replica, Request
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.ledger import Attempt, Group
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.records import Fate
from cadenza.rollout.sampler import SamplerConfig
from cadenza.rollout.sampler_client import InferenceService, SamplerClient
from cadenza.simulation.virtual_cluster.clock import run
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.testing import ByteCodec, FakeReplica, LocalCluster

T = TypeVar("T")
FOREVER = 1e9
"""Longer than any test: what hangs, sleeps this long."""


def simulate(main: Callable[[], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Run under virtual time; whoever waits without a deadline fails the test instead of hanging it."""
    return run(main, max_time=1e6, **options)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and when it came."""
    return await work, now()


# -- environments ------------------------------------------------------------------------------------------------------


class OneStepEnv:
    """One question, one answer, one point."""

    async def reset(self, seed: int) -> str:
        return f"task {seed}"

    async def step(self, action: str) -> tuple[Any, ...]:
        return "", 1.0, True, False, {}


def chain(turns: int, seconds: float = 0.0) -> type:
    """An env of so many turns; a step takes so long and pays one point."""

    class Chain:
        def __init__(self) -> None:
            self.turn = 0

        async def reset(self, seed: int) -> str:
            return f"task {seed}"

        async def step(self, action: str) -> tuple[Any, ...]:
            await asyncio.sleep(seconds)
            self.turn += 1
            return f"turn {self.turn}", 1.0, self.turn == turns, False, {}

    return Chain


def stepping(step: Callable[[int, int], Coroutine[Any, Any, Any]]) -> type:
    """An env whose step is `await step(seed, n)`, `n` being the number of the env among those of its seed."""

    class Stepping:
        made: ClassVar[dict[int, int]] = {}
        opened: ClassVar[list[Any]] = []
        closed: ClassVar[list[Any]] = []

        async def reset(self, seed: int) -> str:
            self.seed = seed
            self.number = self.made.get(seed, 0)
            self.made[seed] = self.number + 1
            self.opened.append(self)
            return f"task {seed}"

        async def step(self, action: str) -> Any:
            outcome = await step(self.seed, self.number)
            return ("", 1.0, True, False, {}) if outcome is None else outcome

        async def close(self) -> None:
            self.closed.append(self)

    return Stepping


def first_time(act: Callable[[], Coroutine[Any, Any, Any]], seed: int = 0) -> type:
    """An env that does this in its first step ever for one task, and is well otherwise."""

    async def step(task: int, number: int) -> Any:
        return await act() if (task, number) == (seed, 0) else None

    return stepping(step)


# -- replicas ----------------------------------------------------------------------------------------------------------


def fake(seconds: Callable[[Request], float] | float = 1.0, *, tokens: int = 10, **options: Any) -> FakeReplica:
    """A replica that writes so many tokens in so many seconds."""
    return FakeReplica(lambda request: [65 + i % 26 for i in range(tokens)], seconds=seconds, **options)


def by_attempt(*seconds: float, rest: float = 1.0) -> Callable[[Request], float]:
    """The n-th attempt of the run takes the n-th time, all later ones `rest`."""
    return lambda request: seconds[request.session] if request.session < len(seconds) else rest


def pool(count: int, seconds: Callable[[Request], float] | float = 1.0, **options: Any) -> list[FakeReplica]:
    return [fake(seconds, name=f"r{i}", devices=(i,), **options) for i in range(count)]


def sim_replicas(count: int, length: Callable[[Request], int] | int = 100, **options: Any) -> list[SimReplica]:
    """Simulated replicas that write a token in 10 ms, whatever else they do; made inside the running loop."""
    cost = options.pop("cost", None) or CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=100_000)
    draw = length if callable(length) else lambda request: length
    return [SimReplica(f"r{i}", cost, draw, devices=(i,), **options) for i in range(count)]


# -- schedulers --------------------------------------------------------------------------------------------------------


def build(
    replicas: Sequence[Replica] | None = None,
    *,
    cluster: LocalCluster | None = None,
    domains: Mapping[str, Mapping[str, Any]] | None = None,
    mode: str = "train",
    sampler: Mapping[str, Any] | None = None,
    collator: Any = None,
    events: Any = None,
    reward_processes: Sequence[WorkerHandle] = (),
    **options: Any,
) -> RolloutScheduler:
    """A scheduler; every option goes to the config that has a field of this name."""
    parts: dict[type, dict[str, Any]] = {RolloutConfig: {}, EnvManagerConfig: {}, DomainConfig: {"env": OneStepEnv}}
    for name, value in options.items():
        owner = next((config for config in parts if name in config.model_fields), RolloutConfig)
        parts[owner][name] = value
    rollout = {"batch_size": 4} | parts[RolloutConfig]
    manager = {"slots": 8} | parts[EnvManagerConfig]
    manager["domains"] = domains if domains is not None else {"toy": parts[DomainConfig]}
    cluster = cluster or LocalCluster(replicas or [fake()], config=SamplerConfig(**(sampler or {})))
    return RolloutScheduler(
        RolloutConfig(**rollout),
        EnvManagerConfig(**manager),
        cluster.resources,
        cluster,
        mode,
        collator,
        events=events,
        reward_processes=reward_processes,
    )


@asynccontextmanager
async def playing(*args: Any, **options: Any) -> AsyncIterator[RolloutScheduler]:
    """A scheduler that is shut down at the end, and whose books are checked then."""
    scheduler = build(*args, **options)
    try:
        yield scheduler
    finally:
        await scheduler.shutdown()
    check_after_shutdown(scheduler)


def check_after_shutdown(scheduler: RolloutScheduler) -> None:
    """What must hold after the end."""
    scheduler.ledger.check()
    assert scheduler.ledger.live == 0
    assert scheduler.ledger.open_groups() == []
    assert scheduler.metrics()["slots/busy"] == 0


def cluster_of(*replicas: Replica, **sampler: Any) -> LocalCluster:
    return LocalCluster(replicas, config=SamplerConfig(**sampler))


async def get(scheduler: RolloutScheduler, size: int, step: int = 0) -> DataProto | None:
    return await scheduler.get_batch(DataProto(meta_info={"global_step": step}), size)


async def got(scheduler: RolloutScheduler, size: int, step: int = 0) -> DataProto:
    """A batch that must be there."""
    batch = await get(scheduler, size, step)
    assert batch is not None
    return batch


async def publish(scheduler: RolloutScheduler | LocalSampler, version: int) -> None:
    """Suspend, update, and leave the gate closed."""
    sampler = scheduler if isinstance(scheduler, LocalSampler) else scheduler.sampler
    await scheduler.suspend()
    await sampler.load_weights(version)


# -- what a batch holds ------------------------------------------------------------------------------------------------


def column(batch: DataProto, name: str) -> list[Any]:
    if name in batch.batch:
        return list(batch.batch.numpy(name).tolist())
    return list(batch.non_tensor_batch[name].tolist())


def rows(batch: DataProto, name: str) -> list[Any]:
    """The rows of a ragged column."""
    ragged = batch.batch.ragged(name)
    return [np.asarray(ragged[i]) for i in range(len(ragged))]


def responses(batch: DataProto) -> list[list[int]]:
    """The response tokens of every row."""
    pairs = zip(rows(batch, "input_ids"), rows(batch, "response_mask"), strict=True)
    return [tokens[mask].tolist() for tokens, mask in pairs]


def fates(scheduler: RolloutScheduler) -> dict[str, int]:
    """Attempts by fate, those that occurred."""
    return {fate.value: count for fate, count in scheduler.ledger.fates.items() if count}


def causes(scheduler: RolloutScheduler, fate: Fate) -> dict[str, int]:
    return {cause: count for (of, cause), count in scheduler.ledger.causes.items() if of is fate}


class EventRecorder:
    """An event sink that remembers."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]

    def times(self, kind: str) -> list[float]:
        return [event.time for event in self.of(kind)]


def open_attempts(scheduler: RolloutScheduler) -> list[Attempt]:
    return [attempt for group in open_groups(scheduler) for attempt in group.live]


def open_groups(scheduler: RolloutScheduler) -> list[Group]:
    return scheduler.ledger.open_groups()


# -- a sampler of its own ----------------------------------------------------------------------------------------------


class RemoteSamplerSetup:
    """A sampler that is a worker, and schedulers that would be in processes of their own."""

    def __init__(self, service: InferenceService, replicas: int) -> None:
        self.service = service
        self.resources = ResourceManager(replicas)
        self.process: Any = service._process
        self.schedulers: list[RolloutScheduler] = []

    @property
    def sampler(self) -> LocalSampler:
        found: LocalSampler = self.process._worker_host._worker._sampler
        return found

    def scheduler(self, **options: Any) -> RolloutScheduler:
        cluster: Any = InferenceService(self.process, ByteCodec())  # what unpickling would give
        cluster.resources = self.resources
        scheduler = build(cluster=cluster, **options)
        self.schedulers.append(scheduler)
        return scheduler


@asynccontextmanager
async def site(
    replicas: Sequence[FakeReplica] | None = None, **sampler_options: Any
) -> AsyncIterator[RemoteSamplerSetup]:
    """At the end all schedulers are shut down and all books are checked."""
    replicas = replicas or pool(2)
    config = SamplerConfig(**sampler_options)
    service = await InferenceService.start(replicas, ByteCodec(), config, backend="embedded")  # type: ignore[arg-type]
    found = RemoteSamplerSetup(service, len(replicas))
    try:
        yield found
    finally:
        for scheduler in found.schedulers:
            await scheduler.shutdown()
            check_after_shutdown(scheduler)
            await client(scheduler).close()
        if not found.process._ended.done():
            await service.shutdown()


def client(scheduler: RolloutScheduler) -> SamplerClient:
    assert isinstance(scheduler.sampler, SamplerClient)
    return scheduler.sampler
