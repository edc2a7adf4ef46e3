"""Learning from pairs of answers, of which one was preferred.

Invariant: the two rows of a pair are in one micro-batch, on one rank and in one update, because their loss needs both
values at once. A pair is the rows 2i (chosen) and 2i + 1 (rejected). What the loss compares is one value of each row:
for DPO the logprob of the answer (dpo.py), for a reward model its score (reward_model.py). Dropout is off.
```
rows --> value of each row --> [pairs, 2] --> loss of each pair --> / pairs --> update (learner.py)
```
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from cadenza.algorithms import PairLoss, merge_metrics
from cadenza.data import DataProto
from cadenza.training.checkpoint import TrainingState
from cadenza.training.forward import evaluating
from cadenza.training.learner import Learner, MicroLoss, merge_updates
from cadenza.training.packing import PackedRows
from cadenza.training.settings import refuse_unused
from cadenza.training.strategy import ParallelStrategy, assign_ranks
from cadenza.training.supervised import SupervisedConfig
from cadenza.training.token_rows import Array, TokenRows


class PairConfig(SupervisedConfig):
    """How to learn from pairs; `batch_size` counts pairs."""

    @model_validator(mode="after")
    def _every_pair_counts_the_same(self) -> PairConfig:
        refuse_unused(self, ("aggregation", "constant_length"), "with pairs, each of which counts the same")
        return self


class PairLearner:
    """What learners from pairs have in common; a subclass says what is compared, and how."""

    config: PairConfig

    def __init__(
        self,
        module: nn.Module,
        config: PairConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        self.config = config
        self._learner = Learner(module, config, seed, failures=failures, strategy=strategy)

    @property
    def module(self) -> nn.Module:
        return self._learner.module

    @property
    def version(self) -> int:
        """Batches trained on."""
        return self._learner.version

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
        updates = self._learner.updates(batch, rows)
        mine = self._own_rows(rows, updates)
        done: list[dict[str, float]] = []
        micro_metrics: list[list[tuple[dict[str, float], float]]] = [[] for _ in updates]
        for chosen, about in zip(updates, micro_metrics, strict=True):
            losses = self._losses(rows, references, chosen[mine[chosen]], about)
            done.append(self._learner.update(batch, losses, len(chosen) / 2))
        self._learner.version += 1
        of_all_ranks = zip(*self._learner.strategy.ranks.all_gather(micro_metrics), strict=True)
        updated = [
            (metrics | merge_metrics(measured for about in ranks for measured in about), len(chosen) / 2)
            for metrics, ranks, chosen in zip(done, of_all_ranks, updates, strict=True)
        ]
        return merge_updates(updated) | {"tokens": float(rows.lengths.sum())}

    @torch.no_grad()
    def values(self, batch: DataProto) -> DataProto:
        """The columns `value` and `reference` [N]. Rows need not come in pairs."""
        rows = self.rows_of(batch)
        found = np.zeros(len(rows), np.float32)
        with evaluating(self.module):
            for packed in self._learner.micro_batches(rows, rows.active):
                found[packed.rows] = self.row_values(packed).float().cpu().numpy()
        return DataProto({"value": found, "reference": self.references(batch, rows).numpy()})

    def offload(self) -> int:
        """Free the device; see `Learner.offload`."""
        return self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def state(self) -> TrainingState:
        return self._learner.state()

    def load_state(self, state: TrainingState) -> None:
        self._learner.load_state(state)

    def _own_rows(self, rows: TokenRows, updates: list[Array]) -> Array:
        """[N]: whether this rank computes the row, with the other one of its pair."""
        ranks = self._learner.strategy.ranks
        owners = np.zeros(len(rows), np.int64)
        for chosen in updates[: len(updates) // self.config.epochs]:
            costs = rows.lengths[chosen].reshape(-1, 2).sum(1)
            owners[chosen] = np.repeat(assign_ranks(costs, ranks.data_size), 2)
        mine: Array = owners == ranks.data_rank
        return mine

    def _losses(
        self, rows: TokenRows, references: Tensor, computed: Array, about: list[tuple[dict[str, float], float]]
    ) -> Iterator[MicroLoss]:
        """The loss of each micro-batch of the pairs that are computed here."""
        for packed in self._learner.pair_micro_batches(rows, computed):
            values = self.row_values(packed).view(-1, 2)
            constants = references[torch.from_numpy(packed.rows)].to(values.device).view(-1, 2)
            loss = self.pair_loss(values, constants)
            about.append((loss.metrics, float(loss.pairs)))
            yield MicroLoss(loss.values.sum(), packed.rows)
