"""RLOO: scores against the others of their group."""

from __future__ import annotations

from typing import ClassVar

from cadenza.algorithms import rloo
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class Rloo(AdvantageEstimator):
    """The score against the mean of the others of its group (leave one out)."""

    needs_groups: ClassVar[bool] = True

    @property
    def cross_group_setting(self) -> None:
        return None

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(rloo(inputs.scores, inputs.groups, valid=inputs.valid, traj_ids=inputs.trajectories))
