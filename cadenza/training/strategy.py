"""How one module is trained by several ranks: who holds what of it, and how gradients come together.

Invariant: after each update all ranks have the weights that one rank alone would have, up to the order in which floats
are added. Every rank knows the whole batch, so that the counts that a loss is divided by are those of the whole, and
computes its share of the rows; every rank takes part in every update, also with no row of its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from cadenza.training.peers import Peers
from cadenza.training.rows import Array


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of its share of an update."""

    loss: float
    error: Exception | None
    touched: bytes
    """For each parameter, whether it has a gradient."""


class Strategy:
    """Every rank holds all weights, and gradients are added up over the ranks."""

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers or Peers()

    def wrap(self, module: nn.Module) -> None:
        """Make the module ready; before it has an optimizer. All ranks begin with the weights of the first."""
        self.peers.copy_first([*module.parameters(), *module.buffers()])

    def collect(self, parameters: Sequence[nn.Parameter], loss: float, error: Exception | None) -> float:
        """The loss of the update, with its gradient in all parameters; or the error of the first rank that has one."""
        touched = bytes(parameter.grad is not None for parameter in parameters)
        reports = self.peers.exchange(Report(loss, None if error is None else _portable(error), touched))
        for rank, report in enumerate(reports):
            if report.error is not None:
                if rank == self.peers.rank and error is not None:
                    raise error
                report.error.add_note(f"it happened on rank {rank}")
                raise report.error
        if self.peers.size > 1:
            some = np.any([np.frombuffer(report.touched, bool) for report in reports], axis=0)
            self._add_up([parameter for parameter, wanted in zip(parameters, some, strict=True) if wanted])
        return sum(report.loss for report in reports)

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.peers.add_up(gradients)


def _portable(error: Exception) -> Exception:
    """The error, or one that says as much, in a form that reaches the other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickling runs the error's own code
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def shares(costs: Array, ranks: int) -> Array:
    """[n]: the rank of each row, so that neighbours stay together and all have about the same sum of costs."""
    ends = np.cumsum(costs)
    if not len(ends) or not ends[-1]:
        return np.zeros(len(ends), np.int64)
    owners: Array = np.minimum((ends - costs / 2) * ranks // ends[-1], ranks - 1).astype(np.int64)
    return owners
