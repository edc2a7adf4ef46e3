"""Batches that the tests of data share."""

from __future__ import annotations

import numpy as np

from cadenza.data import DataProto
from cadenza.data.ragged import Array, Ragged


def rows_of(*lengths: int) -> list[Array]:
    return [np.arange(1, n + 1, dtype=np.int32) for n in lengths]


def small() -> DataProto:
    return DataProto(
        {"input_ids": rows_of(2, 1, 3), "scores": np.array([0.5, 1.0, 0.0], np.float32)},
        {"task": ["a", "b", "a"]},
        {"global_step": 7},
    )


def train_batch() -> DataProto:
    offsets = [0, 2, 5]
    mask = Ragged.from_runs(np.array([True]), [5], offsets)
    ids = np.arange(2)
    return DataProto(
        {
            "input_ids": Ragged(np.arange(5, dtype=np.int32), offsets),
            "attention_mask": mask,
            "position_ids": Ragged(np.arange(5, dtype=np.int32), offsets),
            "response_mask": mask,
            "prompt_mask": mask,
            "scores": np.zeros(2, np.float32),
            "traj_group_id": ids,
            "traj_id": ids,
            "env_ids": ids,
            "step_scores": Ragged.from_rows([[1.0], [0.0, 1.0]], dtype=np.float32),
            "turns": np.array([1, 2]),
            "episode_scores": np.zeros(2, np.float32),
        }
    )
