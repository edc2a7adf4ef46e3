"""What came of a simulated run, in the figures by which strategies are compared.

Invariant: every figure is taken from the counted steps alone, between the end of the last step of the warm-up and the
end of the last step, and each of them from the trace and the versions of the tokens, not from what a strategy says of
itself.
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
    """One trajectory of a train batch. The rows of a group stand together."""

    group: int
    """Its number in the trace."""
    episode: TraceEpisode
    oldest: int
    """The oldest version that wrote any token of it."""


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """What a strategy has used up since the start of the run."""

    generated: int
    """Tokens that the replicas wrote."""
    wasted: Counter[str]
    """Those of them that can never be trained, by cause."""
    settled: int
    """Groups that are trained or given up."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is recorded of one step."""

    waited: float
    """Seconds for which the trainer waited for its batch."""
    ended: float
    """When its training ended."""
    demand: Demand
    rows: int
    staleness: Counter[int]
    """Rows by staleness: the version that is trained minus the oldest that wrote any token."""
    totals: UsageTotals
    """At the end."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one simulated run."""

    seed: int
    efficiency: float
    step_seconds: float
    limit_seconds: float
    """No schedule that trains everything within the bound has shorter steps; the work is that of the counted steps."""
    tokens_per_second: float
    """Response tokens trained, of the whole cluster."""
    staleness_mean: float
    staleness_max: int
    length_bias: float
    """Mean response of what was trained / mean response of the trace. The trace is read at as many groups as the
    counted steps settled: a strategy that had settled n0 groups (trained or given up) at the end of the warm-up and n1
    at the end is compared with the groups number n0 to n1 of the trace. What it takes out of order comes in at one end
    of this window as it goes out at the other, so that a strategy which drops nothing has 1 on average; and the noise
    of the drawing, which both means share, cancels."""
    waste: dict[str, float]
    """Tokens that were generated and can never be trained, by cause, as shares of all generated."""
    wait_seconds: float
    """For which the trainer waited, per step."""
    balanced_seconds: float
    """T_bal: what one batch takes under perfect balance on the GPUs that generate; where the strategy is synchronous
    and turns have no env, `wait_seconds` compares with it."""

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
        """A batch, or a chunk of it, is trained on this version; returns the seconds it takes."""
        size = self.workload.group_size
        groups = [[row.episode for row in rows[at : at + size]] for at in range(0, len(rows), size)]
        demand = Demand.of(groups)
        self._demand += demand
        self._staleness.update(version - row.oldest for row in rows)
        return bounds.training_seconds(demand, self.workload.train_seconds) / self.train_gpus

    def end_step(self, now: float, waited: float, totals: UsageTotals) -> None:
        """All of the batch is trained."""
        rows = self._staleness.total()
        if rows != self.workload.batch:
            raise ValueError(f"a batch of {self.workload.name} has {self.workload.batch} rows, got {rows}")
        self.steps.append(StepRecord(waited, now, self._demand, rows, self._staleness, totals))
        self._demand, self._staleness = Demand(), Counter()

    def figures(self, seed: int, warm_up: int) -> RunFigures:
        """What the steps after the warm-up say."""
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
        """T1 of the longest trajectory among the first groups of the trace."""
        cost, members = self.workload.cost, range(self.workload.group_size)
        episodes = (self.trace.episode(group, member) for group in range(groups) for member in members)
        if self.workload.responses is not None:  # then the longest answer takes longest
            return bounds.alone_seconds(max(episodes, key=lambda episode: episode.lengths), cost)
        return max(bounds.alone_seconds(episode, cost) for episode in episodes)
