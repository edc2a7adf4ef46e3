"""Where the reference system breaks (FIELD.md, "Beat"), one by one: the right behaviour, with its time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from builders import (
    FOREVER,
    EventRecorder,
    by_attempt,
    causes,
    chain,
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
    sim_replicas,
    simulate,
    stepping,
    timed,
)

from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Finish
from cadenza.rollout.collate import FINISH
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate, Task, Trajectory
from cadenza.simulation.virtual_cluster.tokens import seeded_tokens

# -- 1: a group is not welded to its envs ------------------------------------------------------------------------------


def test_beat_01_an_idle_slot_helps_any_group() -> None:
    slow, quick = [4.0] * 4, [1.0] * 4
    welded = sum(slow) / 2  # two of four slots for each of two groups

    async def main() -> float:
        async with playing([fake(by_attempt(*slow, *quick))], group_size=4, batch_size=8, slots=4) as scheduler:
            await got(scheduler, 8)
            return now()

    assert simulate(main) == pytest.approx(sum(slow + quick) / 4) == 5.0 < welded


def test_beat_01_one_group_takes_all_slots_that_are_free() -> None:
    async def main() -> float:
        async with playing(group_size=8, batch_size=8, slots=8) as scheduler:
            await got(scheduler, 8)
            return now()

    assert simulate(main) == 1.0


# -- 2: no head-of-line blocking ---------------------------------------------------------------------------------------


def test_beat_02_a_batch_of_24_is_returned_when_24_are_complete_although_a_straggler_runs() -> None:
    async def main() -> tuple[float, set[int]]:
        replica = fake(by_attempt(4.0, rest=1.0))
        async with playing([replica], group_size=4, batch_size=24, slots=28, alpha=1) as scheduler:
            batch, when = await timed(got(scheduler, 24))
            straggler = open_attempts(scheduler)[0]
            assert (straggler.id, straggler.fate) == (0, None)
            assert len(batch) == 24
            return when, set(column(batch, "traj_group_id"))

    assert simulate(main) == (1.0, {1, 2, 3, 4, 5, 6})


def test_beat_02_the_straggler_is_in_the_next_batch_when_it_is_complete() -> None:
    async def main() -> tuple[float, list[int]]:
        replica = fake(by_attempt(4.0, rest=1.0), tokens=8)
        async with playing([replica], group_size=4, batch_size=24, slots=28, alpha=1) as scheduler:
            await got(scheduler, 24)
            await publish(scheduler, 1)
            batch, when = await timed(got(scheduler, 24, 1))
            return when, sorted(set(column(batch, "traj_group_id")))[:1]

    assert simulate(main) == (4.0, [0])


def test_beat_02_a_hung_env_does_not_block_the_second_batch() -> None:
    async def hang() -> None:
        await asyncio.sleep(FOREVER)

    async def main() -> list[float]:
        env = first_time(hang)
        async with playing(env=env, group_size=4, batch_size=24, slots=32, alpha=2, lease_seconds=600) as scheduler:
            times = []
            for step in range(2):
                await got(scheduler, 24, step)
                times.append(now())
                await publish(scheduler, step + 1)
            return times

    assert simulate(main) == [1.0, 2.0]


# -- 3: a filtered group is replaced by all free slots -----------------------------------------------------------------

STAGGERED = [0.30625 + 0.08125 * i for i in range(8)]
"""How long the members of a group of 8 take."""


def all_but_the_first(group: list[Trajectory]) -> bool:
    return group[0].group != 0


def test_beat_03_a_filtered_group_is_replaced_by_all_free_slots() -> None:
    last = max(STAGGERED)
    one_env_alone = last + sum(STAGGERED)
    assert one_env_alone == pytest.approx(5.6)

    async def main() -> float:
        replica = fake(by_attempt(*STAGGERED, *STAGGERED))
        async with playing([replica], group_size=8, batch_size=8, slots=8, group_filter=all_but_the_first) as scheduler:
            batch = await got(scheduler, 8)
            assert set(column(batch, "traj_group_id")) == {1}
            assert fates(scheduler) == {"filtered": 8, "trained": 8}
            return now()

    assert simulate(main) == pytest.approx(last + last) == pytest.approx(1.75)


def test_beat_03_no_traj_id_twice_over_filtered_failed_and_trained_attempts() -> None:
    async def fail_now_and_then(seed: int, number: int) -> None:
        if (seed + number) % 5 == 0:
            raise InfrastructureError("the sandbox is gone")

    async def main() -> None:
        story, trained = EventRecorder(), list[int]()
        async with playing(
            env=stepping(fail_now_and_then),
            group_filter=lambda group: group[0].task.seed % 3 > 0,
            group_size=4, batch_size=8, alpha=1, events=story,
        ) as scheduler:  # fmt: skip
            for step in range(4):
                trained += column(await got(scheduler, 8, step), "traj_id")
                await publish(scheduler, step + 1)
            assert fates(scheduler).keys() >= {"filtered", "failed", "trained"}
        assert len(set(trained)) == len(trained) == 32
        issued = [event.subject for event in story.of("issue")]
        assert len(set(issued)) == len(issued) == scheduler.ledger.issued

    simulate(main)


# -- 4: what dies gives its slot back, and nothing else dies with it ---------------------------------------------------


def test_beat_04_the_slot_of_a_dead_env_is_returned() -> None:
    async def die() -> None:
        raise ConnectionError("the env is dead")

    async def main() -> float:
        async with playing(env=first_time(die), batch_size=3, slots=1) as scheduler:
            await got(scheduler, 3)
            return now()

    assert simulate(main) == 4.0  # one slot: the attempt that died, and three that lived


def test_beat_04_one_exception_in_one_env_costs_one_attempt() -> None:
    async def die() -> None:
        raise ZeroDivisionError("a bug in the env")

    async def main() -> tuple[float, dict[str, int]]:
        async with playing(env=first_time(die), group_size=4, batch_size=8, slots=8) as scheduler:
            batch = await got(scheduler, 8)
            assert column(batch, "scores") == [1.0] * 8
            return now(), fates(scheduler)

    assert simulate(main) == (2.0, {"failed": 1, "trained": 8})


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_beat_04_what_is_not_an_exception_costs_one_attempt_too(error: type[BaseException]) -> None:
    """An env that exits, or whose own task was cancelled, is a failed env and not the end of the run."""

    async def die() -> None:
        raise error

    async def main() -> tuple[float, dict[str, int]]:
        async with playing(env=first_time(die), group_size=4, batch_size=8, slots=8) as scheduler:
            await got(scheduler, 8)
            return now(), fates(scheduler)

    assert simulate(main) == (2.0, {"failed": 1, "trained": 8})


def test_beat_04_a_dead_client_does_not_make_suspend_hang() -> None:
    """The rollout dies and leaves its request in flight; the replica, not the client, owns it."""
    left: list[asyncio.Future[Any]] = []

    async def play(task: Task, env: EnvHandle, model: Model) -> None:
        if not left:
            left.append(asyncio.ensure_future(model.chat(await env.reset(task.seed))))
            await asyncio.sleep(0.5)
            raise ConnectionError("the env worker is dead")
        await model.chat(await env.reset(task.seed))

    async def main() -> float:
        [replica] = sim_replicas(1, 1000)
        async with playing([replica], rollout=play, batch_size=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(1.0)
            began = now()
            await scheduler.suspend()
            assert not replica.generating
            took = now() - began
            for request in left:
                request.cancel()
            await asyncio.wait(left)
            return took

    assert simulate(main) == pytest.approx(0.0, abs=0.02)  # at most the decode step in progress


def test_beat_04_a_hung_env_does_not_make_suspend_hang() -> None:
    async def hang() -> None:
        await asyncio.sleep(FOREVER)

    async def main() -> float:
        async with playing(env=first_time(hang), batch_size=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(1.5)
            await scheduler.suspend()
            return now()

    assert simulate(main) == 1.5


# -- 5: suspend keeps what is written ----------------------------------------------------------------------------------


def test_beat_05_suspend_keeps_the_tokens_of_every_turn_in_flight_and_none_is_written_twice() -> None:
    async def main() -> float:
        replicas = sim_replicas(2, 100, vocab=1000)
        async with playing(replicas, env=chain(2), batch_size=8, alpha=2, slots=8) as scheduler:
            await scheduler.resume()
            for version, moment in enumerate((0.5, 1.5), start=1):
                await asyncio.sleep(moment - now())
                await publish(scheduler, version)
                assert not any(replica.generating for replica in replicas)
                if version == 1:
                    await scheduler.resume()
            batch, when = await timed(got(scheduler, 8))
            assert sum(replica.generated for replica in replicas) == sum(len(r) for r in responses(batch)) == 8 * 200
            assert all(replica.discarded == {} for replica in replicas)
            return when

    assert simulate(main) == pytest.approx(2.0)


def test_beat_05_an_interrupted_turn_reads_as_if_never_interrupted() -> None:
    seeds: set[int] = set()

    async def main() -> None:
        replicas = sim_replicas(1, 100, vocab=1000, on_event=lambda time, kind, request: seeds.add(request.seed))
        async with playing(replicas, batch_size=4, alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.3)
            await publish(scheduler, 1)
            batch = await got(scheduler, 4)
        assert sorted(responses(batch)) == sorted(seeded_tokens(seed, 0, 100, 1000)[0].tolist() for seed in seeds)
        for versions in batch.batch.ragged("versions"):
            assert versions[versions >= 0].tolist() == [0] * 30 + [1] * 70

    simulate(main)


# -- 6: nothing slips between gate and engine --------------------------------------------------------------------------


def test_beat_06_a_request_between_gate_and_engine_is_caught_by_suspend() -> None:
    async def main() -> float:
        [replica] = sim_replicas(1, 100, arrival_delay=0.2)
        async with playing([replica], batch_size=4, alpha=1) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.1)  # all requests have their grant, none has arrived
            await scheduler.suspend()
            await asyncio.sleep(10.0)
            assert (replica.generated, replica.generating) == (0, False)
            batch, when = await timed(got(scheduler, 4))
            assert replica.generated >= 4 * 100
            assert [len(response) for response in responses(batch)] == [100] * 4
            return when

    assert simulate(main) == pytest.approx(10.1 + 0.2 + 1.0)


# -- 7: a shrink touches only what leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 5.0])
def test_beat_07_requests_to_a_healthy_replica_are_not_delayed_by_a_shrink_with_late_aborts(late: float) -> None:
    async def main() -> tuple[float, dict[str, Any]]:
        leaving, healthy = sim_replicas(2, lambda request: 100 if request.session % 2 else 400)
        async with playing([leaving, healthy], env=chain(3), batch_size=2, slots=2) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            leaving.late_abort(late)
            shrinking = asyncio.ensure_future(scheduler.shrink_sampler([0]))
            batch = await got(scheduler, 2)
            return column(batch, "ended")[1], await shrinking

    ended, report = simulate(main)
    assert ended == pytest.approx(3.0)  # three turns of 100 tokens, whatever the shrink does
    assert report["devices"] == {0: "asleep", 1: "active"}
    assert report["seconds"] == pytest.approx(late, abs=0.02)


def test_beat_07_the_routing_table_is_never_half_changed_when_an_abort_is_lost() -> None:
    async def main() -> dict[str, Any]:
        leaving, healthy = sim_replicas(2, 100)
        async with playing([leaving, healthy], batch_size=2, slots=2, alpha=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            leaving.lost_abort()
            report = await scheduler.shrink_sampler([0])
            assert report["seconds"] == pytest.approx(scheduler.sampler.config.control_seconds)
            for step in range(3):
                assert len(await got(scheduler, 2, step)) == 2
            return report

    report = simulate(main)
    assert report["devices"] == {0: "lost", 1: "active"}
    assert (report["replicas"], report["lost"]) == ([], ["r0"])


# -- 8: a dead replica leaves the routing table ------------------------------------------------------------------------


def test_beat_08_a_dead_replica_gets_no_request_after_detection_and_its_requests_go_on_elsewhere() -> None:
    async def main() -> tuple[float, dict[str, int]]:
        dead, alive = pool(2, 1.0)
        async with playing([dead, alive], env=chain(3), batch_size=8, slots=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            before = len(dead.requests)
            assert before == 4
            dead.kill("power cut")
            await got(scheduler, 8)
            assert len(dead.requests) == before
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            return now(), fates(scheduler)

    assert simulate(main) == (3.5, {"trained": 8})  # three turns; half a turn was lost with the replica


def test_beat_08_a_hung_replica_is_detected_and_its_requests_go_on_elsewhere() -> None:
    async def main() -> tuple[float, dict[str, int]]:
        hung, alive = sim_replicas(2, 100)
        patience = {"heartbeat_seconds": 1.0, "max_strikes": 3}
        async with playing([hung, alive], batch_size=8, slots=8, sampler=patience) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            hung.hang()
            await got(scheduler, 8)
            return now(), fates(scheduler)

    when, ends = simulate(main)
    assert ends == {"trained": 8}
    assert when == pytest.approx(4.0 + 1.0)  # looks at 1 (moves), 2, 3 and 4 s, then the whole turn again


# -- 9: what hangs costs one lease, what is lost is counted ------------------------------------------------------------


def test_beat_09_a_hung_env_costs_one_lease() -> None:
    async def hang() -> None:
        await asyncio.sleep(FOREVER)

    async def main() -> tuple[float, dict[str, int], float]:
        async with playing(env=first_time(hang), group_size=4, batch_size=8, slots=8, lease_seconds=30) as scheduler:
            await got(scheduler, 8)
            return now(), fates(scheduler), scheduler.metrics()["slots/leases_expired"]

    assert simulate(main) == (1.0 + 30 + 1.0, {"failed": 1, "trained": 8}, 1)


def test_beat_09_stale_surplus_and_late_rollouts_are_all_counted() -> None:
    """Group 0 is slow and goes stale, every other group starts one member too many, two envs outlive their lease."""

    async def step(seed: int, number: int) -> None:
        if seed == 1 and number < 2:
            await asyncio.sleep(4.0)

    async def main() -> None:
        replica = fake(lambda request: 100.0 if request.group == 0 else 1.0)
        async with playing(
            [replica], env=stepping(step), staleness="drop", alpha=2, group_size=2, extra_members=1,
            batch_size=4, slots=18, lease_seconds=3.0,
        ) as scheduler:  # fmt: skip
            for number in range(3):
                await got(scheduler, 4, number)
                await asyncio.sleep(2.5)
                await publish(scheduler, number + 1)
            counted, metrics = fates(scheduler), scheduler.metrics()
            assert counted["stale"] == metrics["fate/stale"] == 3  # all members of group 0
            assert counted["failed"] == metrics["fate/failed"] == metrics["slots/leases_expired"] == 2
            unfinished = [group for group in scheduler.ledger.open_groups() if len(group.finished) < 2]
            whole = scheduler.ledger.groups_opened - len(unfinished) - 1
            assert counted["surplus"] == metrics["fate/surplus"] == whole
            assert counted["trained"] == 12
            assert sum(counted.values()) + scheduler.ledger.live == scheduler.ledger.issued

    simulate(main)


# -- 10: trajectories are ragged ---------------------------------------------------------------------------------------


def test_beat_10_a_trajectory_of_1k_tokens_weighs_9_KB_and_not_137() -> None:
    async def main() -> float:
        [replica] = sim_replicas(1, lambda request: 1000 if request.session else 4000)
        async with playing([replica], batch_size=64, slots=64, sampling={"max_tokens": 4096}) as scheduler:
            batch = await got(scheduler, 64)
            longest = batch[np.argsort(batch.batch.numpy("lengths"))[-1:]]
            return (batch.nbytes - longest.nbytes) / 63

    per_trajectory = simulate(main)
    assert 8_000 < per_trajectory < 10_000


# -- 13: nothing in a batch is made up ---------------------------------------------------------------------------------


def test_beat_13_infrastructure_failures_never_enter_a_batch_as_samples_of_score_zero() -> None:
    async def fail_half(seed: int, number: int) -> None:
        if number % 2 == 0:
            raise InfrastructureError("the sandbox is gone")

    async def main() -> None:
        async with playing(env=stepping(fail_half), group_size=4, batch_size=16, slots=16) as scheduler:
            batch = await got(scheduler, 16)
            assert column(batch, "scores") == [1.0] * 16
            assert all(len(response) == 10 for response in responses(batch))
            assert causes(scheduler, Fate.FAILED) == {"step: InfrastructureError": 16}

    simulate(main)


def test_beat_13_a_dead_replica_does_not_become_a_sample_of_score_zero() -> None:
    async def main() -> None:
        dead, alive = pool(2)
        async with playing([dead, alive], batch_size=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            dead.kill("power cut")
            batch = await got(scheduler, 8)
            assert column(batch, "scores") == [1.0] * 8
            assert column(batch, "finish_reason") == [FINISH[Finish.STOP]] * 8
            assert all(len(response) == 10 for response in responses(batch))

    simulate(main)


def test_beat_13_a_batch_is_never_padded_by_duplicates() -> None:
    async def main() -> None:
        async with playing(tasks=5, group_size=2, batch_size=8) as scheduler:
            first, last = await got(scheduler, 8), await got(scheduler, 8, 1)
            assert (len(first), len(last)) == (8, 2)
            ids = column(first, "traj_id") + column(last, "traj_id")
            assert len(set(ids)) == 10
            assert "is_padding" not in last.batch
            assert await get(scheduler, 8, 2) is None

    simulate(main)
