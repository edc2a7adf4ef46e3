"""From scores to advantages: how much better than expected each trained token was.

Invariant: the columns of the batch stay as they are; the result has `advantages` ([N], or [N, L] where they differ
within a row) and for 'gae' `returns` besides. Rows marked `is_padding` change nothing, and several rows of one
trajectory are one trajectory: it counts once, and time runs on from one of its rows to the next.
```
scores, step_scores --normalise, clip--> the score of each trajectory --reconcile--> what each turn is paid
                                                   |                                         |
ref_logprobs ----------- less the KL ------------->+---------------------------------------->+--> estimator
```
Where a reward function had the last word, the score is not what the env paid: the difference is paid with the last
turn, so that turns and tokens add up to the score that the group is compared by.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from cadenza.algorithms import (
    KlEstimator,
    Moments,
    anchor_ids,
    gae,
    gigpo,
    grpo,
    kl,
    normalise,
    penalised_rewards,
    penalised_scores,
    penalised_steps,
    reconcile_step_scores,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rewards_to_written_turns,
    rloo,
    row_weights,
    step_advantages,
    turn_rewards_to_tokens,
)
from cadenza.config import Config, load_object
from cadenza.data import IS_PADDING, DataProto, Ragged
from cadenza.training.token_rows import Array, TokenRows

Advantages: TypeAlias = "Tensor | Array | Ragged"
"""[N], or [N, L] like `input_ids`."""
CustomEstimator: TypeAlias = Callable[[DataProto], Advantages]
"""Sees the batch with `scores` and `step_scores` as they are after normalisation, clipping and KL."""

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("divide_by_std",),
    "rloo": (),
    "reinforce++": ("gamma",),
    "reinforce++-baseline": (),
    "gae": ("gamma", "lam", "whiten"),
    "gigpo": ("gamma", "step_weight", "divide_by_std"),
    "step": ("gamma", "over", "divide_by_std"),
}
"""The estimators by name, and which settings each of them has."""
ALIASES: Mapping[str, str] = {
    "ppo": "'gae'",
    "dr-grpo": "'grpo' with divide_by_std=False",
    "dr_grpo": "'grpo' with divide_by_std=False",
    "dapo": "'grpo'",
    "reinforce": "'reinforce++'",
}
"""Algorithms whose advantages have another name."""


class EstimatorConfig(Config):
    """Which advantages, and what is done to the scores before. A setting that is None has its estimator's default;
    one that the estimator does not have is refused."""

    name: str | CustomEstimator = "grpo"
    """One of `SETTINGS`, 'module:name', or a function of the batch."""
    divide_by_std: bool | None = None
    """grpo, gigpo, step: divide by the deviation of the group, True unless set. False makes GRPO Dr. GRPO."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Discount, per token for gae and reinforce++ (1), per turn for step (1) and gigpo (0.95)."""
    lam: float | None = Field(default=None, ge=0, le=1)
    """gae: 0 trusts the critic, 1 the returns; per token, 0.95 unless set."""
    whiten: bool | None = None
    """gae: normalise the advantages over all tokens of the batch, True unless set."""
    step_weight: float | None = Field(default=None, ge=0)
    """gigpo: what the step advantage counts besides that of the episode, 1 unless set."""
    over: Literal["group", "batch", "nothing"] | None = None
    """step: what the return of a turn is compared with, the turns of its group unless set."""
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
    def _every_setting_matters(self) -> EstimatorConfig:
        name = self._known_name()
        used = SETTINGS.get(name, ()) if name == self.name else ()
        for setting in dict.fromkeys(setting for names in SETTINGS.values() for setting in names):
            if getattr(self, setting) is not None and setting not in used:
                owners = ", ".join(repr(other) for other, names in SETTINGS.items() if setting in names)
                raise ValueError(f"{setting} does nothing for {name!r}, only for {owners}: remove it")
        if self.over == "nothing" and self.divide_by_std is not None:
            raise ValueError("divide_by_std does nothing with over='nothing': remove it")
        if not self.kl_coef:
            for setting in ("kl_estimator", "kl_logprobs"):
                if getattr(self, setting) is not None:
                    raise ValueError(f"{setting} does nothing while kl_coef is 0: set kl_coef or remove it")
        if self.score_norm != "none" and self._undoes_score_norm and self.score_clip is None and not self.kl_coef:
            raise ValueError(
                f"score_norm={self.score_norm!r} does nothing for {name!r}, which takes mean and deviation out again: "
                "remove it"
            )
        return self

    @property
    def _undoes_score_norm(self) -> bool:
        """Advantages stay as they are when every trajectory is paid a constant more at its end, and all pay is scaled.
        With a discount, the constant would count less the earlier a turn is."""
        if self.name == "grpo":
            return self.divide_by_std is not False
        if self.name in ("gigpo", "step"):
            undiscounted = self.gamma == 1 or (self.gamma is None and self.name == "step")
            return undiscounted and self.divide_by_std is not False and self.over != "nothing"
        return self.name == "reinforce++-baseline" or (self.name == "reinforce++" and self.gamma in (None, 1))

    def _known_name(self) -> str:
        if not isinstance(self.name, str):
            return getattr(self.name, "__name__", type(self.name).__name__)
        if self.name not in SETTINGS and ":" not in self.name:
            near = difflib.get_close_matches(self.name, SETTINGS, n=1, cutoff=0.5)
            meant = ALIASES.get(self.name.lower()) or (repr(near[0]) if near else None)
            hint = f"did you mean {meant}?" if meant else "see EstimatorConfig.name"
            raise ValueError(f"name must be one of {', '.join(SETTINGS)}, 'module:name' or a function, got "
                             f"{self.name!r}; {hint}")  # fmt: skip
        return self.name

    @property
    def needs_critic(self) -> bool:
        """The batch must have the column `values`."""
        return self.name == "gae"

    @property
    def needs_reference(self) -> bool:
        """The batch must have the column `ref_logprobs`."""
        return self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """The batch must have the column `old_logprobs`."""
        return self.kl_coef > 0 and self.kl_logprobs == "old"

    @property
    def cross_group_setting(self) -> str | None:
        """The setting, if any, by which a group's advantages depend on other groups of its batch. Of an estimator of
        one's own nobody knows."""
        if self.score_norm != "none":
            return f"score_norm={self.score_norm!r}"
        if self.over == "batch":
            return "over='batch'"
        return None if self.name in ("grpo", "rloo", "gigpo", "step") else f"name={self._known_name()!r}"

    def explicit(self, *settings: str) -> dict[str, Any]:
        """Those of the settings that are not left to the estimator."""
        return {name: value for name in settings if (value := getattr(self, name)) is not None}


