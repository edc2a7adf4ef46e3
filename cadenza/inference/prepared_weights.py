"""Weights on their way into an engine: from a module or a state dict to what its decoder takes.

Invariant: the module that a replica was made of, and any module it is given, is never written to. A state dict goes
into a copy of the last module, which is kept while state dicts follow one another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import torch
from torch import nn

from cadenza.inference.decoders import Decoder, copy_weights_into


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights that `prepare` has packed, so that loading them costs nothing."""

    module: nn.Module
    """That they were read from."""
    packed: object
    """In the form that decoders of this model take; never written to again."""


class WeightPacker:
    """Packs weights for a decoder, in any thread, one at a time."""

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        self.initial_module = model
        self._decoder = decoder
        self._last_module = model
        self._own_copy: nn.Module | None = None
        self._lock = Lock()

    def prepare(self, weights: object) -> PreparedWeights:
        """Pack a module, a state dict, or with None the module that the replica was made of."""
        with self._lock, torch.no_grad():
            module = self._module_with(weights)
            return PreparedWeights(module, self._decoder.pack(module))

    def note_loaded(self, prepared: PreparedWeights) -> None:
        """The next state dict says what changed since these."""
        self._last_module = prepared.module
        if prepared.module is not self._own_copy:
            self._own_copy = None

    def _module_with(self, weights: object) -> nn.Module:
        """The given module, the first one, or a copy of the last one with the state dict in it: the last one may be a
        trainer's."""
        if weights is None:
            return self.initial_module
        if isinstance(weights, nn.Module):
            return weights
        if not isinstance(weights, Mapping):
            raise TypeError(f"weights must be a module, a state dict or None, got {type(weights).__name__}")
        if self._own_copy is None:
            self._own_copy = copy.deepcopy(self._last_module)
        copy_weights_into(self._own_copy, weights)
        return self._own_copy
