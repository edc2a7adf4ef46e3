"""What all strategies share: the settings, the training program, and the base class.

    run_training(): batch -> train (a sleep) -> publish, step after step, for every strategy

A strategy decides what `batch` waits for and what is generated meanwhile. Where it is synchronous, all GPUs generate
and then all of them train; otherwise `train_gpus` of them train while the others generate, and `shared` of the training
GPUs generate between two train steps.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

import numpy as np

from cadenza.inference.replica import Tokens
from cadenza.simulation.comparison.episodes import TraceLike
from cadenza.simulation.comparison.figures import BatchRow, FiguresBuilder, UsageTotals
from cadenza.simulation.comparison.recorder import RunRecorder
from cadenza.simulation.comparison.workloads import Workload
from cadenza.simulation.virtual_cluster.replica import SimReplica

_ZEROS = np.zeros(1 << 15, np.int32)
ENGINE_LIMIT = 1 << 20
"""Trajectories per replica where `concurrency` is 0: more than any replica has."""


SETTING_OWNERS = {
    "shared": ("cadenza",),
    "parts": ("cadenza",),
    "balance_seconds": ("cadenza",),
    "slice_tokens": ("cadenza",),
    "extra_after": ("cadenza",),
    "extra_members": ("cadenza", "group-queue"),
    "extra_groups": ("cadenza", "group-queue"),
}
"""Strategies that have a setting, for the settings that not all of them have."""


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """The settings of a strategy; `search` finds the best ones. `SETTING_OWNERS` says which strategy has which."""

    train_gpus: int = 0
    """GPUs that train. 0: all GPUs generate, and then all of them train."""
    shared: int = 0
    """Training GPUs that also generate between two train steps."""
    concurrency: int = 0
    """Trajectories under way per replica; 0 is no limit."""
    extra_members: int = 0
    """Redundant members of each group."""
    extra_after: float = 0.0
    """When redundant members start, as in `rollout.extra_after`; 0 starts them with the group."""
    extra_groups: int = 0
    """Redundant groups of each batch."""
    parts: int = 1
    """Chunks in which a batch is taken and trained; all of them are one update."""
    balance_seconds: float = 5.0
    """Seconds between two rounds of balancing in the sampler."""
    slice_tokens: int = -1
    """Tokens after which a long answer yields to waiting ones; -1 is the default of the rollout."""

    def check(self, workload: Workload) -> None:
        if not 0 <= self.train_gpus < workload.gpus:
            raise ValueError(f"train_gpus must be from 0 to {workload.gpus - 1}, got {self.train_gpus}")
        if not 0 <= self.shared <= self.train_gpus:
            raise ValueError(f"shared must be from 0 to train_gpus {self.train_gpus}, got {self.shared}")
        for name in ("concurrency", "extra_members", "extra_after", "extra_groups", "balance_seconds"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, got {value}")
        if self.slice_tokens < -1:
            raise ValueError(f"slice_tokens must be from 0 on, or -1 for what is best, got {self.slice_tokens}")
        if self.parts < 1 or (self.parts > 1 and not self.train_gpus):
            raise ValueError(
                f"parts must be 1, or more where some GPUs only train: got {self.parts} and train_gpus "
                f"{self.train_gpus}"
            )
        if self.parts > 1 and self.shared:
            raise ValueError(
                f"parts must be 1 where GPUs are shared, they are taken back once for a batch: got {self.parts} and "
                f"shared {self.shared}"
            )

    def check_strategy(self, strategy: str) -> None:
        """Refuse a setting that this strategy does not have, unless it has its default value."""
        defaults = StrategySettings()
        for name, owners in SETTING_OWNERS.items():
            if strategy not in owners and (value := getattr(self, name)) != getattr(defaults, name):
                raise ValueError(f"{name} is a setting of {' and '.join(owners)}, got {value} for '{strategy}'")


def observation_of(tokens: int) -> Tokens:
    """Return an observation of this length. Its content does not matter, so most of them share one array."""
    return _ZEROS[:tokens] if tokens <= len(_ZEROS) else np.zeros(tokens, np.int32)


class ScheduleStrategy(ABC):
    """One way to schedule rollouts: decides which replica generates what and when, and which groups make a batch."""

    asynchronous = True
    """Generation goes on while a batch is trained."""

    def __init__(self, workload: Workload, trace: TraceLike, alpha: float, settings: StrategySettings) -> None:
        settings.check(workload)
        self.workload = workload
        self.trace = trace
        self.alpha = alpha
        self.settings = settings
        self.version = 0
        self.replicas: list[SimReplica] = []
        self.recorder: RunRecorder | None = None
        """Receives the events of the run, for plots."""

    @property
    def generating_gpus(self) -> int:
        """GPUs that generate, always or between two train steps."""
        return self.workload.gpus - self.settings.train_gpus + self.settings.shared

    @property
    def training_gpus(self) -> int:
        """GPUs that train."""
        return self.settings.train_gpus or self.workload.gpus

    @abstractmethod
    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Build the replicas and start to generate, on the running loop."""

    def chunks(self) -> list[int]:
        """Return the number of groups in every chunk of a batch. A chunk is trained as soon as it is complete."""
        return [self.workload.groups]

    @abstractmethod
    async def batch(self, groups: int) -> list[BatchRow]:
        """Wait for `groups` groups to train on the current version."""

    @abstractmethod
    async def publish(self, version: int) -> None:
        """Load new weights into the replicas."""

    @abstractmethod
    async def close(self) -> None:
        """Stop generating and shut down."""

    @abstractmethod
    def totals(self) -> UsageTotals: ...


async def run_training(strategy: ScheduleStrategy, steps: int) -> FiguresBuilder:
    """Run the training program: take batches from the strategy, train (sleep) and publish, step after step."""
    if strategy.asynchronous and strategy.alpha and not strategy.settings.train_gpus:
        raise ValueError("an asynchronous strategy needs GPUs that train: train_gpus must be >= 1, got 0")
    builder = FiguresBuilder(strategy.workload, strategy.trace, strategy.alpha, strategy.training_gpus)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        await strategy.start(tasks)
        for step in range(steps):
            waited = 0.0
            for groups in strategy.chunks():
                asked = loop.time()
                rows = await strategy.batch(groups)
                began = loop.time()
                await asyncio.sleep(builder.add_chunk(rows, strategy.version))
                waited += began - asked
                if strategy.recorder is not None:
                    strategy.recorder.step(asked, began, loop.time())
            builder.end_step(loop.time(), waited, strategy.totals())
            if strategy.recorder is not None:
                strategy.recorder.version(loop.time())
            if step < steps - 1:
                await strategy.publish(step + 1)
                strategy.version = step + 1
        await strategy.close()
    return builder


def tokens_discarded(replicas: list[SimReplica]) -> Counter[str]:
    """Return the tokens that no client received, by cause."""
    total: Counter[str] = Counter()
    for replica in replicas:
        total.update(replica.discarded)
    return total


def tokens_generated(replicas: list[SimReplica]) -> int:
    """Return the tokens written, for requests under way up to the last event of their replica."""
    return sum(replica.generated for replica in replicas)
