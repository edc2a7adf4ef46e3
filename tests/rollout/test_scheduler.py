"""The contract of the rollout scheduler, under virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import (
    FOREVER,
    EventRecorder,
    OneStepEnv,
    build,
    by_attempt,
    chain,
    check_after_shutdown,
    cluster_of,
    column,
    fake,
    fates,
    first_time,
    get,
    got,
    now,
    open_attempts,
    playing,
    pool,
    publish,
    responses,
    rows,
    sim_replicas,
    simulate,
    stepping,
    timed,
)

from cadenza import DataProto, RolloutScheduler
from cadenza.data.schema import TRAIN_BATCH
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Request
from cadenza.rewards import Sample
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.failures import FilterLimit, NothingFinished, RolloutError, SchedulerClosed, Stalled
from cadenza.rollout.model import Model
from cadenza.rollout.records import Task, Trajectory
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.testing import FakeReplica

# -- programs ----------------------------------------------------------------------------------------------------------

TRAIN_SECONDS = 2.0


async def train(scheduler: RolloutScheduler, order: str, steps: int) -> list[DataProto]:
    """A controller program: `resume` before the batch, after the train step, or never (`get_batch` opens the gate)."""
    batches = []
    for step in range(steps):
        await scheduler.suspend()
        await scheduler.sampler.load_weights(step + 1)
        if order == "resume first":
            await scheduler.resume()
        batches.append(await got(scheduler, 4, step))
        await asyncio.sleep(TRAIN_SECONDS)
        if order == "resume last":
            await scheduler.resume()
    return batches


@pytest.mark.parametrize("order", ["resume first", "resume last", "never resume"])
@pytest.mark.parametrize(("alpha", "seconds"), [(0, 3 * (1.0 + TRAIN_SECONDS)), (1, 1.0 + 3 * TRAIN_SECONDS)])
def test_every_program_order_runs_as_written(order: str, alpha: int, seconds: float) -> None:
    async def main() -> float:
        async with playing(batch_size=4, group_size=2, alpha=alpha) as scheduler:
            batches = await train(scheduler, order, 3)
            assert [batch.meta_info["version"] for batch in batches] == [1, 2, 3]
            assert [batch.meta_info["global_step"] for batch in batches] == [0, 1, 2]
            assert [len(batch) for batch in batches] == [4, 4, 4]
            return now()

    assert simulate(main) == pytest.approx(seconds)


def test_a_synchronous_program_trains_only_what_the_newest_version_wrote() -> None:
    async def main() -> None:
        async with playing(batch_size=4, group_size=2) as scheduler:
            for version, batch in enumerate(await train(scheduler, "never resume", 3), start=1):
                written = {v for row in rows(batch, "versions") for v in row.tolist()}
                assert written == {-1, version}
            assert scheduler.metrics()["staleness/max"] == 0

    simulate(main)


def test_without_data_the_step_of_a_batch_is_its_version() -> None:
    async def main() -> None:
        async with playing(batch_size=4, group_size=2) as scheduler:
            batch = await scheduler.get_batch(batch_size=4)
            assert batch is not None
            assert (batch.meta_info["global_step"], batch.meta_info["version"]) == (0, 0)
            await publish(scheduler, 7)
            batch = await scheduler.get_batch(batch_size=4)
            assert batch is not None
            assert (batch.meta_info["global_step"], batch.meta_info["version"]) == (7, 7)

    simulate(main)


def test_without_data_and_size_get_batch_gives_everything_until_the_tasks_run_out() -> None:
    async def main() -> None:
        async with playing(tasks=6, mode="val", batch_size=1) as scheduler:
            assert len(await scheduler.get_batch() or ()) == 6

    simulate(main)


def test_step_scores_of_episodes_of_different_lengths_add_up_and_turns_counts_them() -> None:
    async def step(seed: int, number: int) -> Any:
        lengths[seed] = lengths.get(seed, 0) + 1
        return "go on", 0.5, lengths[seed] > seed, False, {}

    lengths: dict[int, int] = {}

    async def main() -> None:
        async with playing(env=stepping(step), tasks=3, mode="val", batch_size=1) as scheduler:
            batch = await got(scheduler, -1)
            assert sorted(column(batch, "turns")) == [1, 2, 3]
            assert batch.batch["step_scores"].sum(1).tolist() == column(batch, "episode_scores")
            assert [0.5 * n for n in column(batch, "turns")] == column(batch, "episode_scores")

    simulate(main)


def test_get_batch_opens_the_gate() -> None:
    async def main() -> float:
        async with playing() as scheduler:
            await scheduler.suspend()
            assert scheduler.sampler.is_held
            await got(scheduler, 4)
            assert not scheduler.sampler.is_held
            return now()

    assert simulate(main) == 1.0


def test_suspend_is_idempotent() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            await scheduler.suspend()
            epoch = scheduler.sampler.epoch
            await scheduler.suspend()
            assert (scheduler.sampler.epoch, now()) == (epoch, 0.0)
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_resume_is_idempotent() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            for _ in range(3):
                await scheduler.resume()
            assert not scheduler.sampler.is_held
            await got(scheduler, 4)
            assert now() == 1.0

    simulate(main)


def test_suspend_and_resume_at_once_leave_the_gate_as_the_last_one_asked() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            await asyncio.gather(scheduler.suspend(), scheduler.suspend(), scheduler.resume())
            assert not scheduler.sampler.is_held
            await asyncio.gather(scheduler.resume(), scheduler.suspend(), scheduler.suspend())
            assert scheduler.sampler.is_held

    simulate(main)


@pytest.mark.parametrize("shuffle", range(4))
def test_the_first_calls_may_come_at_once(shuffle: int) -> None:
    async def main() -> None:
        async with playing(batch_size=4) as scheduler:
            await asyncio.gather(scheduler.resume(), got(scheduler, 4), scheduler.resume(), got(scheduler, 4))
            assert fates(scheduler) == {"trained": 8}

    simulate(main, shuffle=shuffle)


def test_after_suspend_no_token_is_generated_until_resume() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        async with playing(replicas, env=chain(2)) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            await scheduler.suspend()
            written, moment = sum(r.generated for r in replicas), now()
            await asyncio.sleep(100.0)
            assert sum(r.generated for r in replicas) == written
            assert max(r.last_generation_time for r in replicas) <= moment
            await got(scheduler, 4)
            assert now() == pytest.approx(102.0, abs=0.03)

    simulate(main)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "val"])
def test_minus_one_gives_everything_until_the_tasks_run_out_and_then_none(mode: str) -> None:
    async def main() -> None:
        async with playing(tasks=7, group_size=2, batch_size=4, slots=3, mode=mode) as scheduler:
            batch = await got(scheduler, -1)
            assert column(batch, "task_id") == [f"toy/{seed}" for seed in range(7) for _ in range(2)]
            assert await get(scheduler, -1) is None
            assert await get(scheduler, 4) is None
            assert fates(scheduler) == {"trained" if mode == "train" else "validated": 14}

    simulate(main)


def test_the_last_batch_is_short_and_has_whole_groups_only() -> None:
    async def main() -> None:
        async with playing(tasks=5, group_size=3, batch_size=6, slots=4) as scheduler:
            sizes = []
            while (batch := await get(scheduler, 6, len(sizes))) is not None:
                sizes.append(len(batch))
                assert set(Counter(column(batch, "traj_group_id")).values()) == {3}
            assert sizes == [6, 6, 3]

    simulate(main)


def test_a_group_that_cannot_be_completed_does_not_leave_its_members_in_the_last_batch() -> None:
    async def fail(seed: int, number: int) -> None:
        if seed == 4 and number > 0:
            raise ValueError("broken")

    async def main() -> None:
        async with playing(env=stepping(fail), tasks=5, group_size=2, batch_size=8, max_attempts=2) as scheduler:
            assert len(await got(scheduler, 8)) == 8
            assert await get(scheduler, 8) is None
            assert fates(scheduler) == {"trained": 8, "failed": 2, "cancelled": 1}

    simulate(main)


def test_none_means_that_nothing_was_available() -> None:
    async def main() -> None:
        async with playing(tasks=4) as scheduler:
            await got(scheduler, 4)
            assert await get(scheduler, 4) is None
            assert await get(scheduler, 4) is None

    simulate(main)


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_larger_batch_than_configured_is_served(alpha: int) -> None:
    async def main() -> float:
        async with playing(batch_size=4, slots=16, alpha=alpha) as scheduler:
            for step in range(3):
                assert len(await got(scheduler, 12, step)) == 12
                await publish(scheduler, step + 1)
            assert scheduler.metrics()["staleness/max"] <= alpha
            return now()

    simulate(main)


@pytest.mark.parametrize("alpha", [0, 1])
def test_several_batches_for_one_version_are_served(alpha: int) -> None:
    async def main() -> None:
        async with playing(batch_size=4, slots=16, alpha=alpha) as scheduler:
            for version in range(3):
                batches = [await got(scheduler, 4, version) for _ in range(3)]
                assert [batch.meta_info["version"] for batch in batches] == [version] * 3
                await publish(scheduler, version + 1)
            assert scheduler.metrics()["staleness/max"] <= alpha

    simulate(main)


def test_a_batch_that_is_asked_for_behind_another_one_opens_the_gate() -> None:
    async def main() -> None:
        async with playing([fake(5.0)], batch_size=2, alpha=1, slots=8) as scheduler:
            first = asyncio.ensure_future(got(scheduler, 2))
            await asyncio.sleep(1.0)
            await scheduler.suspend()
            second = asyncio.ensure_future(got(scheduler, 2))  # without a resume: this is a valid program
            async with asyncio.timeout(100.0):
                await first
                await second

    simulate(main)


@pytest.mark.parametrize("staleness", ["wait", "drop"])
@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_as_many_batches_as_the_bound_allows_may_be_taken_ahead(alpha: int, staleness: str) -> None:
    def seconds(request: Request) -> float:
        return [1.0, 2.0, 5.0, 40.0][request.seed % 4]

    async def main() -> None:
        options = {"alpha": alpha, "staleness": staleness, "slots": 64, "batch_size": 4}
        async with playing([fake(seconds)], **options) as scheduler:
            held = [await got(scheduler, 4) for _ in range(alpha)]
            for version in range(1, 30):
                held.append(await got(scheduler, 4))
                batch = held.pop(0)
                oldest = min(v for row in rows(batch, "versions") for v in row if v >= 0)
                assert version - 1 - oldest <= alpha
                await asyncio.sleep([0.5, 3.0, 60.0][version % 3])
                await publish(scheduler, version)

    simulate(main)


@pytest.mark.parametrize("extra_groups", [0, 2])
@pytest.mark.parametrize("alpha", [0.5, 1, 2, 4])
def test_the_next_batch_may_be_awaited_while_one_is_trained(alpha: float, extra_groups: int) -> None:
    """Whether generation or training is faster: with the batch taken ahead, the bound holds when it is trained."""

    def seconds(request: Request) -> float:
        return [1.0, 2.0, 5.0, 20.0][request.seed % 4]

    async def main() -> None:
        options = {"alpha": alpha, "extra_groups": extra_groups, "slots": 64}
        async with playing([fake(seconds)], batch_size=4, **options) as scheduler:
            ahead = asyncio.ensure_future(got(scheduler, 4))
            for version in range(1, 25):
                batch = await ahead
                oldest = min(v for row in rows(batch, "versions") for v in row if v >= 0)
                assert version - 1 - oldest <= math.ceil(alpha)
                ahead = asyncio.ensure_future(got(scheduler, 4))
                await asyncio.sleep([0.5, 3.0, 40.0][version % 3])
                await publish(scheduler, version)
                await scheduler.resume()
            await ahead

    simulate(main)


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_a_batch_may_be_taken_in_halves(alpha: int) -> None:
    async def main() -> None:
        async with playing(batch_size=8, group_size=2, slots=16, alpha=alpha) as scheduler:
            for version in range(3):
                assert [len(await got(scheduler, 4, version)) for _ in range(2)] == [4, 4]
                await publish(scheduler, version + 1)
            assert scheduler.metrics()["staleness/max"] <= alpha
            assert fates(scheduler).keys() == {"trained"}

    simulate(main)


@pytest.mark.parametrize("shuffle", range(5))
@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2])
def test_a_batch_may_be_taken_in_parts_of_any_size_that_are_trained_one_by_one(alpha: float, shuffle: int) -> None:
    rng = random.Random(shuffle)

    async def main() -> None:
        async with playing(batch_size=16, group_size=2, slots=12, alpha=alpha) as scheduler:
            for version in range(8):
                ends = [0, *sorted(rng.sample(range(1, 8), 3)), 8]
                for start, end in pairwise(ends):
                    batch = await got(scheduler, 2 * (end - start), version)
                    assert len(batch) == 2 * (end - start)
                    assert batch.meta_info["version"] == version
                    await asyncio.sleep(rng.choice([0.0, 0.5, 5.0]))
                await publish(scheduler, version + 1)
            assert scheduler.metrics()["staleness/max"] <= math.ceil(alpha)
            assert fates(scheduler).keys() <= {"trained"}
            assert fates(scheduler)["trained"] == 8 * 16

    simulate(main, shuffle=shuffle)


def test_two_calls_at_once_get_two_batches_without_a_trajectory_in_common() -> None:
    async def main() -> None:
        async with playing(batch_size=4) as scheduler:
            first, second = await asyncio.gather(got(scheduler, 4), got(scheduler, 4))
            assert not set(column(first, "traj_id")) & set(column(second, "traj_id"))

    simulate(main)


def test_a_call_that_is_given_up_loses_no_trajectory() -> None:
    async def main() -> None:
        async with playing(tasks=4) as scheduler:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(got(scheduler, 4), 0.5)
            assert len(await got(scheduler, 4)) == 4
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


@pytest.mark.parametrize("shuffle", range(8))
def test_a_call_that_is_given_up_at_the_moment_of_the_cut_loses_no_trajectory(shuffle: int) -> None:
    async def main() -> None:
        async with playing(tasks=4) as scheduler:
            trained = 0
            try:
                trained = len(await asyncio.wait_for(got(scheduler, 4), 1.0))
            except TimeoutError:
                trained = len(await get(scheduler, 4) or ())
            assert trained == scheduler.ledger.fates["trained"] == 4

    simulate(main, shuffle=shuffle)


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_policy_drop_counts_its_loss_and_its_bias_towards_short_trajectories() -> None:
    async def main() -> None:
        [replica] = sim_replicas(1, lambda request: 1000 if request.group % 4 == 0 else 100)
        async with playing([replica], batch_size=4, slots=16, alpha=1, staleness="drop") as scheduler:
            for step in range(4):
                await got(scheduler, 4, step)
                await publish(scheduler, step + 1)
            metrics, ends = scheduler.metrics(), fates(scheduler)
            assert ends["stale"] == metrics["fate/stale"] > 0
            assert metrics["tokens/stale"] == metrics["tokens_lost/older than max_staleness"] > 0
            trained = metrics["tokens/trained"] / metrics["fate/trained"]
            assert trained == 100
            assert metrics["length_bias"] < 1.0
            assert metrics["staleness/max"] <= 1

    simulate(main)


def test_policy_wait_drops_nothing_and_takes_the_long_ones_within_the_bound() -> None:
    async def main() -> None:
        [replica] = sim_replicas(1, lambda request: 1000 if request.group % 4 == 0 else 100)
        async with playing([replica], batch_size=4, slots=16, alpha=1) as scheduler:
            for step in range(6):
                await got(scheduler, 4, step)
                await publish(scheduler, step + 1)
            assert fates(scheduler) == {"trained": 24}
            assert scheduler.metrics()["staleness/max"] == 1

    simulate(main)


@pytest.mark.parametrize(("alpha", "ahead"), [(0, 0), (0.25, 1), (0.5, 2), (0.6, 2), (1, 4), (1.5, 6)])
def test_a_fractional_alpha_runs_that_many_groups_ahead(alpha: float, ahead: int) -> None:
    async def main() -> None:
        async with playing(batch_size=4, slots=64, alpha=alpha) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(10.0)
            assert scheduler.ledger.groups_opened == 4 + ahead
            for step in range(4):
                await got(scheduler, 4, step)
                await publish(scheduler, step + 1)
            assert scheduler.metrics()["staleness/max"] == scheduler.config.max_staleness

    simulate(main)


# -- redundancy --------------------------------------------------------------------------------------------------------


def test_members_that_lose_the_race_are_cancelled_at_once() -> None:
    async def main() -> None:
        story = EventRecorder()
        [replica] = sim_replicas(1, lambda request: (100, 1000, 200)[request.session])
        async with playing([replica], group_size=2, extra_members=1, batch_size=2, tasks=1, events=story) as scheduler:
            batch, when = await timed(got(scheduler, 2))
            assert when == pytest.approx(2.0)
            assert column(batch, "traj_id") == [0, 2]
            assert story.times("surplus") == [when]
            await asyncio.sleep(0.02)  # the decode step in progress
            assert not replica.generating
            assert scheduler.metrics()["slots/busy"] == 0
            assert sum(replica.discarded.values()) == pytest.approx(200, abs=2)

    simulate(main)


def test_groups_that_lose_the_race_are_cancelled_when_the_batch_is_cut() -> None:
    async def main() -> None:
        story = EventRecorder()
        [replica] = sim_replicas(1, lambda request: 1000 if request.group == 1 else 100)
        async with playing([replica], group_size=2, extra_groups=1, batch_size=4, events=story) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert when == pytest.approx(1.0)
            assert set(column(batch, "traj_group_id")) == {0, 2}
            assert story.times("surplus") == [when, when]
            assert "the batch was full before" in scheduler.why("g1")
            await asyncio.sleep(0.02)
            assert not replica.generating

    simulate(main)


def test_a_member_that_loses_the_race_while_its_reward_runs_is_surplus() -> None:
    async def reward(sample: Sample) -> float:
        await asyncio.sleep(50.0 if sample.trajectory.member == 0 else 0.0)
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, group_size=2, extra_members=1, batch_size=2, tasks=1) as scheduler:
            batch, when = await timed(got(scheduler, 2))
            assert (column(batch, "traj_id"), when) == ([1, 2], 1.0)
            assert fates(scheduler) == {"trained": 2, "surplus": 1}

    simulate(main)


def test_a_member_that_loses_the_race_while_its_env_closes_gives_its_slot_back() -> None:
    class SlowToClose(OneStepEnv):
        closed = 0

        async def close(self) -> None:
            await asyncio.sleep(2.0)
            SlowToClose.closed += 1

    async def main() -> None:
        replica = fake(lambda request: (1.0, 1.0, 2.0)[request.session % 3])  # the third begins to close at 2.0
        async with playing(
            [replica], env=SlowToClose, group_size=2, extra_members=1, batch_size=2, tasks=1, slots=3
        ) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert when == 3.0
            await asyncio.sleep(2.0)
            assert scheduler.metrics()["slots/busy"] == 0
            assert SlowToClose.closed == 3

    simulate(main)


def test_redundancy_does_not_hide_a_replica_that_hangs() -> None:
    """The losers are always those on the hung replica; taking them back is no sign of life."""

    async def main() -> None:
        hung, alive = sim_replicas(2, 100)
        patience = {"heartbeat_seconds": 4.7, "max_strikes": 2}
        async with playing([hung, alive], extra_groups=1, batch_size=1, slots=2, sampler=patience) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            hung.hang()
            for step in range(60):
                await got(scheduler, 1, step)
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}

    simulate(main)


# -- filter ------------------------------------------------------------------------------------------------------------


async def keep_odd(group: list[Trajectory]) -> bool:
    return group[0].task.seed % 2 == 1


@pytest.mark.parametrize("group_filter", [keep_odd, lambda group: group[0].task.seed % 2 == 1])
def test_a_filter_may_be_sync_or_async(group_filter: Any) -> None:
    async def main() -> None:
        async with playing(group_filter=group_filter, group_size=2) as scheduler:
            assert set(column(await got(scheduler, 4), "task_id")) == {"toy/1", "toy/3"}
            assert fates(scheduler)["filtered"] % 2 == 0

    simulate(main)


def test_a_filter_sees_the_whole_group_with_its_scores() -> None:
    seen: list[list[float]] = []

    def remember(group: list[Trajectory]) -> bool:
        seen.append([trajectory.score for trajectory in group])
        return True

    async def main() -> None:
        async with playing(group_filter=remember, group_size=4, batch_size=8) as scheduler:
            await got(scheduler, 8)

    simulate(main)
    assert seen == [[1.0] * 4, [1.0] * 4]


def test_a_slow_async_filter_delays_no_other_group() -> None:
    async def slow(group: list[Trajectory]) -> bool:
        await asyncio.sleep(50.0 if group[0].group == 0 else 0.0)
        return True

    async def main() -> float:
        async with playing(group_filter=slow, group_size=2, alpha=1) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert set(column(batch, "traj_group_id")) == {1, 2}
            return when

    assert simulate(main) == 1.0


def test_a_slow_sync_filter_delays_no_other_group() -> None:
    costs = iter([50.0])  # the first call; those after it cost nothing

    async def main() -> float:
        async with playing(group_filter=lambda group: True, group_size=2, alpha=1) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert len(batch) == 4
            return when

    assert simulate(main, executor_cost=lambda func: next(costs, 0.0)) == 1.0


def test_a_running_filter_holds_no_slot() -> None:
    async def slow(group: list[Trajectory]) -> bool:
        await asyncio.sleep(50.0)
        return True

    async def main() -> None:
        async with playing(group_filter=slow, group_size=2, batch_size=4, slots=2) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert when == 1.0 + 1.0 + 50.0  # the second group ran while the first was being judged

    simulate(main)


def test_only_groups_filtered_in_a_row_count_towards_the_limit() -> None:
    async def main() -> None:
        async with playing(group_filter=keep_odd, max_filtered=3, slots=1) as scheduler:
            for step in range(4):
                assert len(await got(scheduler, 4, step)) == 4
            assert fates(scheduler)["filtered"] > 3

    simulate(main)


def test_the_filter_limit_ends_the_run_with_a_balanced_ledger() -> None:
    async def main() -> None:
        async with playing(group_filter=lambda group: False, max_filtered=5, group_size=2) as scheduler:
            with pytest.raises(FilterLimit, match="5 groups in a row"):
                await get(scheduler, 4)
            assert scheduler.ledger.live == 0
            scheduler.ledger.check()

    simulate(main)


# -- domains -----------------------------------------------------------------------------------------------------------


def two_domains(**heavy: Any) -> dict[str, dict[str, Any]]:
    return {"heavy": {"env": OneStepEnv, "weight": 3.0} | heavy, "light": {"env": OneStepEnv, "weight": 1.0}}


def test_domains_share_the_batch_by_their_weights() -> None:
    async def main() -> None:
        async with playing(domains=two_domains(), group_size=2, batch_size=16) as scheduler:
            for step in range(3):
                assert Counter(column(await got(scheduler, 16, step), "domain")) == {"heavy": 12, "light": 4}
                await publish(scheduler, step + 1)

    simulate(main)


def test_what_is_trained_and_not_what_is_tried_follows_the_weights_when_groups_are_filtered() -> None:
    async def main() -> None:
        trained: Counter[str] = Counter()
        async with playing(
            domains=two_domains(),
            group_filter=lambda group: group[0].task.domain == "light" or group[0].task.seed % 4 == 0,
            batch_size=16,
        ) as scheduler:
            for step in range(4):
                trained += Counter(column(await got(scheduler, 16, step), "domain"))
                await publish(scheduler, step + 1)
        assert trained == {"heavy": 48, "light": 16}

    simulate(main)


def test_a_domain_never_has_more_envs_than_it_may_and_the_other_takes_the_slots() -> None:
    alive, most = 0, 0

    class Counted(OneStepEnv):
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        async def close(self) -> None:
            nonlocal alive
            await asyncio.sleep(0.5)
            alive -= 1

    async def main() -> None:
        domains = two_domains(env=Counted, max_envs=2)
        async with playing(domains=domains, batch_size=16, slots=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.1)
            assert Counter(a.group.task.domain for a in open_attempts(scheduler)) == {"heavy": 2, "light": 6}
            for step in range(3):
                await got(scheduler, 16, step)
                await publish(scheduler, step + 1)

    simulate(main)
    assert (most, alive) == (2, 0)


def test_any_slot_serves_any_group_and_any_domain() -> None:
    async def main() -> None:
        replica = fake(lambda request: 1.0 + 0.3 * (request.session % 5))
        served: dict[int, set[str]] = {}
        async with playing([replica], domains=two_domains(), group_size=3, batch_size=24, slots=4) as scheduler:
            batch = await got(scheduler, 24)
            for slot, group, domain in zip(
                column(batch, "env_ids"), column(batch, "traj_group_id"), column(batch, "domain"), strict=True
            ):
                served.setdefault(slot, set()).update({group, domain})
        assert served.keys() == {0, 1, 2, 3}
        assert all({"heavy", "light"} < seen and len(seen) >= 5 for seen in served.values())

    simulate(main)


# -- train and validation on one sampler -------------------------------------------------------------------------------


async def steps(scheduler: RolloutScheduler, count: int) -> float:
    for step in range(count):
        await publish(scheduler, step + 1)
        await got(scheduler, 8, step)
        await asyncio.sleep(1.0)
    return now()


async def validation(scheduler: RolloutScheduler) -> float:
    await asyncio.sleep(0.1)
    batch = await got(scheduler, 16)
    assert len(batch) == 16
    return now()


async def side_by_side(*, training: bool, validating: bool, **cost: Any) -> tuple[float, float]:
    """When training and validation end, each with or without the other."""
    model = CostModel(**({"a": 0.01, "b": 0.0, "c": 0.0, "p": 0.0, "kv_capacity": 10**6} | cost))
    cluster = cluster_of(*sim_replicas(2, 100, cost=model))
    async with (
        playing(cluster=cluster, batch_size=8, alpha=1, slots=16) as trainer,
        playing(cluster=cluster, batch_size=16, slots=16, mode="val", tasks=16) as validator,
    ):
        works = []
        works.append(asyncio.ensure_future(steps(trainer, 12) if training else asyncio.sleep(0, 0.0)))
        works.append(asyncio.ensure_future(validation(validator) if validating else asyncio.sleep(0, 0.0)))
        first, second = await asyncio.gather(*works)
        return first, second


def test_validation_neither_stalls_training_nor_is_starved_by_it_when_the_engine_has_room() -> None:
    alone, _ = simulate(lambda: side_by_side(training=True, validating=False))
    _, validated = simulate(lambda: side_by_side(training=False, validating=True))
    together = simulate(lambda: side_by_side(training=True, validating=True))
    assert together[0] == pytest.approx(alone, abs=0.05)
    assert together[1] == pytest.approx(validated, abs=0.05)


def test_validation_and_training_share_a_full_engine() -> None:
    """Eight sequences at once in all: training fills the engine all the time, and validation needs two rounds of it."""
    full = {"max_running": 4}
    alone, _ = simulate(lambda: side_by_side(training=True, validating=False, **full))
    _, validated = simulate(lambda: side_by_side(training=False, validating=True, **full))
    together = simulate(lambda: side_by_side(training=True, validating=True, **full))
    assert together[0] <= alone + validated + 1.0  # whole turns of 1 s
    assert together[1] <= 4 * validated < alone


def test_suspending_for_an_update_closes_the_gate_for_validation_too_and_its_turns_go_on_afterwards() -> None:
    async def main() -> None:
        cluster = cluster_of(*sim_replicas(1, 100))
        async with (
            playing(cluster=cluster, alpha=1) as trainer,
            playing(cluster=cluster, mode="val", tasks=4) as validator,
        ):
            validating = asyncio.ensure_future(got(validator, -1))
            await asyncio.sleep(0.5)
            await publish(trainer, 1)
            await asyncio.sleep(10.0)
            assert not validating.done()
            await trainer.resume()
            batch, when = await timed(asyncio.wait_for(validating, 100.0))
            assert when == pytest.approx(11.0, abs=0.02)
            for versions in rows(batch, "versions"):
                assert set(versions[versions >= 0].tolist()) == {0, 1}
            assert fates(validator) == {"validated": 4}

    simulate(main)


def test_a_replica_tells_the_sessions_and_groups_of_two_schedulers_apart() -> None:
    async def main() -> None:
        replica = fake()
        cluster = cluster_of(replica)
        async with (
            playing(cluster=cluster, group_size=2) as trainer,
            playing(cluster=cluster, group_size=2, mode="val", tasks=2) as validator,
        ):
            await got(trainer, 4)
            training = list(replica.requests)
            await got(validator, 4)
            validating = replica.requests[len(training) :]
            assert not {r.session for r in training} & {r.session for r in validating}
            assert not {r.group for r in training} & {r.group for r in validating}

    simulate(main)


# -- reproducibility ---------------------------------------------------------------------------------------------------


def keyed(request: Request) -> list[int]:
    """An answer that depends on the sampling key, as in an engine."""
    return [(request.seed >> shift) % 251 for shift in range(0, 40, 5)]


def synchronous_run(slots: int, replicas: int, shuffle: int) -> list[tuple[str, str, list[int]]]:
    async def main() -> list[tuple[str, str, list[int]]]:
        story: list[tuple[str, str, list[int]]] = []
        fleet = [
            FakeReplica(keyed, seconds=lambda r: 1.0 + r.seed % 7, name=f"r{i}", devices=(i,)) for i in range(replicas)
        ]
        async with playing(fleet, env=chain(2), group_size=2, batch_size=8, slots=slots, seed=5) as scheduler:
            for step in range(2):
                batch = await got(scheduler, 8, step)
                keys = [key.split("#")[0] for key in column(batch, "traj_key")]
                story += zip(column(batch, "task_id"), keys, responses(batch), strict=True)
                await publish(scheduler, step + 1)
        return story

    return simulate(main, shuffle=shuffle)


def test_at_alpha_0_one_seed_gives_the_same_rows_whatever_the_slots_the_replicas_and_the_order_of_events() -> None:
    runs = [synchronous_run(slots, replicas, slots) for slots, replicas in ((1, 1), (3, 2), (8, 4), (64, 1))]
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert len({tuple(tokens) for _, _, tokens in runs[0]}) == 16


def test_at_alpha_0_rows_are_ordered_by_task_and_member() -> None:
    order = [(task, key) for task, key, _ in synchronous_run(3, 2, 0)]
    assert order == [(f"toy/{g}", f"g{g}.{m}") for g in range(8) for m in range(2)]


def test_another_seed_gives_other_tokens() -> None:
    async def main() -> list[list[list[int]]]:
        found = []
        for seed in (0, 1):
            async with playing([FakeReplica(keyed)], seed=seed) as scheduler:
                found.append(responses(await got(scheduler, 4)))
        return found

    first, second = simulate(main)
    assert first != second


# -- what a batch is ---------------------------------------------------------------------------------------------------


def test_a_collator_replaces_the_default_one() -> None:
    def short(trajectories: list[Trajectory]) -> DataProto:
        return DataProto({"turns": np.array([len(trajectory.turns) for trajectory in trajectories])})

    async def main() -> None:
        async with playing(env=chain(3), collator=short) as scheduler:
            batch = await got(scheduler, 4, 9)
            assert list(batch.batch) == ["turns"]
            assert column(batch, "turns") == [3] * 4
            assert batch.meta_info["global_step"] == 9

    simulate(main)


def test_a_step_wise_rollout_gives_a_row_per_turn_and_the_batch_size_counts_trajectories() -> None:
    async def main() -> None:
        async with playing(env=chain(3), rollout="step", group_size=2, batch_size=4) as scheduler:
            batch = await got(scheduler, 4)
            assert len(batch) == 12
            assert set(Counter(column(batch, "traj_id")).values()) == {3}
            prompts = [
                bytes(ids[~mask])
                for ids, mask in zip(rows(batch, "input_ids"), rows(batch, "response_mask"), strict=True)
            ]
            assert {len(prompt) // 4 for prompt in prompts} == {6}  # "task 0", "turn 1", "turn 2": no history
            assert all(len(row) == 3 for row in rows(batch, "step_scores"))
            turns = zip(rows(batch, "turn_ids"), rows(batch, "response_mask"), strict=True)
            assert [set(ids[mask].tolist()) for ids, mask in turns] == [{0}, {1}, {2}] * 4

    simulate(main)


def test_a_trajectory_wise_rollout_gives_one_row_with_all_turns() -> None:
    async def main() -> None:
        async with playing([fake(tokens=2)], env=chain(3), batch_size=4) as scheduler:
            batch = await got(scheduler, 4)
            assert len(batch) == 4
            text = bytes(rows(batch, "input_ids")[0].astype(np.uint8)).decode()
            assert text == "task 0ABturn 1ABturn 2AB"
            mask = "".join("r" if token else "-" for token in rows(batch, "response_mask")[0])
            assert mask == "------rr------rr------rr"
            assert rows(batch, "turn_ids")[0].tolist() == [*[-1] * 6, 0, 0, *[-1] * 6, 1, 1, *[-1] * 6, 2, 2]
            assert column(batch, "episode_scores") == [3.0] * 4
            assert rows(batch, "step_scores")[0].tolist() == [1.0, 1.0, 1.0]

    simulate(main)


def test_a_train_batch_has_every_column_that_training_relies_on() -> None:
    async def main() -> None:
        async with playing(env=chain(2)) as scheduler:
            batch = await got(scheduler, 4)
        TRAIN_BATCH.check(batch)
        assert {"infer_logprobs", "versions", "turn_ids"} <= set(batch.batch)

    simulate(main)


def test_a_rollout_may_be_written_by_the_user() -> None:
    async def two_drafts(task: Task, env: EnvHandle, model: Model) -> None:
        draft = await model.chat(await env.reset(task.seed))
        await model.chat(f"better than {draft.text}")
        await env.step(draft.text)

    async def main() -> None:
        async with playing(rollout=two_drafts) as scheduler:
            batch = await got(scheduler, 4)
            assert [len(response) for response in responses(batch)] == [20] * 4
            assert column(batch, "episode_scores") == [1.0] * 4

    simulate(main)


def test_a_turn_that_the_rollout_gives_up_leaves_no_trace_in_its_context() -> None:
    """What is trained is what the engine saw."""

    async def impatient(task: Task, env: EnvHandle, model: Model) -> None:
        observation = await env.reset(task.seed)
        await model.chat(observation)
        try:
            async with asyncio.timeout(0.5):
                await model.chat("a hard question")
        except TimeoutError:
            await model.chat("an easy one")
        await env.step("done")

    async def main() -> None:
        replica = fake()
        async with playing([replica], rollout=impatient, tasks=1, batch_size=1) as scheduler:
            batch = await got(scheduler, 1)
        seen = np.concatenate(replica.requests[-1].chunks).tolist()
        assert rows(batch, "input_ids")[0].tolist() == [*seen, *responses(batch)[0][-10:]]

    simulate(main)


# -- why and metrics ---------------------------------------------------------------------------------------------------


def test_why_tells_the_life_of_a_task_a_group_and_an_attempt() -> None:
    async def die() -> None:
        raise ValueError("a bug")

    async def main() -> None:
        async with playing(env=first_time(die, seed=1), group_size=2) as scheduler:
            batch = await got(scheduler, 4)
            task = scheduler.why("toy/1")
            assert task == scheduler.why("g1")
            assert "begun at version 0" in task
            assert "trained at 2.000 s for version 0" in task
            assert "g1.0#0" in task
            assert "failed (step: ValueError: a bug)" in task
            assert "g1.0#1" in task
            attempt = scheduler.why("g1.0#1")
            assert "1 turns, 10 tokens, versions 0..0, reward 1 -> trained" in attempt
            assert "g1.0#0" not in attempt
            for id in batch.batch.numpy("traj_id"):
                assert f"traj_id {id}" in scheduler.why(int(id))

    simulate(main)


def test_why_takes_an_id_as_it_stands_in_a_batch() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            batch = await got(scheduler, 4)
            assert "traj_id 0" in scheduler.why(batch.batch.numpy("traj_id")[0])
            assert "traj_id 0" in scheduler.why(batch.non_tensor_batch["traj_key"][0])

    simulate(main)


@pytest.mark.parametrize("id", ["toy/99", "g99", "g0.7#0", "nonsense", 99])
def test_why_says_so_when_it_does_not_know_an_id(id: str | int) -> None:
    async def main() -> None:
        async with playing() as scheduler:
            await got(scheduler, 4)
            assert scheduler.why(id).startswith(f"{id}: not known")

    simulate(main)


def test_metrics_account_for_every_token_over_losses_of_every_kind() -> None:
    async def fail_now_and_then(seed: int, number: int) -> None:
        if (seed + number) % 7 == 0:
            raise InfrastructureError("the sandbox is gone")

    async def main() -> None:
        replicas = sim_replicas(3, lambda request: 20 + request.seed % 200)
        async with playing(
            replicas, env=stepping(fail_now_and_then), group_size=3, extra_members=1, extra_groups=1, batch_size=6,
            slots=24, alpha=1, staleness="drop", group_filter=lambda group: group[0].task.seed % 5 > 0,
        ) as scheduler:  # fmt: skip
            for step in range(6):
                await got(scheduler, 6, step)
                if step == 2:
                    replicas[0].crash()
                await publish(scheduler, step + 1)
        metrics = scheduler.metrics()
        kept = sum(value for name, value in metrics.items() if name.startswith("tokens/"))
        lost = sum(value for name, value in metrics.items() if name.startswith("tokens_lost/"))
        trained = metrics["tokens/trained"]
        generated = sum(replica.generated for replica in replicas)
        discarded = sum(sum(replica.discarded.values()) for replica in replicas)
        assert {"failed", "filtered", "surplus", "trained", "cancelled"} <= fates(scheduler).keys()
        assert discarded > 0
        assert generated == kept + discarded
        assert kept == trained + lost

    simulate(main)


def test_metrics_travel_with_the_batch() -> None:
    async def main() -> None:
        async with playing() as scheduler:
            batch = await got(scheduler, 4)
            assert batch.meta_info["metrics"]["fate/trained"] == 4
            assert batch.meta_info["wait_seconds"] == 1.0

    simulate(main)


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_a_reward_runs_after_the_slot_is_freed() -> None:
    async def slow(sample: Sample) -> float:
        await asyncio.sleep(5.0)
        return 0.5

    async def main() -> None:
        async with playing(reward=slow, batch_size=3, slots=1) as scheduler:
            batch, when = await timed(got(scheduler, 3))
            assert when == 3 * 1.0 + 5.0
            assert column(batch, "started") == [0.0, 1.0, 2.0]
            assert column(batch, "scores") == [0.5] * 3
            assert column(batch, "episode_scores") == [1.0] * 3

    simulate(main)


def test_a_slow_reward_holds_no_slot_and_no_replica_but_its_place_in_the_reserve() -> None:
    """Batches of one group, alpha 1: the first task has a reward of 30 s, the others have one of none."""

    async def reward(sample: Sample) -> float:
        await asyncio.sleep(0.0 if sample.trajectory.group else 30.0)
        return 1.0

    async def main() -> None:
        async with playing(reward=reward, batch_size=1, alpha=1, slots=4) as scheduler:
            batch, when = await timed(got(scheduler, 1))
            assert (column(batch, "task_id"), when) == (["toy/1"], 1.0)  # a younger one goes first
            await publish(scheduler, 1)
            await scheduler.resume()
            waiting = asyncio.ensure_future(got(scheduler, 1))
            await asyncio.sleep(10.0)
            metrics = scheduler.metrics()
            assert metrics["slots/busy"] == 0
            assert [entry.inflight for entry in scheduler.sampler.entries] == [0]
            assert metrics["groups/opened"] == 3  # the two of version 0, and one: no batch could take a second
            batch, when = await timed(waiting)
            assert (column(batch, "task_id"), when) == (["toy/0"], 31.0)  # at its last chance
            assert scheduler.metrics()["staleness/max"] == 1

    simulate(main)


def test_a_reward_that_is_late_is_asked_again_and_nothing_is_generated_again() -> None:
    calls: Counter[int] = Counter()

    async def flaky(sample: Sample) -> float:
        calls[sample.trajectory.id] += 1
        if calls[sample.trajectory.id] < 3:
            await asyncio.sleep(FOREVER)
        return 1.0

    async def main() -> None:
        replica = fake()
        async with playing([replica], reward=flaky, reward_seconds=10, max_attempts=3) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert when == 1.0 + 10 + 10
            assert len(replica.requests) == 4
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


def test_a_reward_that_never_answers_costs_the_attempt_and_is_no_reward_of_zero() -> None:
    calls: Counter[int] = Counter()

    async def dead(sample: Sample) -> float:
        calls[sample.trajectory.id] += 1
        if sample.trajectory.id == 0:
            await asyncio.sleep(FOREVER)
        return 1.0

    async def main() -> None:
        async with playing(reward=dead, reward_seconds=10, max_attempts=2) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert when == 1.0 + 2 * 10 + 1.0
            assert column(batch, "scores") == [1.0] * 4
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    simulate(main)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_shutdown_wakes_whoever_waits_for_a_batch_and_closes_all_envs() -> None:
    env = stepping(lambda seed, number: asyncio.sleep(FOREVER))

    async def main() -> float:
        scheduler = build(env=env, batch_size=8)
        waiting = asyncio.ensure_future(get(scheduler, 8))
        await asyncio.sleep(2.0)
        await scheduler.shutdown()
        with pytest.raises(SchedulerClosed, match="shut down"):
            await waiting
        check_after_shutdown(scheduler)
        assert fates(scheduler) == {"cancelled": 8}
        assert len(env.opened) == len(env.closed) == 8
        return now()

    assert simulate(main) == 2.0


def test_shutdown_cancels_what_is_ready_but_not_consumed() -> None:
    async def main() -> None:
        async with playing(batch_size=4, alpha=1) as scheduler:
            await got(scheduler, 4)
            await asyncio.sleep(5.0)
        assert fates(scheduler) == {"trained": 4, "cancelled": 4}
        assert "cancelled" in scheduler.why("toy/7")
        assert "shutdown" in scheduler.why("toy/7")

    simulate(main)


def test_shutdown_of_a_suspended_scheduler_wakes_the_turns_at_the_gate() -> None:
    async def main() -> float:
        async with playing(alpha=1) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            await scheduler.suspend()
        return now()

    assert simulate(main) == 0.5


@pytest.mark.parametrize("field", ["group_filter", "reward"])
def test_shutdown_does_not_wait_for_a_slow_filter_or_reward(field: str) -> None:
    async def slow(subject: Any) -> float:
        await asyncio.sleep(100.0)
        return 1.0

    async def main() -> float:
        async with playing(**{field: slow}, reward_seconds=1000) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(2.0)
        return now()

    assert simulate(main) == 2.0


def test_shutdown_lets_an_env_finish_its_close() -> None:
    class SlowToClose(OneStepEnv):
        closed = 0

        async def close(self) -> None:
            await asyncio.sleep(2.0)
            SlowToClose.closed += 1

    async def main() -> float:
        async with playing(env=SlowToClose) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(1.5)  # the episodes are over, the envs are closing
        assert SlowToClose.closed == 4
        return now()

    assert simulate(main) == 3.0


async def deaf(*_: int) -> None:
    """It ignores three cancellations."""
    for _ in range(4):
        try:
            await asyncio.sleep(4_000.0)
        except asyncio.CancelledError:
            continue
        return


def test_shutdown_does_not_wait_for_ever_for_an_env_that_ignores_its_cancellation() -> None:
    async def main() -> float:
        scheduler = build(env=stepping(deaf), close_seconds=30)
        await scheduler.resume()
        await asyncio.sleep(2.0)
        await scheduler.shutdown()
        scheduler.ledger.check()
        assert fates(scheduler) == {"cancelled": 4}
        return now()

    assert simulate(main) <= 2.0 + 2 * 30


def test_an_env_that_ignores_its_cancellation_does_not_keep_its_slot_for_ever() -> None:
    async def main() -> float:
        env = first_time(deaf)
        async with playing(env=env, slots=1, batch_size=2, lease_seconds=10, close_seconds=30) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert scheduler.metrics()["envs/leaked"] == 1
            for step in range(1, 9):  # the env returns at 4,011 s
                await asyncio.sleep(1_000.0)
                assert scheduler.metrics()["slots/busy"] == 0
                asked = now()
                await got(scheduler, 2, step)
                assert now() - asked == pytest.approx(2 * 1.0)  # one after the other, for there is one slot
            assert scheduler.metrics()["envs/leaked"] == 1
            assert fates(scheduler) == {"failed": 1, "trained": 18}
            return when

    assert simulate(main) <= 1.0 + 10 + 2 * 30 + 2.0


def test_a_dead_attempt_asks_the_model_nothing_more() -> None:
    """What a failed rollout left running in the background does not generate for an attempt that has its fate."""
    left: list[asyncio.Future[Any]] = []

    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        async def chatter() -> None:
            for _ in range(100):
                await model.chat("and then?")

        if not left:
            left.append(asyncio.ensure_future(chatter()))
            await asyncio.sleep(0.5)
            raise InfrastructureError("the env is gone")
        await model.chat(await env.reset(task.seed))

    async def main() -> None:
        replica = fake()
        async with playing([replica], rollout=play) as scheduler:
            await got(scheduler, 4)
            await asyncio.sleep(50.0)
            dead = [request for request in replica.requests if request.session == 0]
            for request in left:
                request.cancel()
            await asyncio.wait(left)
            assert len(dead) == 1

    simulate(main)


# -- stalls ------------------------------------------------------------------------------------------------------------


def test_a_scheduler_without_any_progress_says_so_after_stall_seconds() -> None:
    async def main() -> float:
        replicas = [fake(FOREVER)]
        async with playing(replicas, stall_seconds=100, sampler={"heartbeat_seconds": 1e7}) as scheduler:
            with pytest.raises(Stalled, match=r"stall_seconds 100.*4 slots busy.*g0 \(1 live, open\)"):
                await get(scheduler, 4)
            return now()

    assert simulate(main) == 100.0


def test_a_long_suspension_is_no_stall() -> None:
    async def main() -> None:
        cluster = cluster_of(fake(5.0))
        async with (
            playing(cluster=cluster, alpha=1) as trainer,
            playing(cluster=cluster, mode="val", tasks=4, stall_seconds=100) as validator,
        ):
            validating = asyncio.ensure_future(got(validator, -1))
            await asyncio.sleep(1.0)
            await trainer.suspend()
            await asyncio.sleep(198.0)
            await trainer.resume()
            batch, when = await timed(asyncio.wait_for(validating, 1000.0))
            assert (len(batch), when) == (4, pytest.approx(203.0))

    simulate(main)


@pytest.mark.timeout(20)
def test_a_run_may_last_for_days_of_virtual_time() -> None:
    async def main() -> None:
        async with playing([fake(10_000.0)], stall_seconds=1e6, sampler={"heartbeat_seconds": 1e4}) as scheduler:
            for step in range(26):
                await got(scheduler, 4, step)
                await publish(scheduler, step + 1)
            assert now() == pytest.approx(26 * 10_000.0)  # three days

    simulate(main)


def test_attempts_take_the_times_they_are_given() -> None:
    """The builders of these tests: the n-th attempt takes the n-th time."""

    async def main() -> None:
        async with playing([fake(by_attempt(1.0, 3.0, 2.0))], batch_size=3, slots=3) as scheduler:
            assert column(await got(scheduler, 3), "ended") == [1.0, 3.0, 2.0]

    simulate(main)


def test_two_replicas_serve_side_by_side() -> None:
    async def main() -> None:
        replicas = pool(2)
        async with playing(replicas, batch_size=8) as scheduler:
            await got(scheduler, 8)
            assert [len(replica.requests) for replica in replicas] == [4, 4]

    simulate(main)


# -- code that swallows its cancellation -------------------------------------------------------------------------------


async def undisturbed(seconds: float) -> None:
    """Take that long, whoever cancels."""
    over = asyncio.ensure_future(asyncio.sleep(seconds))
    while not over.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([over])


@pytest.mark.parametrize("bound", [{"slots": 2}, {"slots": 8, "max_envs": 2}], ids=["slots", "max_envs"])
def test_the_slot_of_an_env_that_returns_long_after_its_lease_is_freed_once(bound: dict[str, int]) -> None:
    inside, most = 0, 0

    async def step(seed: int, number: int) -> None:
        nonlocal inside, most
        if (seed, number) == (0, 0):
            await undisturbed(200.0)
            return
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(5.0)
        inside -= 1

    async def main() -> None:
        busy: set[float] = set()
        async with playing(env=stepping(step), alpha=1, lease_seconds=20, close_seconds=5, **bound) as scheduler:
            for version in range(1, 41):
                await got(scheduler, 4)
                busy.add(scheduler.metrics()["slots/busy"])
                await publish(scheduler, version)
            assert now() > 300.0
            assert scheduler.metrics()["envs/leaked"] == 1
        assert busy <= {0, 1, 2}

    simulate(main)
    assert most == 2


def test_a_member_that_lost_the_race_and_ignores_it_gives_its_slot_back_all_the_same() -> None:
    async def step(seed: int, number: int) -> None:
        if number == 2:
            await undisturbed(1_000.0)

    async def main() -> None:
        async with playing(
            env=stepping(step), group_size=2, extra_members=1, batch_size=2, tasks=1, slots=3, close_seconds=5
        ) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert when == 1.0
            await asyncio.sleep(2 * 5.0 + 0.1)
            assert scheduler.metrics()["slots/busy"] == 0
            assert scheduler.metrics()["envs/leaked"] == 1
            await asyncio.sleep(2_000.0)  # it returns, and nobody listens
            assert scheduler.metrics()["slots/busy"] == 0
            assert scheduler.metrics()["envs/leaked"] == 1
            assert fates(scheduler) == {"trained": 2, "surplus": 1}

    simulate(main)


def test_members_that_ignore_the_race_do_not_use_up_the_slots() -> None:
    async def step(seed: int, number: int) -> None:
        if number == 2:
            await undisturbed(1e5)

    async def main() -> None:
        async with playing(
            env=stepping(step), group_size=2, extra_members=1, batch_size=2, slots=3, close_seconds=5, alpha=1
        ) as scheduler:
            for version in range(1, 11):
                await got(scheduler, 2)
                await publish(scheduler, version)
            assert now() <= 10 * (1.0 + 2 * 5.0)

    simulate(main)


def test_a_close_that_ignores_its_cancellation_costs_close_seconds_and_not_the_slot() -> None:
    class Stubborn(OneStepEnv):
        async def close(self) -> None:
            await undisturbed(1_000.0)

    async def main() -> None:
        async with playing(env=Stubborn, batch_size=2, tasks=2, slots=1, close_seconds=5) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert when == 2 * (1.0 + 5.0)
            assert scheduler.metrics()["slots/busy"] == 0
            assert scheduler.metrics()["envs/leaked"] == 2
            await asyncio.sleep(2_000.0)
            assert scheduler.metrics()["slots/busy"] == 0
            assert scheduler.metrics()["envs/leaked"] == 2

    simulate(main)


def test_a_reward_that_ignores_its_cancellation_is_given_up_at_its_deadline() -> None:
    async def stubborn(sample: Sample) -> float:
        if sample.trajectory.id == 0:
            await undisturbed(1_000.0)
        return 1.0

    async def main() -> None:
        async with playing(reward=stubborn, reward_seconds=10, max_attempts=2) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert when == 1.0 + 2 * 10 + 1.0
            assert column(batch, "attempt") == [1, 0, 0, 0]
            await asyncio.sleep(2_000.0)
            assert fates(scheduler) == {"failed": 1, "trained": 4}

    simulate(main)


def test_a_rollout_that_swallows_its_cancellation_gets_no_new_lease_and_delays_no_other() -> None:
    """Three members of task 1 hang, and their leases end when that of task 0's loser would, if it got one."""

    class Hangs:
        made: ClassVar[Counter[int]] = Counter()

        async def reset(self, seed: int) -> str:
            self.seed, self.number, self.steps = seed, self.made[seed], 0
            self.made[seed] += 1
            return f"task {seed}"

        async def step(self, action: str) -> tuple[Any, ...]:
            self.steps += 1
            if self.seed == 1 and self.steps == 1:
                for _ in range(20):
                    await asyncio.sleep(0)
                return "more", 0.0, False, False, {}
            if (self.seed == 0 and self.number == 2) or (self.seed == 1 and self.number < 3):
                await asyncio.sleep(1e5)
            return "", 1.0, True, False, {}

    async def careless(task: Task, env: EnvHandle, model: Model) -> None:
        observation = await env.reset(task.seed)
        with suppress(asyncio.CancelledError):
            await model.chat(observation)
        while not env.done:
            await env.step("go on")

    async def main() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with playing(
            [fake(by_attempt(1.0, 1.0, 100.0))], env=Hangs, rollout=careless, group_size=2, extra_members=1,
            batch_size=4, tasks=2, slots=6, lease_seconds=20, close_seconds=5,
        ) as scheduler:  # fmt: skip
            _, when = await timed(got(scheduler, 4))
            assert when == 1.0 + 20.0 + 1.0
            assert scheduler.metrics()["slots/leases_expired"] == 3
            await asyncio.sleep(200.0)
            assert scheduler.metrics()["slots/leases_expired"] == 3
            assert scheduler.metrics()["slots/busy"] == 0
        assert complaints == []

    simulate(main)


