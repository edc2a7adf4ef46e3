"""On-policy distillation: the student's own tokens, judged by a teacher."""

from __future__ import annotations

from typing import ClassVar

from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators.base import AdvantageEstimator, AdvantageResult


class Distill(AdvantageEstimator):
    """How much likelier the teacher (`reference.path`) finds each token than the student did when it wrote it. With it,
    the policy gradient is that of the reverse KL at each token: scores are metrics, and no group is compared."""

    needs_reference: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True

    @property
    def cross_group_setting(self) -> str | None:
        return None

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        rows, batch = inputs.rows, inputs.batch
        student = "old_logprobs" if "old_logprobs" in batch.batch else "infer_logprobs"
        taught, written = (rows.pad(rows.read(batch, name)) for name in ("ref_logprobs", student))
        return AdvantageResult(taught - written)
