"""A reward model: scores a text, so that answers which were chosen score higher than those which were rejected.

It is a classifier of transformers with one label, and scores as that does: at the last token that does not pad. Where
the padding token ends an answer too, this is the token before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from cadenza.algorithms import PairLoss, bradley_terry
from cadenza.data import IS_PADDING, DataProto, Ragged
from cadenza.training.models import base_model
from cadenza.training.packing import PackedRows
from cadenza.training.pairs import PairConfig, PairLearner
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.token_rows import Array, TokenRows


class RewardModelLearner(PairLearner):
    """Trains a classifier with one label on pairs. Of a batch it reads the column `input_ids`."""

    def __init__(
        self,
        module: nn.Module,
        config: PairConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        if strategy is not None and strategy.lockstep:
            raise ValueError(f"a reward model cannot be trained in shards: set strategy 'torch', got {config.strategy}")
        super().__init__(module, config, seed, failures=failures, strategy=strategy)
        base: Any = base_model(module)
        self._pad_token_id: int = base.config.get_text_config().pad_token_id
        self._score: nn.Module = base.score

    def rows_of(self, batch: DataProto) -> TokenRows:
        """The texts up to the token at which they are scored, and one more that stands for the score."""
        texts = [_without_end(row, self._pad_token_id) for row in batch.batch.ragged("input_ids")]
        columns: dict[str, Ragged | Array] = {
            "input_ids": Ragged.from_rows([np.append(text, 0).astype(np.int32) for text in texts]),
            "response_mask": Ragged.from_rows([np.arange(len(text) + 1) == len(text) for text in texts]),
        }
        if IS_PADDING in batch.batch:
            columns[IS_PADDING] = batch.batch.numpy(IS_PADDING)
        return TokenRows.of(DataProto(columns))

    def row_values(self, packed: PackedRows) -> Tensor:
        scores: Tensor = self._score(self._learner.forward.hidden(packed))
        return scores[:, 0]

    def pair_loss(self, values: Tensor, references: Tensor) -> PairLoss:
        return bradley_terry(*values.unbind(1))


def _without_end(tokens: Array, pad_token_id: int) -> Array:
    """The tokens up to the last one that does not pad; the first one where all do."""
    others = np.flatnonzero(tokens != pad_token_id)
    return tokens[: others[-1] + 1] if len(others) else tokens[:1]
