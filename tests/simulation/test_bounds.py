"""The bounds, against slow computations that share no code with them."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from cadenza.inference.replica import Request, Sampling
from cadenza.simulation.comparison import bounds
from cadenza.simulation.comparison.bounds import Demand
from cadenza.simulation.comparison.episodes import Trace
from cadenza.simulation.comparison.workloads import TraceEpisode, find_workload
from cadenza.simulation.virtual_cluster.clock import run
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.replica import SimReplica

COST = CostModel(a=8e-3, b=5e-6, c=90e-9, p=30e-6, kv_capacity=50_000, max_running=64)


def drawn(seed: int, groups: int = 6, members: int = 3, turns: int = 3) -> list[list[TraceEpisode]]:
    dice = random.Random(seed)

    def episode(prompt: int) -> TraceEpisode:
        count = dice.randint(1, turns)
        lengths = tuple(dice.randint(1, 60) for _ in range(count))
        return TraceEpisode(
            lengths, (prompt, *(dice.randint(1, 30) for _ in range(count - 1))), (1.0,) * count, reset=2.0
        )

    return [[episode(20 + group) for _ in range(members)] for group in range(groups)]


def token_by_token(groups: list[list[TraceEpisode]]) -> tuple[int, int, int, int, int]:
    """SL, C, tokens shown, those of them that are shown first, and the longest: every token counted by itself."""
    written = context = shown = unique = longest = 0
    for group in groups:
        prompts = set()
        for number, episode in enumerate(group):
            before = mine = 0
            for length, observation in zip(episode.lengths, episode.observations, strict=True):
                for place in range(observation):
                    shown += 1
                    before += 1
                    key = (place,) if before <= episode.observations[0] else (number, before)
                    unique += key not in prompts
                    prompts.add(key)
                for _ in range(length):
                    context += before
                    before += 1
                    mine += 1
            written += mine
            longest = max(longest, mine)
    return written, context, shown, unique, longest


@pytest.mark.parametrize("seed", range(5))
def test_demand_counts_every_token_once(seed: int) -> None:
    groups = drawn(seed)
    demand = Demand.of(groups)
    found = (demand.written, demand.context, demand.shown, demand.unique, demand.longest)
    assert found == token_by_token(groups)
    halves = Demand.of(groups[:2]) + Demand.of(groups[2:])
    assert halves == demand


def test_the_work_of_a_batch_as_it_is_written() -> None:
    """max(b*SL + (c + a/M)*C, (b + a/S)*SL + c*C) + p * unique prompt tokens."""
    groups = drawn(1, turns=1)
    lengths = [(e.lengths[0], e.observations[0]) for group in groups for e in group]
    total = sum(length for length, _ in lengths)
    context = sum(length * prompt + length * (length - 1) / 2 for length, prompt in lengths)
    prompts = sum(group[0].observations[0] for group in groups)
    by_memory = 5e-6 * total + (90e-9 + 8e-3 / 50_000) * context
    by_count = (5e-6 + 8e-3 / 64) * total + 90e-9 * context
    assert by_memory < by_count
    demand = Demand.of(groups)
    assert bounds.generation_seconds(demand, COST) == pytest.approx(by_count + 30e-6 * prompts, rel=1e-12)
    small = CostModel(a=8e-3, b=5e-6, c=90e-9, p=30e-6, kv_capacity=500, max_running=64)
    by_memory = 5e-6 * total + (90e-9 + 8e-3 / 500) * context
    assert bounds.generation_seconds(demand, small) == pytest.approx(by_memory + 30e-6 * prompts, rel=1e-12)
    tokens = total + sum(prompt for _, prompt in lengths)
    assert bounds.training_seconds(demand, 166e-6) == pytest.approx(tokens * 166e-6, rel=1e-12)
    share = bounds.efficiency(demand, COST, 166e-6, gpus=4, seconds=100)
    work = bounds.generation_seconds(demand, COST) + bounds.training_seconds(demand, 166e-6)
    assert share == pytest.approx(work / 400, rel=1e-12)


def simulated(samples: list[tuple[int, int]], kv_capacity: int = 10_000_000) -> float:
    """Seconds that one replica needs for (prompt, length) pairs, all there at the beginning."""
    cost = CostModel(a=8e-3, b=5e-6, c=90e-9, p=30e-6, kv_capacity=kv_capacity)

    async def main() -> float:
        lengths = dict(enumerate(length for _, length in samples))
        replica = SimReplica("r", cost, lambda request: lengths[request.id])
        futures = [
            replica.generate(
                Request(n, (np.zeros(prompt, np.int32),), prompt, length, Sampling(), n, 0, n, n, 0)
            )
            for n, (prompt, length) in enumerate(samples)
        ]  # fmt: skip
        await asyncio.gather(*futures)
        return asyncio.get_running_loop().time()

    return run(main)


def test_a_replica_that_runs_a_set_takes_exactly_its_steps_and_the_sum_of_w() -> None:
    dice = random.Random(3)
    samples = [(dice.randint(1, 900), dice.randint(1, 4000)) for _ in range(40)]
    demand = Demand.of([[TraceEpisode((length,), (prompt,))] for prompt, length in samples])
    expected = bounds.balanced_seconds(demand, COST, replicas=1)
    assert simulated(samples) == pytest.approx(expected, rel=1e-9)
    lone = TraceEpisode((700,), (300,))
    assert simulated([(300, 700)]) == pytest.approx(bounds.alone_seconds(lone, COST), rel=1e-9)


def test_an_episode_alone_takes_its_turns_its_env_and_its_reward() -> None:
    episode = TraceEpisode((10, 20), (100, 7), (1.5, 2.5), reset=4.0, reward=9.0)
    first = 10 * (8e-3 + 5e-6) + 90e-9 * sum(range(100, 110)) + 30e-6 * 100
    second = 20 * (8e-3 + 5e-6) + 90e-9 * sum(range(117, 137)) + 30e-6 * 7
    assert bounds.alone_seconds(episode, COST) == pytest.approx(first + second + 8.0 + 9.0, rel=1e-12)


def test_the_limit_is_the_work_or_the_share_of_the_longest() -> None:
    demand = Demand.of(drawn(2))
    work = (bounds.generation_seconds(demand, COST) + bounds.training_seconds(demand, 166e-6)) / 3
    assert bounds.limit_seconds(demand, COST, 166e-6, 3, longest_alone=0.0, alpha=1) == pytest.approx(work)
    assert bounds.limit_seconds(demand, COST, 166e-6, 3, longest_alone=1e4, alpha=1) == 5e3
    assert bounds.limit_seconds(demand, COST, 166e-6, 3, longest_alone=1e4, alpha=3) == 2.5e3


@pytest.mark.parametrize("seed", range(4))
def test_no_work_conserving_queue_is_slower_than_the_bound(seed: int) -> None:
    dice = random.Random(seed)
    times = [dice.lognormvariate(0, 1) for _ in range(200)]
    busy_until = [0.0] * 7
    for time in times:  # the worker that is free first takes the next sample
        worker = busy_until.index(min(busy_until))
        busy_until[worker] += time
    mean, longest, training = sum(times) / len(times), max(times), 0.5
    step = max(busy_until) + len(times) * training / len(busy_until)
    assert 0.8 * len(times) * (mean + training) / len(busy_until) < step
    assert step <= bounds.step_seconds_bound(len(times), len(busy_until), mean, training, longest)


def test_w2_has_the_size_that_was_measured_before() -> None:
    """About 570 s for T_bal of a batch, 308 s for its longest response alone."""
    workload = find_workload("W2")
    balanced = []
    for seed in range(6):
        trace = Trace(workload, seed)
        batch = [[trace.episode(g, m) for m in range(16)] for g in range(64)]
        balanced.append(bounds.balanced_seconds(Demand.of(batch), workload.cost, 32))
    assert np.median(balanced) == pytest.approx(570, rel=0.08)
    assert bounds.alone_seconds(TraceEpisode((32_768,), (512,)), workload.cost) == pytest.approx(308, abs=1)
