"""What the critic expects of the future at each trained token: a value head on a language model of its own.

The value at a token is the opinion before that token was written, like its logprob. The head begins at zero, so an
untrained critic expects nothing, and the first advantages are the plain returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from cadenza.algorithms import explained_variance, loss_sum, token_weights, value_clip
from cadenza.data import DataProto
from cadenza.training.batch_learner import BatchLearner
from cadenza.training.checkpoint import TrainingState
from cadenza.training.forward import evaluating
from cadenza.training.learner import LearnerConfig, MicroLoss
from cadenza.training.packing import PackedRows
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.token_rows import Array, TokenRows


class CriticConfig(LearnerConfig):
    """How the critic learns from a batch."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the old one before moving gains nothing; None does not bound it."""


class Critic(BatchLearner[CriticConfig]):
    """Trains a value head and the model under it."""

    def __init__(
        self,
        module: nn.Module,
        config: CriticConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        """`module` is a causal language model; its head is not used."""
        model: Any = module
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        super().__init__(module, config, seed, head=self.head, failures=failures, strategy=strategy)
        self.head.to(self._learner.forward.device)

    @torch.no_grad()
    def values(self, batch: DataProto) -> DataProto:
        """The batch with the column `values`."""
        rows = TokenRows.of(batch)
        values = np.zeros(len(rows.trained), np.float32)
        with evaluating(self.module):
            for packed in self._learner.micro_batches(rows, rows.active):
                values[rows.numbers(packed.rows)] = self._values(packed).cpu().numpy()
        return rows.write(batch, "values", values)

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the columns `returns` and `values`, the latter from before it was trained on."""
        rows = TokenRows.of(batch)
        columns = {name: rows.pad(rows.read(batch, name)) for name in ("returns", "values")}
        columns["mask"] = mask = rows.pad(np.ones(len(rows.trained), bool))
        columns["weights"] = token_weights(mask, self.config.aggregation)
        metrics = self.train_tokens(batch, rows, mask, lambda computed: self._losses(rows, columns, computed))
        metrics["value_loss"] = metrics.pop("loss")
        return metrics | {"explained_variance": explained_variance(columns["values"], columns["returns"], mask)}

    def state(self) -> TrainingState:
        """What a checkpoint needs besides the weights of the module: the value head is part of it."""
        state = super().state()
        heads = {f"head/{name}": tensor.detach() for name, tensor in self.head.state_dict().items()}
        return replace(state, tensors={**state.tensors, **heads})

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        prefix = "head/"
        heads = {k.removeprefix(prefix): t for k, t in state.tensors.items() if k.startswith(prefix)}
        self.head.load_state_dict(heads)

    def _losses(self, rows: TokenRows, columns: Mapping[str, Tensor], computed: Array) -> Iterator[MicroLoss]:
        """The loss of each micro-batch of the rows that are computed here."""
        for packed in self._learner.micro_batches(rows, computed):
            values = packed.by_row(self._values(packed))
            index = torch.from_numpy(packed.rows)
            inputs = {name: t[index, : packed.shape[1]].to(values.device) for name, t in columns.items()}
            loss = value_clip(values, inputs["values"], inputs["returns"], inputs["mask"], clip=self.config.value_clip)
            loss_value = loss_sum(loss.values, inputs["weights"])
            yield MicroLoss(loss_value, packed.rows, loss.metrics, float(loss.tokens))

    def _values(self, packed: PackedRows) -> Tensor:
        """[K]"""
        values: Tensor = self.head(self._learner.forward.hidden(packed).to(self.head.weight.dtype))
        return values[:, 0]
