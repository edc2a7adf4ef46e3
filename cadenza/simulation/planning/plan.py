"""`cadenza plan`: how many GPUs should train and how far generation may run ahead, by simulating the candidates.

Invariant: a plan is a function of the workload and the asynchronous ratios, to the last digit. Every candidate is a run
of the production scheduler on the same trace; good candidates are simulated for more steps.

    per alpha:  splits around the share of the work, a few steps
                -> the best and its neighbours, more steps
                -> the best, as many steps as a comparison takes
    over all:   the smallest alpha whose steps are nearly as short as the shortest

The time is bounded: a plan simulates a fixed number of steps, fewer where a step has many turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cadenza.simulation.comparison import bounds
from cadenza.simulation.comparison.bounds import Demand
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.experiment import SEARCH_SEED, Trial, TrialPool, first_guess
from cadenza.simulation.comparison.figures import RunFigures
from cadenza.simulation.comparison.strategy import StrategySettings
from cadenza.simulation.comparison.workloads import TraceEpisode, Workload

STRATEGY = "cadenza"
SPLITS = (0.6, 0.8, 1.0, 1.25, 1.6)
"""First candidates for the training GPUs, as multiples of their share of the work."""
FEW_SPLITS = (0.75, 1.0, 1.35)
SHARED = (0.25, 0.375, 0.5, 0.625, 0.75)
"""First candidates for training GPUs that also generate, as shares of all GPUs."""
FEW_SHARED = (0.25, 0.5, 0.75)
STEPS = (4, 8, 28)
"""Counted steps of the three rounds."""
MOST_WARM_UP = 12
MANY_TURNS = 4000
"""Turns of a batch above which a plan tries fewer splits and leaves the longest round out."""
CLOSE = 0.05
"""Share by which the steps of a smaller alpha may be longer and it is still chosen: stale samples have a price."""
SAMPLED = 8
"""Batches of the trace from which bounds are computed."""

WORK, KV, TRAINER = "rollout work", "KV cache", "trainer"
LONGEST, ENVS, REWARDS = "longest trajectory", "envs", "rewards"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One candidate, and the figures of its simulation."""

    alpha: float
    train_gpus: int
    """0: all GPUs generate, and then all of them train."""
    shared_gpus: int
    """Training GPUs that generate between two train steps."""
    rollout_gpus: int
    figures: RunFigures
    steps: int
    """Counted steps that were simulated."""
    limits: dict[str, float]
    """Lower limits of the seconds of a step, by reason."""

    @property
    def limited_by(self) -> str:
        """The reason with the largest limit."""
        return max(self.limits, key=lambda reason: self.limits[reason])

    @property
    def explained(self) -> float:
        """Share of a step that the largest limit explains."""
        return min(self.limits[self.limited_by] / self.figures.step_seconds, 1.0)

    def to_json(self) -> dict[str, Any]:
        figures = self.figures.to_json()
        del figures["seed"]
        return {
            "alpha": self.alpha,
            "train_gpus": self.train_gpus,
            "shared_gpus": self.shared_gpus,
            "rollout_gpus": self.rollout_gpus,
            **figures,
            "limited_by": self.limited_by,
            "limits": self.limits,
            "simulated_steps": self.steps,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The simulated candidates, and the chosen one."""

    workload: Workload
    predicted: tuple[Prediction, ...]
    """Ordered by alpha and training GPUs."""
    chosen: Prediction
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "gpus": self.workload.gpus,
            "batch": self.workload.batch,
            "predicted": [prediction.to_json() for prediction in self.predicted],
            "chosen": self.chosen.to_json(),
            "why": self.why,
        }


class CandidateFamily(NamedTuple):
    """Candidates that differ in the number of training GPUs only."""

    alpha: float
    is_shared: bool = False
    """The training GPUs also generate between two train steps."""


Fits = Callable[[int, int], bool]
"""`fits(train, shared)`: whether `train` GPUs can train, and `shared` of these can also generate."""


def make_plan(
    pool: TrialPool,
    workload: Workload,
    alphas: Sequence[float],
    fits: Fits = lambda train, shared: True,
    *,
    shared: bool = False,
) -> Plan:
    """Search the best split for every alpha, among the numbers of training GPUs that fit, and choose an alpha.

    With `shared`, GPUs that train and generate alternately are candidates too, for every alpha above 0.
    """
    if not alphas:
        raise ValueError("a plan needs at least one alpha")
    if workload.gpus == 1 and any(alphas):
        raise ValueError("with one GPU nothing can train while something generates: give more GPUs, or alpha 0")
    search = _PlanSearch(pool, workload, fits)
    families = [CandidateFamily(alpha) for alpha in alphas if search.possible(CandidateFamily(alpha))]
    families += [
        CandidateFamily(alpha, True)
        for alpha in alphas
        if shared and alpha and search.possible(CandidateFamily(alpha, True))
    ]
    for alpha in alphas:
        if not any(family.alpha == alpha for family in families):
            raise ValueError(f"no split of {workload.gpus} GPUs fits at alpha {alpha:g}")
    search.run([(family, gpus) for family in families for gpus in search.splits(family)], 0)
    search.run([(family, gpus) for family in families for gpus in search.around(family)], 1)
    if not search.frugal:
        search.run([(family, search.best(family)) for family in families], 2)
    return search.plan(families)


def predict(pool: TrialPool, workload: Workload, alphas: Sequence[float], train_gpus: int, shared_gpus: int) -> Plan:
    """Predict a given split for every alpha."""
    search = _PlanSearch(pool, workload, lambda train, shared: train == train_gpus, shared_gpus)
    families = [CandidateFamily(alpha, bool(shared_gpus)) for alpha in alphas]
    search.run([(family, train_gpus) for family in families], 1 if search.frugal else 2)
    return search.plan(families)


class _PlanSearch:
    """The search over candidates: the predictions so far, and the next candidates."""

    def __init__(self, pool: TrialPool, workload: Workload, fits: Fits, shared_gpus: int | None = None) -> None:
        """In a shared family all training GPUs are shared, unless `shared_gpus` says how many."""
        self.found: dict[tuple[CandidateFamily, int], Prediction] = {}
        """Predictions by family and training GPUs, from the longest run of each."""
        self._pool = pool
        self._workload = workload
        self._shared_gpus = shared_gpus
        self._step_limits = StepLimits.of(workload)
        self.frugal = self._step_limits.turns > MANY_TURNS
        self._fitting = {
            is_shared: [gpus for gpus in range(workload.gpus) if fits(gpus, gpus if is_shared else 0)]
            for is_shared in (False, True)
        }

    def possible(self, family: CandidateFamily) -> list[int]:
        """Return the possible numbers of training GPUs: 0 when synchronous, else at least 1."""
        return [gpus for gpus in self._fitting[family.is_shared] if bool(gpus) == bool(family.alpha)]

    def splits(self, family: CandidateFamily) -> list[int]:
        """Return the first candidates of a family."""
        if not family.alpha:
            return [0]
        if family.is_shared:
            return self._nearest(family, (self._workload.gpus * f for f in (FEW_SHARED if self.frugal else SHARED)))
        guess = first_guess(self._workload, STRATEGY, family.alpha).train_gpus
        return self._nearest(family, (guess * f for f in (FEW_SPLITS if self.frugal else SPLITS)))

    def around(self, family: CandidateFamily) -> list[int]:
        """Return the best candidate so far, and the middles to its neighbours; at the edge, a factor of 1.5."""
        if not family.alpha:
            return [0]
        tried, best = sorted(gpus for known, gpus in self.found if known == family), self.best(family)
        at = tried.index(best)
        below = (best + tried[at - 1]) // 2 if at else round(best / 1.5)
        above = (best + tried[at + 1]) // 2 if at + 1 < len(tried) else round(best * 1.5)
        return self._nearest(family, (best, below, above))

    def _nearest(self, family: CandidateFamily, wanted: Iterable[float]) -> list[int]:
        possible = self.possible(family)
        return sorted({min(possible, key=lambda gpus: abs(gpus - round(want))) for want in wanted})

    def best(self, family: CandidateFamily) -> int:
        """Return the candidate with the shortest steps among those that ran longest; of equals, the fewer GPUs."""
        known = [prediction for (other, _), prediction in self.found.items() if other == family]
        longest = max(prediction.steps for prediction in known)
        finalists = [prediction for prediction in known if prediction.steps == longest]
        return min(finalists, key=lambda found: (found.figures.step_seconds, found.train_gpus)).train_gpus

    def plan(self, families: Sequence[CandidateFamily]) -> Plan:
        """Choose among the best candidates of every alpha: of a split and of shared GPUs, the shorter steps win."""
        by_alpha: dict[float, Prediction] = {}
        for family in sorted(families):
            found = self.found[family, self.best(family)]
            known = by_alpha.get(family.alpha)
            if known is None or found.figures.step_seconds < known.figures.step_seconds:
                by_alpha[family.alpha] = found
        finalists = list(by_alpha.values())
        chosen = _chosen(finalists)
        predicted = tuple(self.found[key] for key in sorted(self.found))
        return Plan(self._workload, predicted, chosen, _why(chosen, finalists, predicted))

    def run(self, candidates: Iterable[tuple[CandidateFamily, int]], round: int) -> None:
        """Simulate the candidates for the steps of this round."""
        candidates = list(candidates)
        counted = STEPS[round]
        trials, shares = [], []
        for family, gpus in candidates:
            warm_up = min(2 * (round + 1) + math.ceil(family.alpha), MOST_WARM_UP)
            shares.append((gpus if self._shared_gpus is None else self._shared_gpus) if family.is_shared else 0)
            settings = StrategySettings(train_gpus=gpus, shared=shares[-1])
            trials.append(
                Trial(self._workload, STRATEGY, family.alpha, SEARCH_SEED, settings, warm_up + counted, warm_up)
            )
        for (family, gpus), shared, figures in zip(candidates, shares, self._pool.run(trials), strict=True):
            limits = self._step_limits.limits(family.alpha, gpus, shared)
            generating = self._workload.gpus - gpus + shared
            self.found[family, gpus] = Prediction(
                alpha=family.alpha,
                train_gpus=gpus,
                shared_gpus=shared,
                rollout_gpus=generating,
                figures=figures,
                steps=counted,
                limits=limits,
            )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Lower limits of a step's seconds, from the mean batch of the first batches of the trace."""

    workload: Workload
    demand: Demand
    """Demand of all sampled batches together."""
    longest: TraceEpisode
    """The trajectory that takes longest alone."""
    turns: float
    """Mean turns of a batch."""

    @classmethod
    def of(cls, workload: Workload) -> StepLimits:
        trace = trace_of(workload, SEARCH_SEED)
        members = range(workload.group_size)
        groups = [[trace.episode(g, m) for m in members] for g in range(SAMPLED * workload.groups)]
        episodes = [episode for group in groups for episode in group]
        longest = max(episodes, key=lambda episode: bounds.alone_seconds(episode, workload.cost))
        turns = sum(len(episode.lengths) for episode in episodes) / SAMPLED
        return cls(workload, Demand.of(groups), longest, turns)

    def limits(self, alpha: float, train_gpus: int, shared_gpus: int = 0) -> dict[str, float]:
        """Return the lower limits of a step's seconds at this split, by reason."""
        workload, demand = self.workload, self.demand
        generators, trainers = workload.gpus - train_gpus + shared_gpus, train_gpus or workload.gpus
        training = bounds.training_seconds(demand, workload.train_seconds) / SAMPLED / trainers
        generation = bounds.generation_seconds(demand, workload.cost) / SAMPLED + training * shared_gpus
        generation = generation / generators + workload.sync_seconds
        training += workload.sync_seconds
        alone = bounds.alone_seconds(self.longest, workload.cost)
        longest = LONGEST
        if self.longest.env_seconds > alone / 2:
            longest = ENVS
        elif self.longest.reward > alone / 2:
            longest = REWARDS
        return {
            KV if bounds.is_bound_by_memory(demand, workload.cost) else WORK: generation,
            TRAINER: training,
            longest: alone / (alpha + 1),
        }


def _chosen(finalists: Sequence[Prediction]) -> Prediction:
    """Return the prediction with the smallest alpha whose steps are nearly as short as the shortest."""
    shortest = min(finalist.figures.step_seconds for finalist in finalists)
    return next(finalist for finalist in finalists if finalist.figures.step_seconds <= shortest * (1 + CLOSE))


def _why(chosen: Prediction, finalists: Sequence[Prediction], predicted: Sequence[Prediction]) -> str:
    """Explain the choice in one sentence."""
    seconds = chosen.figures.step_seconds
    below = [finalist for finalist in finalists if finalist.alpha < chosen.alpha]
    above = [finalist for finalist in finalists if finalist.alpha > chosen.alpha]
    reasons = [f"steps of {seconds:,.4g} s at efficiency {chosen.figures.efficiency:.2f}"]
    if below:
        slower = min(below, key=lambda finalist: finalist.figures.step_seconds)
        reasons.append(f"{slower.figures.step_seconds / seconds - 1:.0%} longer at alpha {slower.alpha:g}")
    if above:
        faster = min(above, key=lambda finalist: finalist.figures.step_seconds)
        gain = 1 - faster.figures.step_seconds / seconds
        reasons.append(
            f"{gain:.0%} shorter at alpha {faster.alpha:g}, not worth its staleness" if gain > 0.005
            else "no shorter at a larger alpha"
        )  # fmt: skip
    beside = [other for other in predicted if other.alpha == chosen.alpha and other is not chosen]
    if beside:
        reasons.append(f"the best of {len(beside) + 1} splits")
    return f"alpha {chosen.alpha:g} with {_split(chosen)}: {', '.join(reasons)}; {_limit(chosen)}."


def _limit(chosen: Prediction) -> str:
    reasons = {
        WORK: "the work of generating",
        KV: "the work of generating in batches that the KV cache allows",
        TRAINER: "training",
        LONGEST: f"the longest trajectory over alpha + 1 = {chosen.alpha + 1:g} steps",
        ENVS: f"the envs of the longest trajectory over alpha + 1 = {chosen.alpha + 1:g} steps",
        REWARDS: f"the reward of the longest trajectory over alpha + 1 = {chosen.alpha + 1:g} steps",
    }
    return f"{reasons[chosen.limited_by]} takes {chosen.explained:.0%} of a step"


def _split(prediction: Prediction) -> str:
    if not prediction.train_gpus:
        return f"all {prediction.rollout_gpus} GPUs in turn"
    if prediction.shared_gpus:
        only = prediction.train_gpus - prediction.shared_gpus
        others = f", and {only} that only train" if only else ""
        return f"{prediction.rollout_gpus} generating GPUs, {prediction.shared_gpus} of which train by turns{others}"
    return f"{prediction.train_gpus} training and {prediction.rollout_gpus} generating GPUs"
