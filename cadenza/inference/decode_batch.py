"""The tensors of a decode step, kept from one step to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza.inference.kv_cache import RowBlock
from cadenza.inference.sampling import GOLDEN, MASK64, BatchSampling, uniforms
from cadenza.inference.sequence import EngineSequence

RANDOM_STEPS_AHEAD = 8
"""Steps whose random numbers are made at once."""


@dataclass(slots=True)
class DecodeBatch:
    """The tensors that a decode step needs; they move on by themselves while no sequence starts or ends."""

    ready: list[EngineSequence]
    """By row."""
    ids: Tensor
    """[n] the last token of each."""
    positions: Tensor
    """[n] where it stands."""
    cache_indices: Tensor
    """[n * heads] where its keys and values go."""
    row_blocks: list[RowBlock]
    block_steps: int
    """Steps for which the row blocks are wide enough."""
    sampling: BatchSampling
    rng_counters: NDArray[np.uint64]
    """[n, 1] where each stands in its stream of random numbers, after those in `uniforms`."""
    stop_ids: frozenset[int]
    """Tokens that end any of them."""
    steps_left: int
    """Steps until the first of them is as long as it may be."""
    tokens: list[list[int]] = field(default_factory=list)
    """[steps][n] not flushed yet"""
    logprobs: list[list[float]] = field(default_factory=list)
    uniforms: list[Tensor] = field(default_factory=list)
    """[steps][n, 1] the random numbers of the next steps, last step first"""

    def next_uniforms(self) -> Tensor:
        """The random numbers of this step."""
        if not self.uniforms:
            ahead = torch.from_numpy(uniforms(self.rng_counters, RANDOM_STEPS_AHEAD)).to(self.ids.device)
            self.uniforms = list(ahead.flip(0))
            self.rng_counters += np.uint64(RANDOM_STEPS_AHEAD * GOLDEN & MASK64)
        return self.uniforms.pop()

    def flush(self) -> None:
        """Give the noted tokens to their sequences."""
        if steps := len(self.tokens):
            columns = zip(self.ready, zip(*self.tokens, strict=True), zip(*self.logprobs, strict=True), strict=True)
            for sequence, tokens, logprobs in columns:
                sequence.tokens.extend(tokens)
                sequence.logprobs.extend(logprobs)
                sequence.last_token = tokens[-1]
                sequence.length += steps
                sequence.computed += steps
                sequence.rng_counter = (sequence.rng_counter + steps * GOLDEN) & MASK64
            self.tokens.clear()
            self.logprobs.clear()
