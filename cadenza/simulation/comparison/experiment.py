"""One strategy on one workload: a trial per seed, a search for the best settings, and a pool of processes.

Invariant: a trial is a function of its fields. It has the same figures to the last digit in every process, and a result
is the median of the same trials in the same order.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, TypeVar

from cadenza.simulation.comparison.baselines import (
    AdmissionStrategy,
    BarrierStrategy,
    GroupQueueStrategy,
    OracleStrategy,
    QueueStrategy,
)
from cadenza.simulation.comparison.bounds import Demand, generation_seconds, training_seconds
from cadenza.simulation.comparison.cadenza_strategy import CadenzaStrategy
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.figures import RunFigures
from cadenza.simulation.comparison.strategy import ScheduleStrategy, StrategySettings, run_training
from cadenza.simulation.comparison.tuned_settings import TUNED_SETTINGS
from cadenza.simulation.comparison.workloads import Workload
from cadenza.simulation.virtual_cluster import clock

T = TypeVar("T")
R = TypeVar("R")
STRATEGIES: dict[str, type[ScheduleStrategy]] = {
    "barrier": BarrierStrategy,
    "queue": QueueStrategy,
    "group-queue": GroupQueueStrategy,
    "admission": AdmissionStrategy,
    "cadenza": CadenzaStrategy,
    "oracle": OracleStrategy,
}
STEPS, WARM_UP = 40, 12
SEARCH_SEED = 10_007
"""Seed on which settings are searched; results are reported for other seeds."""
SEARCH_STEPS, SEARCH_WARM_UP = 16, 6


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulated run of a strategy on a workload."""

    workload: Workload
    strategy: str
    alpha: float
    seed: int
    settings: StrategySettings
    steps: int = STEPS
    warm_up: int = WARM_UP

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"policy '{self.strategy}' is not known; take one of {', '.join(STRATEGIES)}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be >= 0, got {self.alpha}")
        if not 1 <= self.warm_up < self.steps:
            raise ValueError(f"the warm-up must be from 1 to steps - 1 = {self.steps - 1} steps, got {self.warm_up}")
        self.settings.check(self.workload)
        self.settings.check_strategy(self.strategy)
        longest, kv = self.workload.longest_context, self.workload.cost.kv_capacity
        if longest is not None and longest > kv:
            raise ValueError(f"a context of {self.workload.name} has {longest} tokens, but a KV cache holds {kv}")

    def run(self) -> RunFigures:
        """Simulate the run under virtual time."""
        trace = trace_of(self.workload, self.seed)
        strategy = STRATEGIES[self.strategy](self.workload, trace, self.alpha, self.settings)
        return clock.run(lambda: run_training(strategy, self.steps)).figures(self.seed, self.warm_up)


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """The figures of a strategy on a workload, for every seed."""

    workload: str
    strategy: str
    alpha: float
    settings: StrategySettings
    seeds: tuple[RunFigures, ...]

    @property
    def typical(self) -> RunFigures:
        """Median of each figure over the seeds; `staleness_max` is the maximum, and `waste` has every cause."""
        names = (
            "efficiency", "step_seconds", "limit_seconds", "tokens_per_second", "staleness_mean", "length_bias",
            "wait_seconds", "balanced_seconds",
        )  # fmt: skip
        medians: dict[str, Any] = {name: median(getattr(figures, name) for figures in self.seeds) for name in names}
        causes = sorted({cause for figures in self.seeds for cause in figures.waste})
        waste = {cause: median(figures.waste.get(cause, 0.0) for figures in self.seeds) for cause in causes}
        worst = max(figures.staleness_max for figures in self.seeds)
        return RunFigures(seed=-1, staleness_max=worst, waste=waste, **medians)

    @property
    def worst(self) -> RunFigures:
        """Figures of the seed with the lowest efficiency."""
        return min(self.seeds, key=lambda figures: (figures.efficiency, figures.seed))

    def to_json(self) -> dict[str, Any]:
        typical = self.typical.to_json()
        del typical["seed"]
        return {
            "workload": self.workload,
            "policy": self.strategy,
            "alpha": self.alpha,
            "seeds": len(self.seeds),
            **typical,
            "worst_seed": self.worst.to_json(),
            "settings": asdict(self.settings),
        }


