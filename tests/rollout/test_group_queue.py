"""The group queue alone: as an actor's methods are called, with copies of attempts."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from builders import OneStepEnv, simulate

from cadenza import GroupQueueManager
from cadenza.inference.replica import Finish, Span
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import NothingFinished, RolloutError, SchedulerClosed
from cadenza.rollout.ledger import Attempt, AttemptCopy
from cadenza.rollout.records import Trajectory, Turn
from cadenza.rollout.remote_attempts import MAX_WAITING
from cadenza.rollout.staleness_bound import StalenessBound

LEASE_SECONDS = 60.0


def queue_of(*, tasks: int | None = None, max_envs: int | None = None, **options: Any) -> GroupQueueManager:
    domain = {"env": OneStepEnv, "tasks": tasks, "max_envs": max_envs}
    max_waiting = options.pop("max_waiting", MAX_WAITING)
    config = RolloutConfig(**{"batch_size": 4, "group_size": 2} | options)
    envs = EnvManagerConfig(domains={"toy": domain}, slots=8, lease_seconds=LEASE_SECONDS)
    return GroupQueueManager(config, envs, max_waiting=max_waiting)


def shipped(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def episode(attempt: Attempt, tokens: int = 0) -> Trajectory:
    response, logprobs = np.ones(tokens, np.int32), np.zeros(tokens, np.float32)
    turn = Turn(np.ones(1, np.int32), response, logprobs, (Span(0, tokens),), Finish.STOP, True, 0.0, 0.0)
    return Trajectory(
        id=attempt.id, task=attempt.group.task, group=attempt.group.id, member=attempt.member, attempt=attempt.number,
        slot=attempt.slot, seed=0, score=1.0, turns=[turn] if tokens else [],
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
    assert queue_of().ready_groups == 0


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
        assert queue.ready_groups == 1

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
        queue.end_run(SchedulerClosed("the end"))
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


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
def test_the_tasks_begin_anew_after_a_short_batch_and_before_a_publication(alpha: float) -> None:
    async def main() -> None:
        queue = queue_of(tasks=5, alpha=alpha)
        workers = [asyncio.ensure_future(work(queue)) for _ in range(3)]
        sizes = []
        for version in range(1, 13):
            sizes.append(len(await queue.take(2)))
            if sizes[-1] < 2:
                queue.reset()
                workers = [worker for worker in workers if not worker.done()]
                workers += [asyncio.ensure_future(work(queue)) for _ in range(3 - len(workers))]
                await asyncio.sleep(0.1)  # the train step
            queue.advance(version)
        assert sizes == [2, 2, 1] * 4
        queue.end_run(SchedulerClosed("the end"))
        await asyncio.gather(*workers)

    simulate(main)


def test_the_bound_counts_as_its_class_says() -> None:
    bound = StalenessBound(RolloutConfig(batch_size=2, alpha=1.0), is_training=True)
    assert bound.max_started() == 4
    for _ in range(4):
        bound.begin(0)
    for _ in range(3):
        bound.make_ready(0)
    assert bound.may_cut(2)
    for _ in range(2):
        bound.consume(0)
    bound.advance(1)
    assert bound.max_started() == 6


def test_everything_of_tasks_that_never_end_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"until the tasks run out, but those of .*toy.* never do"):
            await queue_of().take()

    simulate(main)


def test_a_worker_that_vanishes_costs_its_attempt_when_the_lease_is_over() -> None:
    async def main() -> None:
        queue = queue_of(tasks=2, group_size=1, batch_size=2, max_envs=1)
        gone = shipped(await queue.next_attempt())
        worker = asyncio.ensure_future(work(queue))
        batch = await asyncio.wait_for(queue.take(2), 2 * LEASE_SECONDS)
        assert [(group[0].task.id, group[0].attempt) for group in batch] == [("toy/0", 1), ("toy/1", 0)]
        assert queue.ledger.causes == {("failed", "worker: lease expired"): 1}
        queue.put(gone, episode(gone))  # it was only slow: too late
        assert await worker == 2
        queue.ledger.check()

    simulate(main)


def test_a_lease_is_renewed_by_a_worker_that_says_so_and_that_learns_when_its_attempt_is_over() -> None:
    async def main() -> None:
        queue = queue_of(tasks=1, group_size=1, batch_size=1, extra_members=1)
        slow, fast = shipped(await queue.next_attempt()), shipped(await queue.next_attempt())
        for _ in range(5):
            await asyncio.sleep(0.9 * LEASE_SECONDS)
            assert queue.renew(slow)
            assert queue.renew(fast)
        queue.put(fast, episode(fast))
        assert not queue.renew(slow)
        assert not queue.renew(fast)
        assert queue.ledger.fates == {"surplus": 1}

    simulate(main)


def test_a_worker_that_vanishes_with_an_attempt_that_has_its_fate_frees_its_env() -> None:
    async def main() -> None:
        queue = queue_of(tasks=2, group_size=1, batch_size=1, extra_members=1, max_envs=2, alpha=1.0)
        _gone, fast = shipped(await queue.next_attempt()), shipped(await queue.next_attempt())
        queue.put(fast, episode(fast))  # the other one is surplus
        await queue.next_attempt()
        waiting = asyncio.ensure_future(queue.next_attempt())
        assert (await asyncio.wait_for(waiting, 2 * LEASE_SECONDS)) is not None

    simulate(main)


def test_the_tokens_of_a_copy_are_booked_with_its_fate() -> None:
    async def main() -> None:
        queue = queue_of(tasks=1, group_size=1, batch_size=1, extra_members=2)
        copies = [shipped(await queue.next_attempt()) for _ in range(3)]
        copies[0].tokens = 5  # what the worker counted before its env crashed
        queue.fail(shipped(copies[0]), "env: crashed")
        for copy in copies[1:]:
            queue.put(shipped(copy), episode(copy, tokens=3))
        assert len(await queue.take(1)) == 1
        assert queue.ledger.tokens == {"failed": 5, "trained": 3, "surplus": 3}
        assert "1 turns, 3 tokens" in queue.ledger.why(copies[1].id)

    simulate(main)


def test_a_worker_in_the_process_of_the_queue_ends_its_attempts_in_the_same_way() -> None:
    async def main() -> None:
        queue = queue_of(tasks=2, group_size=1, batch_size=2, max_envs=1)
        for _ in range(2):
            attempt = await queue.next_attempt()
            assert attempt is not None
            queue.put(attempt, episode(attempt))
        assert len(await queue.take(2)) == 2

    simulate(main)


def test_waiting_workers_are_woken_one_after_the_other_and_so_many_at_most() -> None:
    async def main() -> None:
        queue = queue_of(tasks=8, batch_size=2, max_waiting=20)
        attempts = [shipped(await queue.next_attempt()) for _ in range(2)]
        waiting = [asyncio.ensure_future(queue.next_attempt()) for _ in range(20)]
        await asyncio.sleep(1.0)
        with pytest.raises(RolloutError, match=r"20 calls of next_attempt wait already.*max_concurrency"):
            await queue.next_attempt()
        issue, tries = queue.issue, []
        queue.issue = lambda slot: tries.append(slot) or issue(slot)  # type: ignore[func-returns-value, method-assign]
        queue.fail(attempts[0], "env: crashed")
        await asyncio.sleep(1.0)
        assert sum(call.done() for call in waiting) == 1
        assert len(tries) < 5  # and not one for each that waits
        waiting.append(asyncio.ensure_future(queue.next_attempt()))  # now there are 20 again
        queue.on_work()
        await asyncio.sleep(1.0)
        assert sum(call.done() for call in waiting) == 1  # the one that was woken for nothing waits on
        waiting[5].cancel()
        queue.fail(attempts[1], "env: crashed")
        await asyncio.sleep(1.0)
        assert sum(call.done() and not call.cancelled() for call in waiting) == 2
        for cancelled in waiting[10:13]:
            cancelled.cancel()
            queue.on_work()
        queue.end_run(SchedulerClosed("the end"))
        await asyncio.wait(waiting)
        assert [await call for call in waiting if not call.cancelled()].count(None) == 15

    simulate(main)
