"""One module that learns: its forward pass, its optimizer, and the way from micro-batch losses to an update.

Invariant: an update happens whole or not at all. Losses of micro-batches are sums and are added up as gradients, over
all chunks of the update (`add`), and divided once by the count of them all (`finish`). When a loss or the gradient is
not finite, or anything raises on the way, the gradients of all chunks are dropped and the weights stay as they were
before that update, on all ranks. The batch at fault is saved, to be looked at. An update without any gradient is not
made (`updates_skipped`).
```
rows --mini_batches--> rows of one update --own_rows--> --pack--> micro-batch --loss--> backward --> divide, clip, step
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor, nn

from cadenza.algorithms import Aggregation, merge_metrics
from cadenza.data import DataProto
from cadenza.training.batching import mini_batches, pair_batches
from cadenza.training.checkpoint import TrainingState
from cadenza.training.forward import Forward, Use
from cadenza.training.models import adapter_weights
from cadenza.training.offload import Offloaded
from cadenza.training.optim import NonFiniteGradient, OptimConfig, Optimizer
from cadenza.training.packing import PackedRows, Packing
from cadenza.training.settings import refuse_unused
from cadenza.training.strategy import ParallelStrategy, Precision, StrategyName, assign_ranks
from cadenza.training.token_rows import Array, TokenRows


class LearnerConfig(OptimConfig):
    """How a batch becomes updates."""

    epochs: int = Field(default=1, gt=0)
    """Times that a batch is gone through."""
    mini_batches: int = Field(default=1, gt=0)
    """Updates per epoch, each on its share of the trajectories; their order is shuffled anew every epoch. A batch of
    fewer trajectories is that many updates."""
    token_budget: int = Field(default=4096, gt=0)
    """Tokens computed at once. It bounds memory and changes no result."""
    packing: Packing | Literal["auto"] = "auto"
    """How rows share a pass (packing.py); 'auto' takes the fastest that the model can do."""
    precision: Precision = "fp32"
    strategy: StrategyName = "torch"
    """How ranks train one model together: 'torch', 'fsdp2', or 'module:name' of a strategy of yours."""
    aggregation: Aggregation = "token_mean"
    """How the losses of the tokens become one number."""
    constant_length: int | None = Field(default=None, gt=0)
    """Tokens by which 'sequence_sum' divides every sequence: the most that a response may have."""

    @model_validator(mode="after")
    def _known_length(self) -> LearnerConfig:
        if self.aggregation != "sequence_sum":
            refuse_unused(self, ("constant_length",), f"with aggregation {self.aggregation!r}")
        elif self.constant_length is None:
            raise ValueError("aggregation 'sequence_sum' needs constant_length: the most tokens a response may have")
        return self


class NonFiniteLoss(ArithmeticError):
    """A loss or a gradient is NaN or infinite."""

    def __init__(self, what: str, step: int, rows: tuple[int, ...], saved: str) -> None:
        super().__init__(what, step, rows, saved)
        self.what = what
        self.step = step
        """Updates done before the one that failed."""
        self.rows = rows
        """The rows of the batch that were computed when it happened; all of them for a gradient."""
        self.saved = saved
        """Where the batch is, or why it could not be saved."""

    def __str__(self) -> str:
        some = ", ".join(map(str, self.rows[:8])) + (" ..." if len(self.rows) > 8 else "")
        return f"{self.what} at update {self.step}, rows {some}; the weights were not changed; {self.saved}"


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """The loss of one micro-batch: its share of the sum that is the update's loss before it is divided."""

    loss: Tensor
    rows: Array
    metrics: dict[str, float] = field(default_factory=dict)
    """What it says besides its loss."""
    weight: float = 0.0
    """How much that counts among the micro-batches of the update."""


@dataclass(slots=True)
class PendingUpdate:
    """An update of which some chunks were added and which is not made yet."""

    batches: list[DataProto] = field(default_factory=list)
    computed: list[Array] = field(default_factory=list)
    """Rows computed on this rank, numbered through all batches."""
    loss: float = 0.0
    """A sum, of all ranks."""
    count: float = 0.0

    @property
    def batch(self) -> DataProto:
        """All chunks."""
        one = len(self.batches) == 1
        return self.batches[0] if one else DataProto.concat(self.batches, on_meta_conflict="drop")


