"""Between rows, turns and tokens.

A row [N] is one context; most trajectories are one row, one whose contexts start afresh is several. A turn is
numbered within its trajectory, so `turns` [N, L] (-1 outside responses) finds a token's turn in `step_scores`
[N, T], which every row carries for its whole trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza.algorithms.groups import Groups, sum_by_id
from cadenza.algorithms.shapes import at_least_float32, check_rows, check_shapes, zero_outside


def turns_in_row(turns: Tensor, count: int) -> Tensor:
    """[N, count] bool: which turns of its trajectory have tokens in the row."""
    present = torch.zeros(turns.shape[0], count + 1, dtype=torch.bool, device=turns.device)
    return present.scatter(1, _turn_index(turns, len(turns), count), True)[:, 1:]


def rows_to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[N, L]: each row's value [N] on all its masked tokens, 0 elsewhere."""
    check_rows(mask, values=values)
    return zero_outside(values[:, None].expand(mask.shape), mask)


def turns_to_tokens(values: Tensor, turns: Tensor) -> Tensor:
    """[N, L]: each turn's value [N, T] on all its tokens, 0 outside."""
    padded = torch.nn.functional.pad(at_least_float32(values), (1, 0))
    return padded.gather(1, _turn_index(turns, *values.shape))


def turn_rewards_to_tokens(step_scores: Tensor, turns: Tensor) -> Tensor:
    """[N, L]: what the env paid for a turn (`step_scores` [N, T]) on the last token of that turn.

    A turn of which no token is in the batch has no token to pay; its reward is left out.
    """
    index = _turn_index(turns, *step_scores.shape)
    columns = torch.arange(turns.shape[1], device=turns.device).expand(turns.shape)
    last = torch.full((turns.shape[0], step_scores.shape[1] + 1), -1, device=turns.device)
    last = last.scatter_reduce(1, index, columns, "amax")
    return zero_outside(turns_to_tokens(step_scores, turns), (turns >= 0) & (columns == last.gather(1, index)))


def rewards_to_written_turns(step_scores: Tensor, turns: Tensor, *, traj_ids: Tensor | None = None) -> Tensor:
    """[N, T]: the pay of a turn without tokens goes to the turn with tokens before it, or else after it.

    A turn has tokens if it has them in any row of its trajectory (`traj_ids` [N]).
    """
    exists = ~step_scores.isnan()
    written = sum_by_id(turns_in_row(turns, step_scores.shape[1]).float(), traj_ids) > 0
    if bool((written | ~exists).all()):
        return step_scores
    target = torch.where(written, torch.arange(step_scores.shape[1], device=turns.device), -1).cummax(1).values
    target = torch.where(target < 0, written.int().argmax(1, keepdim=True), target)
    return torch.zeros_like(step_scores).scatter_add(1, target, step_scores.nan_to_num(0.0))


def anchor_ids(tokens: Tensor, turns: Tensor, offsets: Tensor, count: int) -> Tensor:
    """[N, count] int64: the state in which each turn of a row began, as a number; -1 for turns that are not in the row.

    `tokens` [K] and `turns` [K] are those of all rows, which begin at `offsets` [N + 1]. States are equal when the
    turns were shown the same tokens since the one before; the whole prompt, where a context starts afresh. What the
    model itself had said before does not matter, nor whether it ended its answer: the prompt after an answer that was
    cut begins with the end token that other answers have themselves.
    """
    ids, turn, firsts = tokens.numpy(), turns.numpy(), offsets.numpy()
    edges = np.union1d(np.flatnonzero(np.diff(turn)) + 1, firsts[:-1][np.diff(firsts) > 0])
    of_edge = turn[edges]
    begins = np.flatnonzero(of_edge >= 0)
    rows = np.searchsorted(firsts, edges[begins], side="right") - 1
    # A row begins with a prompt: before a turn are tokens of its row, which no turn wrote or the turn before it.
    starts = np.where(of_edge[begins - 1] < 0, edges[begins - 1], edges[begins])
    spans = list(zip(starts.tolist(), edges[begins].tolist(), (starts > firsts[rows]).tolist(), strict=True))
    shown = [ids[start:stop].tobytes() for start, stop, _ in spans]
    # With the last token of the answer before it, a prompt may be what others were shown after an answer that was cut.
    ended = [ids[start - 1 : stop].tobytes() if follows else b"" for start, stop, follows in spans]
    known = set(shown)
    numbers: dict[bytes, int] = {}
    anchors = np.full((len(firsts) - 1, count), -1, np.int64)
    anchors[rows, of_edge[begins]] = [
        numbers.setdefault(longer if longer and longer in known else short, len(numbers))
        for short, longer in zip(shown, ended, strict=True)
    ]
    return torch.from_numpy(anchors)


