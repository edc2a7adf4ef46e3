"""Rewards in processes of their own. Here the processes are workers on the same virtual loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from builders import column, fates, got, playing, simulate, timed

from cadenza.errors import InfrastructureError
from cadenza.rewards import Sample
from cadenza.rollout.reward_pool import RewardPool


def test_the_pool_scores_side_by_side_and_a_slow_sample_holds_up_no_other() -> None:
    async def reward(sample: Sample) -> float:
        await asyncio.sleep(50.0 if sample.trajectory.id == 0 else 0.0)
        return float(sample.trajectory.id)

    async def main() -> None:
        async with playing(reward=reward, reward_workers=2, group_size=2, batch_size=2, extra_groups=1) as scheduler:
            batch, when = await timed(got(scheduler, 2))
            assert column(batch, "scores") == [2.0, 3.0]
            assert when < 5.0

    simulate(main)


def test_what_a_reward_raises_in_the_pool_costs_its_attempt_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    calls: Counter[int] = Counter()

    async def reward(sample: Sample) -> float:
        calls[sample.trajectory.id] += 1
        if sample.trajectory.id == 0:
            raise ValueError("no such unit")
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, reward_workers=1) as scheduler:
            await got(scheduler, 4)
            assert fates(scheduler) == {"failed": 1, "trained": 4}
            assert scheduler.metrics()["errors/user_code"] == 1

    simulate(main)
    assert "no such unit" in caplog.text
    assert set(calls.values()) == {1}


def test_a_process_that_dies_costs_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[RewardPool] = []
    made = RewardPool.__init__

    def remember(self: RewardPool, *args: Any) -> None:
        made(self, *args)
        pools.append(self)

    monkeypatch.setattr(RewardPool, "__init__", remember)

    async def reward(sample: Sample) -> float:
        await asyncio.sleep(10.0)
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, reward_workers=2) as scheduler:
            asyncio.get_running_loop().call_later(5.0, lambda: pools[0]._workers[0].handle.kill())
            await got(scheduler, 4)
            assert fates(scheduler) == {"trained": 4}
            await asyncio.sleep(100.0)
            assert len(pools[0]._workers) == 2, "a new one has taken its place"

    simulate(main)


def test_an_infrastructure_failure_in_the_pool_stays_one() -> None:
    async def reward(sample: Sample) -> float:
        if sample.trajectory.id == 0:
            raise InfrastructureError("the judge is down")
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, reward_workers=1, max_attempts=2) as scheduler:
            await got(scheduler, 4)
            assert scheduler.metrics()["errors/user_code"] == 0
            assert "the judge is down" in scheduler.why("g0.0#0")

    simulate(main)
