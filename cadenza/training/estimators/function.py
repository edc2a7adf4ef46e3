"""A plain function of the batch as an estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from torch import Tensor

from cadenza.data import DataProto, Ragged
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator
from cadenza.training.token_rows import Array

Advantages: TypeAlias = "Tensor | Array | Ragged"
"""[N], or [N, L] like `input_ids`."""
CustomEstimator: TypeAlias = Callable[[DataProto], Advantages]
"""Sees the batch with `scores` and `step_scores` as they are after normalisation, clipping and KL."""


class FunctionEstimator(AdvantageEstimator):
    """Calls the function that `estimator.name` is. It has no settings, and may look at the whole batch."""

    function: CustomEstimator

    def with_advantages(self, inputs: AdvantageInputs) -> DataProto:
        seen, result = inputs.batch.select(), inputs.batch.select()
        if inputs.config.shapes_scores:
            seen.batch["scores"] = inputs.scores
            seen.batch.assign_like("step_scores", inputs.steps, "step_scores")
        advantages = self.function(seen)
        if isinstance(advantages, Tensor | np.ndarray) and advantages.ndim > 1:
            result.batch.assign_like("advantages", advantages, "input_ids")
        else:
            result.batch["advantages"] = advantages
        return result
