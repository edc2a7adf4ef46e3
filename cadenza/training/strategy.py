"""How one module is trained by several ranks: who holds what of it, and how gradients come together.

Invariant: after each update all ranks have the weights that one rank alone would have, up to the order in which floats
are added. Every rank knows the whole batch, so that the counts that a loss is divided by are those of the whole, and
computes its share of the rows; every rank takes part in every update, also with no row of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from cadenza.training.process_group import RankGroup
from cadenza.training.token_rows import Array

StrategyName = Literal["torch", "fsdp2"]
"""torch: every rank holds all weights. fsdp2: every rank holds a shard of them (fsdp.py)."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank tells the others of its share of some rows."""

    loss: float
    error: Exception | None


class ParallelStrategy:
    """Every rank holds all weights, and gradients are added up over the ranks."""

    lockstep = False
    """Whether the module must be called as a whole, by all ranks in step."""

    def __init__(self, ranks: RankGroup | None = None) -> None:
        self.ranks = ranks or RankGroup()

    def wrap(self, module: nn.Module) -> None:
        """Make the module ready; before it has an optimizer. All ranks begin with the weights of the first."""
        self.ranks.broadcast([*module.parameters(), *module.buffers()])

    def pass_count(self, passes: int) -> int:
        """How many passes to make where this rank has work for so many."""
        return passes

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as one rank alone would have them, on the first rank; others may get nothing. All ask."""
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def reshard(self, module: nn.Module) -> None:
        """Give up whatever the module holds of other ranks' weights."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.ranks.global_rank == 0

    def sum_losses(self, loss: float, error: Exception | None) -> float:
        """The sum of the losses of all ranks; or the error of the first rank that has one."""
        reports = self.ranks.all_gather(RankReport(loss, None if error is None else _picklable(error)))
        for rank, report in enumerate(reports):
            if report.error is not None:
                if rank == self.ranks.data_rank and error is not None:
                    raise error
                report.error.add_note(f"it happened on rank {rank}")
                raise report.error
        return sum(report.loss for report in reports)

    def reduce_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """The gradients of all ranks, added up in all parameters that any of them has one for."""
        touched = bytes(parameter.grad is not None for parameter in named.values())
        some = np.any([np.frombuffer(flags, bool) for flags in self.ranks.all_gather(touched)], axis=0)
        self._all_reduce_gradients(
            {name: parameter for (name, parameter), wanted in zip(named.items(), some, strict=True) if wanted}
        )

    def _all_reduce_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        if self.ranks.data_size == 1:
            return
        gradients = []
        for parameter in named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.ranks.all_reduce(gradients)


def _picklable(error: Exception) -> Exception:
    """The error, or one that says as much, in a form that reaches the other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the error's own code
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def assign_ranks(costs: Array, ranks: int) -> Array:
    """[n]: the rank of each row, so that neighbours stay together and all have about the same sum of costs."""
    ends = np.cumsum(costs)
    if not len(ends) or not ends[-1]:
        return np.zeros(len(ends), np.int64)
    owners: Array = np.minimum((ends - costs / 2) * ranks // ends[-1], ranks - 1).astype(np.int64)
    return owners
