"""Between rows, turns and tokens.

A row [N] is one context; most trajectories are one row, one whose contexts start afresh is several. A turn is
numbered within its trajectory, so `turns` [N, L] (-1 outside responses) finds a token's place in `step_scores`
[N, T], which every row carries for its whole trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.algorithms.groups import Groups
from cadenza.algorithms.shapes import check_rows, check_shapes, kept, wide


def train_mask(response_mask: Tensor, is_padding: Tensor | None = None) -> Tensor:
    """[N, L] bool: the tokens that train. None of a row that `is_padding` [N] marks as filling up the batch."""
    check_rows(response_mask, is_padding=is_padding)
    mask = response_mask.bool()
    return mask if is_padding is None else mask & ~is_padding.bool()[:, None]


def turn_numbers(response_mask: Tensor, first: Tensor | None = None) -> Tensor:
    """[N, L] int64: the turn that wrote each token, -1 outside responses.

    Reads the turns off the runs of `response_mask` [N, L], so a turn is recognised by the env tokens before it. Give
    it the mask of the batch, not one with single tokens taken out. `first` [N] is the turn a row starts with, 0
    unless the trajectory has earlier rows.
    """
    check_rows(response_mask, first=first)
    mask = response_mask.bool()
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    numbers = begins.cumsum(1) - 1
    if first is not None:
        numbers = numbers + first[:, None]
    return numbers.masked_fill(~mask, -1)


def turns_in_row(turns: Tensor, count: int) -> Tensor:
    """[N, count] bool: which turns of its trajectory have tokens in the row."""
    present = torch.zeros(turns.shape[0], count + 1, dtype=torch.bool, device=turns.device)
    return present.scatter(1, _turn_index(turns, len(turns), count), True)[:, 1:]


def rows_to_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """[N, L]: each row's value [N] on all its masked tokens, 0 elsewhere."""
    check_rows(mask, values=values)
    return kept(values[:, None].expand(mask.shape), mask)


def turns_to_tokens(values: Tensor, turns: Tensor) -> Tensor:
    """[N, L]: each turn's value [N, T] on all its tokens, 0 outside."""
    padded = torch.nn.functional.pad(wide(values), (1, 0))
    return padded.gather(1, _turn_index(turns, *values.shape))


def pay_turns(step_scores: Tensor, turns: Tensor) -> Tensor:
    """[N, L]: what the env paid for a turn (`step_scores` [N, T]) on the last token of that turn.

    A turn of which no token is in the batch has nobody to pay; its reward is left out.
    """
    index = _turn_index(turns, *step_scores.shape)
    columns = torch.arange(turns.shape[1], device=turns.device).expand(turns.shape)
    last = torch.full((turns.shape[0], step_scores.shape[1] + 1), -1, device=turns.device)
    last = last.scatter_reduce(1, index, columns, "amax")
    return kept(turns_to_tokens(step_scores, turns), (turns >= 0) & (columns == last.gather(1, index)))


def pay_last_token(
    scores: Tensor, mask: Tensor, *, traj_ids: Tensor | None = None, turns: Tensor | None = None
) -> Tensor:
    """[N, L]: the score [N] of a trajectory on its last token; see `Timeline` for `traj_ids` and `turns`."""
    timeline = Timeline.of(mask, traj_ids=traj_ids, turns=turns)
    is_last = torch.zeros_like(timeline.occupied)
    is_last[:, :-1] = ~timeline.occupied[:, 1:]
    is_last[:, -1:] = True
    return timeline.scatter(timeline.gather(rows_to_tokens(scores, mask)) * is_last)


def settle(step_scores: Tensor, scores: Tensor) -> Tensor:
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
    return settled.to(wide(step_scores).dtype)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The trained tokens as lines, one per trajectory, in the order in which they were written.

    Prompt and env tokens are not in it: what follows the last token of a turn is the first token of the next one.
    ```
    mask   . . 1 1 . . 1 .         line   a b c
               a b     c
    ```
    """

    rows: Tensor
    """[K] where each token is in the batch"""
    columns: Tensor
    """[K]"""
    lines: Tensor
    """[K] where it is in the timeline"""
    places: Tensor
    """[K]"""
    occupied: Tensor
    """[M, P] bool"""
    shape: torch.Size
    """[N, L] of the batch"""

    @classmethod
    def of(cls, mask: Tensor, *, traj_ids: Tensor | None = None, turns: Tensor | None = None) -> Timeline:
        """Without `traj_ids` [N] each row is a trajectory of its own. With them, the rows of one trajectory are
        joined: by the turn of each token (`turns` [N, L]), or in the order of the rows if that is not given.
        """
        check_rows(mask, traj_ids=traj_ids)
        rows, columns = mask.bool().nonzero(as_tuple=True)
        lines = rows
        if traj_ids is not None:
            lines = Groups.of(traj_ids).index[rows]
            # Stable sorts, the least significant key first; a row's own order is there from the start.
            order = torch.arange(len(rows), device=rows.device)
            if turns is not None:
                check_shapes(mask=mask, turns=turns)
                order = turns[rows, columns].argsort(stable=True)
            order = order[lines[order].argsort(stable=True)]
            rows, columns, lines = rows[order], columns[order], lines[order]
        lengths = lines.bincount(minlength=mask.shape[0])
        places = torch.arange(len(lines), device=lines.device) - (lengths.cumsum(0) - lengths)[lines]
        longest = int(lengths.max()) if lengths.numel() else 0
        occupied = torch.arange(longest, device=lines.device) < lengths[:, None]
        return cls(rows, columns, lines, places, occupied, mask.shape)

    def gather(self, values: Tensor) -> Tensor:
        """Token values [N, L] as lines [M, P], 0 after the end of a line."""
        lined = values.new_zeros(self.occupied.shape)
        lined[self.lines, self.places] = values[self.rows, self.columns]
        return lined

    def scatter(self, lined: Tensor) -> Tensor:
        """Lines [M, P] back to where their tokens are [N, L], 0 elsewhere."""
        values = lined.new_zeros(self.shape)
        values[self.rows, self.columns] = lined[self.lines, self.places]
        return values


def _turn_index(turns: Tensor, rows: int, count: int) -> Tensor:
    """Turn t as index t + 1 into values [rows, 1 + count], so that 0 stands for no turn."""
    if len(turns) != rows:
        raise ValueError(f"turns has {len(turns)} rows, the values of the turns have {rows}")
    if turns.numel() and int(turns.max()) >= count:
        raise ValueError(f"turns has turn {int(turns.max())}, but the trajectories have {count} turns at most")
    return turns.long() + 1
