"""Slots in env workers, rehearsed in one process under virtual time: the contract is that of slots in the scheduler."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from builders import (
    FOREVER,
    OneStepEnv,
    build,
    by_attempt,
    causes,
    chain,
    check_after_shutdown,
    column,
    fake,
    fates,
    first_time,
    get,
    got,
    now,
    playing,
    pool,
    publish,
    responses,
    rows,
    simulate,
    stepping,
)  # fmt: skip

from cadenza.cluster import VersionMismatch, WorkerLost
from cadenza.cluster.worker_handle import LocalWorkerHandle, WorkerHandle
from cadenza.data import DataProto
from cadenza.errors import InfrastructureError
from cadenza.rewards import Sample
from cadenza.rollout import fleet as fleet_module
from cadenza.rollout import fleet_worker
from cadenza.rollout.failures import RolloutError, TrajectoriesLost
from cadenza.rollout.fleet import EnvFleet, NoEnvWorkers
from cadenza.rollout.ledger import LedgerError
from cadenza.rollout.records import Fate, Trajectory


def fleet(scheduler: Any) -> EnvFleet:
    assert isinstance(scheduler._slots, EnvFleet)
    return scheduler._slots


async def batches(count: int, **options: Any) -> list[DataProto]:
    async with playing(pool(2, lambda r: 1.0 + r.session % 3), batch_size=8, group_size=4, **options) as scheduler:
        found = []
        for step in range(count):
            found.append(await got(scheduler, 8, step))
            await publish(scheduler, step + 1)
        return found


SAME = ("input_ids", "response_mask", "infer_logprobs", "versions", "step_scores")


def test_a_fleet_gives_the_batches_that_one_worker_gives() -> None:
    env = chain(3, 0.5)
    alone = simulate(lambda: batches(3, env=env, slots=6))
    apart = simulate(lambda: batches(3, env=env, slots=6, workers=3))
    for one, other in zip(alone, apart, strict=True):
        for name in SAME:
            for row, same in zip(rows(one, name), rows(other, name), strict=True):
                np.testing.assert_array_equal(row, same)
        for name in ("scores", "seed", "task_id", "traj_key", "finish_reason", "truncated"):
            assert column(one, name) == column(other, name)
        assert sorted(set(column(other, "env_ids"))) <= list(range(6))


def test_the_emptiest_worker_gets_the_next_lease() -> None:
    async def main() -> None:
        async with playing([fake(100.0)], slots=7, workers=3, batch_size=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(1.0)
            assert sorted(len(worker.attempts) for worker in fleet(scheduler)._workers) == [2, 2, 3]
            assert scheduler.metrics()["slots/busy"] == 7

    simulate(main)


def test_suspend_and_resume_go_on_from_the_tokens() -> None:
    async def main() -> None:
        replica = fake(10.0)
        async with playing([replica], slots=4, workers=2, batch_size=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            await scheduler.suspend()
            assert not replica._running
            await asyncio.sleep(50.0)
            assert not replica._running
            batch = await got(scheduler, 4)
        assert all(len(tokens) == 10 for tokens in responses(batch))
        assert {request.offset for request in replica.requests} > {0}

    simulate(main)


def test_a_dead_env_worker_costs_its_own_attempts_only() -> None:
    async def main() -> None:
        replica = fake(10.0)
        async with playing([replica], slots=8, workers=2, batch_size=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            worker = fleet(scheduler)._workers[0]
            worker.handle.kill()
            batch = await got(scheduler, 8)
            assert causes(scheduler, Fate.FAILED) == {"env worker lost": 4}
            assert sorted(column(batch, "attempt")) == [0] * 4 + [1] * 4
            assert len(fleet(scheduler)._workers) == 2
            assert scheduler.sampler.entries[0].inflight == 0
            assert not replica._running
        assert fates(scheduler) == {"trained": 8, "failed": 4}

    simulate(main)


def test_what_a_dead_env_worker_finished_is_kept() -> None:
    async def main() -> None:
        async with playing([fake(1.0)], slots=4, workers=2, batch_size=4, group_size=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            for worker in list(fleet(scheduler)._workers):
                worker.handle.kill()
            await asyncio.sleep(5.0)
            batch = await got(scheduler, 4)
            assert column(batch, "attempt") == [0] * 4

    simulate(main)


def test_trajectories_that_are_lost_with_their_node_cost_their_groups() -> None:
    async def main() -> None:
        async with playing(
            [fake(by_attempt(1.0, 1.0, 3.0, 3.0))], slots=4, workers=2, batch_size=4, group_size=2
        ) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            ready, _ = scheduler.ledger.open_groups()
            lost: Any = ready.finished[0].trajectory
            lost.bundle.worker = Gone("node")
            with pytest.raises(TrajectoriesLost, match="1 of the 2 groups of this batch are lost: the node is gone"):
                await get(scheduler, 4)
            assert len(await got(scheduler, 4)) == 2

    simulate(main)


class Gone(LocalWorkerHandle):
    """A peer whose node is gone."""

    def __init__(self, role: str) -> None:
        WorkerHandle.__init__(self, role)

    def fetch_blocking(self, handles: Any) -> list[Any]:
        raise WorkerLost("the node is gone")


def test_env_workers_that_die_again_and_again_end_the_run() -> None:
    async def main() -> None:
        async with playing([fake(10.0)], slots=4, workers=2, batch_size=4) as scheduler:

            async def murder() -> None:
                while True:
                    await asyncio.sleep(1.0)
                    for worker in list(fleet(scheduler)._workers):
                        worker.handle.kill()

            murderer = asyncio.create_task(murder())
            with pytest.raises(NoEnvWorkers, match="died in a row"):
                await get(scheduler, 4)
            murderer.cancel()

    simulate(main)


def test_an_env_worker_that_cannot_be_replaced_at_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with playing([fake(1.0)], slots=4, workers=2, batch_size=4, alpha=1.0) as scheduler:
            await got(scheduler, 4)
            real, tries = fleet_worker.start_worker, 0

            async def full(*args: Any, **options: Any) -> WorkerHandle:
                nonlocal tries
                tries += 1
                if tries == 1:
                    raise InfrastructureError("no node has room")
                if tries == 2:
                    raise VersionMismatch("another torch")
                return await real(*args, **options)

            monkeypatch.setattr(fleet_worker, "start_worker", full)
            fleet(scheduler)._workers[0].handle.kill()  # type: ignore[union-attr]
            for version in range(1, 3):
                await publish(scheduler, version)
                await got(scheduler, 4, version)
            await asyncio.sleep(3 * fleet_module.RETRY_SECONDS)
            assert sorted(len(worker.free) + len(worker.attempts) for worker in fleet(scheduler)._workers) == [2, 2]
            assert tries == 3

    simulate(main)


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_shutdown_does_not_wait_for_a_replacement(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*args: Any, **options: Any) -> WorkerHandle:
        if is_slow:
            await asyncio.sleep(FOREVER)
        raise InfrastructureError("no node has room")

    async def main() -> None:
        async with playing([fake(1.0)], slots=4, workers=2, batch_size=4) as scheduler:
            await got(scheduler, 4)
            monkeypatch.setattr(fleet_worker, "start_worker", full)
            fleet(scheduler)._workers[0].handle.kill()  # type: ignore[union-attr]
            await asyncio.sleep(1.0)
            began = now()
            await scheduler.shutdown()
            assert now() == began
            await scheduler.shutdown()

    simulate(main)


def test_what_an_env_tells_must_pickle(caplog: pytest.LogCaptureFixture) -> None:
    class Handle:
        async def reset(self, seed: int) -> str:
            return f"task {seed}"

        async def step(self, action: str) -> tuple[Any, ...]:
            return "", 1.0, True, False, {"lock": threading.Lock()}

    async def main() -> None:
        async with playing(env=Handle, slots=4, workers=2, batch_size=4, max_attempts=1, error_budget=3) as scheduler:
            with pytest.raises(RolloutError, match="info of domain 'toy': TypeError"):
                await get(scheduler, 4)
            assert "give it plain values" in caplog.text
            assert causes(scheduler, Fate.FAILED) == {"info: TypeError": 4}
            assert fleet(scheduler).lost == 0

    simulate(main)


def test_an_env_that_hangs_loses_its_lease_and_is_tried_again() -> None:
    async def main() -> None:
        env = first_time(lambda: asyncio.sleep(FOREVER))
        async with playing(env=env, slots=4, workers=2, batch_size=4, lease_seconds=30.0) as scheduler:
            batch = await got(scheduler, 4)
            assert causes(scheduler, Fate.FAILED) == {"step: lease expired": 1}
            assert sorted(column(batch, "attempt")) == [0, 0, 0, 1]
            assert scheduler.metrics()["slots/leases_expired"] == 1

    simulate(main)


def test_exceptions_of_user_code_are_counted_where_the_budget_is() -> None:
    async def broken() -> None:
        raise KeyError("no such room")

    async def main() -> None:
        async with playing(env=first_time(broken), slots=4, workers=2, batch_size=4) as scheduler:
            await got(scheduler, 4)
            assert scheduler.queue.errors.by_origin == {"step of domain 'toy': KeyError": 1}
            assert causes(scheduler, Fate.FAILED) == {"step: KeyError": 1}

    simulate(main)


def test_redundant_members_are_stopped_on_their_workers() -> None:
    async def step(task: int, number: int) -> None:
        await asyncio.sleep(1.0 if number < 2 else 1000.0)

    async def main() -> None:
        env: Any = stepping(step)
        options = {"group_size": 2, "extra_members": 2, "batch_size": 4, "slots": 8, "workers": 3}
        async with playing(env=env, **options) as scheduler:
            await got(scheduler, 4)
        assert fates(scheduler) == {"trained": 4, "surplus": 4}
        assert len(env.closed) == len(env.opened) == 8

    simulate(main)


async def score(sample: Sample) -> float:
    await asyncio.sleep(5.0)
    return float(len(sample.trajectory.turns[0].response))


def test_rewards_run_beside_the_env_and_filters_see_the_turns() -> None:
    def keep(trajectories: list[Trajectory]) -> bool:
        return all(len(t.turns) == 2 and len(t.turns[0].response) == 10 for t in trajectories)

    async def main() -> None:
        options = {"reward": score, "group_filter": keep, "group_size": 2}
        async with playing(env=chain(2), slots=4, workers=2, batch_size=4, **options) as scheduler:
            batch = await got(scheduler, 4)
            assert column(batch, "scores") == [10.0] * 4

    simulate(main)


def test_a_saved_state_holds_the_turns_of_all_workers(tmp_path: Any) -> None:
    options: dict[str, Any] = {"slots": 4, "workers": 2, "batch_size": 4, "group_size": 4, "alpha": 1.0, "tasks": 8}

    async def save() -> list[list[int]]:
        async with playing([fake(1.0)], **options) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            scheduler.save(tmp_path)
            return responses(await got(scheduler, 4))

    async def restore() -> list[list[int]]:
        scheduler = build([fake(1.0)], **options)
        scheduler.restore(tmp_path)
        batch = await got(scheduler, 4)
        await scheduler.shutdown()
        check_after_shutdown(scheduler)
        return responses(batch)

    assert simulate(save) == simulate(restore)


def test_a_shutdown_with_attempts_under_way_leaves_nothing() -> None:
    env: Any = stepping(lambda task, number: asyncio.sleep(100.0))

    async def main() -> None:
        async with playing(env=env, slots=6, workers=3, batch_size=6) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(50.0)
        assert len(env.closed) == len(env.opened) == 6
        assert fates(scheduler) == {"cancelled": 6}

    simulate(main)


def test_a_lost_replica_is_reported_and_left() -> None:
    async def main() -> None:
        replicas = pool(2, 10.0)
        async with playing(replicas, env=OneStepEnv, slots=8, workers=2, batch_size=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            replicas[0].kill("power")
            batch = await got(scheduler, 8)
            assert scheduler.sampler.lost == {"r0": "power"}
            assert column(batch, "attempt") == [0] * 8

    simulate(main)


def test_more_workers_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="workers 3 share 2 slots"):
        build(slots=2, workers=3)


def test_an_error_of_the_env_worker_itself_ends_the_run() -> None:
    async def main() -> None:
        async with playing(slots=4, workers=2, batch_size=4) as scheduler:
            await scheduler.resume()
            worker = fleet(scheduler)._workers[0]
            host = worker.handle._worker_host._worker  # type: ignore[attr-defined]
            host._start_task(_bug(), "bug")
            with pytest.raises(RolloutError, match="assert False"):
                await get(scheduler, 8)

    async def _bug() -> None:
        assert False  # noqa: B011, PT015

    simulate(main)


def test_a_dead_env_worker_whose_loss_retires_a_task_is_replaced() -> None:
    """One member of the task still runs, the other has its reward computed, on the same worker."""

    async def step(task: int, number: int) -> None:
        await asyncio.sleep(100.0 if task == 0 and number % 2 == 0 else 1.0)

    async def slow(sample: Sample) -> float:
        await asyncio.sleep(100.0 if sample.trajectory.task.seed == 0 else 0.0)
        return 1.0

    async def main() -> None:
        options = {"env": stepping(step), "reward": slow, "group_size": 2, "batch_size": 2, "max_attempts": 1}
        async with playing([fake(0.0)], slots=2, workers=1, **options) as scheduler:
            await scheduler.resume()
            for _ in range(2):
                await asyncio.sleep(10.0)
                [group] = scheduler.ledger.open_groups()
                assert sorted(attempt.state.value for attempt in group.live) == ["running", "scoring"]
                group.tries_used = dict.fromkeys(group.tries_used or (), 0.75)
                fleet(scheduler)._workers[0].handle.kill()
            batch = await got(scheduler, 2)
            assert column(batch, "task_id") == ["toy/1"] * 2
            assert len(fleet(scheduler)._workers) == 1

    simulate(main)


def test_a_bug_in_what_hears_an_env_worker_ends_the_run_and_says_so() -> None:
    def bug(attempt: Any, trajectory: Any) -> None:
        raise LedgerError("the books are wrong")

    async def main() -> None:
        async with playing(slots=4, workers=2, batch_size=4) as scheduler:
            scheduler.queue.put = bug  # type: ignore[method-assign]
            with pytest.raises(RolloutError, match="the books are wrong"):
                await get(scheduler, 4)

    simulate(main)


def test_a_state_can_be_saved_when_trajectories_are_lost_with_their_node(tmp_path: Any) -> None:
    async def main() -> None:
        seconds = by_attempt(1.0, 2.0, 3.0, 4.0, 5.0, 100.0)  # each in a bundle of its own
        async with playing([fake(seconds)], slots=6, workers=2, batch_size=6, group_size=2, alpha=0.0) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(10.0)
            ready, kept, open_one = scheduler.ledger.open_groups()
            for group in (ready, open_one):
                lost: Any = group.finished[0].trajectory
                lost.bundle.worker = Gone("node")
            scheduler.save(tmp_path)
            assert causes(scheduler, Fate.FAILED) == {"lost with its node": 4}
            batch = await got(scheduler, 6)
            assert set(column(batch, "traj_group_id")) == {kept.id, 3, 4}

    simulate(main)


def test_a_task_whose_finished_trajectories_are_lost_with_their_node_is_drawn_again(tmp_path: Any) -> None:
    async def main() -> None:
        seconds = by_attempt(1.0, 2.0, 3.0, 4.0)  # each in a bundle of its own
        options: dict[str, Any] = {"slots": 4, "workers": 2, "batch_size": 4, "group_size": 2, "tasks": 2}
        async with playing([fake(seconds)], **options) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(10.0)
            lost: Any = scheduler.ledger.open_groups()[0].finished[0].trajectory
            lost.bundle.worker = Gone("node")
            scheduler.save(tmp_path)
            assert sorted(column(await got(scheduler, 4), "task_id")) == ["toy/0"] * 2 + ["toy/1"] * 2

    simulate(main)


def test_a_group_that_is_lost_before_its_filter_sees_it_is_no_error_of_the_filter() -> None:
    def gone(handles: Any) -> list[Any]:
        raise WorkerLost("the node is gone")

    async def main() -> None:
        options: dict[str, Any] = {"group_filter": lambda trajectories: True, "group_size": 2, "error_budget": 0}
        async with playing([fake(1.0)], slots=2, workers=1, batch_size=2, **options) as scheduler:
            await scheduler.resume()
            peer = fleet(scheduler)._workers[0].handle
            peer.fetch_blocking = gone
            await asyncio.sleep(1.5)
            del peer.fetch_blocking
            await got(scheduler, 2)
            assert causes(scheduler, Fate.FAILED) == {"lost with its node": 2}
            assert scheduler.queue.errors.total == 0

    simulate(main)
