"""The figures by which strategies are compared, computed from the steps of a simulated run.

Invariant: every figure covers the counted steps alone, from the end of the warm-up to the end of the last step, and is
computed from the trace and the versions of the tokens, not from statements of the strategy about itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cadenza.simulation.comparison import bounds
from cadenza.simulation.comparison.bounds import Demand
from cadenza.simulation.comparison.episodes import TraceLike
from cadenza.simulation.comparison.workloads import TraceEpisode, Workload


class BatchRow(NamedTuple):
    """One trajectory of a train batch; the rows of a group follow each other."""

    group: int
    """Number of the group in the trace."""
    episode: TraceEpisode
    oldest: int
    """Oldest version that wrote any token of the trajectory."""


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Tokens and groups that a strategy has used since the start of the run."""

    generated: int
    """Tokens that the replicas wrote."""
    wasted: Counter[str]
    """Tokens of these that can never be trained, by cause."""
    settled: int
    """Groups that were trained or given up."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Measurements of one step."""

    waited: float
    """Seconds for which the trainer waited for its batch."""
    ended: float
    """Time at which its training ended."""
    demand: Demand
    """Tokens of its batch."""
    rows: int
    """Trajectories of its batch."""
    staleness: Counter[int]
    """Number of rows by staleness: the version trained minus the oldest that wrote any token."""
    totals: UsageTotals
    """Totals of the strategy at the end of the step."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one simulated run."""

    seed: int
    efficiency: float
    """Share of all GPU seconds that the work needs."""
    step_seconds: float
    """Mean seconds of a step."""
    limit_seconds: float
    """Shortest possible step of a schedule that trains everything within the staleness bound."""
    tokens_per_second: float
    """Response tokens that the whole cluster trains on per second."""
    staleness_mean: float
    staleness_max: int
    length_bias: float
    """Mean response length of the trained trajectories / mean response length of the trace.

    The trace is read at the groups n0 to n1: n0 groups were settled (trained or given up) at the end of the warm-up, n1
    at the end of the run. Groups that are taken out of order enter this window at one end and leave it at the other, so
    a strategy that drops nothing has 1 on average, and the noise of the draws, which both means share, cancels."""
    waste: dict[str, float]
    """Tokens that were generated and can never be trained, by cause, as shares of all generated tokens."""
    wait_seconds: float
    """Seconds per step for which the trainer waited for its batch."""
    balanced_seconds: float
    """T_bal: seconds of one batch under perfect balance on the generating GPUs. `wait_seconds` compares with it where
    the strategy is synchronous and turns have no env."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class FiguresBuilder:
    """Records the steps of one run and computes its figures."""

    def __init__(self, workload: Workload, trace: TraceLike, alpha: float, train_gpus: int) -> None:
        self.workload = workload
        self.trace = trace
        self.alpha = alpha
        self.train_gpus = train_gpus
        self.steps: list[StepRecord] = []
        self._demand = Demand()
        self._staleness: Counter[int] = Counter()

    def add_chunk(self, rows: Sequence[BatchRow], version: int) -> float:
        """Count a batch, or a chunk of it, that is trained on this version; returns the seconds of its training."""
        size = self.workload.group_size
        groups = [[row.episode for row in rows[at : at + size]] for at in range(0, len(rows), size)]
        demand = Demand.of(groups)
        self._demand += demand
        self._staleness.update(version - row.oldest for row in rows)
        return bounds.training_seconds(demand, self.workload.train_seconds) / self.train_gpus

    def end_step(self, now: float, waited: float, totals: UsageTotals) -> None:
        """End a step whose batch is trained completely."""
        rows = self._staleness.total()
        if rows != self.workload.batch:
            raise ValueError(f"a batch of {self.workload.name} has {self.workload.batch} rows, got {rows}")
        step = StepRecord(
            waited=waited, ended=now, demand=self._demand, rows=rows, staleness=self._staleness, totals=totals
        )
        self.steps.append(step)
        self._demand, self._staleness = Demand(), Counter()

    def figures(self, seed: int, warm_up: int) -> RunFigures:
        """Compute the figures of the steps after the warm-up."""
        before, counted = self.steps[warm_up - 1], self.steps[warm_up:]
        last = counted[-1]
        demand, staleness = Demand(), Counter[int]()
        for step in counted:
            demand += step.demand
            staleness.update(step.staleness)
        seconds = last.ended - before.ended
        workload, steps, rows = self.workload, len(counted), staleness.total()
        per_token = workload.train_seconds
        first, end = before.totals.settled, last.totals.settled
        longest = self._longest_alone(end)
        work = bounds.limit_seconds(demand, workload.cost, per_token, workload.gpus, 0.0, 0.0) / steps
        generated = max(last.totals.generated - before.totals.generated, 1)
        wasted = last.totals.wasted - before.totals.wasted
        return RunFigures(
            seed=seed,
            efficiency=bounds.efficiency(demand, workload.cost, per_token, workload.gpus, seconds),
            step_seconds=seconds / steps,
            limit_seconds=max(work, longest / (self.alpha + 1)),
            tokens_per_second=demand.written / seconds,
            staleness_mean=sum(versions * count for versions, count in staleness.items()) / rows,
            staleness_max=max(staleness),
            length_bias=demand.written / rows / self.trace.mean_response(first, end),
            waste={cause: tokens / generated for cause, tokens in sorted(wasted.items())},
            wait_seconds=sum(step.waited for step in counted) / steps,
            balanced_seconds=sum(
                bounds.balanced_seconds(step.demand, workload.cost, workload.gpus - self.train_gpus or workload.gpus)
                for step in counted
            )
            / steps,
        )

    def _longest_alone(self, groups: int) -> float:
        """Return T1 of the longest trajectory among the first groups of the trace."""
        cost, members = self.workload.cost, range(self.workload.group_size)
        episodes = (self.trace.episode(group, member) for group in range(groups) for member in members)
        return max(bounds.alone_seconds(episode, cost) for episode in episodes)
