"""A domain whose rewards are out of service is paused: the others train on, and it comes back when they do.

`playing` checks the books at the end of every test.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import FOREVER, OneStepEnv, causes, column, fake, got, now, playing, publish, simulate

from cadenza import RolloutScheduler
from cadenza.errors import InfrastructureError
from cadenza.rewards import Sample
from cadenza.rollout.failures import Stalled
from cadenza.rollout.outages import FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, Outages
from cadenza.rollout.records import Fate

GROUP = 4
BATCH = 4 * GROUP


def judged(is_down: Callable[[], bool], **options: Any) -> dict[str, Any]:
    """A domain whose judge cannot be reached while it is down."""

    async def judge(sample: Sample) -> float:
        if is_down():
            raise InfrastructureError("connection refused")
        return 0.5

    return {"env": OneStepEnv, "reward": {"name": judge, "tries": 1}, **options}


def settings(judge: dict[str, Any], **options: Any) -> dict[str, Any]:
    """One domain that is well, and a judged one."""
    domains = {"sums": {"env": OneStepEnv}, "judged": judge}
    return {"domains": domains, "group_size": GROUP, "batch_size": BATCH, "slots": 2 * BATCH, **options}


async def train(scheduler: RolloutScheduler, steps: int, first: int = 0) -> list[Counter[str]]:
    """Trains and publishes so many times; returns the groups of each batch by domain."""
    trained = []
    for step in range(first, first + steps):
        batch = await got(scheduler, BATCH, step)
        trained.append(Counter(column(batch, "domain")[::GROUP]))
        await publish(scheduler, step + 1)
    return trained


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_the_other_domain_trains_every_step_while_one_is_down_all_the_time(alpha: float, workers: int) -> None:
    async def main() -> None:
        options = settings(judged(lambda: True), alpha=alpha, workers=workers)
        async with playing([fake()], **options) as scheduler:
            assert await train(scheduler, 30) == [Counter(sums=4)] * 30
            metrics = scheduler.metrics()
            assert metrics["domains/paused"] == 1
            assert metrics["staleness/max"] <= math.ceil(alpha)
            assert metrics["fate/trained"] == 30 * BATCH
            assert "reward: RewardUnavailable" in causes(scheduler, Fate.FAILED)
            assert "domain paused" in causes(scheduler, Fate.CANCELLED)
            assert metrics["fate/stale"] == 0

    simulate(main)


def test_healthy_domains_share_what_a_paused_one_leaves_by_their_weights() -> None:
    async def main() -> None:
        options = settings(judged(lambda: True, weight=4.0))
        options["domains"] = {"many": {"env": OneStepEnv, "weight": 3.0}, **options["domains"]}
        async with playing([fake()], **options) as scheduler:
            trained = sum(await train(scheduler, 20), Counter())
            assert trained == {"many": 60, "sums": 20}

    simulate(main)


def test_a_domain_that_comes_back_is_trained_by_its_weight_and_does_not_make_up_for_its_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        options = settings(judged(lambda: 10.0 < now() < 60.0))
        async with playing([fake()], **options) as scheduler:
            trained = await train(scheduler, 200)
            back = max(step for step, batch in enumerate(trained) if not batch["judged"]) + 1
            assert sum(batch["judged"] for batch in trained[:5]) == 10
            assert sum(batch["judged"] for batch in trained[back : back + 50]) == pytest.approx(100, abs=2)
            assert scheduler.metrics()["domains/paused"] == 0
            assert now() < 300

    simulate(main)
    said = [record.message for record in caplog.records if "domain 'judged' is" in record.message]
    assert len(said) == 2, "once each"
    assert "8 rewards of it failed in a row" in said[0]
    assert "connection refused" in said[0]
    assert "Bring back what its reward needs" in said[0]
    assert "what it missed is not made up for" in said[1]


def test_probes_come_less_and_less_often() -> None:
    asked: list[float] = []

    async def main() -> None:
        options = settings(judged(lambda: asked.append(now()) or True))
        async with playing([fake()], **options) as scheduler:
            await train(scheduler, 1000)

    simulate(main)
    probes = sorted({when for when in asked if when > asked[0] + FIRST_WAIT_SECONDS})
    waits = [later - sooner for sooner, later in pairwise(probes)]
    assert len(waits) >= 6
    for number, wait in enumerate(waits):
        expected = min(FIRST_WAIT_SECONDS * 2 ** (number + 1), MAX_WAIT_SECONDS)
        assert expected <= wait <= expected + 4.0, "the next admission and its rollout"


def test_a_service_that_hangs_is_an_outage_too() -> None:
    async def hang(sample: Sample) -> float:
        await asyncio.sleep(FOREVER)
        return 1.0

    async def main() -> None:
        judge = {"env": OneStepEnv, "reward": {"name": hang, "tries": 1}}
        async with playing([fake()], **settings(judge, reward_seconds=10)) as scheduler:
            assert await train(scheduler, 20) == [Counter(sums=4)] * 20

    simulate(main)


@pytest.mark.parametrize("names", [["judged"], ["judged", "checked"]])
def test_the_run_ends_with_its_error_when_all_domains_are_down(names: list[str]) -> None:
    async def main() -> None:
        options = settings({})
        options["domains"] = {name: judged(lambda: True) for name in names}
        async with playing([fake()], **options) as scheduler:
            with pytest.raises(Stalled, match=r"the last 485 attempts all failed; .* connection refused"):
                await got(scheduler, BATCH)
            assert now() < 60

    simulate(main)


def test_a_validation_measures_the_other_domain_and_all_of_them_when_the_service_is_back() -> None:
    async def main() -> None:
        down = [True]
        options = settings(judged(lambda: down[0], tasks=100), mode="val")
        options["domains"]["sums"]["tasks"] = 100
        async with playing([fake()], **options) as scheduler:
            assert set(column(await got(scheduler, -1), "domain")) == {"sums"}
            down[0] = False
            await scheduler.reset()
            assert Counter(column(await got(scheduler, -1), "domain")) == {"sums": 400, "judged": 400}

    simulate(main)


def test_of_two_domains_that_are_down_the_one_that_comes_back_is_found_before_the_run_ends() -> None:
    async def main() -> None:
        options = settings(judged(lambda: now() < 40.0))
        options["domains"]["sums"] = judged(lambda: now() > 30.0)
        async with playing([fake()], **options) as scheduler:
            trained = await train(scheduler, 100)
            assert trained[5] == Counter(sums=4)
            assert trained[-1] == Counter(judged=4)

    simulate(main)


def test_a_task_whose_reward_always_fails_costs_its_domain_a_pause_and_not_its_life() -> None:
    """The domain has one group in a batch, so that nothing else of it succeeds meanwhile."""

    async def judge(sample: Sample) -> float:
        if sample.trajectory.task.id == "judged/3":
            raise InfrastructureError("the verdict cannot be read")
        return 0.5

    async def main() -> None:
        options = settings({"env": OneStepEnv, "reward": {"name": judge, "tries": 1}, "weight": 1 / 3})
        async with playing([fake()], **options) as scheduler:
            trained = await train(scheduler, 60)
            assert sum(batch["judged"] for batch in trained[-20:]) == 20
            ids = [group.task.id for group in scheduler.ledger._closed.values() if group.fate is Fate.TRAINED]
            assert "judged/4" in ids
            assert "judged/3" not in ids

    simulate(main)


def test_the_tasks_of_the_groups_that_a_pause_ends_are_drawn_again() -> None:
    async def main() -> None:
        options = settings(judged(lambda: now() < 4.0, tasks=8))
        async with playing([fake()], **options) as scheduler:
            trained = sum(await train(scheduler, 40), Counter())
            assert trained["judged"] == 8

    simulate(main)


def test_a_resumed_run_begins_without_a_pause_and_does_not_make_up_for_the_old_one(tmp_path: Path) -> None:
    async def before() -> None:
        async with playing([fake()], **settings(judged(lambda: True))) as scheduler:
            await train(scheduler, 50)
            assert scheduler.metrics()["domains/paused"] == 1
            scheduler.save(tmp_path)

    async def after() -> None:
        async with playing([fake()], **settings(judged(lambda: False))) as scheduler:
            scheduler.restore(tmp_path)
            await scheduler.sampler.load_weights(50)
            assert "domains/paused" not in scheduler.metrics()
            trained = await train(scheduler, 10, first=50)
            assert sum(batch["judged"] for batch in trained) == pytest.approx(20, abs=3)

    simulate(before)
    simulate(after)


def test_a_domain_is_paused_after_failures_in_a_row_and_a_success_between_them_counts_anew() -> None:
    async def main() -> None:
        async with playing(**settings(judged(lambda: False))) as scheduler:
            outages = Outages(scheduler.queue.domains, GROUP)
            failed = [outages.record_failure("judged", "down", 0.0) for _ in range(7)]
            outages.record_success("judged", 0.0)
            failed += [outages.record_failure("judged", "down", 0.0) for _ in range(8)]
            assert failed == [False] * 14 + [True]
            assert outages.held_back(FIRST_WAIT_SECONDS - 0.1) == {"judged"}
            assert outages.held_back(FIRST_WAIT_SECONDS) == set()

    simulate(main)