class TrialPool:
    """A pool of processes that run trials, one per CPU; a single trial runs in this process."""

    def __init__(self, pool: ProcessPoolExecutor | None) -> None:
        self._pool = pool

    def run(self, trials: Iterable[Trial]) -> list[RunFigures]:
        """Run all trials; returns their figures in the order of the trials."""
        return self.map(Trial.run, trials)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call the function for each item in the pool; returns the results in the order of the items."""
        waiting = list(items)
        if self._pool is None or len(waiting) == 1:
            return [function(item) for item in waiting]
        return list(self._pool.map(function, waiting))


@contextmanager
def trial_pool(processes: int | None = None) -> Iterator[TrialPool]:
    count = processes or os.cpu_count() or 1
    if count == 1:
        yield TrialPool(None)
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield TrialPool(pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def evaluate(
    pool: TrialPool,
    workload: Workload,
    strategy: str,
    alpha: float,
    seeds: Sequence[int],
    *,
    settings: StrategySettings | None = None,
    given: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    search_anew: bool = False,
) -> StrategyResult:
    """Run a strategy over the seeds, with `settings`, or else with the tuned or searched ones; the fields of `given`
    replace single settings."""
    alpha = alpha if STRATEGIES[strategy].asynchronous else 0.0
    if settings is None and not search_anew:
        settings = TUNED_SETTINGS.get((workload.name, strategy, alpha))
    if settings is None:
        settings = search(pool, workload, strategy, alpha, given)
    settings = replace(settings, **(given or {}))
    figures = pool.run(Trial(workload, strategy, alpha, seed, settings, steps, warm_up) for seed in seeds)
    return StrategyResult(workload.name, strategy, alpha, settings, tuple(figures))


# -- the best settings -------------------------------------------------------------------------------------------------


def search(
    pool: TrialPool, workload: Workload, strategy: str, alpha: float, given: Mapping[str, Any] | None = None
) -> StrategySettings:
    """Return the settings with the highest efficiency, found by coordinate search until no axis improves them. The
    fields of `given` stay as they are."""
    held = dict(given or {})
    best = replace(first_guess(workload, strategy, alpha), **held)
    known: dict[StrategySettings, float] = {}

    def measure(candidates: list[StrategySettings]) -> None:
        new = [settings for settings in dict.fromkeys(candidates) if settings not in known]
        trials = [
            Trial(workload, strategy, alpha, SEARCH_SEED, settings, SEARCH_STEPS, SEARCH_WARM_UP) for settings in new
        ]
        known.update(zip(new, (figures.efficiency for figures in pool.run(trials)), strict=True))

    measure([best])
    while True:
        before = best
        for candidates in _axes(workload, strategy, alpha):
            others = [replace(settings, **held) for settings in candidates(best)]
            here = [best, *(settings for settings in others if _fits(settings, workload, strategy, alpha))]
            measure(here)
            best = max(here, key=lambda settings: known[settings])
        if best == before:
            return best


def first_guess(workload: Workload, strategy: str, alpha: float) -> StrategySettings:
    """Return the settings that the search begins with: training GPUs by their share of the work, no limit on
    concurrency."""
    if not STRATEGIES[strategy].asynchronous or not alpha:
        return StrategySettings()
    trace = trace_of(workload, SEARCH_SEED)
    members = range(workload.group_size)
    demand = Demand.of([trace.episode(group, member) for member in members] for group in range(2 * workload.groups))
    train = training_seconds(demand, workload.train_seconds)
    share = train / (train + generation_seconds(demand, workload.cost))
    return StrategySettings(train_gpus=min(max(round(share * workload.gpus), 1), workload.gpus - 1))


def _fits(settings: StrategySettings, workload: Workload, strategy: str, alpha: float) -> bool:
    asynchronous = STRATEGIES[strategy].asynchronous and alpha > 0
    return 0 <= settings.train_gpus < workload.gpus and (settings.train_gpus > 0) == asynchronous


def _axes(workload: Workload, strategy: str, alpha: float) -> list[Any]:
    """Return functions from settings to their neighbours, one function per axis of the search."""
    axes: list[Any] = []
    if STRATEGIES[strategy].asynchronous and alpha:
        unit = max(1, workload.gpus // 32)
        axes.append(lambda s: [replace(s, train_gpus=s.train_gpus + unit * d) for d in (-4, -2, -1, 1, 2, 4)])
    if strategy != "barrier":
        most = workload.batch * (1 + math.ceil(alpha)) / workload.gpus
        axes.append(
            lambda s: [
                replace(s, concurrency=c) for c in (0, *(round(most * share) for share in (0.25, 0.35, 0.5, 0.7, 0.85)))
            ]
        )
    if strategy == "cadenza" and alpha:
        axes.append(lambda s: [replace(s, parts=n) for n in (1, 4, 8)])
    if strategy == "group-queue":
        axes.append(lambda s: [replace(s, extra_groups=workload.groups * n // 16) for n in (0, 1, 2)])
        axes.append(lambda s: [replace(s, extra_members=n) for n in (0, 1, 2)])
    return axes
