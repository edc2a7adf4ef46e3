"""The group queue as a Ray actor of its own, with workers that are no part of Cadenza."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
ray = pytest.importorskip("ray")

from cadenza import GroupQueueManager  # noqa: E402
from cadenza.envs.frozenlake import FrozenLake  # noqa: E402
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig  # noqa: E402
from cadenza.rollout.failures import NothingFinished  # noqa: E402
from cadenza.rollout.records import Trajectory  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("nodes")]

SECONDS = 120.0
"""For anything on a busy machine."""


def queue_of(tasks: int, lease_seconds: float = 600.0, **options: Any) -> Any:
    domains = {"lake": {"env": FrozenLake, "tasks": tasks}}
    envs = EnvManagerConfig(domains=domains, slots=2, lease_seconds=lease_seconds)
    return (
        ray.remote(GroupQueueManager)
        .options(num_cpus=0)
        .remote(RolloutConfig(**{"batch_size": 4, "group_size": 2} | options), envs)
    )


@ray.remote
def work(queue: Any) -> int:
    """Run attempts until there is none."""
    count = 0
    while (attempt := ray.get(queue.next_attempt.remote())) is not None:
        trajectory = Trajectory(
            id=attempt.id, task=attempt.group.task, group=attempt.group.id, member=attempt.member,
            attempt=attempt.number, slot=attempt.slot, seed=0, score=float(attempt.member),
        )  # fmt: skip
        ray.get(queue.put.remote(attempt, trajectory))
        count += 1
    return count


def test_a_group_queue_is_an_actor() -> None:
    queue = queue_of(tasks=4)
    workers = [work.remote(queue) for _ in range(2)]
    first = ray.get(queue.take.remote(2), timeout=SECONDS)
    ray.get(queue.advance.remote(1), timeout=SECONDS)
    second = ray.get(queue.take.remote(2), timeout=SECONDS)
    assert sorted(group[0].task.id for group in first + second) == [f"lake/{n}" for n in range(4)]
    assert [[t.score for t in group] for group in first + second] == [[0.0, 1.0]] * 4
    assert ray.get(queue.take.remote(2), timeout=SECONDS) == []
    assert sum(ray.get(workers, timeout=SECONDS)) == 8


def test_the_error_of_a_queue_that_is_an_actor_arrives_as_it_is() -> None:
    queue = queue_of(tasks=1, group_size=1, batch_size=1, max_attempts=1)
    attempt = ray.get(queue.next_attempt.remote(), timeout=SECONDS)
    ray.get(queue.fail.remote(attempt, "env: crashed"), timeout=SECONDS)
    with pytest.raises(NothingFinished, match="env: crashed"):
        ray.get(queue.take.remote(1), timeout=SECONDS)


@ray.remote
class VanishingWorker:
    """Takes an attempt and is killed."""

    def take(self, queue: Any) -> int:
        attempt: int = ray.get(queue.next_attempt.remote()).number
        return attempt


def test_the_attempt_of_a_worker_that_was_killed_is_issued_anew() -> None:
    queue = queue_of(tasks=1, group_size=1, batch_size=1, lease_seconds=2.0)
    worker = VanishingWorker.options(num_cpus=0).remote()
    assert ray.get(worker.take.remote(queue), timeout=SECONDS) == 0
    ray.kill(worker)
    retry = work.remote(queue)
    (group,) = ray.get(queue.take.remote(1), timeout=SECONDS)
    assert [trajectory.attempt for trajectory in group] == [1]
    assert ray.get(retry, timeout=SECONDS) == 1
