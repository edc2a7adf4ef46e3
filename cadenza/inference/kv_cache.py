"""Where keys and values live: rows for the sequences that run, a prefix cache for contexts that no sequence uses now.

Invariant: row r holds the keys and values of the first `computed` tokens of the sequence that has it, at positions
0, 1, 2, ...; what lies behind is zeros or left over, finite, and masked. A cached prefix has its tokens with it:
it is reused as far as they are the beginning of the new context, and no further, for any session.

    rows          [layer, row, head, position, dim]   dense: the keys of a batch are a slice of it, never gathered
    prefix cache  session -> [layer, head, position, dim]   least recently used first; gives way to the rows
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza.inference.replica import Tokens

Index = NDArray[np.int64]
_LEAST_WIDTH, _LEAST_ROWS = 64, 8


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves behind in the cache."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.layers * self.heads * 2 * max(self.key_dim, self.value_dim) * self.dtype.itemsize


class RowBlock(NamedTuple):
    """Consecutive rows `first` to `last - 1` that attend to the same number of positions, `width`."""

    first: int
    last: int
    width: int


class RowBlockView(NamedTuple):
    """What the rows of a block attend to, without a copy; heads are taken as rows."""

    mask: Tensor
    """[r, 1, width]"""
    keys: list[Tensor]
    """By layer, [r, dim, width]"""
    values: list[Tensor]
    """By layer, [r, width, dim]"""


class KVCache:
    """One row per running sequence, all as wide as the longest needs, and one more to move things around unless there
    is one alone. A cell holds one token: `cells` of them are allocated, whether they are used or not, and
    never more than the limit given to `reserve`. Only while they are copied to new tensors do both exist."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.rows = self.width = 0
        self.free()

    def free(self) -> None:
        """Give all memory back."""
        self._allocate(0, 0)

    @property
    def cells(self) -> int:
        return self.rows * self.width

    def reserve(self, sequences: int, width: int, limit: int) -> bool:
        """Have cells for so many sequences of `width` positions; True when the tensors are new ones.

        The tensors never have more than `limit` cells, which must suffice for what is asked. They double while that
        stays within half of the limit, and beyond it have an eighth to spare. Above half of the limit they shrink when
        they are twice what is asked. Only rows and positions that are asked for keep what they hold.
        """
        rows = rows_needed(sequences)
        fits = rows <= self.rows and width <= self.width
        if fits and (self.cells <= limit // 2 or 2 * rows * width > self.cells):
            return False
        old = self._store
        new_rows = self.rows if rows <= self.rows else max(2 * self.rows, rows, _LEAST_ROWS + 1)
        new_width = self.width if width <= self.width else max(2 * self.width, width, _LEAST_WIDTH)
        if new_rows * new_width > limit // 2:
            new_rows, new_width = rows + rows // 8, width + width // 8
        if new_rows * new_width > limit:
            new_rows, new_width = rows, width
        kept_rows, kept_width = min(new_rows, self.rows), min(new_width, self.width)
        self._allocate(new_rows, new_width)
        self._store[:, :, :kept_rows, :, :kept_width] = old[:, :, :kept_rows, :, :kept_width]
        return True

    def indices(self, rows: Index, positions: Index) -> Tensor:
        """[n * heads] where the tokens at these rows and positions belong in `flat`."""
        heads = self.shape.heads
        first = (rows * heads)[:, None] + np.arange(heads)
        return torch.from_numpy((first * self.width + positions[:, None]).reshape(-1)).to(self.shape.device)

    def block_view(self, block: RowBlock) -> RowBlockView:
        """Its keys, values and mask, without a copy."""
        view = self._views.get(block)
        if view is None:
            if len(self._views) > 1024:
                self._views.clear()
            rows = slice(block.first * self.shape.heads, block.last * self.shape.heads)
            view = self._views[block] = RowBlockView(
                self.mask[rows, :, : block.width],
                [keys.flatten(0, 1)[rows, : block.width].transpose(1, 2) for keys in self.keys],
                [values.flatten(0, 1)[rows, : block.width] for values in self.values],
            )
        return view

    def set_visible_lengths(self, lengths: Index) -> None:
        """Let row r of the mask see its first `lengths[r]` positions."""
        ends = torch.from_numpy(np.repeat(lengths, self.shape.heads)).to(self.shape.device)
        self.mask[: len(ends), 0].zero_().masked_fill_(self._positions >= ends[:, None], -torch.inf)

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one row to another."""
        self._store[:, :, target, :, :length] = self._store[:, :, source, :, :length]

    def copy_to_rows(self, source: int, targets: list[int], length: int) -> None:
        """The first `length` positions of one row to many others."""
        if len(targets) == 1:
            self.copy(source, targets[0], length)
            return
        first = self._store[:, :, source : source + 1, :, :length]
        if targets[-1] - targets[0] == len(targets) - 1 and targets == sorted(targets):
            self._store[:, :, targets[0] : targets[-1] + 1, :, :length] = first
        else:
            self._store[:, :, targets, :, :length] = first

    def save(self, row: int, length: int) -> Tensor:
        """A copy of the first `length` positions."""
        return self._store[:, :, row, :, :length].clone()

    def restore(self, row: int, saved: Tensor, length: int) -> None:
        """The first `length` positions of a saved context into a row."""
        self._store[:, :, row, :, :length] = saved[:, :, :, :length]

    def _allocate(self, rows: int, width: int) -> None:
        shape = self.shape
        dim = max(shape.key_dim, shape.value_dim)
        size = (2, shape.layers, rows, shape.heads, width, dim)
        self._store = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.keys = self._store[0, ..., : shape.key_dim]
        """[layer, row, head, position, dim]"""
        self.values = self._store[1, ..., : shape.value_dim]
        self.flat = [self._store[:, layer].view(2, -1, dim) for layer in range(shape.layers)] if rows else []
        """By layer, keys and values as [2, row * head * position, dim]: what `indices` counts."""
        self.mask = torch.zeros(rows * shape.heads, 1, width, dtype=shape.dtype, device=shape.device)
        """What is added to the scores of each row and head: 0 where it may look, else minus infinity."""
        self._views: dict[RowBlock, RowBlockView] = {}
        self._positions = torch.arange(width, device=shape.device)
        self.rows, self.width = rows, width


@dataclass(slots=True)
class CachedPrefix:
    """Keys and values of a context that no running sequence uses."""

    tokens: Tokens
    """[T] what they were computed from."""
    saved: Tensor
    """[2, layer, head, T, dim]"""
    group: int


class KVPrefixCache:
    """Contexts that no sequence uses now, by session, least recently used first."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of all contexts together."""
        self._prefixes: OrderedDict[int, CachedPrefix] = OrderedDict()
        self._groups: dict[int, int] = {}

    def put(self, session: int, context: CachedPrefix) -> None:
        """Keep the newest context of a session."""
        self.take(session)
        self._prefixes[session] = context
        self._groups[context.group] = session
        self.tokens += len(context.tokens)

    def take(self, session: int) -> CachedPrefix | None:
        """Remove and return the context of a session."""
        context = self._prefixes.pop(session, None)
        if context is not None:
            self.tokens -= len(context.tokens)
            if self._groups.get(context.group) == session:
                del self._groups[context.group]
        return context

    def candidates(self, session: int, group: int) -> Iterator[CachedPrefix]:
        """Contexts worth comparing with a new one: that of its session, the latest of its group."""
        for key in (session, self._groups.get(group)):
            if key is not None and (context := self._prefixes.get(key)) is not None:
                self._prefixes.move_to_end(key)
                yield context

    def evict_to(self, tokens: int) -> None:
        """Keep at most `tokens`, the most recently used ones."""
        while self._prefixes and self.tokens > tokens:
            self.take(next(iter(self._prefixes)))

    def clear(self) -> None:
        self._prefixes.clear()
        self._groups.clear()
        self.tokens = 0

    def check(self) -> None:
        """Assert what must hold between two calls."""
        assert self.tokens == sum(len(context.tokens) for context in self._prefixes.values())
        assert all(context.saved.shape[3] == len(context.tokens) for context in self._prefixes.values())
        assert all(self._prefixes[session].group == group for group, session in self._groups.items())


def rows_needed(sequences: int) -> int:
    """Rows for so many sequences: one more to move things around, unless there is one alone."""
    return sequences + (sequences > 1)


def common_prefix_length(first: Tokens, second: Tokens) -> int:
    """How many tokens two contexts have in common from the beginning."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    index = int(different.argmax()) if length else 0
    return index if length and different[index] else length
