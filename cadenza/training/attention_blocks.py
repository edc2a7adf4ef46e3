"""Attention over packed rows as a few dense blocks.

A row's queries are the slots that it owns; its keys are all its slots, its own and the shared ones. Rows with about
as many queries form a block: one call of scaled dot-product attention, [n, S] queries against [n, L] keys.
```
row 0   q q q q q q q        block 0: 1 row,  7 queries, 7 keys, causal
row 1   k k k k k q q   ->   block 1: 2 rows, 2 queries, 7 keys, masked
row 2   k k k k k q q
```
Every query is in exactly one block. Keys beyond the end of a row come after all its queries, so no query sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza.training.packing import PackedRows
from cadenza.training.token_rows import Array

BLOCK_COST = 2000
"""Pairs of query and key that could be computed in the time that one more block takes (measured on a CPU)."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows whose attention is one dense call."""

    rows: int
    queries: int
    keys: int
    mask: Tensor | None
    """[rows, 1, queries, keys] float32, 0 where a query sees a key and -inf where not; None is the plain triangle"""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """How the slots become blocks and the results of the blocks become slots again. None is the identity."""

    queries: Tensor | None
    """[sum of rows * queries] the query at each position of the blocks"""
    keys: Tensor | None
    """[sum of rows * keys] the slot at each position of the blocks"""
    blocks: tuple[AttentionBlock, ...]
    results: Tensor | None
    """for each query, its position in the blocks"""


def attention_layout(
    packed: PackedRows, queries: Array | None = None, *, block_cost: int = BLOCK_COST
) -> AttentionLayout:
    """Attention of all slots, or only of the slots in `queries` (ascending), which are then numbered in that order."""
    slots, device = len(packed.tokens), packed.tokens.device
    number = np.arange(slots)
    if queries is not None:
        number = np.full(slots, -1)
        number[queries] = np.arange(len(queries))
    column = np.arange(packed.grid.shape[1])
    numbers = number[packed.grid]
    is_query = (column >= packed.owned[:, None]) & (column < packed.lengths[:, None]) & (numbers >= 0)
    counts = is_query.sum(1)
    # One more than the last query's position: no query sees the keys after it.
    reach = np.where(counts > 0, is_query.shape[1] - is_query[:, ::-1].argmax(1), 0)
    blocks: list[AttentionBlock] = []
    query_index, key_index = [], []
    result = np.empty(slots if queries is None else len(queries), np.int64)
    base = 0
    for members in _members(counts, reach, block_cost):
        width, keys = int(counts[members].max()), int(reach[members].max())
        row, position = is_query[members, :keys].nonzero()
        rank = np.arange(len(row)) - np.repeat(np.cumsum(counts[members]) - counts[members], counts[members])
        query_numbers = numbers[members][row, position]
        index = np.zeros((len(members), width), np.int64)
        index[row, rank] = query_numbers
        result[query_numbers] = base + row * width + rank
        mask = None
        if not np.array_equal(counts[members], reach[members]):
            at = np.zeros((len(members), width), np.int64)
            at[row, rank] = position
            seen = (column[:keys] <= at[:, :, None])[:, None]
            mask = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))).to(device)
        blocks.append(AttentionBlock(len(members), width, keys, mask))
        query_index.append(index.ravel())
        key_index.append(packed.grid[members, :keys].ravel())
        base += len(members) * width
    return AttentionLayout(
        _index(np.concatenate(query_index), len(result), device),
        _index(np.concatenate(key_index), slots, device),
        tuple(blocks),
        _index(result, base, device),
    )


def _members(counts: Array, reach: Array, block_cost: int) -> list[Array]:
    """The rows of each block: a new one where it halves the queries and saves more than a block costs."""
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] > 0]
    cuts, keys = [0], int(reach.max(initial=0))
    sorted_counts = counts[order].tolist()
    for i, count in enumerate(sorted_counts):
        most = sorted_counts[cuts[-1]]
        if 2 * count <= most and (most - count) * keys * (len(order) - i) > block_cost:
            cuts.append(i)
    # In the order of the batch, so that rows of one length need no gather.
    return [np.sort(members) for members in np.split(order, cuts[1:])]


def _index(index: Array, size: int, device: torch.device) -> Tensor | None:
    identity = len(index) == size and np.array_equal(index, np.arange(size))
    return None if identity else torch.from_numpy(index).to(device)