# -- tasks that always fail, and how often they may --------------------------------------------------------------------


def test_a_task_whose_reward_never_answers_is_retired_and_the_reward_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def dead(sample: Sample) -> float:
        await asyncio.sleep(FOREVER if sample.trajectory.task.seed == 1 else 0.0)
        return 1.0

    async def main() -> None:
        async with playing(reward=dead, group_size=2, reward_seconds=10, max_attempts=2, error_budget=0) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert set(column(batch, "task_id")) == {"toy/0", "toy/2"}
            assert when <= 2 * (1.0 + 2 * 10) + 1.0
            assert "task retired, member" in scheduler.why("toy/1")
            assert "of domain 'toy' did not return within reward_seconds" in scheduler.why("toy/1")
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)
    told = [message for message in caplog.messages if "did not return within" in message]
    assert told[0].endswith("of domain 'toy' did not return within reward_seconds (10 s), asked 2 times")


def test_a_task_whose_infrastructure_always_fails_is_retired_after_four_times_as_many_tries() -> None:
    async def gone(seed: int, number: int) -> None:
        if seed == 1:
            raise InfrastructureError("the sandbox is gone")

    async def main() -> None:
        async with playing(env=stepping(gone), max_attempts=2, error_budget=0) as scheduler:
            batch = await got(scheduler, 4)
            assert set(column(batch, "task_id")) == {f"toy/{seed}" for seed in (0, 2, 3, 4)}
            assert fates(scheduler) == {"failed": 4 * 2, "trained": 4}
            assert "task retired" in scheduler.why("toy/1")
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


