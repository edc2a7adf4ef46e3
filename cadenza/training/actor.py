"""The policy that is trained.

Invariant: the loss of an update is a sum over its trained tokens divided by one count for the whole update, so the
result is the same however the rows are cut into micro-batches, shared among ranks, each of which is given the whole
batch, or given chunk by chunk (`add` ... `finish`); rows marked `is_padding` count nowhere.
```
advantages, logprobs of the past --> token loss (ppo_clip ...) * importance weights --+
entropy, reference logprobs      --> entropy bonus, KL                              --+--> sum / count --> update
```
Which logprobs are the old ones: those in the column `old_logprobs` if it is there; else those of the weights at the
beginning of `train`. A batch that is one update needs no pass for them: they are its own logprobs, without gradient;
so do its chunks, each of which finds the weights as they were.
Dropout is off in every pass: with it, a policy would differ from its own past before it has learned anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cadenza.algorithms import (
    LOSSES,
    TokenLoss,
    denominator,
    entropy_bonus,
    kl,
    kl_loss,
    loss_sum,
    ppo_clip,
    token_metrics,
    token_weights,
    truncated_weights,
)
from cadenza.config import load_object
from cadenza.data import DataProto
from cadenza.training.checkpoint import TrainingState
from cadenza.training.learner import Learner, LearnerConfig, MicroLoss, merge_updates
from cadenza.training.packing import PackedRows
from cadenza.training.settings import refuse_unused
from cadenza.training.strategy import ParallelStrategy, StrategyName
from cadenza.training.token_rows import Array, TokenRows
from cadenza.training.update_metrics import UpdateMetrics

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""From logprobs, old logprobs, advantages and mask [n, R]: a row's trained tokens side by side."""


