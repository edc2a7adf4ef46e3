"""The policy that is trained.

Invariant: the loss of an update is a sum over its trained tokens divided by one count for the whole update, so the
result is the same however the rows are cut into micro-batches, shared among ranks, each of which is given the whole
batch, or given part by part (`add` ... `finish`); rows marked `is_padding` count nowhere.
```
advantages, logprobs of the past --> token loss (ppo_clip ...) * importance weights --+
entropy, reference logprobs      --> entropy bonus, KL                              --+--> sum / count --> update
```
Which logprobs are the old ones: those in the column `old_logprobs` if it is there; else those of the weights at the
beginning of `train`. A batch that is one update needs no pass for them: they are its own logprobs, without gradient;
so do its parts, each of which finds the weights as they were.
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
    merge_metrics,
    ppo_clip,
    token_metrics,
    token_weights,
    truncated_weights,
)
from cadenza.config import load_object
from cadenza.data import DataProto
from cadenza.training.learner import Learner, LearnerConfig, MicroLoss, TrainingState
from cadenza.training.packing import Packed
from cadenza.training.rows import Array, Rows
from cadenza.training.settings import refuse_idle
from cadenza.training.strategy import Strategy, StrategyName
from cadenza.training.tally import Tally

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
            refuse_idle(self, ("clip_low", "clip_high", "dual_clip"), f"with the loss {name!r}")
        if self.loss == "policy_gradient":
            refuse_idle(self, ("old_logprobs",), "with the loss 'policy_gradient', which has no ratio")
        if not self.kl_coef:
            refuse_idle(self, ("kl_estimator",), "while kl_coef is 0")
        if self.aggregation == "token_mean":
            refuse_idle(self, ("sequence",), "with aggregation 'token_mean'")
        return self

    @property
    def skips(self) -> bool:
        """Whether a row without advantages can be left out."""
        known = isinstance(self.loss, str) and self.loss in LOSSES
        return self.skip_idle and known and not self.entropy_coef and not self.kl_coef


@dataclass(slots=True)
class Columns:
    """What the loss needs besides the policy's logprobs: [N, R], a row's trained tokens side by side."""

    mask: Tensor
    advantages: Tensor
    weights: Tensor
    """Of each token in the sum of the loss."""
    old: Tensor
    """Logprobs that the policy moves away from."""
    pending: Array
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
        strategy: Strategy | None = None,
    ) -> None:
        self.config = config
        self._learner = Learner(module, config, seed, failures=failures, strategy=strategy)
        self._loss = _policy_loss(config)
        self._tally = Tally()
        """Of the update under way."""
        self._sequences: set[int] = set()
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
        self._learner.check_idle()
        rows = Rows.of(batch)
        updates = self._learner.updates(batch, rows)
        columns = self._columns(batch, rows)
        working = self._working(columns)
        mine = self._learner.share(rows, updates, working)
        self._recall(rows, columns, updates[0], working, mine)
        done = []
        try:
            for chosen in updates:
                self._add(batch, rows, columns, chosen, working, mine)
                done.append(self._update())
        finally:
            self.drop()
        return self._trained(done)

    def add(self, part: DataProto) -> None:
        """Learn from a part of a batch, of which nothing is seen in the weights before `finish`. If it fails, the parts
        before it are dropped too."""
        try:
            if self.config.epochs * self.config.mini_batches > 1:
                raise ValueError(
                    "a batch that comes in parts is one update, but epochs is "
                    f"{self.config.epochs} and mini_batches {self.config.mini_batches}: leave them at 1, or use `train`"
                )
            rows = Rows.of(part)
            columns = self._columns(part, rows)
            chosen, working = rows.active, self._working(columns)
            self._check_whole(columns, chosen)
            self._add(part, rows, columns, chosen, working, self._learner.share(rows, [chosen], working))
        except BaseException:
            self.drop()
            raise

    def finish(self) -> dict[str, float]:
        """The update from all parts that were added, as if they had been one batch."""
        try:
            return self._trained([self._update()])
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget the parts that were added."""
        self._learner.drop()
        self._tally, self._sequences = Tally(), set()

    def logprobs(self, batch: DataProto) -> DataProto:
        """The batch with the column `old_logprobs`: what the policy says of it now."""
        rows = Rows.of(batch)
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

    def _logprobs(self, rows: Rows, chosen: Array) -> Array:
        return self._learner.forward.logprobs(
            rows,
            chosen,
            budget=self.config.token_budget,
            packing=self._learner.packing,
            temperature=self.config.temperature,
        )

    def _columns(self, batch: DataProto, rows: Rows) -> Columns:
        config = self.config

        def read(name: str, *, needed: bool) -> Tensor | None:
            return rows.pad(rows.read(batch, name)) if needed or name in batch.batch else None

        mask = rows.pad(np.ones(len(rows.trained), bool))
        infer = read("infer_logprobs", needed=config.correction != "off" or config.old_logprobs == "infer")
        old = infer if config.old_logprobs == "infer" else read("old_logprobs", needed=False)
        trajectories = batch.batch["traj_id"] if config.sequence == "trajectory" else None
        return Columns(
            mask=mask,
            advantages=cast("Tensor", read("advantages", needed=True)),
            weights=token_weights(mask, config.aggregation, traj_ids=trajectories),
            old=torch.zeros(mask.shape) if old is None else old,
            pending=np.full(len(rows), old is None),
            infer=infer,
            reference=read("ref_logprobs", needed=config.kl_coef > 0),
            trajectories=trajectories,
        )

    def _working(self, columns: Columns) -> Array:
        """[N]: the rows that have to be computed."""
        works = columns.mask if not self.config.skips else columns.mask & (columns.advantages != 0)
        return works.any(1).numpy()

    def _recall(self, rows: Rows, columns: Columns, first: Array, working: Array, mine: Array) -> None:
        """Old logprobs for the rows whose first pass comes after the weights have changed: those of this rank, but all
        ranks look, because some compute in step."""
        later = columns.pending & working
        later[first] = False
        if later.any():
            columns.old = rows.pad(self._logprobs(rows, np.flatnonzero(later & mine)))
            columns.pending[later] = False

    def _check_whole(self, columns: Columns, chosen: Array) -> None:
        """A sequence of several rows has one weight, so they come together."""
        if columns.trajectories is None:
            return
        found = set(columns.trajectories[chosen].tolist())
        if twice := found & self._sequences:
            raise ValueError(
                f"trajectory {min(twice)} has rows in two parts of an update: with sequence='trajectory' all rows of "
                "one go into the same part"
            )
        self._sequences |= found

    def _add(self, batch: DataProto, rows: Rows, columns: Columns, chosen: Array, working: Array, mine: Array) -> None:
        """The chosen rows to the update under way."""
        computed = chosen[working[chosen]]
        if not len(computed):
            computed = chosen[:1]  # an update without gradient is still one: the optimizer's momentum goes on
        count = self._count(columns, chosen)
        tally = self._tally
        self._learner.add(batch, self._losses(rows, columns, computed[mine[computed]], tally), count)
        tally.count += count
        tally.tokens += int(rows.counts[chosen].sum())
        tally.skipped += len(chosen) - len(computed)

    def _update(self) -> tuple[dict[str, float], Tally]:
        """Make the update under way; what is said of it."""
        tally, self._tally = self._tally, Tally()
        metrics = self._learner.finish()
        return metrics | Tally.metrics(self._learner.strategy.peers.exchange(tally)), tally

    def _trained(self, updates: Sequence[tuple[dict[str, float], Tally]]) -> dict[str, float]:
        """A batch is done; what its updates say together."""
        self._learner.version += 1
        merged = merge_metrics((metrics, float(tally.tokens)) for metrics, tally in updates)
        totals = {
            "tokens": sum(tally.tokens for _, tally in updates) // self.config.epochs,
            "updates": len(updates),
            "skipped_rows": sum(tally.skipped for _, tally in updates),
        }
        return merged | {"lr": updates[-1][0]["lr"]} | {name: float(n) for name, n in totals.items()}

    def _count(self, columns: Columns, chosen: Array) -> float:
        """What the rows add to the denominator of their update."""
        if not len(chosen):
            return 0.0
        trajectories = None if columns.trajectories is None else columns.trajectories[chosen]
        config = self.config
        return denominator(
            columns.mask[chosen], config.aggregation, constant_length=config.constant_length, traj_ids=trajectories
        )

    def _losses(self, rows: Rows, columns: Columns, computed: Array, tally: Tally) -> Iterator[MicroLoss]:
        """The loss of each micro-batch of the rows that are computed here."""
        config = self.config
        for packed in self._learner.packed(rows, computed):
            scores = self._learner.forward.scores(
                packed, temperature=config.temperature, entropy="gradient" if config.entropy_coef else "value"
            )
            logprobs = packed.by_row(scores.logprobs)
            entropies = packed.by_row(cast("Tensor", scores.entropy))
            if columns.pending[packed.rows].all():
                columns.old[packed.rows, : packed.shape[1]] = logprobs.detach().float().cpu()
                columns.pending[packed.rows] = False
            part = _select(columns, packed)
            yield MicroLoss(self._micro_loss(part, logprobs, entropies, tally), packed.rows)

    def _micro_loss(self, part: Columns, logprobs: Tensor, entropies: Tensor, tally: Tally) -> Tensor:
        """The share of some rows in the loss of the update, before it is divided by the count of all."""
        config = self.config
        mask, old = part.mask, part.old
        policy = self._loss(logprobs, old, part.advantages, mask)
        if not isinstance(policy, TokenLoss):
            kind = type(policy).__name__
            raise TypeError(f"actor.loss must return a TokenLoss(values, metrics, tokens), got {kind}")
        values = policy.values
        metrics = dict(policy.metrics)
        trainer = logprobs.detach() if config.old_logprobs == "infer" else old
        sampler = part.infer if part.infer is not None else old
        level: Literal["token", "sequence"] = "sequence" if config.correction == "sequence" else "token"
        correction = truncated_weights(trainer, sampler, mask, level=level, cap=config.correction_cap)
        metrics |= {name: correction.metrics[name] for name in MISMATCH_METRICS}
        if config.correction != "off":
            values = values * correction.weights
        pg_loss = loss_sum(values, part.weights)
        bonus = entropy_bonus(entropies, mask, coefficient=config.entropy_coef)
        metrics |= bonus.metrics
        if config.entropy_coef:
            values = values + bonus.values
        if part.reference is not None and config.kl_coef:
            penalty = kl_loss(logprobs, part.reference, mask, coefficient=config.kl_coef, estimator=config.kl_estimator)
            metrics |= penalty.metrics
            values = values + (penalty.values if config.correction == "off" else penalty.values * correction.weights)
        elif part.reference is not None:
            metrics |= token_metrics(mask, kl=kl(logprobs.detach(), part.reference, mask, estimator="k3"))
        # One sample per row where a row has one weight; its first trained token speaks for all.
        samples = correction.weights[:, 0] if level == "sequence" else correction.weights[mask]
        tally.add(metrics, policy.tokens, float(pg_loss.detach()), samples)
        return loss_sum(values, part.weights)


MISMATCH_METRICS = ("mismatch_kl", "logprob_gap_mean", "logprob_gap_max", "weight_mean", "weight_changed_fraction")
"""What is told about the distance of trainer and sampler."""


def _select(columns: Columns, packed: Packed) -> Columns:
    """The rows of a micro-batch, as wide as their longest."""
    index, width = torch.from_numpy(packed.rows), packed.shape[1]

    def take(values: Tensor) -> Tensor:
        return values.index_select(0, index)[:, :width].to(packed.tokens.device)

    return Columns(
        mask=take(columns.mask),
        advantages=take(columns.advantages),
        weights=take(columns.weights),
        old=take(columns.old),
        pending=columns.pending[packed.rows],
        infer=None if columns.infer is None else take(columns.infer),
        reference=None if columns.reference is None else take(columns.reference),
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
