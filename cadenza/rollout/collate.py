"""Trajectories become a batch: ragged, each token written once.

A row is one context. A trajectory with one growing context is one row, one whose contexts start afresh is a row each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cadenza.data import DataProto, Ragged
from cadenza.inference.replica import Finish
from cadenza.rollout.records import Trajectory, Turn

FINISH = {Finish.STOP: 0, Finish.LENGTH: 1, Finish.ABORT: 2}
"""Finish reasons as numbers."""


def collate(trajectories: Sequence[Trajectory]) -> DataProto:
    """The default train batch; its columns are those of `TRAIN_BATCH`."""
    rows = [(t, turns) for t in trajectories for turns in _contexts(t.turns)]
    pieces: list[Any] = []
    logprobs: list[Any] = []
    counts: list[int] = []
    is_response: list[bool] = []
    versions: list[int] = []
    lengths = np.empty(len(rows), np.int64)
    prompt_lengths = np.empty(len(rows), np.int64)
    zeros: dict[int, Any] = {}
    for number, (_, turns) in enumerate(rows):
        length = prompts = 0
        for turn in turns:
            prompt, response = len(turn.prompt), len(turn.response)
            pieces += (turn.prompt, turn.response)
            if prompt not in zeros:
                zeros[prompt] = np.zeros(prompt, np.float32)
            logprobs += (zeros[prompt], turn.logprobs)
            counts.append(prompt)
            is_response.append(False)
            versions.append(-1)
            for version, span in turn.spans:
                counts.append(span)
                is_response.append(True)
                versions.append(version)
            length += prompt + response
            prompts += prompt
        lengths[number] = length
        prompt_lengths[number] = prompts
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    input_ids = Ragged(np.concatenate(pieces), offsets)
    responses = np.array(is_response)
    batch: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": Ragged.from_runs(np.ones(len(rows), bool), lengths, offsets),
        "position_ids": Ragged(_positions(lengths), offsets),
        "response_mask": Ragged.from_runs(responses, counts, offsets),
        "prompt_mask": Ragged.from_runs(~responses, counts, offsets),
        "infer_logprobs": Ragged(np.concatenate(logprobs), offsets),
        "versions": Ragged.from_runs(np.array(versions, np.int32), counts, offsets, pad=-1),
        "lengths": lengths,
        "response_lengths": lengths - prompt_lengths,
        "step_scores": Ragged.from_rows(
            [np.array([turn.reward for turn in t.turns], np.float32) for t, _ in rows], pad=float("nan")
        ),
        "scores": _column(rows, "score", np.float32),
        "episode_scores": _column(rows, "episode_score", np.float32),
        "traj_group_id": _column(rows, "group", np.int64),
        "traj_id": _column(rows, "id", np.int64),
        "env_ids": _column(rows, "slot", np.int64),
        "attempt": _column(rows, "attempt", np.int64),
        "seed": _column(rows, "seed", np.uint64).view(np.int64),
        "started": _column(rows, "started", np.float64),
        "ended": _column(rows, "ended", np.float64),
        "finish_reason": np.array([FINISH[turns[-1].finish] for _, turns in rows], np.int64),
        "truncated": _column(rows, "truncated", bool),
    }
    names: dict[str, Any] = {
        "task_id": [t.task.id for t, _ in rows],
        "domain": [t.task.domain for t, _ in rows],
        "traj_key": [f"g{t.group}.{t.member}#{t.attempt}" for t, _ in rows],
    }
    return DataProto(batch, names, {})


def _contexts(turns: list[Turn]) -> list[list[Turn]]:
    """Turns that share a context, together."""
    contexts: list[list[Turn]] = []
    for turn in turns:
        if turn.fresh or not contexts:
            contexts.append([])
        contexts[-1].append(turn)
    return contexts


def _positions(lengths: Any) -> Any:
    """0, 1, 2 ... in every row."""
    longest = np.arange(lengths.max(), dtype=np.int32)
    return np.concatenate([longest[:length] for length in lengths])


def _column(rows: list[tuple[Trajectory, list[Turn]]], name: str, dtype: Any) -> Any:
    return np.array([getattr(trajectory, name) for trajectory, _ in rows], dtype)
