"""Algorithms: advantages, losses, KL, normalisation, aggregation and corrections as pure functions of tensors.

Token tensors are [N, L] with a mask [N, L] of the tokens that train; rows that only fill up a batch have none of them.
What is masked changes nothing: no value, no gradient, no statistic, no denominator.
"""

from __future__ import annotations

from cadenza.algorithms.advantages import (
    Estimate,
    anchor_ids,
    discounted_returns,
    gae,
    gigpo,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    step_advantages,
    turn_returns,
)
from cadenza.algorithms.aggregate import Aggregation, denominator, loss_sum, token_weights
from cadenza.algorithms.corrections import (
    Correction,
    FreshTokens,
    effective_sample_size,
    masked_weights,
    staleness_mask,
    truncated_weights,
)
from cadenza.algorithms.groups import Groups, row_weights
from cadenza.algorithms.kl import Estimator, kl, kl_loss, penalised_rewards, penalised_scores
from cadenza.algorithms.losses import (
    LOSSES,
    TokenLoss,
    entropy,
    entropy_bonus,
    explained_variance,
    policy_gradient,
    ppo_clip,
    value_clip,
)
from cadenza.algorithms.metrics import merge_metrics, token_metrics
from cadenza.algorithms.normalise import Moments, normalise, normalise_by_group
from cadenza.algorithms.tokens import (
    pay_last_token,
    pay_turns,
    rows_to_tokens,
    settle,
    train_mask,
    turn_numbers,
    turns_in_row,
    turns_to_tokens,
)

__all__ = [
    "LOSSES",
    "Aggregation",
    "Correction",
    "Estimate",
    "Estimator",
    "FreshTokens",
    "Groups",
    "Moments",
    "TokenLoss",
    "anchor_ids",
    "denominator",
    "discounted_returns",
    "effective_sample_size",
    "entropy",
    "entropy_bonus",
    "explained_variance",
    "gae",
    "gigpo",
    "grpo",
    "kl",
    "kl_loss",
    "loss_sum",
    "masked_weights",
    "merge_metrics",
    "normalise",
    "normalise_by_group",
    "pay_last_token",
    "pay_turns",
    "penalised_rewards",
    "penalised_scores",
    "policy_gradient",
    "ppo_clip",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "row_weights",
    "rows_to_tokens",
    "settle",
    "staleness_mask",
    "step_advantages",
    "token_metrics",
    "token_weights",
    "train_mask",
    "truncated_weights",
    "turn_numbers",
    "turn_returns",
    "turns_in_row",
    "turns_to_tokens",
    "value_clip",
]