class ActorConfig(LearnerConfig):
    """How the policy learns from a batch."""

    strategy: StrategyName = "torch"
    temperature: float = Field(default=1.0, gt=0)
    """That of the sampler, so that logprobs are those of the distribution that was sampled from. What top-p or top-k
    cut off is not: their logprobs differ from these, and `correction` sees it as a mismatch."""
    loss: str | PolicyLoss = "ppo_clip"
    """'ppo_clip', 'policy_gradient', 'module:name', or a function."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)
    """Above `clip_low`, rare tokens can become likely faster (DAPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with a negative advantage."""
    entropy_coef: float = Field(default=0.0, ge=0)
    kl_coef: float = Field(default=0.0, ge=0)
    """KL to the reference in the loss; needs the column `ref_logprobs`."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    sequence: Literal["row", "trajectory"] = "row"
    """What counts as one sequence, where the contexts of a trajectory are several rows."""
    old_logprobs: Literal["recompute", "infer"] = "recompute"
    """What the policy moves away from: the trainer's own logprobs, or those that the sampler reported."""
    correction: Literal["off", "token", "sequence"] = "off"
    """Weights trainer / sampler for tokens of older versions or other kernels, by token or by row."""
    correction_cap: float = Field(default=2.0, gt=0)
    skip_idle: bool = True
    """Rows whose advantages are all 0 have no gradient: leave their passes out where nothing else (entropy, KL, a
    loss of one's own) needs them. They count in the denominator; other metrics are about the rows that were computed.
    """

    @model_validator(mode="after")
    def _one_past(self) -> ActorConfig:
        if self.correction != "off" and self.old_logprobs == "infer":
            raise ValueError(
                "correction and old_logprobs='infer' both divide by the sampler's probability: use one of them"
            )
        if isinstance(self.loss, str) and self.loss not in LOSSES and ":" not in self.loss:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, 'module:name' or a function, got {self.loss!r}")
        return self

    @model_validator(mode="after")
    def _every_setting_matters(self) -> ActorConfig:
        name = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", type(self.loss).__name__)
        if self.loss != "ppo_clip":
            refuse_unused(self, ("clip_low", "clip_high", "dual_clip"), f"with the loss {name!r}")
        if self.loss == "policy_gradient":
            refuse_unused(self, ("old_logprobs",), "with the loss 'policy_gradient', which has no ratio")
        if not self.kl_coef:
            refuse_unused(self, ("kl_estimator",), "while kl_coef is 0")
        if self.aggregation == "token_mean":
            refuse_unused(self, ("sequence",), "with aggregation 'token_mean'")
        return self

    @property
    def skips(self) -> bool:
        """Whether a row without advantages can be left out."""
        known = isinstance(self.loss, str) and self.loss in LOSSES
        return self.skip_idle and known and not self.entropy_coef and not self.kl_coef


@dataclass(slots=True)
class LossInputs:
    """What the loss needs besides the policy's logprobs: [N, R], a row's trained tokens side by side."""

    mask: Tensor
    advantages: Tensor
    weights: Tensor
    """Of each token in the sum of the loss."""
    old: Tensor
    """Logprobs that the policy moves away from."""
    needs_old: Array
    """[N] rows whose old logprobs are those of their first pass, which is still to come"""
    infer: Tensor | None
    """Logprobs that the sampler reported."""
    reference: Tensor | None
    trajectories: Tensor | None
    """[N] which rows are one sequence, if a row is not"""


class Actor:
    """Trains a policy."""

    def __init__(
        self,
        module: nn.Module,
        config: ActorConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        self.config = config
        self._learner = Learner(module, config, seed, failures=failures, strategy=strategy)
        self._loss = _policy_loss(config)
        self._update_metrics = UpdateMetrics()
        """Of the update under way."""
        self._seen_trajectories: set[int] = set()
        """The trajectories in it, where each of them is one sequence."""

    @property
    def module(self) -> nn.Module:
        return self._learner.module

    @property
    def version(self) -> int:
        """Batches trained on: the version of the weights."""
        return self._learner.version

    def train(self, batch: DataProto) -> dict[str, float]:
        """Learn from a batch with the columns `input_ids`, `response_mask` and `advantages` ([N, L] or [N])."""
        self._learner.check_no_pending_update()
        rows = TokenRows.of(batch)
        updates = self._learner.updates(batch, rows)
        inputs = self._loss_inputs(batch, rows)
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
            inputs = self._loss_inputs(chunk, rows)
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

    def weights(self) -> dict[str, Tensor]:
        """What is published: all parameters and buffers, or with LoRA the adapter alone. The live tensors, not copies:
        whoever keeps them beyond the next `train` copies them. With shards, whole copies on the first rank; all ask."""
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
        self.drop()
        self._learner.load_state(state)

    def _logprobs(self, rows: TokenRows, chosen: Array) -> Array:
        return self._learner.forward.logprobs(
            rows,
            chosen,
            budget=self.config.token_budget,
            packing=self._learner.packing,
            temperature=self.config.temperature,
        )

    def _loss_inputs(self, batch: DataProto, rows: TokenRows) -> LossInputs:
        config = self.config

        def read(name: str, *, needed: bool) -> Tensor | None:
            return rows.pad(rows.read(batch, name)) if needed or name in batch.batch else None

        mask = rows.pad(np.ones(len(rows.trained), bool))
        infer = read("infer_logprobs", needed=config.correction != "off" or config.old_logprobs == "infer")
        old = infer if config.old_logprobs == "infer" else read("old_logprobs", needed=False)
        trajectories = batch.batch["traj_id"] if config.sequence == "trajectory" else None
        return LossInputs(
            mask=mask,
            advantages=cast("Tensor", read("advantages", needed=True)),
            weights=token_weights(mask, config.aggregation, traj_ids=trajectories),
            old=torch.zeros(mask.shape) if old is None else old,
            needs_old=np.full(len(rows), old is None),
            infer=infer,
            reference=read("ref_logprobs", needed=config.kl_coef > 0),
            trajectories=trajectories,
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
            of_batch = _select(inputs, packed)
            yield MicroLoss(self._micro_loss(of_batch, logprobs, entropies, update_metrics), packed.rows)

    def _micro_loss(
        self, inputs: LossInputs, logprobs: Tensor, entropies: Tensor, update_metrics: UpdateMetrics
    ) -> Tensor:
        """The share of some rows in the loss of the update, before it is divided by the count of all."""
        config = self.config
        mask, old = inputs.mask, inputs.old
        policy = self._loss(logprobs, old, inputs.advantages, mask)
        if not isinstance(policy, TokenLoss):
            kind = type(policy).__name__
            raise TypeError(f"actor.loss must return a TokenLoss(values, metrics, tokens), got {kind}")
        values = policy.values
        metrics = dict(policy.metrics)
        trainer = logprobs.detach() if config.old_logprobs == "infer" else old
        sampler = inputs.infer if inputs.infer is not None else old
        level: Literal["token", "sequence"] = "sequence" if config.correction == "sequence" else "token"
        correction = truncated_weights(trainer, sampler, mask, level=level, cap=config.correction_cap)
        metrics |= {name: correction.metrics[name] for name in MISMATCH_METRICS}
        if config.correction != "off":
            values = values * correction.weights
        pg_loss = loss_sum(values, inputs.weights)
        bonus = entropy_bonus(entropies, mask, coefficient=config.entropy_coef)
        metrics |= bonus.metrics
        if config.entropy_coef:
            values = values + bonus.values
        if inputs.reference is not None and config.kl_coef:
            penalty = kl_loss(
                logprobs, inputs.reference, mask, coefficient=config.kl_coef, estimator=config.kl_estimator
            )
            metrics |= penalty.metrics
            values = values + (penalty.values if config.correction == "off" else penalty.values * correction.weights)
        elif inputs.reference is not None:
            metrics |= token_metrics(mask, kl=kl(logprobs.detach(), inputs.reference, mask, estimator="k3"))
        # One sample per row where a row has one weight; its first trained token speaks for all.
        samples = correction.weights[:, 0] if level == "sequence" else correction.weights[mask]
        update_metrics.add(metrics, policy.tokens, float(pg_loss.detach()), samples)
        return loss_sum(values, inputs.weights)


MISMATCH_METRICS = ("mismatch_kl", "logprob_gap_mean", "logprob_gap_max", "weight_mean", "weight_changed_fraction")
"""What is told about the distance of trainer and sampler."""


def _select(inputs: LossInputs, packed: PackedRows) -> LossInputs:
    """The rows of a micro-batch, as wide as their longest."""
    index, width = torch.from_numpy(packed.rows), packed.shape[1]

    def take(values: Tensor) -> Tensor:
        return values.index_select(0, index)[:, :width].to(packed.tokens.device)

    return LossInputs(
        mask=take(inputs.mask),
        advantages=take(inputs.advantages),
        weights=take(inputs.weights),
        old=take(inputs.old),
        needs_old=inputs.needs_old[packed.rows],
        infer=None if inputs.infer is None else take(inputs.infer),
        reference=None if inputs.reference is None else take(inputs.reference),
        trajectories=None,
    )


def _policy_loss(config: ActorConfig) -> PolicyLoss:
    if config.loss == "ppo_clip":

        def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
            return ppo_clip(
                logprobs,
                old,
                advantages,
                mask,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
            )

        return clipped
    if not isinstance(config.loss, str):
        return config.loss
    found: Any = LOSSES[config.loss] if config.loss in LOSSES else load_object(config.loss)
    return cast("PolicyLoss", found)
