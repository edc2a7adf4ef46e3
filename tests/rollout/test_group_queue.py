"""The group queue alone: as an actor's methods are called, with copies of attempts."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from builders import OneStepEnv, simulate

from cadenza import GroupQueueManager
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import NothingFinished, SchedulerClosed
from cadenza.rollout.ledger import Attempt, AttemptCopy
from cadenza.rollout.records import Trajectory


def queue_of(*, tasks: int | None = None, max_envs: int | None = None, **options: Any) -> GroupQueueManager:
    domain = {"env": OneStepEnv, "tasks": tasks, "max_envs": max_envs}
    config = RolloutConfig(**{"batch_size": 4, "group_size": 2} | options)
    return GroupQueueManager(config, EnvManagerConfig(domains={"toy": domain}, slots=8))


def shipped(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def episode(attempt: Attempt) -> Trajectory:
    return Trajectory(
        id=attempt.id, task=attempt.group.task, group=attempt.group.id, member=attempt.member, attempt=attempt.number,
        slot=attempt.slot, seed=0, score=1.0,
    )  # fmt: skip


async def work(queue: GroupQueueManager, seconds: float = 1.0) -> int:
    """A worker in another process: it sees only copies. Returns how many attempts it ran."""
    count = 0
    while (attempt := shipped(await queue.next_attempt())) is not None:
        await asyncio.sleep(seconds)
        queue.put(attempt, shipped(episode(attempt)))
        count += 1
    return count


def test_a_queue_is_made_where_no_loop_runs() -> None:
    assert queue_of().ready == 0


def test_workers_with_copies_of_attempts_fill_whole_groups() -> None:
    async def main() -> None:
        queue = queue_of(tasks=4)
        workers = [asyncio.ensure_future(work(queue)) for _ in range(3)]
        first = await queue.take(2)
        queue.advance(1)
        second = await queue.take(2)
        assert [[t.task.id for t in group] for group in first + second] == [[f"toy/{n}"] * 2 for n in range(4)]
        assert await queue.take(2) == []
        assert sum(await asyncio.gather(*workers)) == 8
        queue.ledger.check()
        assert queue.ledger.live == 0

    simulate(main)


def test_a_copy_knows_its_task_and_no_other_attempt_of_its_group() -> None:
    async def main() -> None:
        queue = queue_of()
        attempts = [queue.issue(slot) for slot in range(2)]
        copy = shipped(attempts[1])
        assert isinstance(copy, AttemptCopy)
        assert attempts[1] is not None
        assert (copy.key, copy.group.task, copy.slot) == (attempts[1].key, attempts[1].group.task, 1)
        assert (copy.group.attempts, copy.group.key64) == ([], attempts[1].group.key64)

    simulate(main)


def test_what_comes_of_a_copy_that_has_its_fate_is_dropped() -> None:
    async def main() -> None:
        queue = queue_of(extra_members=1, max_envs=3)
        copies = [shipped(await queue.next_attempt(slot)) for slot in range(3)]
        assert queue.issue(3) is None
        for copy in copies:
            queue.put(copy, episode(copy))
        queue.fail(copies[2], "late")
        assert queue.ledger.fates == {"surplus": 1}
        assert queue.ready == 1

    simulate(main)


def test_a_copy_that_fails_is_tried_again_until_its_task_is_retired() -> None:
    async def main() -> None:
        queue = queue_of(tasks=1, batch_size=1, group_size=1, max_attempts=2)
        for number in range(2):
            copy = shipped(await queue.next_attempt())
            assert copy.number == number
            queue.fail(copy, "env: crashed")
        assert await queue.next_attempt() is None
        with pytest.raises(NothingFinished, match="env: crashed"):
            await queue.take(1)

    simulate(main)


def test_the_end_of_the_run_wakes_workers_and_the_controller() -> None:
    async def main() -> None:
        queue = queue_of(alpha=0, batch_size=2)
        copies = [shipped(queue.issue(slot)) for slot in range(2)]
        worker, controller = asyncio.ensure_future(queue.next_attempt()), asyncio.ensure_future(queue.take(1))
        await asyncio.sleep(1.0)
        assert not worker.done()
        queue.fatal(SchedulerClosed("the end"))
        assert await worker is None
        with pytest.raises(SchedulerClosed):
            await controller
        queue.put(copies[0], episode(copies[0]))
        queue.ledger.check()

    simulate(main)


def test_what_a_worker_says_twice_of_an_attempt_is_dropped() -> None:
    async def main() -> None:
        queue = queue_of(tasks=20, max_envs=1, group_size=1)
        attempt = shipped(await queue.next_attempt())
        queue.put(attempt, episode(attempt))
        queue.put(attempt, episode(attempt))  # a call that Ray made again
        queue.fail(attempt, "env: close failed")  # in a worker's `finally`
        assert [issued is not None for issued in (queue.issue(0), queue.issue(1))] == [True, False]
        queue.ledger.check()

    simulate(main)


def test_everything_of_tasks_that_never_end_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"until the tasks run out, but those of .*toy.* never do"):
            await queue_of().take()

    simulate(main)
