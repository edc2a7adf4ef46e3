"""Rows laid out for one forward pass, so that no token is computed twice and none sees a foreign row.

A slot is one token to compute. Invariant: the state of a slot depends on the tokens up to it in its own row, and on
nothing else, whatever else is in the pass.

    padded   every row as long as the longest; slots = n * L
    packed   rows end to end, no padding; slots = tokens
    shared   tokens with the same past are one slot: the prompt of a group is computed once, not once per member
```
rows  a b c d        padded  a b c d       packed  a b c d         shared  a b c d
      a b e                  a b e .               a b e                   . . e
      f g                    f g . .               f g                     f g
```
A row shares with the row before it, so rows sorted by their tokens share all there is to share. Computing a prefix
once is exact: causal states are equal where the past is equal, and gradients of a slot add up over the rows using it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cadenza.training.token_rows import Array, TokenRows, ranges

Packing = Literal["padded", "packed", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """n rows of a batch, laid out as U slots for one forward pass."""

    packing: Packing
    rows: Array
    """[n] which rows of the batch these are, in the order of the layout"""
    tokens: Tensor
    """[U]"""
    positions: Tensor
    """[U] position in its own row"""
    grid: Array
    """[n, L] the slot of each token of each row; 0 beyond its end"""
    lengths: Array
    """[n] tokens of each row"""
    owned: Array
    """[n] the first position of each row that no row before it has"""
    reads: Array
    """[P] the slots that predict a trained token, ascending"""
    predicts: Tensor
    """[K] for each trained token, the number in `reads` of the slot that predicts it"""
    targets: Tensor
    """[K] the trained tokens, row after row"""
    flat_index: Tensor | None
    """[K] where each trained token is in [n, R] flattened; None where that is its number already"""
    shape: tuple[int, int]
    """n, R: the rows, and the trained tokens of the row that has most"""

    def to(self, device: torch.device) -> PackedRows:
        """The same with its tensors on a device."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            predicts=self.predicts.to(device),
            targets=self.targets.to(device),
            flat_index=None if self.flat_index is None else self.flat_index.to(device),
        )

    def by_row(self, values: Tensor) -> Tensor:
        """[n, R]: values [K] of the trained tokens, one row's side by side, 0 beyond."""
        if self.flat_index is None:
            return values.view(self.shape)
        return values.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.flat_index, values).view(self.shape)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[1, 1, U, U]: 0 where a slot sees another, the lowest number where not. For slots as one sequence."""
        slots = len(self.tokens)
        mask = torch.full((slots, slots), torch.finfo(dtype).min, dtype=dtype)
        for slot_of, first, length in zip(self.grid, self.owned, self.lengths, strict=True):
            past = torch.from_numpy(slot_of[:length])
            sees = torch.full((length - first, length), torch.finfo(dtype).min, dtype=dtype).triu(int(first) + 1)
            mask[past[first:, None], past[None]] = sees
        return mask[None, None].to(self.tokens.device)


def pack(rows: TokenRows, chosen: Array, packing: Packing) -> PackedRows:
    """Lay out these rows, which must have trained tokens, in the order given."""
    lengths = rows.lengths[chosen]
    count, width = len(chosen), int(lengths.max())
    position = np.arange(width)
    exists = position < lengths[:, None]
    ids = np.zeros((count, width), rows.tokens.dtype)
    ids[exists] = rows.tokens[ranges(rows.offsets[:-1][chosen], lengths)]
    owned = np.zeros(count, np.int64)
    if packing == "padded":
        lengths, exists = np.full(count, width), np.ones_like(exists)
    elif packing == "shared":
        owned[1:] = shared_prefixes(ids, lengths)
    grid, kept = _slots(exists, owned)
    counts = rows.counts[chosen]
    trained = rows.trained[ranges(rows.firsts[:-1][chosen], counts)]
    row = np.repeat(np.arange(count), counts)
    before = trained - rows.offsets[:-1][chosen][row] - 1
    reads, predicts = np.unique(grid[row, before], return_inverse=True)
    most = int(counts.max())
    flat_index = None
    if len(trained) < count * most:
        flat_index = torch.from_numpy(ranges(np.arange(count) * most, counts))
    return PackedRows(
        packing=packing,
        rows=chosen,
        tokens=torch.from_numpy(ids.ravel()[kept].astype(np.int64)),
        positions=torch.from_numpy(kept % width),
        grid=grid,
        lengths=lengths,
        owned=owned,
        reads=reads,
        predicts=torch.from_numpy(predicts),
        targets=torch.from_numpy(rows.tokens[trained].astype(np.int64)),
        flat_index=flat_index,
        shape=(count, most),
    )


def shared_prefixes(ids: Array, lengths: Array) -> Array:
    """[n-1]: how many first tokens each row of ids [n, L] has in common with the row before it."""
    differs = ids[1:] != ids[:-1]
    first = np.where(differs.any(1), differs.argmax(1), ids.shape[1])
    common: Array = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    return common


def _slots(exists: Array, owned: Array) -> tuple[Array, Array]:
    """The slot of each position [n, L], and the flat positions [U] that are slots."""
    count, width = exists.shape
    position = np.arange(width)
    is_slot = exists & (position >= owned[:, None])
    kept = np.flatnonzero(is_slot)
    slot = np.zeros(count * width, np.int64)
    slot[kept] = np.arange(len(kept))
    slot = slot.reshape(count, width)
    if owned.any():
        # A position that a row does not own belongs to the last row above that does.
        owner = np.maximum.accumulate(np.where(owned[:, None] <= position, np.arange(count)[:, None], 0), axis=0)
        slot = np.where(exists, slot[owner, position], 0)
    return slot, kept
