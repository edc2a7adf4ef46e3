"""Learning to say what was said: token cross-entropy on examples, with the actor's machinery.

For SFT, and for the cold start before reinforcement learning. Prompt tokens do not train, and dropout is on. The
optimizer is its own, so what it remembers does not leak into the actor that goes on with the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor, nn

from cadenza.algorithms import loss_sum, token_weights
from cadenza.data import DataProto, Ragged
from cadenza.training.batch_learner import BatchLearner
from cadenza.training.forward import evaluating
from cadenza.training.learner import LearnerConfig, MicroLoss
from cadenza.training.packing import PackedRows
from cadenza.training.token_rows import Array, TokenRows

Pair = tuple[npt.ArrayLike, npt.ArrayLike]
"""Prompt tokens and response tokens."""


class SupervisedConfig(LearnerConfig):
    """How to learn from examples."""

    batch_size: int = Field(default=64, gt=0)
    """Examples per batch."""


class Supervised(BatchLearner[SupervisedConfig]):
    """Trains a language model on examples."""

    dropout: ClassVar[bool] = True
    judged: ClassVar[tuple[str, ...]] = ("loss", "missed")

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the columns `input_ids` and `response_mask`."""
        rows = TokenRows.of(batch)
        mask = rows.pad(np.ones(len(rows.trained), bool))
        weights = token_weights(mask, self.config.aggregation)
        metrics = self.train_tokens(batch, rows, mask, lambda computed: self._losses(rows, weights, computed))
        return metrics | {"tokens": float(len(rows.trained))}

    def fit(self, data: DataProto, *, passes: int = 1) -> Iterator[dict[str, float]]:
        """Go through the examples in batches, shuffled anew for every pass; the metrics of each batch."""
        for index in range(passes):
            order = np.random.default_rng((self._learner.seed, index)).permutation(len(data))
            for start in range(0, len(order), self.config.batch_size):
                yield self.train(data[order[start : start + self.config.batch_size]])

    @torch.no_grad()
    def evaluate(self, batch: DataProto) -> DataProto:
        """By row, how many `tokens` it trains and the sums over them that `judge` names; and `exact`: whether each of
        them is the likeliest one, so that greedy decoding would write the same answer."""
        rows = TokenRows.of(batch)
        columns = {name: np.zeros(len(rows), np.float32) for name in self.judged}
        with evaluating(self.module):
            for packed in self._learner.micro_batches(rows, rows.active):
                for name, values in zip(self.judged, self.judge(packed.to(self._learner.forward.device)), strict=True):
                    columns[name][packed.rows] = packed.by_row(values).sum(1).cpu().numpy()
        exact = (columns["missed"] == 0).astype(np.float32)
        return DataProto({**columns, "exact": exact, "tokens": rows.counts.astype(np.float32)})

    # -- what is learned -------------------------------------------------------------------------------------------

    def token_losses(self, packed: PackedRows) -> Tensor:
        """[K]"""
        return -self._learner.forward.scores(packed).logprobs

    def judge(self, packed: PackedRows) -> tuple[Tensor, ...]:
        """[K] each: what `judged` names. `missed` is 1 where another token is likelier."""

        def compare(logits: Tensor, slots: slice, predicts: Tensor, tokens: Tensor | None) -> tuple[Tensor, ...]:
            targets = packed.targets if tokens is None else packed.targets[tokens]
            logits = logits.float()[predicts]
            loss = nn.functional.cross_entropy(logits, targets, reduction="none")
            return loss, (logits.argmax(-1) != targets).float()

        return self._learner.forward.over_logits(packed, compare)

    def _losses(self, rows: TokenRows, weights: Tensor, computed: Array) -> Iterator[MicroLoss]:
        for packed in self._learner.micro_batches(rows, computed):
            losses = packed.by_row(self.token_losses(packed))
            weight = weights[packed.rows, : packed.shape[1]].to(losses.device)
            yield MicroLoss(loss_sum(losses, weight), packed.rows)


def examples(pairs: Sequence[Pair]) -> DataProto:
    """A batch of (prompt, response) pairs."""
    ids, masks = [], []
    for prompt, response in pairs:
        first, second = np.asarray(prompt, np.int32), np.asarray(response, np.int32)
        ids.append(np.concatenate((first, second)))
        masks.append(np.repeat((False, True), (len(first), len(second))))
    return DataProto({"input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(masks)})
