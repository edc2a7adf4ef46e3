"""Learning from pairs of answers, of which one was preferred.

Invariant: the two rows of a pair are in one micro-batch, on one rank and in one update, because their loss needs both
values at once. A pair is the rows 2i (chosen) and 2i + 1 (rejected). What the loss compares is one value of each row:
for DPO the logprob of the answer (dpo.py), for a reward model its score (reward_model.py). Dropout is off.
```
rows --> value of each row --> [pairs, 2] --> loss of each pair --> / pairs --> update (batch_learner.py)
```
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from cadenza.algorithms import PairLoss
from cadenza.data import DataProto
from cadenza.training.batch_learner import BatchLearner
from cadenza.training.forward import evaluating
from cadenza.training.learner import MicroLoss
from cadenza.training.packing import PackedRows
from cadenza.training.settings import refuse_unused
from cadenza.training.supervised import SupervisedConfig
from cadenza.training.token_rows import Array, TokenRows


class PairConfig(SupervisedConfig):
    """How to learn from pairs; `batch_size` counts pairs."""

    @model_validator(mode="after")
    def _every_pair_counts_the_same(self) -> PairConfig:
        refuse_unused(self, ("aggregation", "constant_length"), "with pairs, each of which counts the same")
        return self


class PairLearner(BatchLearner[PairConfig]):
    """What learners from pairs have in common; a subclass says what is compared, and how."""

    # -- what a subclass says --------------------------------------------------------------------------------------

    def rows_of(self, batch: DataProto) -> TokenRows:
        """The tokens that are computed for a batch."""
        return TokenRows.of(batch)

    def row_values(self, packed: PackedRows) -> Tensor:
        """[n]: what is compared, of each row."""
        raise NotImplementedError

    def references(self, batch: DataProto, rows: TokenRows) -> Tensor:
        """[N]: constants that the values are compared with, where the loss has any."""
        return torch.zeros(len(rows))

    def pair_loss(self, values: Tensor, references: Tensor) -> PairLoss:
        """Of values [M, 2] and references [M, 2]: chosen, rejected."""
        raise NotImplementedError

    # -- learning --------------------------------------------------------------------------------------------------

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the column `input_ids`, two rows a pair."""
        rows = self.rows_of(batch)
        if len(rows) % 2 or not rows.counts.all():
            raise ValueError(f"a batch of pairs has two rows with an answer for each, got {len(rows)} rows")
        references = self.references(batch, rows)
        metrics = self.train_updates(
            batch,
            rows,
            lambda computed: self._losses(rows, references, computed),
            count=lambda chosen: len(chosen) / 2,
            weight=lambda chosen: len(chosen) / 2,
            rows_each=2,
        )
        return metrics | {"tokens": float(rows.lengths.sum())}

    @torch.no_grad()
    def evaluate(self, batch: DataProto) -> DataProto:
        """The columns `value` and `reference` [N]. Rows need not come in pairs."""
        rows = self.rows_of(batch)
        found = np.zeros(len(rows), np.float32)
        with evaluating(self.module):
            for packed in self._learner.micro_batches(rows, rows.active):
                found[packed.rows] = self.row_values(packed).float().cpu().numpy()
        return DataProto({"value": found, "reference": self.references(batch, rows).numpy()})

    def _losses(self, rows: TokenRows, references: Tensor, computed: Array) -> Iterator[MicroLoss]:
        """The loss of each micro-batch of the pairs that are computed here."""
        for packed in self._learner.pair_micro_batches(rows, computed):
            values = self.row_values(packed).view(-1, 2)
            constants = references[torch.from_numpy(packed.rows)].to(values.device).view(-1, 2)
            loss = self.pair_loss(values, constants)
            yield MicroLoss(loss.values.sum(), packed.rows, loss.metrics, float(loss.pairs))
