"""What estimators read of a batch: the scores of its trajectories, after they are shaped, and what the tokens are paid.
```
scores, step_scores --normalise, clip--> the score of each trajectory --reconcile--> what each turn is paid
                                                   |                                         |
ref_logprobs ----------- less the KL ------------->+---------------------------------------->+--> estimator
```
Where a reward function had the last word, the score is not what the env paid: the difference is paid with the last
turn, so that turns and tokens add up to the score that the group is compared by.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from cadenza.algorithms import (
    KlEstimator,
    Moments,
    anchor_ids,
    kl,
    penalised_rewards,
    penalised_scores,
    penalised_steps,
    reconcile_step_scores,
    rewards_to_written_turns,
    row_weights,
    turn_rewards_to_tokens,
)
from cadenza.config import Config
from cadenza.data import IS_PADDING, DataProto
from cadenza.training.token_rows import TokenRows


class ScoreConfig(Config):
    """What is done to the scores before any estimator sees them."""

    score_norm: Literal["none", "batch", "running"] = "none"
    """Scores less their mean, in deviations: of this batch, or of everything seen so far. Step scores are divided by
    the same deviation."""
    score_clip: float | None = Field(default=None, gt=0)
    """Scores within plus and minus this, after `score_norm`."""
    kl_coef: float = Field(default=0.0, ge=0)
    """KL to the reference in the reward, after the above; needs the column `ref_logprobs`."""
    kl_estimator: KlEstimator | None = None
    """k1 unless set, which has no bias here."""
    kl_logprobs: Literal["infer", "old"] | None = None
    """Whose KL: that of the policies that wrote the tokens (`infer_logprobs`), unless set to that of the trainer
    (`old_logprobs`), where both models have the same kernels but stale tokens bias the estimate."""

    @model_validator(mode="after")
    def _kl_settings_matter(self) -> ScoreConfig:
        if not self.kl_coef:
            for setting in ("kl_estimator", "kl_logprobs"):
                if getattr(self, setting) is not None:
                    raise ValueError(f"{setting} does nothing while kl_coef is 0: set kl_coef or remove it")
        return self

    @property
    def shapes_scores(self) -> bool:
        """Whether estimators see other scores than those that came."""
        return self.score_norm != "none" or self.score_clip is not None or self.kl_coef > 0


class AdvantageInputs:
    """What the estimators read of a batch. Token tensors are [N, R], a row's trained tokens side by side."""

    def __init__(self, batch: DataProto, config: ScoreConfig) -> None:
        self.batch = batch
        self.config = config
        self.rows = TokenRows.of(batch)
        self.mask = self.rows.pad(np.ones(len(self.rows.trained), bool))
        self.raw_scores = batch.batch["scores"]
        """[N] the scores as they came"""
        self.groups = batch.batch["traj_group_id"]
        """[N]"""
        padding = batch.batch[IS_PADDING].bool() if IS_PADDING in batch.batch else torch.zeros(len(batch)).bool()
        self.valid = ~padding
        """[N] rows that exist"""
        ids = batch.batch.numpy("traj_id")[self.valid.numpy()]
        self.trajectories = batch.batch["traj_id"] if len(np.unique(ids)) < len(ids) else None
        """[N] which rows are one trajectory, if a row is not"""
        self.weight = row_weights(self.raw_scores, valid=self.valid, traj_ids=self.trajectories)
        """[N] what each row counts among the trajectories"""
        self._moments: Moments | None = None

    def normalise(self, moments: Moments) -> None:
        """Measure the scores by these; before anything else is asked for."""
        self._moments = moments

    @cached_property
    def kl(self) -> Tensor | None:
        """[N, R], if it is part of the reward."""
        if not self.config.kl_coef:
            return None
        policy = "old_logprobs" if self.config.kl_logprobs == "old" else "infer_logprobs"
        return kl(
            self._tokens(policy), self._tokens("ref_logprobs"), self.mask, estimator=self.config.kl_estimator or "k1"
        )

    @cached_property
    def scores(self) -> Tensor:
        """[N] of the trajectories, less the KL of all their tokens."""
        if self.kl is None:
            return self._scores
        return penalised_scores(self._scores, self.kl, coefficient=self.config.kl_coef, traj_ids=self.trajectories)

    @cached_property
    def turns(self) -> Tensor:
        """[N, R] the turn of its trajectory that wrote each token, -1 where there is none"""
        return torch.where(self.mask, self._tokens("turn_ids").long(), -1)

    @cached_property
    def steps(self) -> Tensor:
        """[N, T] what each turn is paid, less the KL of its tokens; adds up to `scores`"""
        if self.kl is None:
            return self._steps
        return penalised_steps(
            self._steps, self.kl, self.turns, coefficient=self.config.kl_coef, traj_ids=self.trajectories
        )

    @cached_property
    def rewards(self) -> Tensor:
        """[N, R] what each token is paid: its turn's pay on the turn's last token, and everywhere less its KL"""
        paid = turn_rewards_to_tokens(
            rewards_to_written_turns(self._steps, self.turns, traj_ids=self.trajectories), self.turns
        )
        return paid if self.kl is None else penalised_rewards(paid, self.kl, coefficient=self.config.kl_coef)

    @cached_property
    def values(self) -> Tensor:
        """[N, R] of the critic"""
        return self._tokens("values")

    @cached_property
    def anchors(self) -> Tensor:
        """[N, T] the state in which each turn of the row began, -1 for other turns"""
        ids, turns = self.batch.batch.ragged("input_ids"), self.batch.batch.ragged("turn_ids")
        flat, of_turn, offsets = (torch.from_numpy(values) for values in (ids.values, turns.values, ids.offsets))
        return anchor_ids(flat, of_turn, offsets, self._steps.shape[1])

    def groups_without_variance(self) -> float:
        """The share of groups whose scores are all equal, as they came: nothing can be learned by comparing them."""
        valid = self.valid.numpy()
        groups, scores = self.groups.numpy()[valid], self.raw_scores.numpy()[valid]
        if not len(groups):
            return 0.0
        order = np.argsort(groups)
        firsts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[0]] - 1))
        low, high = (extreme.reduceat(scores[order], firsts) for extreme in (np.minimum, np.maximum))
        return float((low == high).mean())

    @cached_property
    def _scores(self) -> Tensor:
        """[N] normalised and clipped"""
        scores = self.raw_scores if self._moments is None else self._moments.normalise(self.raw_scores)
        clip = self.config.score_clip
        return scores if clip is None else scores.clamp(-clip, clip)

    @cached_property
    def _steps(self) -> Tensor:
        """[N, T] what each turn is paid, 0 where there is none"""
        steps = self.batch.batch["step_scores"]
        if self._moments is not None:
            steps = self._moments.normalise(steps, centre=False)
        return reconcile_step_scores(steps, self.batch.batch["turns"], self._scores)

    def _tokens(self, name: str) -> Tensor:
        return self.rows.pad(self.rows.read(self.batch, name))
