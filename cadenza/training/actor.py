"""The policy that is trained.

Invariant: the loss of an update is a sum over its trained tokens divided by one count for the whole update, so the
result is the same however the rows are cut into micro-batches, shared among ranks, each of which is given the whole
batch, or given chunk by chunk (`add` ... `finish`); rows marked `is_padding` count nowhere.
```
rows of an update --> passes --> sums over micro-batches (policy_loss.py) --> / count --> update (learner.py)
```
Which logprobs are the old ones: those in the column `old_logprobs` if it is there; else those of the weights at the
beginning of `train`. A batch that is one update needs no pass for them: they are its own logprobs, without gradient;
so do its chunks, each of which finds the weights as they were.
Dropout is off in every pass: with it, a policy would differ from its own past before it has learned anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from cadenza.algorithms import denominator
from cadenza.data import DataProto
from cadenza.training.batch_learner import BatchLearner
from cadenza.training.checkpoint import TrainingState
from cadenza.training.learner import MicroLoss, merge_updates
from cadenza.training.policy_loss import LossInputs, PolicyLossConfig, PolicyObjective
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.token_rows import Array, TokenRows
from cadenza.training.update_metrics import UpdateMetrics


class ActorConfig(PolicyLossConfig):
    """How the policy learns from a batch."""

    temperature: float = Field(default=1.0, gt=0)
    """That of the sampler, so that logprobs are those of the distribution that was sampled from. What top-p or top-k
    cut off is not: their logprobs differ from these, and `correction` sees it as a mismatch."""
    skip_idle: bool = True
    """Rows whose advantages are all 0 have no gradient: leave their passes out where nothing else (entropy, KL, a
    loss of the user) needs them. They count in the denominator; other metrics are about the rows that were computed.
    """

    @property
    def skips(self) -> bool:
        """Whether a row without advantages can be left out."""
        return self.skip_idle and self.needs_advantages


class Actor(BatchLearner[ActorConfig]):
    """Trains a policy on batches that have advantages.

        actor = Actor(load_model(ModelConfig(), vocab_size=64, seed=0), ActorConfig(lr=1e-3), seed=0)
        batch, _ = Estimator(EstimatorConfig(name="grpo")).advantages(batch)
        metrics = actor.train(batch)          # loss, grad_norm, entropy, ...: epochs x mini_batches updates
        weights = actor.weights()             # what replicas are sent

    A batch may also come in chunks: `add(chunk)` for each and then `finish()` make one update. An update whose gradient
    is exactly 0 is not made, and counted as `updates_skipped`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ActorConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        super().__init__(module, config, seed, failures=failures, strategy=strategy)
        self._objective = PolicyObjective(config)
        self._update_metrics = UpdateMetrics()
        """Of the update under way."""
        self._seen_trajectories: set[int] = set()
        """The trajectories in it, where each of them is one sequence."""

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the columns `input_ids`, `response_mask` and `advantages` ([N, L] or [N])."""
        self._learner.check_no_pending_update()
        rows = TokenRows.of(batch)
        updates = self._learner.updates(batch, rows)
        inputs = LossInputs.of(batch, rows, self.config)
        to_compute = self._rows_to_compute(inputs)
        mine = self._learner.own_rows(rows, updates, to_compute)
        self._compute_old_logprobs(rows, inputs, updates[0], to_compute, mine)
        done = []
        try:
            for chosen in updates:
                self._add(batch, rows, inputs, chosen, to_compute, mine)
                done.append(self._update())
        finally:
            self.drop()
        return self._finish_batch(done)

    def add(self, chunk: DataProto) -> None:
        """Learn from a chunk of a batch, of which nothing is seen in the weights before `finish`. If it fails, the
        chunks before it are dropped too."""
        try:
            if self.config.epochs * self.config.mini_batches > 1:
                raise ValueError(
                    "a batch that comes in chunks is one update, but epochs is "
                    f"{self.config.epochs} and mini_batches {self.config.mini_batches}: leave them at 1, or use `train`"
                )
            rows = TokenRows.of(chunk)
            inputs = LossInputs.of(chunk, rows, self.config)
            chosen, to_compute = rows.active, self._rows_to_compute(inputs)
            self._check_whole_trajectories(inputs, chosen)
            self._add(chunk, rows, inputs, chosen, to_compute, self._learner.own_rows(rows, [chosen], to_compute))
        except BaseException:
            self.drop()
            raise

    def finish(self) -> dict[str, float]:
        """The update from all chunks that were added, as if they had been one batch."""
        try:
            return self._finish_batch([self._update()])
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget the chunks that were added."""
        self._learner.drop()
        self._update_metrics, self._seen_trajectories = UpdateMetrics(), set()

    def logprobs(self, batch: DataProto) -> DataProto:
        """The batch with the column `old_logprobs`: what the policy says of it now."""
        rows = TokenRows.of(batch)
        return rows.write(batch, "old_logprobs", self._logprobs(rows, rows.active))

    def load_state(self, state: TrainingState) -> None:
        self.drop()
        super().load_state(state)

    def _logprobs(self, rows: TokenRows, chosen: Array) -> Array:
        return self._learner.forward.logprobs(
            rows,
            chosen,
            budget=self.config.token_budget,
            packing=self._learner.packing,
            temperature=self.config.temperature,
        )

    def _rows_to_compute(self, inputs: LossInputs) -> Array:
        """[N]: the rows that have to be computed."""
        works = inputs.mask if not self.config.skips else inputs.mask & (inputs.advantages != 0)
        return works.any(1).numpy()

    def _compute_old_logprobs(
        self, rows: TokenRows, inputs: LossInputs, first: Array, to_compute: Array, mine: Array
    ) -> None:
        """Old logprobs for the rows whose first pass comes after the weights have changed: those of this rank, but all
        ranks look, because some compute in step."""
        later = inputs.needs_old & to_compute
        later[first] = False
        if later.any():
            inputs.old = rows.pad(self._logprobs(rows, np.flatnonzero(later & mine)))
            inputs.needs_old[later] = False

    def _check_whole_trajectories(self, inputs: LossInputs, chosen: Array) -> None:
        """A sequence of several rows has one weight, so they come together."""
        if inputs.trajectories is None:
            return
        found = set(inputs.trajectories[chosen].tolist())
        if twice := found & self._seen_trajectories:
            raise ValueError(
                f"trajectory {min(twice)} has rows in two chunks of an update: with sequence='trajectory' all rows of "
                "one go into the same chunk"
            )
        self._seen_trajectories |= found

    def _add(
        self, batch: DataProto, rows: TokenRows, inputs: LossInputs, chosen: Array, to_compute: Array, mine: Array
    ) -> None:
        """The chosen rows to the update under way."""
        computed = chosen[to_compute[chosen]]
        if not len(computed):
            computed = chosen[:1]  # so that something can be said of the update
        count = self._count(inputs, chosen)
        update_metrics = self._update_metrics
        self._learner.add(batch, self._losses(rows, inputs, computed[mine[computed]], update_metrics), count)
        update_metrics.count += count
        update_metrics.tokens += int(rows.counts[chosen].sum())
        update_metrics.skipped += len(chosen) - len(computed)

    def _update(self) -> tuple[dict[str, float], UpdateMetrics]:
        """Make the update under way; what is said of it."""
        update_metrics, self._update_metrics = self._update_metrics, UpdateMetrics()
        metrics = self._learner.finish()
        return metrics | UpdateMetrics.merge(self._learner.strategy.ranks.all_gather(update_metrics)), update_metrics

    def _finish_batch(self, updates: Sequence[tuple[dict[str, float], UpdateMetrics]]) -> dict[str, float]:
        """A batch is done; what its updates say together."""
        self._learner.version += 1
        merged = merge_updates([(metrics, float(update_metrics.tokens)) for metrics, update_metrics in updates])
        totals = {
            "tokens": sum(update_metrics.tokens for _, update_metrics in updates) // self.config.epochs,
            "updates": len(updates),
            "skipped_rows": sum(update_metrics.skipped for _, update_metrics in updates),
        }
        return merged | {name: float(n) for name, n in totals.items()}

    def _count(self, inputs: LossInputs, chosen: Array) -> float:
        """What the rows add to the denominator of their update."""
        if not len(chosen):
            return 0.0
        trajectories = None if inputs.trajectories is None else inputs.trajectories[chosen]
        config = self.config
        return denominator(
            inputs.mask[chosen], config.aggregation, constant_length=config.constant_length, traj_ids=trajectories
        )

    def _losses(
        self, rows: TokenRows, inputs: LossInputs, computed: Array, update_metrics: UpdateMetrics
    ) -> Iterator[MicroLoss]:
        """The loss of each micro-batch of the rows that are computed here."""
        config = self.config
        for packed in self._learner.micro_batches(rows, computed):
            scores = self._learner.forward.scores(
                packed, temperature=config.temperature, entropy="gradient" if config.entropy_coef else "value"
            )
            logprobs = packed.by_row(scores.logprobs)
            entropies = packed.by_row(cast("Tensor", scores.entropy))
            if inputs.needs_old[packed.rows].all():
                inputs.old[packed.rows, : packed.shape[1]] = logprobs.detach().float().cpu()
                inputs.needs_old[packed.rows] = False
            loss = self._objective.sum(inputs.select(packed), logprobs, entropies, update_metrics)
            yield MicroLoss(loss, packed.rows)
