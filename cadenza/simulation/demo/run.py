"""The run that `cadenza demo` shows: the production scheduler on a virtual clock, over simulated replicas and envs.

It trains nothing. Lengths, latencies and faults are drawn from the seed, so the same seed gives the same run; the
scheduler, the router, the ledger and the sampler are those of a real run, unchanged.

    play(): suspend -> publish -> resume -> get_batch -> train (a sleep), step after step
    meanwhile: an env hangs, two envs vanish, a replica crashes; `watch` gets a snapshot every TICK virtual seconds
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cadenza.data import DataProto
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import ReplicaError, Request, Sampling, Tokens
from cadenza.observe.events import Event
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.records import Trajectory
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.virtual_cluster.cost import H100_QWEN3_8B
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.testing import LocalCluster

STEPS, GROUPS, GROUP_SIZE, ALPHA = 12, 8, 8, 1.0
BATCH = GROUPS * GROUP_SIZE
SLOTS = 96
REPLICAS = 4
TICK = 1.0
"""Virtual seconds between two snapshots."""
TRAIN_SECONDS_PER_TOKEN = 166e-6 / 4
"""Training time of an 8B model on four H100."""
LEASE_SECONDS = 20.0
PROMPT = np.arange(2048, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DemoFaults:
    """The faults of the run. Envs are numbered in the order in which they are made."""

    hanging_env: int
    vanishing_envs: frozenset[int]
    crash_step: int
    crashing_replica: int

    @classmethod
    def draw(cls, seed: int) -> DemoFaults:
        rng = random.Random(f"faults {seed}")
        return cls(
            hanging_env=rng.randrange(100, 300),
            vanishing_envs=frozenset(rng.sample(range(300, 700), 2)),
            crash_step=rng.randrange(6, 8),
            crashing_replica=rng.randrange(1, REPLICAS),
        )


@dataclass(slots=True)
class DemoWorld:
    """State that all envs of a run share."""

    seed: int
    faults: DemoFaults
    envs: int = 0

    def next_env(self) -> int:
        self.envs += 1
        return self.envs


class SandboxEnv:
    """A multi-turn env with a slow reset, a few slow steps, and at the end a reward of 0 or 1."""

    def __init__(self, world: DemoWorld) -> None:
        self._number = world.next_env()
        self._world = world
        self._rng = random.Random(f"env {world.seed} {self._number}")
        self._turn = 0
        self._turns = 0
        self._ease = 0.0

    async def reset(self, seed: int) -> Tokens:
        task = random.Random(f"task {self._world.seed} {seed}")
        self._turns = task.randrange(2, 6)
        self._ease = 0.02 if task.random() < 0.06 else task.uniform(0.3, 0.7)
        await self._work(1.0)
        return PROMPT[: task.randrange(400, 1200)]

    async def step(self, action: str) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        if self._turn == 2:
            await self._misbehave()
        await self._work(1.2)
        done = self._turn >= self._turns
        reward = float(done and self._rng.random() < self._ease)
        return PROMPT[: self._rng.randrange(150, 800)], reward, done, False, {}

    async def _work(self, median: float) -> None:
        await asyncio.sleep(min(self._rng.lognormvariate(math.log(median), 0.7), LEASE_SECONDS / 2))

    async def _misbehave(self) -> None:
        if self._number == self._world.faults.hanging_env:
            await asyncio.get_running_loop().create_future()
        if self._number in self._world.faults.vanishing_envs:
            raise InfrastructureError("the sandbox vanished")


def response_length(request: Request) -> int:
    """Return the tokens of a turn, from a distribution with a long tail."""
    rng = random.Random(request.seed)
    length = rng.lognormvariate(math.log(280), 0.6)
    return max(8, int(length * (4 if rng.random() < 0.02 else 1)))


def worth_training(group: list[Trajectory]) -> bool:
    """Whether the group has a signal: equal rewards give every member an advantage of 0."""
    return len({trajectory.score for trajectory in group}) > 1


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The figures of one batch, for the display."""

    time: float
    step: int
    version: int
    wait_seconds: float
    mean_staleness: float
    max_staleness: int
    trajectories: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaSummary:
    """One replica at one moment."""

    name: str
    state: str
    version: int
    running: int
    waiting: int
    kv_share: float


@dataclass(frozen=True, slots=True)
class DemoSnapshot:
    """The run at one moment."""

    time: float
    step: int
    phase: str
    replicas: list[ReplicaSummary]
    busy: int
    issued: int
    live: int
    fates: dict[str, int]


