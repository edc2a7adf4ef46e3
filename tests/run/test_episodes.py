"""The figures of a batch of episodes."""

from __future__ import annotations

import numpy as np

from cadenza.inference.replica import Finish, Span
from cadenza.rollout.records import Task, Trajectory, Turn
from cadenza.run.episodes import EpisodeStats


def episode(id: int, rewards: dict[str, float]) -> Trajectory:
    token = np.ones(1, np.int32)
    turn = Turn(token, token, np.zeros(1, np.float32), (Span(0, 1),), Finish.STOP, True, 0.0, 1.0)
    info: dict[str, object] = {"rewards": rewards}
    return Trajectory(id, Task("a/0", 0, "a"), id, 0, 0, 0, 0, [turn], info=info)


def test_the_mean_of_a_reward_behind_a_gate_is_the_same_in_one_batch_and_in_chunks() -> None:
    first = [episode(0, {"gate": 1.0, "right": 1.0}), *(episode(id, {"gate": 0.0}) for id in (1, 2, 3))]
    second = [episode(id, {"gate": 1.0, "right": 0.0}) for id in (4, 5, 6, 7)]
    whole = EpisodeStats.of(first + second, 0).metrics("train")
    assert whole["train/reward/right"] == 1 / 5
    assert EpisodeStats.merge([EpisodeStats.of(first, 0), EpisodeStats.of(second, 0)], 0).metrics("train") == whole