def test_a_timeout_error_that_a_reward_raises_is_its_error_and_no_deadline() -> None:
    calls: Counter[int] = Counter()

    async def client(sample: Sample) -> float:
        calls[sample.trajectory.id] += 1
        if sample.trajectory.id == 0:
            raise TimeoutError("the judge did not answer")
        return 1.0

    async def main() -> None:
        async with playing(reward=client) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert (when, set(calls.values())) == (2.0, {1})
            assert scheduler.metrics()["errors/user_code"] == 1
            assert "reward: TimeoutError: the judge did not answer" in scheduler.why("g0.0#0")

    simulate(main)


# -- names, verdicts, turns --------------------------------------------------------------------------------------------


def test_the_text_of_an_error_is_in_why_and_not_in_the_names_of_metrics() -> None:
    calls: list[int] = []

    async def flaky(seed: int, number: int) -> None:
        calls.append(seed)
        if number == 0:
            raise InfrastructureError(f"connection {len(calls)} reset")

    async def main() -> None:
        async with playing(env=stepping(flaky), batch_size=16) as scheduler:
            metrics = (await got(scheduler, 16)).meta_info["metrics"]
            lost = {name: tokens for name, tokens in metrics.items() if name.startswith("tokens_lost/")}
            assert lost == {"tokens_lost/step: InfrastructureError": 16 * 10}
            assert "step: InfrastructureError: connection 1 reset" in scheduler.why("g0.0#0")

    simulate(main)