@dataclass(slots=True)
class DemoRun:
    """The run and its history; `play` runs it once."""

    seed: int
    events: list[Event] = field(default_factory=list)
    batches: list[BatchSummary] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Notable events, as sentences with their times."""
    replicas: list[SimReplica] = field(init=False)
    scheduler: RolloutScheduler = field(init=False)
    _faults: DemoFaults = field(init=False)
    _main: asyncio.Task[None] | None = None
    _step: int = 0
    _phase: str = "starting"

    async def play(self, watch: Callable[[DemoSnapshot], None]) -> None:
        """Run from the first step to the shutdown; `watch` gets a snapshot every TICK virtual seconds."""
        self._main = asyncio.current_task()
        self._build()
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(watch), name="watch")
                await self._train(tasks)
                watching.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self.scheduler.shutdown()
            await asyncio.sleep(TICK)  # the engines end their step in progress
            await self.scheduler.sampler.close()
        self._phase = "done"
        watch(await self._snapshot())

    def stop(self) -> None:
        """End the run early: `play` shuts down and raises CancelledError."""
        if self._main is not None:
            self._main.cancel()

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Run the controller's program."""
        scheduler, sampler = self.scheduler, self.scheduler.sampler
        for self._step in range(1, STEPS + 1):
            if self._step == self._faults.crash_step:
                tasks.create_task(self._crash(), name="crash")
            self._phase = f"publishing version {self._step}"
            await scheduler.suspend()
            await sampler.load_weights(self._step)
            await scheduler.resume()
            self._phase = "waiting for a batch"
            batch = await scheduler.get_batch(DataProto(meta_info={"global_step": self._step}), BATCH)
            assert batch is not None, "the tasks never run out"
            self._record_batch(batch)
            self._phase = "training"
            await asyncio.sleep(float(batch.batch.numpy("lengths").sum()) * TRAIN_SECONDS_PER_TOKEN)

    def _build(self) -> None:
        self._faults = DemoFaults.draw(self.seed)
        self.replicas = [
            SimReplica(f"r{number}", H100_QWEN3_8B, response_length, devices=(number,), load_seconds=2.0)
            for number in range(REPLICAS)
        ]
        cluster = LocalCluster(self.replicas)
        cluster.sampler.events = self._on_event
        domain = DomainConfig(env=SandboxEnv, env_args={"world": DemoWorld(self.seed, self._faults)})
        self.scheduler = RolloutScheduler(
            RolloutConfig(
                batch_size=BATCH, group_size=GROUP_SIZE, alpha=ALPHA, group_filter=worth_training, seed=self.seed
            ),
            EnvManagerConfig(
                domains={"sandbox": domain},
                slots=SLOTS,
                lease_seconds=LEASE_SECONDS,
                sampling=Sampling(max_tokens=2048),
            ),
            cluster.resources,
            cluster,
            events=self._on_event,
        )

    async def _crash(self) -> None:
        await asyncio.sleep(5.0)
        self.replicas[self._faults.crashing_replica].crash()

    async def _watch(self, watch: Callable[[DemoSnapshot], None]) -> None:
        while True:
            watch(await self._snapshot())
            await asyncio.sleep(TICK)

    async def _snapshot(self) -> DemoSnapshot:
        ledger, metrics = self.scheduler.ledger, self.scheduler.metrics()
        return DemoSnapshot(
            time=asyncio.get_running_loop().time(),
            step=self._step,
            phase=self._phase,
            replicas=[await self._summarize(replica) for replica in self.replicas],
            busy=int(metrics["slots/busy"]),
            issued=ledger.issued,
            live=ledger.live,
            fates={fate.value: count for fate, count in ledger.fates.items()},
        )

    async def _summarize(self, replica: SimReplica) -> ReplicaSummary:
        try:
            stats = await replica.stats()
        except ReplicaError:
            return ReplicaSummary(replica.name, "lost", replica.version, 0, 0, 0.0)
        state = "paused" if stats.paused else "active"
        return ReplicaSummary(
            replica.name, state, stats.version, stats.running, stats.waiting, stats.kv_tokens / stats.kv_capacity
        )

    def _record_batch(self, batch: DataProto) -> None:
        versions = batch.batch.numpy("versions")
        oldest = np.where(versions < 0, np.iinfo(np.int32).max, versions).min(axis=1)
        staleness = batch.meta_info["version"] - oldest
        self.batches.append(
            BatchSummary(
                time=asyncio.get_running_loop().time(),
                step=self._step,
                version=batch.meta_info["version"],
                wait_seconds=batch.meta_info["wait_seconds"],
                mean_staleness=float(staleness.mean()),
                max_staleness=int(staleness.max()),
                trajectories=len(staleness),
                tokens=int(batch.batch.numpy("response_lengths").sum()),
            )
        )

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if text := _in_words(event, self.notes[-1][1] if self.notes else ""):
            self.notes.append((event.time, text))


def _in_words(event: Event, before: str) -> str:
    """Return a sentence for a notable event, else an empty text; a filtered group gets one sentence for all members."""
    _, kind, subject, detail = event
    if kind == "lost":
        return f"{subject} lost: {detail}, its requests move"
    if kind == "failed":
        return f"{subject} failed: {detail.rpartition(': ')[2]}"
    if kind == "issue" and not subject.endswith("#0"):
        return f"{subject} issued: the next try"
    if kind == "filtered":
        text = f"{subject.partition('.')[0]} filtered: all its rewards are equal"
        return "" if text == before else text
    return ""
