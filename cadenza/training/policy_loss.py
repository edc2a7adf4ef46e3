"""The loss of the policy: its settings, what it reads of a batch, and its sum over a micro-batch.
```
advantages, logprobs of the past --> token loss (ppo_clip ...) * importance weights --+
entropy, reference logprobs      --> entropy bonus, KL                              --+--> sum, of the micro-batch
```
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from cadenza.algorithms import (
    LOSSES,
    NamedLoss,
    TokenLoss,
    entropy_bonus,
    kl,
    kl_loss,
    loss_sum,
    token_metrics,
    token_weights,
    truncated_weights,
)
from cadenza.config import load_object
from cadenza.data import DataProto
from cadenza.training.learner import LearnerConfig
from cadenza.training.packing import PackedRows
from cadenza.training.settings import refuse_unused
from cadenza.training.token_rows import Array, TokenRows
from cadenza.training.update_metrics import UpdateMetrics
from cadenza.user_code import named_user_code

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""From logprobs, old logprobs, advantages and mask [n, R]: a row's trained tokens side by side."""


class PolicyLossConfig(LearnerConfig):
    """What the policy is trained for."""

    loss: str | PolicyLoss = "ppo_clip"
    """'ppo_clip', 'policy_gradient', 'module:name', or a function."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)
    """Above `clip_low`, rare tokens can become likely faster (DAPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with a negative advantage."""
    entropy_coef: float = Field(default=0.0, ge=0)
    kl_coef: float = Field(default=0.0, ge=0)
    """KL to the reference in the loss; needs the column `ref_logprobs`."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    sequence: Literal["row", "trajectory"] = "row"
    """What counts as one sequence, where the contexts of a trajectory are several rows."""
    old_logprobs: Literal["recompute", "infer"] = "recompute"
    """What the policy moves away from: the trainer's own logprobs, or those that the sampler reported."""
    correction: Literal["off", "token", "sequence"] = "off"
    """Weights trainer / sampler for tokens of older versions or other kernels, by token or by row."""
    correction_cap: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _one_past(self) -> PolicyLossConfig:
        if self.correction != "off" and self.old_logprobs == "infer":
            raise ValueError(
                "correction and old_logprobs='infer' both divide by the sampler's probability: use one of them"
            )
        if isinstance(self.loss, str) and self.loss not in LOSSES and ":" not in self.loss:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, 'module:name' or a function, got {self.loss!r}")
        return self

    @model_validator(mode="after")
    def _every_setting_matters(self) -> PolicyLossConfig:
        named, name = self.named_loss, getattr(self.loss, "__name__", self.loss)
        used = () if named is None else named.settings
        unused = tuple(key for other in LOSSES.values() for key in other.settings if key not in used)
        refuse_unused(self, unused, f"with the loss {name!r}")
        if named is not None and not named.has_ratio:
            refuse_unused(self, ("old_logprobs",), f"with the loss {name!r}, which has no ratio")
        if not self.kl_coef:
            refuse_unused(self, ("kl_estimator",), "while kl_coef is 0")
        if self.aggregation == "token_mean":
            refuse_unused(self, ("sequence",), "with aggregation 'token_mean'")
        return self

    @property
    def named_loss(self) -> NamedLoss | None:
        """The built-in loss; None for a function of the user."""
        return LOSSES.get(self.loss) if isinstance(self.loss, str) else None

    @property
    def needs_advantages(self) -> bool:
        """A row whose advantages are all 0 has no gradient. For a loss of the user that is not known."""
        return self.named_loss is not None and not self.entropy_coef and not self.kl_coef

    def token_loss(self) -> PolicyLoss:
        """The loss as a function, with its settings."""
        if (named := self.named_loss) is not None:
            return partial(named.function, **{key: getattr(self, key) for key in named.settings})
        return self.loss if not isinstance(self.loss, str) else cast("PolicyLoss", load_object(self.loss))


@dataclass(slots=True, kw_only=True)
class LossInputs:
    """What the loss needs besides the policy's logprobs: [N, R], a row's trained tokens side by side."""

    mask: Tensor
    advantages: Tensor
    weights: Tensor
    """Of each token in the sum of the loss."""
    old: Tensor
    """Logprobs that the policy moves away from."""
    needs_old: Array
    """[N] rows whose old logprobs are those of their first pass, which is still to come"""
    infer: Tensor | None
    """Logprobs that the sampler reported."""
    reference: Tensor | None
    trajectories: Tensor | None
    """[N] which rows are one sequence, if a row is not"""

    @classmethod
    def of(cls, batch: DataProto, rows: TokenRows, config: PolicyLossConfig) -> LossInputs:
        """Of all rows of a batch."""

        def read(name: str, *, needed: bool) -> Tensor | None:
            return rows.pad(rows.read(batch, name)) if needed or name in batch.batch else None

        mask = rows.pad(np.ones(len(rows.trained), bool))
        infer = read("infer_logprobs", needed=config.correction != "off" or config.old_logprobs == "infer")
        old = infer if config.old_logprobs == "infer" else read("old_logprobs", needed=False)
        trajectories = batch.batch["traj_id"] if config.sequence == "trajectory" else None
        return cls(
            mask=mask,
            advantages=cast("Tensor", read("advantages", needed=True)),
            weights=token_weights(mask, config.aggregation, traj_ids=trajectories),
            old=torch.zeros(mask.shape) if old is None else old,
            needs_old=np.full(len(rows), old is None),
            infer=infer,
            reference=read("ref_logprobs", needed=config.kl_coef > 0),
            trajectories=trajectories,
        )

    def select(self, packed: PackedRows) -> LossInputs:
        """The rows of a micro-batch, as wide as their longest."""
        index, width = torch.from_numpy(packed.rows), packed.shape[1]

        def take(values: Tensor) -> Tensor:
            return values.index_select(0, index)[:, :width].to(packed.tokens.device)

        return LossInputs(
            mask=take(self.mask),
            advantages=take(self.advantages),
            weights=take(self.weights),
            old=take(self.old),
            needs_old=self.needs_old[packed.rows],
            infer=None if self.infer is None else take(self.infer),
            reference=None if self.reference is None else take(self.reference),
            trajectories=None,
        )


class PolicyObjective:
    """Sums up the loss of micro-batches."""

    def __init__(self, config: PolicyLossConfig) -> None:
        self._config = config
        self._token_loss = config.token_loss()

    def sum(self, inputs: LossInputs, logprobs: Tensor, entropies: Tensor, update_metrics: UpdateMetrics) -> Tensor:
        """The share of some rows in the loss of the update, before it is divided by the count of all."""
        config = self._config
        mask, old = inputs.mask, inputs.old
        with named_user_code("actor.loss", config.loss):
            policy = self._token_loss(logprobs, old, inputs.advantages, mask)
            _check_token_loss(policy, mask)
        values = policy.values
        metrics = dict(policy.metrics)
        trainer = logprobs.detach() if config.old_logprobs == "infer" else old
        sampler = inputs.infer if inputs.infer is not None else old
        level: Literal["token", "sequence"] = "sequence" if config.correction == "sequence" else "token"
        correction = truncated_weights(trainer, sampler, mask, level=level, cap=config.correction_cap)
        metrics |= correction.metrics
        if config.correction != "off":
            values = values * correction.weights
        pg_loss = loss_sum(values, inputs.weights)
        bonus = entropy_bonus(entropies, mask, coefficient=config.entropy_coef)
        metrics |= bonus.metrics
        if config.entropy_coef:
            values = values + bonus.values
        if inputs.reference is not None and config.kl_coef:
            penalty = kl_loss(
                logprobs, inputs.reference, mask, coefficient=config.kl_coef, estimator=config.kl_estimator
            )
            metrics |= penalty.metrics
            values = values + (penalty.values if config.correction == "off" else penalty.values * correction.weights)
        elif inputs.reference is not None:
            metrics |= token_metrics(mask, kl=kl(logprobs.detach(), inputs.reference, mask, estimator="k3"))
        # One sample per row where a row has one weight; its first trained token speaks for all.
        samples = correction.weights[:, 0] if level == "sequence" else correction.weights[mask]
        update_metrics.add(metrics, policy.tokens, float(pg_loss.detach()), samples)
        return loss_sum(values, inputs.weights)


def _check_token_loss(policy: object, mask: Tensor) -> None:
    """Raise unless a loss returned what it must: one value for each token."""
    if not isinstance(policy, TokenLoss):
        kind = type(policy).__name__
        raise TypeError(f"actor.loss must return a TokenLoss(values, metrics, tokens), got {kind}")
    if policy.values.shape != mask.shape:
        raise ValueError(
            f"actor.loss must return values of the shape of its mask, {list(mask.shape)}, got "
            f"{list(policy.values.shape)}: do not sum them up, actor.aggregation does that"
        )