def test_a_lambda_around_an_async_filter_is_awaited() -> None:
    async def main() -> None:
        async with playing(group_filter=lambda group: keep_odd(group), group_size=2) as scheduler:
            assert set(column(await got(scheduler, 4), "task_id")) == {"toy/1", "toy/3"}

    simulate(main)


def test_max_turns_also_ends_an_episode_that_only_talks() -> None:
    async def talk(task: Task, env: EnvHandle, model: Model) -> None:
        await model.chat(await env.reset(task.seed))
        while True:
            await model.chat("go on")

    async def main() -> None:
        async with playing(rollout=talk, max_turns=3, stall_seconds=100) as scheduler:
            batch, when = await timed(got(scheduler, 4))
            assert when == 3.0
            assert column(batch, "truncated") == [True] * 4
            assert [len(row) for row in rows(batch, "step_scores")] == [3] * 4

    simulate(main)


# -- versions and the gate ---------------------------------------------------------------------------------------------


def test_staleness_is_never_negative_while_a_version_is_being_rolled_out() -> None:
    class SlowToLoad(FakeReplica):
        async def load_weights(self, version: int, weights: object) -> None:
            await asyncio.sleep(50.0)
            await super().load_weights(version, weights)

    async def main() -> None:
        slow = SlowToLoad(seconds=1.0, name="slow", devices=(1,))
        async with playing([fake(), slow], alpha=4, slots=4) as scheduler:
            await scheduler.resume()
            loading = asyncio.ensure_future(scheduler.sampler.load_weights(1))
            await asyncio.sleep(3.5)
            for step in range(3):
                batch = await got(scheduler, 4, step)
                assert batch.meta_info["metrics"]["staleness/mean"] >= 0
            assert any(1 in row for row in rows(batch, "versions"))
            assert (scheduler.queue.version, min(scheduler.queue.staleness)) == (0, 0)
            await loading

    simulate(main)


