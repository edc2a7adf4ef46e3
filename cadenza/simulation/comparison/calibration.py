"""The calibration checks: a comparison of strategies is trustworthy only while the simulation reproduces published
figures about them, in shape and within 20 %.

    admission     throughput of `admission` over `barrier` at eta 1, 2, 4, 8 (AReaL), on W2
    env-level     env-level over batch-level interaction at sigma 1 and 10 (RollArt), on W4
    kv-bound      `queue` and `oracle` over group round-robin while the KV cache binds (Seer), on W3
    sync-bound    a synchronous step against the bound of ROLL Flash's Prop. 2, on W2
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from cadenza.simulation.comparison import bounds
from cadenza.simulation.comparison.baselines import BarrierStrategy, BaselineSample, OracleStrategy, QueueStrategy
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.experiment import SEARCH_STEPS, SEARCH_WARM_UP, Trial, TrialPool
from cadenza.simulation.comparison.figures import BatchRow
from cadenza.simulation.comparison.strategy import ScheduleStrategy, StrategySettings, run_training
from cadenza.simulation.comparison.workloads import WORKLOADS, Workload, w4
from cadenza.simulation.virtual_cluster import clock

TOLERANCE = 0.2
ETAS = (1.0, 2.0, 4.0, 8.0)
SIGMAS = (1.0, 10.0)


@dataclass(frozen=True, slots=True)
class CalibrationCheck:
    """One published figure beside the figure of the simulation."""

    name: str
    what: str
    published: tuple[float, ...]
    value: tuple[float, ...]
    """Figures of the simulation: medians over the seeds."""
    shape: bool
    """Whether the figures rise and saturate as the published ones do."""
    at_most: bool = False
    """The published figure is an upper limit, and not a value to reproduce."""

    @property
    def holds(self) -> bool:
        if self.at_most:
            return all(value <= limit for value, limit in zip(self.value, self.published, strict=True))
        near = all(
            abs(value / published - 1) <= TOLERANCE for value, published in zip(self.value, self.published, strict=True)
        )
        return self.shape and near

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def run_checks(pool: TrialPool, seeds: Sequence[int]) -> list[CalibrationCheck]:
    """Run all checks; each figure is the median over the seeds."""
    return [_admission(pool, seeds), _env_level(seeds), _kv_bound(seeds), _sync_bound(seeds)]


_HOLDS: dict[str, bool] = {}


def which_checks_hold(pool: TrialPool) -> dict[str, bool]:
    """Return which checks hold on seed 0. The answer depends on the code alone, so a process computes it once."""
    if not _HOLDS:
        _HOLDS.update({check.name: check.holds for check in run_checks(pool, [0])})
    return dict(_HOLDS)


def _admission(pool: TrialPool, seeds: Sequence[int]) -> CalibrationCheck:
    workload = WORKLOADS["W2"]

    def speeds(strategy: str, alpha: float, settings: StrategySettings) -> list[float]:
        trials = (Trial(workload, strategy, alpha, seed, settings, SEARCH_STEPS, SEARCH_WARM_UP) for seed in seeds)
        return [figures.tokens_per_second for figures in pool.run(trials)]

    base = speeds("barrier", 0.0, StrategySettings())
    split = StrategySettings(train_gpus=5, concurrency=40)
    value = tuple(_ratio(speeds("admission", eta, split), base) for eta in ETAS)
    rising = all(later >= 0.98 * earlier for earlier, later in pairwise(value))
    saturates = value[1] - value[0] > abs(value[3] - value[1])
    what = f"throughput of admission over barrier, eta {_listed(ETAS)} (AReaL; W2)"
    return CalibrationCheck("admission", what, (2.09, 2.77, 2.77, 2.89), value, rising and saturates)


def _env_level(seeds: Sequence[int]) -> CalibrationCheck:
    value = []
    for sigma in SIGMAS:
        workload = w4(sigma)
        together = [_rollout_seconds(LockstepStrategy, workload, seed) for seed in seeds]
        value.append(_ratio(together, [_rollout_seconds(QueueStrategy, workload, seed) for seed in seeds]))
    what = f"env-level over batch-level env interaction, sigma {_listed(SIGMAS)} (RollArt; W4)"
    return CalibrationCheck("env-level", what, (1.23, 2.27), tuple(value), value[0] > 1 and value[1] > 1.5 * value[0])


def _kv_bound(seeds: Sequence[int]) -> CalibrationCheck:
    workload = WORKLOADS["W3"]
    pinned = [_rollout_seconds(BarrierStrategy, workload, seed) for seed in seeds]
    value = (
        _ratio(pinned, [_rollout_seconds(QueueStrategy, workload, seed, concurrency=48) for seed in seeds]),
        _ratio(pinned, [_rollout_seconds(OracleStrategy, workload, seed, concurrency=80) for seed in seeds]),
    )
    what = "queue and oracle over group round-robin, bound by the KV cache (Seer; W3)"
    return CalibrationCheck("kv-bound", what, (1.42, 1.63), value, 1 < value[0] < value[1])


def _sync_bound(seeds: Sequence[int]) -> CalibrationCheck:
    workload = WORKLOADS["W2"]
    shares = []
    for seed in seeds:
        trace = trace_of(workload, seed)
        step = clock.run(
            lambda trace=trace: run_training(QueueStrategy(workload, trace, 0.0, StrategySettings()), 1)  # type: ignore[misc]
        ).steps[0]
        members = range(workload.group_size)
        longest = max(
            bounds.alone_seconds(trace.episode(group, member), workload.cost)
            for group in range(workload.groups)
            for member in members
        )
        bound = bounds.step_seconds_bound(
            workload.batch,
            workload.gpus,
            bounds.generation_seconds(step.demand, workload.cost) / workload.batch,
            bounds.training_seconds(step.demand, workload.train_seconds) / workload.batch,
            longest,
        )
        shares.append(step.ended / bound)
    what = "a synchronous step (queue) over the bound of ROLL Flash Prop. 2 (W2); at most"
    return CalibrationCheck("sync-bound", what, (1.05,), (median(shares),), True, at_most=True)


def _ratio(above: list[float], below: list[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


def _rollout_seconds(
    strategy: Callable[..., ScheduleStrategy], workload: Workload, seed: int, **settings: int
) -> float:
    """Return the seconds in which all GPUs generate one batch."""
    made = strategy(workload, trace_of(workload, seed), 0.0, StrategySettings(**settings))
    return clock.run(lambda: run_training(made, 1)).steps[0].waited


def _listed(values: Sequence[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)


class LockstepStrategy(BarrierStrategy):
    """Batch-level interaction: all trajectories take each turn together, and wait for the slowest env each time."""

    async def batch(self, groups: int) -> list[BatchRow]:
        numbers = range(self.version * groups, (self.version + 1) * groups)
        samples = [sample for number in numbers for sample in self.members(number)]
        for index, sample in enumerate(samples):
            sample.replica = index % self.generating_gpus
        await asyncio.sleep(max(sample.episode.reset for sample in samples))
        for turn in range(max(len(sample.episode.lengths) for sample in samples)):
            going = [sample for sample in samples if turn < len(sample.episode.lengths)]
            await asyncio.gather(*(self._take(sample, number, turn) for number, sample in enumerate(going)))
            await asyncio.sleep(max(sample.episode.steps[turn] for sample in going))
        return self.rows(samples)

    async def _take(self, sample: BaselineSample, number: int, turn: int) -> None:
        episode = sample.episode
        context = sum(episode.observations[: turn + 1]) + sum(episode.lengths[:turn])
        session = sample.group * self.workload.group_size + sample.member
        await self._turn(sample, session, context, episode.lengths[turn])
