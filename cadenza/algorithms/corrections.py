"""Corrections for tokens that were not written by the policy that is trained.

The sampler's logprobs differ from the trainer's: its weights are older, and its kernels round differently. The
weights here, w = trainer / sampler, go in front of the token loss and carry no gradient:

    correction = truncated_weights(trainer_logprobs, infer_logprobs, mask)
    loss = ppo_clip(logprobs, trainer_logprobs, advantages, mask).values * correction.weights

A token of weight 0 still counts in the denominator of the loss: less signal is a smaller step, not a louder rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cadenza.algorithms.losses import LOG_RATIO_LIMIT
from cadenza.algorithms.metrics import token_metrics
from cadenza.algorithms.shapes import check_shapes, zero_outside

Level = Literal["token", "sequence"]
"""token: each token by its own ratio; little variance, some bias. sequence: all tokens of a row by the product of
their ratios; without bias before the cap, but the variance grows with the length."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What to multiply a token loss with."""

    weights: Tensor
    """[N, L], 0 outside the mask"""
    metrics: dict[str, float]
    """Of the weights, and of the distance between trainer and sampler."""


def truncated_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, level: Level = "token", cap: float = 2.0
) -> Correction:
    """Truncated importance sampling: the ratio, but at most `cap`."""
    if cap <= 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    gap = _gap(trainer_logprobs, sampler_logprobs, mask)
    ratio = _ratio(gap, level)
    weights = ratio.clamp(max=cap)
    metrics = token_metrics(
        mask,
        weight_mean=weights,
        weight_changed_fraction=weights != ratio,
        mismatch_kl=-gap,
        logprob_gap_mean=gap.abs(),
        logprob_gap_max=gap.abs(),
    )
    return Correction(zero_outside(weights, mask), metrics)


def _gap(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[N, L]: log(trainer / sampler) of each token, 0 outside the mask."""
    check_shapes(mask=mask, trainer_logprobs=trainer_logprobs, sampler_logprobs=sampler_logprobs)
    return zero_outside(trainer_logprobs.detach(), mask) - zero_outside(sampler_logprobs.detach(), mask)


def _ratio(gap: Tensor, level: Level) -> Tensor:
    """[N, L]: trainer / sampler, of the token or of its whole row."""
    if level == "sequence":
        gap = gap.sum(1, keepdim=True).expand(gap.shape)
    elif level != "token":
        raise ValueError(f"level must be 'token' or 'sequence', got {level!r}")
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
