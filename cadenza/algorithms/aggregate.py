"""From token losses to one number, the same however the batch is cut.

    weights = token_weights(mask, by)           # once, on the global batch
    count = denominator(mask, by)               # once, on the global batch
    for each micro-batch:                       # any rows, any order, padded or packed
        (loss_sum(loss, weights) / count).backward()

The sum over the micro-batches is the loss of the whole, because a token's weight knows only its own sequence and the
count is that of the whole. What the mask leaves out is in neither.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from cadenza.algorithms.groups import Groups
from cadenza.algorithms.shapes import at_least_float32, check_rows, check_shapes

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
"""token_mean: every token counts the same (DAPO). sequence_mean: every sequence counts the same, as the mean of its
tokens (GRPO). sequence_sum: the sum of a sequence's tokens over a constant length (Dr. GRPO): a token's weight depends
neither on how long its sequence became nor on how long the others did."""


def token_weights(mask: Tensor, by: Aggregation, *, traj_ids: Tensor | None = None) -> Tensor:
    """[N, L]: what each token's loss is multiplied by in the sum.

    A sequence is a row, or with `traj_ids` [N] all rows of a trajectory; then this needs the global batch.
    """
    _check(mask, by, traj_ids)
    weights = at_least_float32(mask.bool())
    if by != "sequence_mean":
        return weights
    lengths = weights.sum(1, dtype=torch.float64)
    if traj_ids is not None:
        lengths = Groups.of(traj_ids).sum(lengths)
    return weights / lengths.clamp(min=1).to(weights.dtype)[:, None]


def denominator(
    mask: Tensor, by: Aggregation, *, constant_length: int | None = None, traj_ids: Tensor | None = None
) -> float:
    """What the sum over the global batch is divided by: its tokens, its sequences, or its sequences times
    `constant_length`. Sequences without a masked token do not count. At least 1, so that nothing has a loss of 0.
    """
    _check(mask, by, traj_ids)
    if (by == "sequence_sum") != (constant_length is not None):
        raise ValueError(
            f"constant_length goes with 'sequence_sum' and nothing else, got {constant_length} with {by!r}"
        )
    if constant_length is not None and constant_length < 1:
        raise ValueError(f"constant_length must be above 0, got {constant_length}")
    if by == "token_mean":
        return float(max(int(mask.bool().sum()), 1))
    trains = mask.bool().any(1)
    sequences = int(trains.sum()) if traj_ids is None else Groups.of(traj_ids[trains]).count
    return float(max(sequences, 1) * (constant_length or 1))


def loss_sum(loss: Tensor, weights: Tensor) -> Tensor:
    """Scalar: the weighted sum of the token losses [N, L]; a token of weight 0 adds nothing, not even NaN."""
    check_shapes(weights=weights, loss=loss)
    return (loss.masked_fill(weights == 0, 0.0) * weights).sum()


def _check(mask: Tensor, by: Aggregation, traj_ids: Tensor | None) -> None:
    check_rows(mask, traj_ids=traj_ids)
    if by not in get_args(Aggregation):
        raise ValueError(f"by must be one of {', '.join(get_args(Aggregation))}, got {by!r}")
