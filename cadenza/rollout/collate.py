"""Trajectories become a batch: ragged, each token written once.

A row is one context. A trajectory with one growing context is one row, one whose contexts start afresh is a row each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cadenza.data import DataProto, Positions, Ragged
from cadenza.inference.replica import Finish
from cadenza.rollout.records import Trajectory, Turn

FINISH = {Finish.STOP: 0, Finish.LENGTH: 1, Finish.ABORT: 2}
"""Finish reasons as numbers."""
SCALARS: dict[str, Any] = {
    "scores": np.float32, "episode_scores": np.float32, "traj_group_id": np.int64, "traj_id": np.int64,
    "env_ids": np.int64, "attempt": np.int64, "seed": np.int64, "started": np.float64, "ended": np.float64,
    "finish_reason": np.int64, "truncated": np.bool_,
}  # fmt: skip
"""Columns with one number per row. `seed` is the 64-bit key, moved into the signed range."""


def collate(trajectories: Sequence[Trajectory]) -> DataProto:
    """The default train batch; its columns are those of `TRAIN_BATCH`."""
    rows = [(t, *context) for t in trajectories for context in _contexts(t.turns)]
    pieces: list[Any] = []
    logprobs: list[Any] = []
    counts: list[int] = []
    is_response: list[bool] = []
    versions: list[int] = []
    turn_ids: list[int] = []
    lengths = np.empty(len(rows), np.int64)
    prompt_lengths = np.empty(len(rows), np.int64)
    zeros: dict[int, Any] = {}
    for number, (_, first, turns) in enumerate(rows):
        length = prompts = 0
        for turn_id, turn in enumerate(turns, first):
            prompt, response = len(turn.prompt), len(turn.response)
            pieces += (turn.prompt, turn.response)
            if prompt not in zeros:
                zeros[prompt] = np.zeros(prompt, np.float32)
            logprobs += (zeros[prompt], turn.logprobs)
            counts.append(prompt)
            is_response.append(False)
            versions.append(-1)
            turn_ids.append(-1)
            for version, span in turn.spans:
                counts.append(span)
                is_response.append(True)
                versions.append(version)
                turn_ids.append(turn_id)
            length += prompt + response
            prompts += prompt
        lengths[number] = length
        prompt_lengths[number] = prompts
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    runs = np.array(counts, np.int64)
    responses = np.array(is_response)
    scalars = list(zip(*[_scalars(trajectory, turns) for trajectory, _, turns in rows], strict=True))
    batch: dict[str, Any] = {
        "input_ids": Ragged(np.concatenate(pieces), offsets),
        "attention_mask": Ragged.from_runs(np.ones(len(rows), bool), lengths, offsets),
        "position_ids": Positions(offsets),
        "response_mask": Ragged.from_runs(responses, runs, offsets),
        "prompt_mask": Ragged.from_runs(~responses, runs, offsets),
        "infer_logprobs": Ragged(np.concatenate(logprobs), offsets),
        "versions": Ragged.from_runs(np.array(versions, np.int32), runs, offsets, pad=-1),
        "turn_ids": Ragged.from_runs(np.array(turn_ids, np.int32), runs, offsets, pad=-1),
        "step_scores": _step_scores([t for t, _, _ in rows]),
        "turns": np.array([len(t.turns) for t, _, _ in rows], np.int64),
        "lengths": lengths,
        "response_lengths": lengths - prompt_lengths,
    }
    for (name, dtype), values in zip(SCALARS.items(), scalars, strict=True):
        batch[name] = np.array(values, dtype)
    names: dict[str, Any] = {
        "task_id": [t.task.id for t, _, _ in rows],
        "domain": [t.task.domain for t, _, _ in rows],
        "traj_key": [f"g{t.group}.{t.member}#{t.attempt}" for t, _, _ in rows],
    }
    return DataProto(batch, names, {})


def _scalars(trajectory: Trajectory, turns: list[Turn]) -> tuple[Any, ...]:
    """The values of one row, in the order of `SCALARS`."""
    return (
        trajectory.score, trajectory.episode_score, trajectory.group, trajectory.id, trajectory.slot,
        trajectory.attempt, trajectory.seed - (1 << 63), trajectory.started, trajectory.ended,
        FINISH[turns[-1].finish], trajectory.truncated,
    )  # fmt: skip


def _step_scores(trajectories: list[Trajectory]) -> Ragged:
    """What the env paid, turn by turn, for the whole trajectory of each row; padded with 0 behind its `turns`."""
    counts = [len(trajectory.turns) for trajectory in trajectories]
    values = np.array([turn.reward for trajectory in trajectories for turn in trajectory.turns], np.float32)
    return Ragged(values, np.concatenate(([0], np.cumsum(counts))))


def _contexts(turns: list[Turn]) -> list[tuple[int, list[Turn]]]:
    """Turns that share a context, together, behind the number of the first of them."""
    contexts: list[tuple[int, list[Turn]]] = []
    for number, turn in enumerate(turns):
        if turn.fresh or not contexts:
            contexts.append((number, []))
        contexts[-1][1].append(turn)
    return contexts
