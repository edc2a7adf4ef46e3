"""Learning to say what was said: token cross-entropy on (prompt, response) pairs, with the actor's machinery.

For cold starts (the format of an answer, or demonstrations) before reinforcement learning, and for SFT. Prompt tokens
do not train, and dropout is on. The optimizer is its own, so what it remembers does not leak into the actor that goes
on with the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor, nn

from cadenza.algorithms import denominator, loss_sum, token_weights
from cadenza.data import DataProto, Ragged
from cadenza.training.checkpoint import TrainingState
from cadenza.training.forward import evaluating
from cadenza.training.learner import Learner, LearnerConfig, MicroLoss, merge_updates
from cadenza.training.packing import PackedRows
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.token_rows import Array, TokenRows

Pair = tuple[npt.ArrayLike, npt.ArrayLike]
"""Prompt tokens and response tokens."""


class SupervisedConfig(LearnerConfig):
    """How to learn from examples."""

    batch_size: int = Field(default=64, gt=0)
    """Examples per batch in `fit`."""


class Supervised:
    """Trains a language model on examples."""

    def __init__(
        self,
        module: nn.Module,
        config: SupervisedConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self._learner = Learner(module, config, seed, dropout=True, failures=failures, strategy=strategy)

    @property
    def module(self) -> nn.Module:
        return self._learner.module

    @property
    def version(self) -> int:
        """Batches trained on."""
        return self._learner.version

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the columns `input_ids` and `response_mask`."""
        rows = TokenRows.of(batch)
        updated = []
        updates = self._learner.updates(batch, rows)
        mine = self._learner.own_rows(rows, updates)
        mask = rows.pad(np.ones(len(rows.trained), bool))
        by, length = self.config.aggregation, self.config.constant_length
        weights = token_weights(mask, by)
        for chosen in updates:
            losses = self._losses(rows, weights, chosen[mine[chosen]])
            metrics = self._learner.update(batch, losses, denominator(mask[chosen], by, constant_length=length))
            updated.append((metrics, float(rows.counts[chosen].sum())))
        self._learner.version += 1
        return merge_updates(updated) | {"tokens": float(len(rows.trained))}

    def fit(self, data: DataProto, *, passes: int = 1) -> Iterator[dict[str, float]]:
        """Go through the examples in batches, shuffled anew for every pass; the metrics of each batch."""
        for index in range(passes):
            order = np.random.default_rng((self.seed, index)).permutation(len(data))
            for start in range(0, len(order), self.config.batch_size):
                yield self.train(data[order[start : start + self.config.batch_size]])

    @torch.no_grad()
    def evaluate(self, batch: DataProto) -> DataProto:
        """By row, the columns `loss` (a sum over its `tokens`) and `exact`: whether each of its tokens is the likeliest
        one, so that greedy decoding would write the same answer."""
        rows = TokenRows.of(batch)
        found = np.zeros((2, len(rows)), np.float32)
        with evaluating(self.module):
            for packed in self._learner.micro_batches(rows, rows.active):
                losses, misses = self._learner.forward.over_logits(packed, partial(_judge, packed))
                found[:, packed.rows] = [packed.by_row(values).sum(1).cpu().numpy() for values in (losses, misses)]
        columns = {"loss": found[0], "tokens": rows.counts.astype(np.float32), "exact": found[1] == 0}
        return DataProto({name: column.astype(np.float32) for name, column in columns.items()})

    def offload(self) -> int:
        """Free the device; see `Learner.offload`."""
        return self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def state(self) -> TrainingState:
        return self._learner.state()

    def load_state(self, state: TrainingState) -> None:
        self._learner.load_state(state)

    def _losses(self, rows: TokenRows, weights: Tensor, computed: Array) -> Iterator[MicroLoss]:
        for packed in self._learner.micro_batches(rows, computed):
            logprobs = packed.by_row(self._learner.forward.scores(packed).logprobs)
            weight = weights[packed.rows, : packed.shape[1]].to(logprobs.device)
            yield MicroLoss(loss_sum(-logprobs, weight), packed.rows)


def _judge(
    packed: PackedRows, logits: Tensor, slots: slice, predicts: Tensor, tokens: Tensor | None
) -> tuple[Tensor, ...]:
    """Of each trained token the loss, and 1 where another one is likelier."""
    targets = packed.targets.to(logits.device)
    targets = targets if tokens is None else targets[tokens]
    logits = logits.float()[predicts]
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return loss, (logits.argmax(-1) != targets).float()


def examples(pairs: Sequence[Pair]) -> DataProto:
    """A batch of (prompt, response) pairs."""
    ids, masks = [], []
    for prompt, response in pairs:
        first, second = np.asarray(prompt, np.int32), np.asarray(response, np.int32)
        ids.append(np.concatenate((first, second)))
        masks.append(np.repeat((False, True), (len(first), len(second))))
    return DataProto({"input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(masks)})