@pytest.mark.parametrize("shuffle", range(20))
def test_the_first_calls_after_weights_were_published_begin_at_that_version(shuffle: int) -> None:
    async def main() -> None:
        async with playing(alpha=1, slots=16) as scheduler:
            await scheduler.sampler.load_weights(3)
            _, batch = await asyncio.gather(scheduler.resume(), got(scheduler, 4))
            assert batch.meta_info["version"] == 3
            assert "begun at version 3" in scheduler.why("g0")
            assert batch.meta_info["metrics"]["staleness/max"] == 0

    simulate(main, shuffle=shuffle)


def test_suspend_after_shutdown_is_refused_and_does_not_hold_the_gate() -> None:
    async def main() -> None:
        cluster = cluster_of(fake())
        async with playing(cluster=cluster, mode="val", tasks=4) as validator:
            async with playing(cluster=cluster) as trainer:
                await got(trainer, 4)
            with pytest.raises(SchedulerClosed, match="shut down"):
                await trainer.suspend()
            assert not trainer.sampler.is_held
            assert len(await asyncio.wait_for(got(validator, -1), 10.0)) == 4

    simulate(main)


def test_a_version_that_is_published_while_the_scheduler_starts_counts_when_it_has_started() -> None:
    async def main() -> None:
        replica = fake()
        async with playing([replica], batch_size=4) as scheduler:
            starting = asyncio.ensure_future(scheduler.resume())
            await asyncio.sleep(0)
            assert scheduler._run_task is not None
            assert scheduler._tasks is None
            replica.version = scheduler.sampler.version = 1  # what the end of a `load_weights` does
            for heard in scheduler.sampler.on_version:
                heard(1)
            await starting
            assert (await got(scheduler, 4)).meta_info["version"] == 1

    simulate(main)


