"""GAE: what a critic did not foresee."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from cadenza.algorithms import gae, normalise
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class Gae(AdvantageEstimator):
    """Generalised advantage estimation over the tokens that the policy wrote: the advantages of PPO."""

    needs_critic: ClassVar[bool] = True

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """0 trusts the critic, 1 the returns; per token."""
    whiten: bool = True
    """Normalise the advantages over all tokens of the batch."""

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        found = gae(
            inputs.rewards,
            inputs.values,
            inputs.mask,
            gamma=self.gamma,
            lam=self.lam,
            traj_ids=inputs.trajectories,
            turns=inputs.turns,
        )
        advantages = normalise(found.advantages, inputs.mask) if self.whiten else found.advantages
        return AdvantageResult(advantages, found.returns)
