"""Algorithms: advantages, losses, KL, normalisation, aggregation and corrections as pure functions of tensors.

Token tensors are [N, L] with a mask [N, L] of the tokens that train; rows that only fill up a batch have none of them.
What is masked changes nothing: no value, no gradient, no statistic, no denominator.
"""

from __future__ import annotations

from cadenza.algorithms.advantages import (
    GaeResult,
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
    truncated_weights,
)
from cadenza.algorithms.distillation import DIVERGENCES, forward_kl, reverse_kl
from cadenza.algorithms.groups import Groups, row_weights, sum_by_id
from cadenza.algorithms.kl import KlEstimator, kl, kl_loss, penalised_rewards, penalised_scores, penalised_steps
from cadenza.algorithms.losses import (
    LOSSES,
    NamedLoss,
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
from cadenza.algorithms.preferences import PairLoss, bradley_terry, dpo
from cadenza.algorithms.tokens import (
    anchor_ids,
    reconcile_step_scores,
    rewards_to_written_turns,
    rows_to_tokens,
    turn_rewards_to_tokens,
    turns_in_row,
    turns_to_tokens,
)

__all__ = [
    "DIVERGENCES",
    "LOSSES",
    "Aggregation",
    "Correction",
    "GaeResult",
    "Groups",
    "KlEstimator",
    "Moments",
    "NamedLoss",
    "PairLoss",
    "TokenLoss",
    "anchor_ids",
    "bradley_terry",
    "denominator",
    "discounted_returns",
    "dpo",
    "entropy",
    "entropy_bonus",
    "explained_variance",
    "forward_kl",
    "gae",
    "gigpo",
    "grpo",
    "kl",
    "kl_loss",
    "loss_sum",
    "merge_metrics",
    "normalise",
    "normalise_by_group",
    "penalised_rewards",
    "penalised_scores",
    "penalised_steps",
    "policy_gradient",
    "ppo_clip",
    "reconcile_step_scores",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reverse_kl",
    "rewards_to_written_turns",
    "rloo",
    "row_weights",
    "rows_to_tokens",
    "step_advantages",
    "sum_by_id",
    "token_metrics",
    "token_weights",
    "truncated_weights",
    "turn_returns",
    "turn_rewards_to_tokens",
    "turns_in_row",
    "turns_to_tokens",
    "value_clip",
]