# -- the same tasks again ----------------------------------------------------------------------------------------------


def test_a_validation_can_be_asked_again_for_the_same_tasks() -> None:
    async def main() -> None:
        async with playing(tasks=6, mode="val", batch_size=1) as scheduler:
            first = await got(scheduler, -1)
            assert await get(scheduler, -1) is None
            await scheduler.reset()
            await publish(scheduler, 1)
            second = await got(scheduler, -1)
            assert column(first, "task_id") == column(second, "task_id")
            assert not set(column(first, "traj_id")) & set(column(second, "traj_id"))
            assert second.meta_info["version"] == 1
            assert await get(scheduler, -1) is None
            assert fates(scheduler) == {"validated": 12}

    simulate(main)


def test_finite_tasks_can_be_trained_in_several_passes() -> None:
    async def main() -> None:
        async with playing(tasks=3, batch_size=4, group_size=2, alpha=1) as scheduler:
            seen: list[str] = []
            version = 0
            for _ in range(3):
                while (batch := await get(scheduler, 4)) is not None:
                    seen += column(batch, "task_id")[::2]
                    version += 1
                    await publish(scheduler, version)
                await scheduler.reset()
            assert seen == ["toy/0", "toy/1", "toy/2"] * 3
            assert scheduler.metrics()["staleness/max"] <= 1

    simulate(main)