class Estimator:
    """Gives batches their advantages."""

    def __init__(self, config: EstimatorConfig | None = None) -> None:
        self.config = config or EstimatorConfig()
        self._estimate = _estimate(self.config)
        self._score_moments = Moments()
        """Of all scores so far, for `score_norm` 'running'."""

    @property
    def needs_critic(self) -> bool:
        return self.config.needs_critic

    @property
    def needs_reference(self) -> bool:
        return self.config.needs_reference

    @property
    def needs_old_logprobs(self) -> bool:
        return self.config.needs_old_logprobs

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The batch with its advantages, and metrics: of advantages and returns over the trained tokens, of scores
        over the trajectories, as they came."""
        inputs = AdvantageInputs(batch, self.config)
        _check_scores(inputs)
        moments = Moments.of(inputs.raw_scores, inputs.weight)
        seen = self._score_moments.merge(moments) if self.config.score_norm == "running" else self._score_moments
        if self.config.score_norm != "none":
            inputs.normalise(moments if self.config.score_norm == "batch" else seen)
        result = self._estimate(inputs)
        _check_finite(inputs.rows.read(result, "advantages"), inputs)
        self._score_moments = seen  # only now: a batch that is given a second time after an error counts once
        return result, self._metrics(inputs, moments, result)

    def metrics(self, batch: DataProto) -> dict[str, float]:
        """The same of a batch that has its advantages, as one whose chunks were given them one by one."""
        inputs = AdvantageInputs(batch, self.config)
        return self._metrics(inputs, Moments.of(inputs.raw_scores, inputs.weight), batch)

    def _metrics(self, inputs: AdvantageInputs, moments: Moments, result: DataProto) -> dict[str, float]:
        given = inputs.rows.read(result, "advantages")
        metrics = {
            "score_mean": moments.mean,
            "score_std": moments.std,
            "groups_without_variance": inputs.groups_without_variance(),
            "advantage_mean": _mean(given),
            "advantage_std": float(given.std()) if len(given) else 0.0,
            "advantage_abs_mean": _mean(np.abs(given)),
        }
        if inputs.kl is not None:
            metrics["reward_kl"] = _mean(inputs.kl[inputs.mask].numpy())
        if self.config.needs_critic:
            metrics["return_mean"] = _mean(inputs.rows.read(result, "returns"))
        return metrics

    def state(self) -> dict[str, float]:
        """What a restart needs, JSON-like."""
        return {
            "count": self._score_moments.count,
            "mean": self._score_moments.mean,
            "squares": self._score_moments.squares,
        }

    def load_state(self, state: Mapping[str, float]) -> None:
        self._score_moments = Moments(state["count"], state["mean"], state["squares"])


class AdvantageInputs:
    """What the estimators read of a batch. Token tensors are [N, R], a row's trained tokens side by side."""

    def __init__(self, batch: DataProto, config: EstimatorConfig) -> None:
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


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """What a named estimator makes of the inputs."""

    advantages: Tensor
    """[N] or [N, R]"""
    returns: Tensor | None = None
    """[N, R] what the critic should have said"""


