"""Direct preference optimisation: a policy learns to prefer the answers that were chosen, measured from a reference."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from cadenza.algorithms import PairLoss, dpo
from cadenza.data import DataProto
from cadenza.training.packing import PackedRows
from cadenza.training.pairs import PairConfig, PairLearner
from cadenza.training.token_rows import TokenRows


class DpoConfig(PairConfig):
    """How a policy learns from preferences."""

    beta: float = Field(default=0.1, gt=0)
    """How much of a reward a nat of difference to the reference is: small ones let the policy go far."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """How likely it is that the two answers of a pair were mixed up."""


class Dpo(PairLearner):
    """Trains a policy on pairs. A batch has the column `ref_logprobs`, as `Reference.logprobs` writes it."""

    config: DpoConfig

    def row_values(self, packed: PackedRows) -> Tensor:
        """The logprob of the whole answer."""
        return packed.by_row(self._learner.forward.scores(packed).logprobs).sum(1)

    def references(self, batch: DataProto, rows: TokenRows) -> Tensor:
        return rows.pad(rows.read(batch, "ref_logprobs")).sum(1)

    def pair_loss(self, values: Tensor, references: Tensor) -> PairLoss:
        return pair_loss(values, references, self.config)


def pair_loss(values: Tensor, references: Tensor, config: DpoConfig) -> PairLoss:
    """Of logprobs [M, 2] of answers under the policy and the reference."""
    arguments = (column for pairs in (values, references) for column in torch.unbind(pairs, 1))
    return dpo(*arguments, beta=config.beta, label_smoothing=config.label_smoothing)
