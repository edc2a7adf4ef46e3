"""Step: the return from each turn on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cadenza.algorithms import step_advantages
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult
from cadenza.training.settings import refuse_unused


class Step(AdvantageEstimator):
    """The return from each turn on, on every token of that turn."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn."""
    over: Literal["group", "batch", "nothing"] = "group"
    """What the return of a turn is compared with: the turns of its group, of the batch, or none."""
    divide_by_std: bool = True
    """Divide by the deviation of what is compared."""

    @model_validator(mode="after")
    def _every_setting_matters(self) -> Step:
        if self.over == "nothing":
            refuse_unused(self, ("divide_by_std",), "with over='nothing'")
        return self

    @property
    def cross_group_setting(self) -> str | None:
        return "over" if self.over == "batch" else None

    @property
    def undoes_score_norm(self) -> bool:
        return self.gamma == 1 and self.divide_by_std and self.over != "nothing"

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(
            step_advantages(
                inputs.steps,
                inputs.groups,
                inputs.turns,
                gamma=self.gamma,
                over=self.over,
                divide_by_std=self.divide_by_std,
                valid=inputs.valid,
            )
        )
