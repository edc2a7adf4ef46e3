"""Lower limits of the time of a step, and the bound of a work-conserving schedule.

The symbols are those of docs/simulation.md: K GPUs; a batch of N samples; alpha, the asynchronous ratio; a sample
writes L tokens behind a prompt of P tokens. Each turn of a longer episode counts as a sample: its prompt is the whole
context before it, and its prefill is only the new tokens of that context.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.simulation.comparison.workloads import TraceEpisode
from cadenza.simulation.virtual_cluster.cost import CostModel


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens that a set of trajectories asks for; demands of disjoint sets can be added."""

    written: int = 0
    """SL: tokens that the model writes."""
    context: int = 0
    """C: the context, summed over every token written."""
    shown: int = 0
    """Tokens of prompts and observations, with the prompt of a group counted for every member."""
    unique: int = 0
    """Tokens of prompts and observations, with the prompt of a group counted once."""
    longest: int = 0
    """Most tokens that one trajectory writes."""

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.written + other.written,
            self.context + other.context,
            self.shown + other.shown,
            self.unique + other.unique,
            max(self.longest, other.longest),
        )

    @property
    def tokens(self) -> int:
        """Tokens that are trained."""
        return self.written + self.shown

    @classmethod
    def of(cls, groups: Iterable[Iterable[TraceEpisode]]) -> Demand:
        """Return the demand of whole groups."""
        written = context = shown = unique = longest = 0
        for group in groups:
            for number, episode in enumerate(group):
                before = new = own = 0
                for length, observation in zip(episode.lengths, episode.observations, strict=True):
                    before = observation if episode.fresh else before + observation
                    new += observation
                    context += length * before + length * (length - 1) // 2
                    before += length
                    own += length
                written += own
                shown += new
                unique += new - (episode.observations[0] if number else 0)
                longest = max(longest, own)
        return cls(written, context, shown, unique, longest)


def generation_seconds(demand: Demand, cost: CostModel) -> float:
    """Return W_rollout: GPU seconds to generate it at the largest batch that the KV cache and the engine allow."""
    steps = max(demand.context / cost.kv_capacity, demand.written / cost.max_running)
    return cost.a * steps + cost.b * demand.written + cost.c * demand.context + cost.p * demand.unique


def is_bound_by_memory(demand: Demand, cost: CostModel) -> bool:
    """Whether the KV cache, and not `max_running`, limits how many sequences decode together."""
    return demand.context / cost.kv_capacity > demand.written / cost.max_running


def training_seconds(demand: Demand, seconds_per_token: float) -> float:
    """Return W_train: GPU seconds to train on it."""
    return demand.tokens * seconds_per_token


def efficiency(demand: Demand, cost: CostModel, seconds_per_token: float, gpus: int, seconds: float) -> float:
    """Return the share of all GPU seconds that the work needs: idle time, waste, re-prefill and imbalance lower it."""
    work = generation_seconds(demand, cost) + training_seconds(demand, seconds_per_token)
    return work / (gpus * seconds)


def marginal_seconds(demand: Demand, cost: CostModel) -> float:
    """Return the sum of w: what the samples cost a replica besides the constant `a` of its decode steps."""
    return cost.b * demand.written + cost.c * demand.context + cost.p * demand.shown


def alone_seconds(episode: TraceEpisode, cost: CostModel) -> float:
    """Return T1: the seconds of an episode that has a replica to itself, until its reward is known."""
    demand = Demand.of([[episode]])
    generation = cost.a * demand.written + marginal_seconds(demand, cost)
    return generation + episode.env_seconds + episode.reward


def balanced_seconds(demand: Demand, cost: CostModel, replicas: int) -> float:
    """Return T_bal: seconds of a batch of one-turn samples under perfect balance, where the KV cache does not bind."""
    return cost.a * demand.longest + marginal_seconds(demand, cost) / replicas


def limit_seconds(
    demand: Demand, cost: CostModel, seconds_per_token: float, gpus: int, longest_alone: float, alpha: float
) -> float:
    """Return the work of a step, or the share of the longest sample: what a schedule that drops nothing can reach.

    The longest sample holds the alpha + 1 steps of its own life up and no others. So the mean step of a run can be
    shorter than this where so long a sample is rare, and never shorter than the work.
    """
    work = generation_seconds(demand, cost) + training_seconds(demand, seconds_per_token)
    return max(work / gpus, longest_alone / (alpha + 1))


def step_seconds_bound(
    samples: int, workers: int, mean_generation: float, mean_training: float, longest: float
) -> float:
    """Return the seconds in which a work-conserving queue ends a synchronous step at the best split (Prop. 2 of ROLL
    Flash)."""
    return samples / workers * (mean_generation + mean_training) + longest
