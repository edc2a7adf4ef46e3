"""Losses per token [N, L]; aggregate.py makes one number of them.

Only the tokens of the mask [N, L] have a loss, a gradient and a say in the metrics. Advantages, old logprobs, old
values and returns are constants: no gradient goes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.algorithms.metrics import token_metrics
from cadenza.algorithms.normalise import Moments
from cadenza.algorithms.shapes import check_shapes, zero_outside

LOG_RATIO_LIMIT = 20.0
"""Logprob differences are kept within this before `exp`: a ratio of 5e8 is as wrong as infinity, but adds up."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss that is not aggregated yet."""

    values: Tensor
    """[N, L], 0 outside the mask"""
    metrics: dict[str, float]
    """Means over the masked tokens (largest values where the name ends in `_max`)."""
    tokens: int
    """How many tokens the metrics are about: their weight in `metrics.merge_metrics`."""


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """The clipped surrogate of PPO: no gain from a ratio outside [1 - clip_low, 1 + clip_high].

    A `clip_high` above `clip_low` lets rare tokens become likely (DAPO's clip-higher). The minimum of the two
    surrogates leaves one side open: a bad token that became much more likely counts with its whole ratio.
    `dual_clip` c > 1 bounds it there: at most c times the advantage, and no gradient beyond.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be from 0 to 1, got {clip_low}")
    if clip_high < 0:
        raise ValueError(f"clip_high must be >= 0, got {clip_high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    log_ratio, advantage = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    too_bad = torch.zeros_like(advantage, dtype=torch.bool)
    if dual_clip is not None:
        too_bad = (advantage < 0) & (ratio > dual_clip)
        loss = torch.where(too_bad, -advantage * dual_clip, loss)
    metrics = token_metrics(
        mask,
        **_drift(log_ratio, ratio),
        clip_fraction_low=(advantage < 0) & (ratio < 1 - clip_low),
        clip_fraction_high=(advantage > 0) & (ratio > 1 + clip_high),
        clip_fraction_dual=too_bad,
    )
    return TokenLoss(zero_outside(loss, mask), metrics, int(mask.bool().sum()))


def policy_gradient(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """REINFORCE: minus the advantage times the logprob, no ratio and no clip.

    Right for tokens of the policy that is trained. For others, multiply by the weights of corrections.py. The old
    logprobs enter the metrics only.
    """
    log_ratio, advantage = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -advantage * zero_outside(logprobs, mask)
    return TokenLoss(loss, token_metrics(mask, **_drift(log_ratio, ratio)), int(mask.bool().sum()))


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> TokenLoss:
    """Half the squared error of the critic. With `clip`, moving further than that from the old value gains nothing."""
    check_shapes(mask=mask, values=values, old_values=old_values, returns=returns)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be above 0, got {clip}")
    value, old, target = (
        zero_outside(values, mask),
        zero_outside(old_values.detach(), mask),
        zero_outside(returns.detach(), mask),
    )
    error = (value - target) ** 2
    clipped_error = error
    if clip is not None:
        clipped_error = (old + (value - old).clamp(-clip, clip) - target) ** 2
    loss = 0.5 * torch.maximum(error, clipped_error)
    metrics = token_metrics(mask, value_mean=value, value_error=error, value_clip_fraction=clipped_error > error)
    return TokenLoss(loss, metrics, int(mask.bool().sum()))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """How much of the spread of the returns the critic foresaw: 1 all, 0 none, less than 0 worse than a constant."""
    check_shapes(mask=mask, values=values, returns=returns)
    spread = Moments.of(returns.detach(), mask).squares
    return 1 - Moments.of(returns.detach() - values.detach(), mask).squares / spread if spread else 0.0


def entropy(logprobs: Tensor) -> Tensor:
    """[*]: the entropy of distributions over V tokens, in nats, from their logprobs [*, V], which may be -inf."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)  # 0 * -inf is no number


def entropy_bonus(entropies: Tensor, mask: Tensor, *, coefficient: float) -> TokenLoss:
    """Minus `coefficient` times the entropy [N, L]: added to a loss, it rewards staying undecided."""
    check_shapes(mask=mask, entropies=entropies)
    metrics = token_metrics(mask, entropy=entropies)
    return TokenLoss(-coefficient * zero_outside(entropies, mask), metrics, int(mask.bool().sum()))


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss of the policy that `actor.loss` can name."""

    function: Callable[..., TokenLoss]
    """It begins with (logprobs, old_logprobs, advantages, mask), and has no gradient where the advantage is 0."""
    settings: tuple[str, ...] = ()
    """Its keywords, which are settings of the actor."""
    has_ratio: bool = True
    """Whether the gradient depends on the old logprobs."""


LOSSES: Mapping[str, NamedLoss] = {
    "ppo_clip": NamedLoss(ppo_clip, settings=("clip_low", "clip_high", "dual_clip")),
    "policy_gradient": NamedLoss(policy_gradient, has_ratio=False),
}
"""A new one is a function above and a line here; and a field of `PolicyLossConfig` for each new setting."""


def _inputs(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log ratio and advantages, with nothing left of what is masked."""
    check_shapes(mask=mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return zero_outside(logprobs, mask) - zero_outside(old_logprobs.detach(), mask), zero_outside(
        advantages.detach(), mask
    )


def _drift(log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """How far the policy has moved: KL(old || new) by the k3 estimator, and the ratios themselves."""
    return {"approx_kl": ratio - 1 - log_ratio, "ratio_mean": ratio, "ratio_max": ratio}
