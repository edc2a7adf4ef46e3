"""GiGPO: episodes against their group, and turns against those that began in the same state."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from cadenza.algorithms import gigpo
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class Gigpo(AdvantageEstimator):
    """The advantage of the episode in its group, plus that of the turn among turns of the group from the same state."""

    needs_groups: ClassVar[bool] = True

    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn."""
    step_weight: float = Field(default=1.0, ge=0)
    """What the step advantage counts besides that of the episode."""
    divide_by_std: bool = True
    """Divide by the deviation of what is compared."""

    @property
    def undoes_score_norm(self) -> bool:
        return self.gamma == 1 and self.divide_by_std

    @property
    def cross_group_setting(self) -> None:
        return None

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(
            gigpo(
                inputs.scores,
                inputs.steps,
                inputs.anchors,
                inputs.groups,
                inputs.turns,
                gamma=self.gamma,
                step_weight=self.step_weight,
                divide_by_std=self.divide_by_std,
                valid=inputs.valid,
                traj_ids=inputs.trajectories,
            )
        )
