"""What an estimator is: a frozen config that holds its settings, says what it needs, and computes advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cadenza.config import Config
from cadenza.data import DataProto
from cadenza.training.advantage_inputs import AdvantageInputs


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """What an estimator makes of the inputs."""

    advantages: Tensor
    """[N] or [N, R]"""
    returns: Tensor | None = None
    """[N, R] what the critic should have said"""


class AdvantageEstimator(Config):
    """Computes the advantages of a batch. Its fields are its settings: keys beside `estimator.name` in a run config.

    class AboveBar(AdvantageEstimator):
        bar: float = 0.5

        def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
            return AdvantageResult(inputs.scores - self.bar)

    estimator: {name: my_module:AboveBar, bar: 0.7}
    """

    needs_critic: ClassVar[bool] = False
    """It reads `inputs.values`, and its result has `returns` for the critic to learn from."""
    needs_reference: ClassVar[bool] = False
    """It reads the column `ref_logprobs` of `inputs.batch`, whatever `kl_coef` is."""
    needs_teacher: ClassVar[bool] = False
    """Its reference is another model, which `reference.path` names."""
    needs_groups: ClassVar[bool] = False
    """It compares the members of a group, and learns nothing from a group of one."""

    @property
    def cross_group_setting(self) -> str | None:
        """The setting by which a group's advantages depend on other groups of its batch, None if there is none. A
        batch then cannot be trained in chunks; so an estimator that says nothing gets whole batches."""
        return "name"

    @property
    def undoes_score_norm(self) -> bool:
        """Whether advantages stay as they are when every trajectory is paid a constant more at its end, and all pay is
        scaled. With a discount they do not: the constant counts less the earlier a turn is."""
        return False

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        """The advantages of a batch; rows outside `inputs.valid` get 0."""
        raise NotImplementedError

    def with_advantages(self, inputs: AdvantageInputs) -> DataProto:
        """The batch with the new columns: `advantages`, and `returns` if the result has them."""
        result, rows, batch = self.estimate(inputs), inputs.rows, inputs.batch
        if result.returns is not None:
            batch = rows.write(batch, "returns", result.returns[inputs.mask].numpy())
        elif self.needs_critic:
            raise ValueError(f"{type(self).__name__} needs a critic, so its result must have `returns`, got None")
        if result.advantages.ndim > 1:
            return rows.write(batch, "advantages", result.advantages[inputs.mask].numpy())
        batch = batch.select()
        batch.batch["advantages"] = result.advantages.float()
        return batch
