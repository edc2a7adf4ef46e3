"""REINFORCE++ with the group as baseline."""

from __future__ import annotations

from typing import ClassVar

from cadenza.algorithms import reinforce_plus_plus_baseline
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """The score against the mean of its group, normalised over all tokens of the batch."""

    needs_groups: ClassVar[bool] = True

    @property
    def undoes_score_norm(self) -> bool:
        return True

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(
            reinforce_plus_plus_baseline(
                inputs.scores, inputs.groups, inputs.mask, valid=inputs.valid, traj_ids=inputs.trajectories
            )
        )
