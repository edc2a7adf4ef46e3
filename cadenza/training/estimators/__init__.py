"""The estimators by name: one small file each, which declares its settings, what it needs, and its function.

A new one is a file beside this with a subclass of `AdvantageEstimator`, and a line in `ESTIMATORS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from cadenza.config import load_object
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult
from cadenza.training.estimators.function import CustomEstimator, FunctionEstimator

__all__ = [
    "ALIASES",
    "ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageResult",
    "CustomEstimator",
    "EstimatorName",
    "FunctionEstimator",
    "load_estimator",
    "names_within_groups",
    "setting_owners",
]

EstimatorName: TypeAlias = str | Callable[..., Any]
"""One of `ESTIMATORS`, 'module:name', an `AdvantageEstimator` class, or a function of the batch."""

ESTIMATORS: Mapping[str, str] = {
    "grpo": "cadenza.training.estimators.grpo:Grpo",
    "rloo": "cadenza.training.estimators.rloo:Rloo",
    "reinforce++": "cadenza.training.estimators.reinforce:ReinforcePlusPlus",
    "reinforce++-baseline": "cadenza.training.estimators.reinforce_baseline:ReinforcePlusPlusBaseline",
    "gae": "cadenza.training.estimators.gae:Gae",
    "gigpo": "cadenza.training.estimators.gigpo:Gigpo",
    "step": "cadenza.training.estimators.step:Step",
    "distill": "cadenza.training.estimators.distill:Distill",
}
"""Where each of them is."""
ALIASES: Mapping[str, str] = {
    "ppo": "'gae'",
    "dr-grpo": "'grpo' with divide_by_std=False",
    "dr_grpo": "'grpo' with divide_by_std=False",
    "dapo": "'grpo'",
    "reinforce": "'reinforce++'",
}
"""Algorithms whose advantages have another name."""


def load_estimator(name: EstimatorName) -> type[AdvantageEstimator] | CustomEstimator:
    """The class or the function that `estimator.name` means; raises ValueError if it means nothing."""
    if isinstance(name, str) and name not in ESTIMATORS and ":" not in name:
        near = difflib.get_close_matches(name, ESTIMATORS, n=1, cutoff=0.5)
        meant = ALIASES.get(name.lower()) or (repr(near[0]) if near else None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise ValueError(f"must be one of {', '.join(ESTIMATORS)}, 'module:name' or a function{hint}")
    found: Any = load_object(ESTIMATORS.get(name, name)) if isinstance(name, str) else name
    if isinstance(found, type) and not issubclass(found, AdvantageEstimator):
        raise ValueError(f"{name!r} is a class without advantages: derive it from AdvantageEstimator")
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}: an estimator is a function of the batch or a class")
    estimator: type[AdvantageEstimator] | CustomEstimator = found
    return estimator


def setting_owners() -> dict[str, list[str]]:
    """The settings of the built-in estimators, and for each the names of those that have it."""
    owners: dict[str, list[str]] = {}
    for name, path in ESTIMATORS.items():
        for setting in load_object(path).model_fields:
            owners.setdefault(setting, []).append(name)
    return owners


def names_within_groups() -> list[str]:
    """The built-in estimators whose advantages depend on one group alone, unless a setting changes it."""
    return [name for name, path in ESTIMATORS.items() if load_object(path)().cross_group_setting is None]
