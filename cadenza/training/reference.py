"""The policy that the trained one must not leave too far behind: a frozen model.

With LoRA there is no second model: the reference is the trained one with its adapter switched off, so it costs no
memory and must not run while the actor trains. Without, it is a frozen copy, or any other model of the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import Field
from torch import nn

from cadenza.config import Config
from cadenza.data import DataProto
from cadenza.training.forward import Forward
from cadenza.training.models import is_adapted
from cadenza.training.packing import Packing
from cadenza.training.strategy import ParallelStrategy, Precision
from cadenza.training.token_rows import TokenRows


class ReferenceConfig(Config):
    """Which model it is, and how it computes."""

    path: str | None = None
    """Another model of the same vocabulary, as the teacher of the estimator 'distill': a directory written by
    `save_pretrained`, or a name on the hub. None is the policy as it is when reinforcement learning begins."""
    temperature: float = Field(default=1.0, gt=0)
    """That of the actor, so that the two distributions can be compared. A run sets it from that of the sampler."""
    token_budget: int = Field(default=4096, gt=0)
    packing: Packing | Literal["auto"] = "auto"
    precision: Precision = "fp32"


class Reference:
    """Logprobs of a model that does not change."""

    def __init__(
        self, module: nn.Module, config: ReferenceConfig | None = None, *, strategy: ParallelStrategy | None = None
    ) -> None:
        """`module` is used as it is. If it has an adapter, the reference is the model under it, and `strategy` that of
        the actor that trains it; else it is frozen."""
        self.config = config or ReferenceConfig()
        self.module = module
        if not is_adapted(module):
            module.requires_grad_(False).eval()
        self._forward = Forward(module, precision=self.config.precision, strategy=strategy)
        self._packing = self._forward.resolve(self.config.packing)

    def logprobs(self, batch: DataProto) -> DataProto:
        """The batch with the column `ref_logprobs`."""
        rows = TokenRows.of(batch)
        with self._without_adapter():
            values = self._forward.logprobs(
                rows,
                rows.active,
                budget=self.config.token_budget,
                packing=self._packing,
                temperature=self.config.temperature,
            )
        return rows.write(batch, "ref_logprobs", values)

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        if not is_adapted(self.module):
            yield
            return
        adapted: Any = self.module
        with adapted.disable_adapter():
            yield
