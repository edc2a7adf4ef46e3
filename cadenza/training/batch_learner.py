"""What an actor, a critic and learners from examples have in common: a model, and the updates of a batch.

A learner says what the loss of a micro-batch is and what the losses of an update are divided by. The rest is here:
```
batch --> rows of each update --> those of this rank --losses--> sum / count --> update (learner.py)
metrics of the batch: of its updates, by weight; those of an update: of its micro-batches on all ranks, by weight
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from cadenza.algorithms import denominator, merge_metrics
from cadenza.data import DataProto
from cadenza.training.checkpoint import TrainingState
from cadenza.training.learner import Learner, LearnerConfig, MicroLoss, merge_updates
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.token_rows import Array, TokenRows

C = TypeVar("C", bound=LearnerConfig)


class BatchLearner(Generic[C]):
    """A model that learns from batches. A subclass has `train(batch)`, by `train_updates` or `train_tokens`; an actor,
    whose updates may come in chunks, has a loop of its own."""

    dropout: ClassVar[bool] = False
    """Whether an update drops what the model's config says."""

    def __init__(
        self,
        module: nn.Module,
        config: C,
        seed: int,
        *,
        head: nn.Module | None = None,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        """`failures` is the directory for batches with a loss that is not finite. `strategy` is how ranks train
        together; without one, this process is the only rank. `head` is trained besides the module."""
        self.config = config
        self._learner = Learner(
            module, config, seed, head=head, dropout=self.dropout, failures=failures, strategy=strategy
        )

    @property
    def module(self) -> nn.Module:
        return self._learner.module

    @property
    def version(self) -> int:
        """Batches trained on: the version of the weights."""
        return self._learner.version

    def train_updates(
        self,
        batch: DataProto,
        rows: TokenRows,
        losses: Callable[[Array], Iterable[MicroLoss]],
        *,
        count: Callable[[Array], float],
        weight: Callable[[Array], float],
        rows_each: int = 1,
    ) -> dict[str, float]:
        """Make the updates of a batch; what they say together. `losses` computes the given rows, micro-batch by
        micro-batch; `count` is what the losses of an update on the given rows are divided by, and `weight` is how much
        it counts in the metrics. So many consecutive rows as `rows_each` are computed on one rank."""
        learner = self._learner
        updates = learner.updates(batch, rows)
        mine = learner.own_rows(rows, updates, rows_each=rows_each)
        done: list[dict[str, float]] = []
        micro_metrics: list[list[tuple[dict[str, float], float]]] = [[] for _ in updates]
        for chosen, about in zip(updates, micro_metrics, strict=True):
            own_losses = _with_metrics_noted(losses(chosen[mine[chosen]]), about)
            done.append(learner.update(batch, own_losses, count(chosen)))
        learner.version += 1
        of_all_ranks = zip(*learner.strategy.ranks.all_gather(micro_metrics), strict=True)
        return merge_updates(
            [
                (metrics | merge_metrics(measured for about in ranks for measured in about), weight(chosen))
                for metrics, ranks, chosen in zip(done, of_all_ranks, updates, strict=True)
            ]
        )

    def train_tokens(
        self, batch: DataProto, rows: TokenRows, mask: Tensor, losses: Callable[[Array], Iterable[MicroLoss]]
    ) -> dict[str, float]:
        """`train_updates` where tokens have the losses: divided as `aggregation` says, and weighed by their number.
        `mask` [N, L] has the trained ones."""
        by, length = self.config.aggregation, self.config.constant_length
        return self.train_updates(
            batch,
            rows,
            losses,
            count=lambda chosen: denominator(mask[chosen], by, constant_length=length),
            weight=lambda chosen: float(rows.counts[chosen].sum()),
        )

    def weights(self) -> dict[str, Tensor]:
        """What is published: all parameters and buffers, or with LoRA the adapter alone. The live tensors, not copies:
        to keep them beyond the next `train`, copy them. With shards, whole copies on the first rank; all ask."""
        return self._learner.weights()

    def offload(self) -> int:
        """Free the device; see `Learner.offload`."""
        return self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def state(self) -> TrainingState:
        """What a checkpoint needs besides the weights."""
        return self._learner.state()

    def load_state(self, state: TrainingState) -> None:
        self._learner.load_state(state)


def _with_metrics_noted(
    losses: Iterable[MicroLoss], about: list[tuple[dict[str, float], float]]
) -> Iterator[MicroLoss]:
    for micro in losses:
        about.append((micro.metrics, micro.weight))
        yield micro
