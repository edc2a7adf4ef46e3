"""How one module is trained by several ranks: which rank holds what of it, and how gradients are summed.

Invariant: after each update all ranks have the weights that one rank alone would have, up to the order in which floats
are added. Every rank knows the whole batch, so that the counts that a loss is divided by are those of the whole, and
computes its share of the rows; every rank takes part in every update, also with no row of its own.

A strategy is a subclass of `ParallelStrategy` that declares what it needs. A new built-in one is a file with it, and a
line in `STRATEGIES`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from cadenza.config import load_object
from cadenza.training.checkpoint import Checkpointable, load_role, save_role
from cadenza.training.process_group import RankGroup
from cadenza.training.token_rows import Array

Precision = Literal["fp32", "bf16"]
"""fp32: as the parameters are. bf16: matrix products in bfloat16 (autocast), parameters and softmax as they are."""

STRATEGIES: Mapping[str, str] = {
    "torch": "cadenza.training.strategy:ParallelStrategy",
    "fsdp2": "cadenza.training.fsdp:Fsdp2",
}
"""Where each of them is. torch: every rank holds all weights. fsdp2: every rank holds a shard of them."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank tells the others of its share of some rows."""

    loss: float
    error: Exception | None


class ParallelStrategy:
    """Every rank holds all weights, and gradients are added up over the ranks. Others derive from it, and a run finds
    them by name: `actor.strategy=my_module:MyStrategy`."""

    needs_processes: ClassVar[bool] = False
    """Its ranks are processes of their own (a `ProcessGroup`), also where there is only one."""
    tensor_parallel: ClassVar[bool] = False
    """Several ranks can hold one copy of the model together."""
    lockstep: ClassVar[bool] = False
    """The module must be called as a whole, by all ranks in step."""
    own_precision: ClassVar[bool] = False
    """It computes in `precision` by itself; else passes do."""

    def __init__(self, ranks: RankGroup | None = None, *, precision: Precision = "fp32") -> None:
        self.ranks = ranks or RankGroup()
        self.precision = precision

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

    def save(self, directory: Path, role: Checkpointable) -> None:
        """Write weights and training state of the role, as files of a checkpoint. All ask."""
        if self.is_first:
            save_role(directory, role)

    def load(self, directory: Path, role: Checkpointable) -> None:
        """Go on from what `save` wrote. All ask."""
        load_role(directory, role)

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


def load_strategy(name: str) -> type[ParallelStrategy]:
    """The class that 'strategy' means: one of `STRATEGIES`, or 'module:name'."""
    if name not in STRATEGIES and ":" not in name:
        raise ValueError(f"must be one of {', '.join(STRATEGIES)} or 'module:name'")
    found: Any = load_object(STRATEGIES.get(name, name))
    if not isinstance(found, type) or not issubclass(found, ParallelStrategy):
        raise ValueError(f"'{name}' is not a strategy: derive it from ParallelStrategy")
    return found


def names_with_tensor_parallel() -> list[str]:
    """The built-in strategies that can split a model over several ranks."""
    return [name for name in STRATEGIES if load_strategy(name).tensor_parallel]


def _check_name(name: str) -> str:
    load_strategy(name)
    return name


StrategyName = Annotated[str, AfterValidator(_check_name)]
"""In a config."""


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
