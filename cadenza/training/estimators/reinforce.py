"""REINFORCE++: returns of tokens, normalised over the batch."""

from __future__ import annotations

from pydantic import Field

from cadenza.algorithms import reinforce_plus_plus
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class ReinforcePlusPlus(AdvantageEstimator):
    """The return from each token on, normalised over all tokens of the batch."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""

    @property
    def undoes_score_norm(self) -> bool:
        return self.gamma == 1

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(
            reinforce_plus_plus(
                inputs.rewards, inputs.mask, gamma=self.gamma, traj_ids=inputs.trajectories, turns=inputs.turns
            )
        )
