"""From scores to advantages: how much better than expected each trained token was.

Invariant: the columns of the batch stay as they are; the result has `advantages` ([N], or [N, L] where they differ
within a row) and for estimators with a critic `returns` besides. Rows marked `is_padding` change nothing, and several
rows of one trajectory are one trajectory: it counts once, and time runs on from one of its rows to the next.

    batch --AdvantageInputs (advantage_inputs.py)--> --an AdvantageEstimator (estimators/)--> batch with advantages
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from cadenza.algorithms import Moments
from cadenza.data import DataProto
from cadenza.training.advantage_inputs import AdvantageInputs, ScoreConfig
from cadenza.training.estimators import (
    AdvantageEstimator,
    EstimatorName,
    FunctionEstimator,
    load_estimator,
    setting_owners,
)
from cadenza.training.estimators.grpo import Grpo
from cadenza.training.token_rows import Array
from cadenza.user_code import named_user_code


class EstimatorConfig(ScoreConfig):
    """Which advantages, and what is done to the scores before. The settings of the estimator are keys beside `name`
    (`{name: gae, lam: 0.9}`); one that it does not have is refused, one that is None has its default."""

    name: EstimatorName = "grpo"
    """One of `ESTIMATORS`, 'module:name', or an `AdvantageEstimator` class or a function of the batch itself."""
    method: SerializeAsAny[AdvantageEstimator] = Field(default_factory=Grpo)
    """The estimator with its settings. It is no key: it is made from `name` and the keys that are not common to all."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        common = {key: value for key, value in values.items() if key in cls.model_fields and key != "method"}
        name = values.get("name", cls.model_fields["name"].default)
        try:
            kind = load_estimator(name)
        except ValueError:
            return common  # the validator of `name` says so, at its place
        settings = {key: value for key, value in values.items() if key not in common}
        if isinstance(kind, type) and issubclass(kind, AdvantageEstimator):
            _check_settings(name, tuple(kind.model_fields), settings)
            given = {key: value for key, value in settings.items() if value is not None}
            return common | {"method": kind.model_validate(given)}
        _check_settings(name, (), settings)
        return common | {"method": FunctionEstimator(function=kind)}

    @classmethod
    def key_names(cls) -> Sequence[str]:
        return [key for key in cls.model_fields if key != "method"] + list(setting_owners())

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: EstimatorName) -> EstimatorName:
        load_estimator(name)
        return name

    @model_validator(mode="after")
    def _score_norm_matters(self) -> EstimatorConfig:
        undone = self.method.undoes_score_norm and self.score_clip is None and not self.kl_coef
        if self.score_norm != "none" and undone:
            raise ValueError(
                f"score_norm={self.score_norm!r} does nothing for {_called(self.name)!r}, which takes mean and "
                "deviation out again: remove it"
            )
        return self

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Settings that were not set are None: what was written out can be read with another `name`."""
        values: dict[str, Any] = handler(self)
        settings = values.pop("method")
        if isinstance(self.method, FunctionEstimator):
            settings = {}
        is_set = self.method.model_fields_set
        return (
            {"name": values.pop("name")} | {key: settings[key] if key in is_set else None for key in settings} | values
        )

    @property
    def needs_critic(self) -> bool:
        """The batch must have the column `values`."""
        return self.method.needs_critic

    @property
    def needs_reference(self) -> bool:
        """The batch must have the column `ref_logprobs`."""
        return self.method.needs_reference or self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """The batch must have the column `old_logprobs`."""
        return self.kl_coef > 0 and self.kl_logprobs == "old"

    @property
    def cross_group_setting(self) -> str | None:
        """The setting, if any, by which a group's advantages depend on other groups of its batch, with its value."""
        if self.score_norm != "none":
            return f"score_norm={self.score_norm!r}"
        setting = self.method.cross_group_setting
        if setting is None:
            return None
        value = _called(self.name) if setting == "name" else getattr(self.method, setting)
        return f"{setting}={value!r}"


def _called(name: EstimatorName) -> str:
    return name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)


def _check_settings(name: EstimatorName, own: tuple[str, ...], settings: Mapping[str, Any]) -> None:
    """Refuse keys that are no settings of the named estimator, where they are set."""
    owners = setting_owners()
    for key, value in settings.items():
        if key in own:
            continue
        if key in owners:
            if value is not None:
                names = ", ".join(map(repr, owners[key]))
                raise ValueError(f"{key} does nothing for {_called(name)!r}, only for {names}: remove it")
            continue
        known = [key for key in (*EstimatorConfig.model_fields, *own, *owners) if key != "method"]
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        raise ValueError(f"EstimatorConfig has no key '{key}'; {hint}")


class Estimator:
    """Gives batches their advantages."""

    def __init__(self, config: EstimatorConfig | None = None) -> None:
        self.config = config or EstimatorConfig()
        self._score_moments = Moments()
        """Of all scores so far, for `score_norm` 'running'."""

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The batch with its advantages, and metrics: of advantages and returns over the trained tokens, of scores
        over the trajectories, as they came."""
        inputs = AdvantageInputs(batch, self.config)
        _check_scores(inputs)
        moments = Moments.of(inputs.raw_scores, inputs.weight)
        seen = self._score_moments.merge(moments) if self.config.score_norm == "running" else self._score_moments
        if self.config.score_norm != "none":
            inputs.normalise(moments if self.config.score_norm == "batch" else seen)
        with named_user_code("estimator.name", self.config.name):
            result = self.config.method.with_advantages(inputs)
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
        if "returns" in result.batch:
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
