"""A student learns the distributions of a teacher, over the whole vocabulary, at the tokens of given texts.

The teacher is in the same process as the student: logits of a whole vocabulary are computed where they are compared,
for some slots at a time, and never sent or stored. On texts of a dataset this is distillation; on texts that the
student wrote, with `reverse_kl`, it is on-policy distillation. Dropout is off.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from cadenza.algorithms import DIVERGENCES
from cadenza.training.forward import Forward
from cadenza.training.packing import PackedRows
from cadenza.training.strategy import ParallelStrategy
from cadenza.training.supervised import Supervised, SupervisedConfig


class DistillConfig(SupervisedConfig):
    """How a student learns from its teacher."""

    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """forward_kl: cover all that the teacher might say. reverse_kl: say nothing that the teacher would not."""
    temperature: float = Field(default=1.0, gt=0)
    """Of both distributions. Above 1, what the teacher thinks of unlikely tokens counts more."""


class Distiller(Supervised):
    """Trains a language model on the distributions of another one."""

    dropout: ClassVar[bool] = False
    judged: ClassVar[tuple[str, ...]] = ("loss", "missed", "differs")
    config: DistillConfig

    def __init__(
        self,
        module: nn.Module,
        teacher: nn.Module,
        config: DistillConfig,
        seed: int,
        *,
        failures: Path | None = None,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        super().__init__(module, config, seed, failures=failures, strategy=strategy)
        self._teacher = Forward(teacher.requires_grad_(False).eval(), precision=config.precision)
        if config.packing == "auto" and self._teacher.packing != self._learner.packing:
            self._learner.packing = "padded"  # both read one layout
        else:
            self._teacher.resolve(config.packing)
        self._divergence = DIVERGENCES[config.divergence]

    def token_losses(self, packed: PackedRows) -> Tensor:
        return self._compare(packed, judge=False)[0]

    def judge(self, packed: PackedRows) -> tuple[Tensor, ...]:
        """Besides, `differs` is 1 where the teacher finds another token likeliest."""
        return self._compare(packed, judge=True)

    def _compare(self, packed: PackedRows, *, judge: bool) -> tuple[Tensor, ...]:
        packed = packed.to(self._learner.forward.device)
        with torch.no_grad():
            teacher_logits = self._teacher.logits_by_slot(packed)

        def compare(logits: Tensor, slots: slice, predicts: Tensor, tokens: Tensor | None) -> tuple[Tensor, ...]:
            with torch.no_grad():
                taught = teacher_logits(slots)
            known = min(logits.shape[-1], taught.shape[-1])  # a vocabulary may be padded
            logits, taught = logits[:, :known], taught[:, :known]
            loss = self._divergence(logits, taught, temperature=self.config.temperature)[predicts]
            if not judge:
                return (loss,)
            targets = packed.targets if tokens is None else packed.targets[tokens]
            likeliest = logits.argmax(-1)
            missed, differs = likeliest[predicts] != targets, (likeliest != taught.argmax(-1))[predicts]
            return loss, missed.float(), differs.float()

        return self._learner.forward.over_logits(packed, compare)
