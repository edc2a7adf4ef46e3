"""GRPO: scores against their group."""

from __future__ import annotations

from typing import ClassVar

from cadenza.algorithms import grpo
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class Grpo(AdvantageEstimator):
    """The score against the mean of its group, in deviations of the group."""

    needs_groups: ClassVar[bool] = True

    divide_by_std: bool = True
    """False makes it Dr. GRPO."""

    @property
    def undoes_score_norm(self) -> bool:
        return self.divide_by_std

    @property
    def cross_group_setting(self) -> None:
        return None

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(
            grpo(
                inputs.scores,
                inputs.groups,
                divide_by_std=self.divide_by_std,
                valid=inputs.valid,
                traj_ids=inputs.trajectories,
            )
        )