def test_reset_is_refused_while_groups_are_open() -> None:
    async def main() -> None:
        async with playing(tasks=6, batch_size=2, alpha=1) as scheduler:
            await got(scheduler, 2)
            with pytest.raises(RolloutError, match="2 groups of this pass over them are open, the oldest is g2"):
                await scheduler.reset()
            await publish(scheduler, 1)
            assert column(await got(scheduler, 2), "task_id") == ["toy/2", "toy/3"]

    simulate(main)


def test_reset_awaits_the_batch_that_is_being_taken() -> None:
    async def main() -> None:
        async with playing(tasks=4, mode="val", batch_size=1) as scheduler:
            batch, _ = await asyncio.gather(got(scheduler, -1), scheduler.reset())
            assert len(batch) == len(await got(scheduler, -1)) == 4

    simulate(main)


def test_a_pass_that_fails_as_a_whole_is_an_error_also_after_one_that_was_trained() -> None:
    async def step(seed: int, number: int) -> Any:
        if number:
            raise ValueError("worn out")

    async def main() -> None:
        async with playing(env=stepping(step), tasks=2, mode="val", batch_size=1) as scheduler:
            assert len(await got(scheduler, -1)) == 2
            await scheduler.reset()
            with pytest.raises(NothingFinished, match="ValueError: worn out"):
                await get(scheduler, -1)

    simulate(main)
