"""Losses of pairs [M]: one answer of each pair was preferred.

Reference values are constants: no gradient goes into them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cadenza.algorithms.shapes import at_least_float32, check_shapes


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A loss that is not aggregated yet."""

    values: Tensor
    """[M]"""
    metrics: dict[str, float]
    """Means over the pairs."""
    pairs: int
    """How many pairs the metrics are about: their weight in `metrics.merge_metrics`."""


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Direct preference optimisation, from the logprobs [M] of whole answers under the policy and the reference.

    The implied reward of an answer is `beta` times what the policy says more of it than the reference. With
    `label_smoothing` e, a pair counts as labelled the wrong way round with probability e.
    """
    check_shapes(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be from 0 to below 0.5, got {label_smoothing}")
    reward_chosen = beta * (at_least_float32(chosen) - ref_chosen.detach())
    reward_rejected = beta * (at_least_float32(rejected) - ref_rejected.detach())
    margin = reward_chosen - reward_rejected
    values = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    rewards = {"reward_chosen": _mean(reward_chosen), "reward_rejected": _mean(reward_rejected)}
    return PairLoss(values, pair_metrics(margin) | rewards, len(margin))


def bradley_terry(chosen: Tensor, rejected: Tensor) -> PairLoss:
    """Minus the log of the probability that the chosen answer wins, from the scores [M] of both."""
    check_shapes(chosen=chosen, rejected=rejected)
    margin = at_least_float32(chosen) - at_least_float32(rejected)
    return PairLoss(-F.logsigmoid(margin), pair_metrics(margin), len(margin))


def pair_metrics(margin: Tensor) -> dict[str, float]:
    """How many pairs are in the right order, and by how much: `margin` [M] is above 0 where they are. A tie counts
    half."""
    right = (margin > 0).float() + 0.5 * (margin == 0).float()
    return {"accuracy": _mean(right), "margin": _mean(margin)}


def _mean(values: Tensor) -> float:
    return float(values.detach().mean(dtype=torch.float64))