def _grpo(inputs: AdvantageInputs) -> AdvantageResult:
    settings = inputs.config.explicit("divide_by_std")
    return AdvantageResult(
        grpo(inputs.scores, inputs.groups, valid=inputs.valid, traj_ids=inputs.trajectories, **settings)
    )


def _rloo(inputs: AdvantageInputs) -> AdvantageResult:
    return AdvantageResult(rloo(inputs.scores, inputs.groups, valid=inputs.valid, traj_ids=inputs.trajectories))


def _reinforce(inputs: AdvantageInputs) -> AdvantageResult:
    settings = inputs.config.explicit("gamma")
    return AdvantageResult(
        reinforce_plus_plus(inputs.rewards, inputs.mask, traj_ids=inputs.trajectories, turns=inputs.turns, **settings)
    )


def _reinforce_baseline(inputs: AdvantageInputs) -> AdvantageResult:
    return AdvantageResult(
        reinforce_plus_plus_baseline(
            inputs.scores, inputs.groups, inputs.mask, valid=inputs.valid, traj_ids=inputs.trajectories
        )
    )


def _gae(inputs: AdvantageInputs) -> AdvantageResult:
    settings = inputs.config.explicit("gamma", "lam")
    estimate = gae(
        inputs.rewards, inputs.values, inputs.mask, traj_ids=inputs.trajectories, turns=inputs.turns, **settings
    )
    if inputs.config.whiten is False:
        return AdvantageResult(estimate.advantages, estimate.returns)
    return AdvantageResult(normalise(estimate.advantages, inputs.mask), estimate.returns)


def _gigpo(inputs: AdvantageInputs) -> AdvantageResult:
    settings = inputs.config.explicit("gamma", "step_weight", "divide_by_std")
    seen = (inputs.scores, inputs.steps, inputs.anchors, inputs.groups, inputs.turns)
    return AdvantageResult(gigpo(*seen, valid=inputs.valid, traj_ids=inputs.trajectories, **settings))


def _step(inputs: AdvantageInputs) -> AdvantageResult:
    settings = inputs.config.explicit("gamma", "over", "divide_by_std")
    return AdvantageResult(step_advantages(inputs.steps, inputs.groups, inputs.turns, valid=inputs.valid, **settings))


ESTIMATORS: Mapping[str, Callable[[AdvantageInputs], AdvantageResult]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce++": _reinforce,
    "reinforce++-baseline": _reinforce_baseline,
    "gae": _gae,
    "gigpo": _gigpo,
    "step": _step,
}


def _estimate(config: EstimatorConfig) -> Callable[[AdvantageInputs], DataProto]:
    """From the inputs to the batch with its new columns."""
    if isinstance(config.name, str) and config.name in ESTIMATORS:
        named = ESTIMATORS[config.name]
        return lambda inputs: _with_columns(inputs, named(inputs))
    custom = load_object(config.name) if isinstance(config.name, str) else config.name
    if not callable(custom):
        raise ValueError(f"{config.name!r} is a {type(custom).__name__}: an estimator is a function of the batch")
    return lambda inputs: _with_custom(inputs, custom)


def _with_columns(inputs: AdvantageInputs, estimated: AdvantageResult) -> DataProto:
    rows, batch = inputs.rows, inputs.batch
    if estimated.returns is not None:
        batch = rows.write(batch, "returns", estimated.returns[inputs.mask].numpy())
    if estimated.advantages.ndim > 1:
        return rows.write(batch, "advantages", estimated.advantages[inputs.mask].numpy())
    result = batch.select()
    result.batch["advantages"] = estimated.advantages.float()
    return result


def _with_custom(inputs: AdvantageInputs, custom: CustomEstimator) -> DataProto:
    config = inputs.config
    seen, result = inputs.batch.select(), inputs.batch.select()
    if config.score_norm != "none" or config.score_clip is not None or config.kl_coef:
        seen.batch["scores"] = inputs.scores
        seen.batch.assign_like("step_scores", inputs.steps, "step_scores")
    advantages = custom(seen)
    if isinstance(advantages, Tensor | np.ndarray) and advantages.ndim > 1:
        result.batch.assign_like("advantages", advantages, "input_ids")
    else:
        result.batch["advantages"] = advantages
    return result


def _check_scores(inputs: AdvantageInputs) -> None:
    """Before one score that is no number spoils those of its whole group."""
    wrong = (inputs.valid & ~inputs.raw_scores.isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"row {row} has a score of {float(inputs.raw_scores[row])}: a score must be a finite number")


def _check_finite(given: Array, inputs: AdvantageInputs) -> None:
    wrong = np.flatnonzero(~np.isfinite(given))
    if wrong.size:
        row = int(np.searchsorted(inputs.rows.firsts, wrong[0], side="right")) - 1
        raise ValueError(
            f"row {row} has an advantage of {given[wrong[0]]}; its score is {float(inputs.raw_scores[row])}"
        )


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else 0.0