def reconcile_step_scores(step_scores: Tensor, scores: Tensor) -> Tensor:
    """[N, T]: the step scores, with the last turn changed so that they add up to the score [N] of the trajectory.

    Where a reward function had the last word, its verdict is thereby paid when the episode ends. Where the score is
    what the env paid, nothing changes.
    """
    check_rows(step_scores, scores=scores)
    exists = ~step_scores.isnan()
    order = torch.arange(step_scores.shape[1], device=step_scores.device)
    is_last = exists & (order == exists.sum(1, keepdim=True) - 1)
    missing = scores.double() - step_scores.double().nansum(1)
    settled = torch.where(is_last, step_scores.double() + missing[:, None], step_scores.double())
    return settled.to(at_least_float32(step_scores).dtype)


@dataclass(frozen=True, slots=True)
class TrajectoryTokens:
    """The trained tokens by trajectory [M, P], each in the order in which they were written.

    Prompt and env tokens are not in it: what follows the last token of a turn is the first token of the next one.
    ```
    mask   . . 1 1 . . 1 .         trajectory   a b c
               a b     c
    ```
    """

    rows: Tensor
    """[K] where each token is in the batch"""
    columns: Tensor
    """[K]"""
    trajectories: Tensor
    """[K] its trajectory"""
    steps: Tensor
    """[K] its number in the trajectory"""
    exists: Tensor
    """[M, P] bool: where a trajectory has a token"""
    shape: torch.Size
    """[N, L] of the batch"""

    @classmethod
    def of(cls, mask: Tensor, *, traj_ids: Tensor | None = None, turns: Tensor | None = None) -> TrajectoryTokens:
        """Without `traj_ids` [N] each row is a trajectory of its own. With them, the rows of one trajectory are
        joined: by the turn of each token (`turns` [N, L]), or in the order of the rows if that is not given.
        """
        check_rows(mask, traj_ids=traj_ids)
        rows, columns = mask.bool().nonzero(as_tuple=True)
        trajectories = rows
        if traj_ids is not None:
            trajectories = Groups.of(traj_ids).index[rows]
            # Stable sorts, the least significant key first; a row's own order is there from the start.
            order = torch.arange(len(rows), device=rows.device)
            if turns is not None:
                check_shapes(mask=mask, turns=turns)
                order = turns[rows, columns].argsort(stable=True)
            order = order[trajectories[order].argsort(stable=True)]
            rows, columns, trajectories = rows[order], columns[order], trajectories[order]
        lengths = trajectories.bincount(minlength=mask.shape[0])
        steps = (
            torch.arange(len(trajectories), device=trajectories.device) - (lengths.cumsum(0) - lengths)[trajectories]
        )
        longest = int(lengths.max()) if lengths.numel() else 0
        exists = torch.arange(longest, device=trajectories.device) < lengths[:, None]
        return cls(rows, columns, trajectories, steps, exists, mask.shape)

    def gather(self, values: Tensor) -> Tensor:
        """Token values [N, L] by trajectory [M, P], 0 after the end of one."""
        ordered = values.new_zeros(self.exists.shape)
        ordered[self.trajectories, self.steps] = values[self.rows, self.columns]
        return ordered

    def scatter(self, ordered: Tensor) -> Tensor:
        """Values by trajectory [M, P] back to where their tokens are [N, L], 0 elsewhere."""
        values = ordered.new_zeros(self.shape)
        values[self.rows, self.columns] = ordered[self.trajectories, self.steps]
        return values


def _turn_index(turns: Tensor, rows: int, count: int) -> Tensor:
    """Turn t as index t + 1 into values [rows, 1 + count], so that 0 stands for no turn."""
    if len(turns) != rows:
        raise ValueError(f"turns has {len(turns)} rows, the values of the turns have {rows}")
    if turns.numel() and int(turns.max()) >= count:
        raise ValueError(f"turns has turn {int(turns.max())}, but the trajectories have {count} turns at most")
    return turns.long() + 1
