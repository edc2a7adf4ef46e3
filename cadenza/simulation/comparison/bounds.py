"""What no schedule can beat, and what a work-conserving one must reach.

The words are those of docs/simulation.md. K GPUs; a batch of N samples; alpha, the asynchronous ratio; of a sample L
tokens are written behind P tokens of prompt. An episode of several turns counts each turn as a sample whose prompt is
the whole context before it, and whose prefill is only what is new in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.simulation.comparison.workloads import TraceEpisode
from cadenza.simulation.virtual_cluster.cost import CostModel


@dataclass(frozen=True, slots=True)
class Demand:
    """What a set of trajectories asks for; it adds up."""

    written: int = 0
    """SL: tokens that the model writes."""
    context: int = 0
    """C: the context, summed over every token written."""
    shown: int = 0
    """Tokens of prompts and observations, a prompt counted for every member."""
    unique: int = 0
    """The same with the prompt of a group counted once."""
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
        """Of whole groups."""
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
    """W_rollout: GPU seconds that generating it takes at the largest batch which the KV cache and the engine allow."""
    steps = max(demand.context / cost.kv_capacity, demand.written / cost.max_running)
    return cost.a * steps + cost.b * demand.written + cost.c * demand.context + cost.p * demand.unique


def is_bound_by_memory(demand: Demand, cost: CostModel) -> bool:
    """Whether the KV cache, and not the engine, says how many sequences decode together."""
    return demand.context / cost.kv_capacity > demand.written / cost.max_running


def training_seconds(demand: Demand, seconds_per_token: float) -> float:
    """W_train: GPU seconds."""
    return demand.tokens * seconds_per_token


def efficiency(demand: Demand, cost: CostModel, seconds_per_token: float, gpus: int, seconds: float) -> float:
    """The share of all GPU seconds that the work needs. It charges idle time, waste, re-prefill and imbalance."""
    work = generation_seconds(demand, cost) + training_seconds(demand, seconds_per_token)
    return work / (gpus * seconds)


def marginal_seconds(demand: Demand, cost: CostModel) -> float:
    """The sum of w: what the samples cost a replica besides its decode steps."""
    return cost.b * demand.written + cost.c * demand.context + cost.p * demand.shown


def alone_seconds(episode: TraceEpisode, cost: CostModel) -> float:
    """T1: an episode that has a replica for itself, its env included."""
    demand = Demand.of([[episode]])
    return cost.a * demand.written + marginal_seconds(demand, cost) + episode.env_seconds


def balanced_seconds(demand: Demand, cost: CostModel, replicas: int) -> float:
    """T_bal: a batch of one-turn samples under perfect balance, while the KV cache does not bind."""
    return cost.a * demand.longest + marginal_seconds(demand, cost) / replicas


def limit_seconds(
    demand: Demand, cost: CostModel, seconds_per_token: float, gpus: int, longest_alone: float, alpha: float
) -> float:
    """What one step takes at least without dropping anything: the work, or the share of the longest sample."""
    work = generation_seconds(demand, cost) + training_seconds(demand, seconds_per_token)
    return max(work / gpus, longest_alone / (alpha + 1))


def sample_seconds_bound(mean: float, longest: float, workers: int, queued: float) -> float:
    """Seconds per sample of any work-conserving queue of so many samples: N when synchronous, (alpha + 1) N else."""
    return mean / workers + longest / queued


def step_seconds_bound(
    samples: int, workers: int, mean_generation: float, mean_training: float, longest: float, alpha: float = 0.0,
    epochs: int = 1,
) -> float:  # fmt: skip
    """One step at the best split (Prop. 2 of ROLL Flash); alpha 0 is synchronous."""
    return samples / workers * (mean_generation + epochs * mean_training) + longest / (alpha + 1)


def largest_normal(count: int) -> float:
    """E[max] of so many standard normals, by the trapezoidal rule on 1 - F^n and F^n."""
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}")
    points, width = 4000, 10.0
    step = 2 * width / points
    total = 0.0
    for point in range(points + 1):
        x = -width + point * step
        power = (0.5 * math.erfc(-x / math.sqrt(2))) ** count
        total += ((1 - power) if x > 0 else -power if x < 0 else 0.5 - power) * (0.5 if point in (0, points) else 1.0)
    return total * step


def batch_level_seconds(turns: float, model: float, mean: float, sigma: float, trajectories: int) -> float:
    """All trajectories do each turn together, and wait for the slowest env each time."""
    return turns * (model + mean + sigma * largest_normal(trajectories))


def env_level_seconds(turns: float, model: float, mean: float, sigma: float, trajectories: int) -> float:
    """Each trajectory goes on by itself."""
    return turns * (model + mean) + sigma * largest_normal(trajectories) * math.sqrt(turns)