class Learner:
    """A module with its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        config: LearnerConfig,
        seed: int,
        *,
        head: nn.Module | None = None,
        dropout: bool = False,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        """`head` is trained besides the module. Without `dropout`, an update sees the function that evaluation sees.
        `failures` is the directory for batches with a loss that is not finite. `strategy` is how ranks train together;
        without one, this process is the only rank."""
        self.strategy = strategy or ParallelStrategy()
        self.strategy.wrap(module)
        self.module = module
        self.config = config
        self.seed = seed
        self.forward = Forward(module, precision=config.precision, strategy=self.strategy)
        self.packing = self.forward.resolve(config.packing)
        self.version = 0
        """Batches trained on."""
        self._dropout = dropout
        self._failures = failures
        self._use: Use = "scores" if head is None else "hidden"
        self._offloaded: Offloaded | None = None
        self._pending_update: PendingUpdate | None = None
        heads = [] if head is None else list(head.named_parameters(prefix="head"))
        self.optimizer = Optimizer([*module.named_parameters(), *heads], config)

    def updates(self, batch: DataProto, rows: TokenRows) -> list[Array]:
        """The rows of each update, for all epochs. The same for the same seed and version."""
        active = rows.active
        if not len(active):
            raise ValueError(f"the batch of {len(rows)} rows has no trained token: is response_mask empty?")
        if self.config.mini_batches == 1:
            return [active] * self.config.epochs
        trajectories = batch.batch.numpy("traj_id") if "traj_id" in batch.batch else np.arange(len(rows))
        updates: list[Array] = []
        for epoch in range(self.config.epochs):
            rng = np.random.default_rng((self.seed, self.version, epoch))
            updates += [active[chosen] for chosen in mini_batches(trajectories[active], self.config.mini_batches, rng)]
        return updates

    def own_rows(
        self, rows: TokenRows, updates: list[Array], to_compute: Array | None = None, *, rows_each: int = 1
    ) -> Array:
        """[N]: whether this rank computes the row, in all epochs. Each update of the first epoch is shared evenly, by
        tokens, in blocks of `rows_each` consecutive rows; rows that are not `to_compute` cost nothing."""
        ranks = self.strategy.ranks
        owners = np.zeros(len(rows), np.int64)
        costs = rows.lengths if to_compute is None else rows.lengths * to_compute
        for chosen in updates[: len(updates) // self.config.epochs]:
            blocks = costs[chosen].reshape(-1, rows_each).sum(1)
            owners[chosen] = np.repeat(assign_ranks(blocks, ranks.data_size), rows_each)
        mine: Array = owners == ranks.data_rank
        return mine

    def micro_batches(self, rows: TokenRows, chosen: Array) -> Iterator[PackedRows]:
        """The chosen rows as micro-batches."""
        return self.forward.batches(rows, chosen, self.config.token_budget, self.packing, self._use)

    def pair_micro_batches(self, rows: TokenRows, chosen: Array) -> Iterator[PackedRows]:
        """The chosen rows, which come in pairs, as micro-batches that part none."""
        batches = pair_batches(rows, chosen, self.config.token_budget)
        return self.forward.passes(rows, batches, self.packing, self._use)

    def update(self, batch: DataProto, losses: Iterable[MicroLoss], count: float) -> dict[str, float]:
        """One update from the losses, each made and taken apart before the next, over this count."""
        self.add(batch, losses, count)
        return self.finish()

    def add(self, batch: DataProto, losses: Iterable[MicroLoss], count: float) -> None:
        """The gradients of one chunk of an update. If it fails, the chunks before it are dropped too."""
        if self._dropout:
            self.module.train()
        else:
            switch_off_dropout(self.module)
        update = self._pending_update = self._pending_update or PendingUpdate()
        total = 0.0
        first = sum(map(len, update.batches))
        error: Exception | None = None
        try:
            try:
                for micro in losses:
                    update.computed.append(micro.rows + first)
                    value = float(micro.loss.detach())
                    if not math.isfinite(value):
                        error = error or self._non_finite_loss(f"the loss is {value}", batch, micro.rows)
                        if not self.strategy.lockstep:
                            break
                    micro.loss.backward()  # type: ignore[no-untyped-call]
                    total += value
            except Exception as own:
                if self.strategy.lockstep:  # the others are in the middle of a pass and cannot be told
                    raise
                error = own
            update.loss += self.strategy.sum_losses(total, error)
        except BaseException:
            self.drop()
            raise
        update.count += count
        update.batches.append(batch)

    def finish(self) -> dict[str, float]:
        """The update from all chunks that were added."""
        if (update := self._pending_update) is None:
            raise RuntimeError("no update is under way: add its chunks first")
        try:
            if not update.count:
                rows = sum(map(len, update.batches))
                raise ValueError(f"the update of {rows} rows has no trained token: is response_mask empty?")
            self.strategy.reduce_gradients(self.optimizer.named)
            done = self.optimizer.apply(update.count)
        except NonFiniteGradient as failed:  # of the sum, so that all ranks are here
            self._raise_on_all_ranks(str(failed), update)
        finally:
            self.drop()
        metrics = {"loss": update.loss / update.count, "grad_norm": done.grad_norm, "lr": done.lr}
        return metrics | {"updates_skipped": float(done.is_skipped)}

    def drop(self) -> None:
        """Forget the update under way, if there is one."""
        self.optimizer.clear()
        self._pending_update = None

    def check_no_pending_update(self) -> None:
        """Raise where an update under way would be mixed up with something else."""
        if self._pending_update is not None:
            chunks = len(self._pending_update.batches)
            raise RuntimeError(f"an update of {chunks} chunks so far is under way: finish or drop it first")

    def offload(self) -> int:
        """Move weights and optimizer memory to the host; the bytes that this frees. Nothing can be computed before
        `reload`."""
        self.check_no_pending_update()
        if self._offloaded is None:
            self.strategy.reshard(self.module)
            self._offloaded = Offloaded([*self.module.parameters(), *self.optimizer.tensors().values()])
            self.forward.offloaded = True
        return self._offloaded.bytes

    def reload(self) -> None:
        """Take them back."""
        if self._offloaded is not None:
            self._offloaded.reload()
            self._offloaded, self.forward.offloaded = None, False

    def weights(self) -> dict[str, Tensor]:
        """What is published, on the first rank: all parameters and buffers, or with LoRA the adapter alone. The live
        tensors, unless there are shards to gather."""
        self.forward.check_loaded()
        return self.strategy.gather_full(adapter_weights(self.module) or self.module.state_dict(keep_vars=True))

    def state(self) -> TrainingState:
        return TrainingState(
            {f"optimizer/{name}": tensor for name, tensor in self.optimizer.tensors().items()},
            {"version": self.version, "updates": self.optimizer.step},
        )

    def load_state(self, state: TrainingState) -> None:
        self.drop()
        prefix = "optimizer/"
        tensors = {k.removeprefix(prefix): t for k, t in state.tensors.items() if k.startswith(prefix)}
        self.optimizer.load(tensors, state.values["updates"])
        self.version = state.values["version"]

    def _raise_on_all_ranks(self, what: str, update: PendingUpdate) -> NoReturn:
        """Raise the same on all ranks; the first one saves the batch."""
        ranks = self.strategy.ranks
        rows = np.concatenate([computed for of_rank in ranks.all_gather(update.computed) for computed in of_rank])
        error = self._non_finite_loss(what, update.batch, rows) if ranks.data_rank == 0 else None
        raise next(found for found in ranks.all_gather(error) if found is not None) from None

    def _non_finite_loss(self, what: str, batch: DataProto, rows: Array) -> NonFiniteLoss:
        step = self.optimizer.step
        return NonFiniteLoss(what, step, tuple(sorted(rows.tolist())), _save_batch(batch, self._failures, step))


def merge_updates(updates: Sequence[tuple[dict[str, float], float]]) -> dict[str, float]:
    """What the updates of a batch say together, each with its weight: means, and the learning rate of the last."""
    skipped = sum(metrics["updates_skipped"] for metrics, _ in updates)
    return merge_metrics(updates) | {"lr": updates[-1][0]["lr"], "updates_skipped": skipped}


def switch_off_dropout(module: nn.Module) -> None:
    """Evaluation mode, but for layers with gradient checkpointing: those compute again only while they train. What
    they would drop themselves is set to 0."""
    module.eval()
    for submodule in module.modules():
        if getattr(submodule, "gradient_checkpointing", False):
            submodule.training = True
            for name in [n for n, value in vars(submodule).items() if "drop" in n and isinstance(value, float)]:
                setattr(submodule, name, 0.0)


def _save_batch(batch: DataProto, directory: Path | None, step: int) -> str:
    """Where the batch went. Saving must not hide the error that it is about."""
    if directory is None:
        return "the batch was not saved: no directory was given for it"
    number = 0
    while (path := directory / f"update-{step}-{number}").exists():
        number += 1
    try:
        try:
            batch.to_disk(path)
        except TypeError:
            # Object columns and meta_info may hold what JSON cannot; the numbers are what matters.
            batch.select(non_tensor_batch_keys=(), meta_info_keys=()).to_disk(path)
    except OSError as error:
        return f"the batch could not be saved to {path}: {error}"
    return f"the batch is in {path}"
