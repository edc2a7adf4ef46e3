"""What training reads of a batch: its tokens, and which of them train.

Invariant: the trained tokens are numbered 0 to K-1, row by row in the order in which they were written. Every column
that the loss needs is read in that order, as [K] or as [N, R] with one row's trained tokens side by side, and every
result is written back to where its tokens are. Prompt tokens, env tokens and rows marked `is_padding` have no number.
```
row   p p r r e r        trained   2 3 5        inputs   p p r r e     the last token predicts nothing
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cadenza.data import IS_PADDING, DataProto, Ragged

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The tokens of a batch, flat."""

    tokens: Array
    """[T] token ids"""
    offsets: Array
    """[N+1] where each row begins in `tokens`"""
    trained: Array
    """[K] where the trained tokens are in `tokens`, ascending"""
    counts: Array
    """[N] trained tokens of each row"""
    firsts: Array
    """[N+1] the number of each row's first trained token"""
    lengths: Array
    """[N] inputs of each row: what stands before its last trained token, 0 if none trains. The rest predicts
    nothing that is trained and is not computed."""

    @classmethod
    def of(cls, batch: DataProto) -> TokenRows:
        ids = batch.batch.ragged("input_ids")
        mask = _flat(batch, "response_mask", ids).astype(bool, copy=False)
        if "attention_mask" in batch.batch and not _flat(batch, "attention_mask", ids).all():
            raise ValueError("attention_mask has zeros inside a row: rows are ragged and need no padding")
        if IS_PADDING in batch.batch:
            mask = mask & ~np.repeat(batch.batch.numpy(IS_PADDING).astype(bool), ids.lengths)
        trained = np.flatnonzero(mask)
        firsts = np.searchsorted(trained, ids.offsets)
        counts = np.diff(firsts)
        lengths = np.zeros(len(ids), np.int64)
        some = np.flatnonzero(counts)
        begin = ids.offsets[some]
        lengths[some] = trained[firsts[some + 1] - 1] - begin
        unpredicted = some[trained[firsts[some]] == begin]
        if unpredicted.size:
            raise ValueError(
                f"row {unpredicted[0]} begins with a response token, which nothing predicts: "
                "begin the prompt with at least one token"
            )
        return cls(ids.values, ids.offsets, trained, counts, firsts, lengths)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def active(self) -> Array:
        """The rows that have trained tokens."""
        return np.flatnonzero(self.counts)

    def read(self, batch: DataProto, name: str) -> Array:
        """[K] float32: a token column at the trained tokens. A column [N] counts for every token of its row."""
        if name not in batch.batch:
            raise KeyError(f"training needs the column {name!r}, there are: {', '.join(batch.batch)}")
        column = batch.columns[name]
        if isinstance(column, Ragged):
            if not np.array_equal(column.offsets, self.offsets):
                raise ValueError(f"column {name!r} has other row lengths than 'input_ids'")
            values = column.values[self.trained]
        elif column.ndim == 1:
            values = np.repeat(column, self.counts)
        else:
            width = int(np.diff(self.offsets).max(initial=0))
            if column.shape != (len(self), width):
                raise ValueError(f"column {name!r} is {list(column.shape)}, 'input_ids' is [{len(self)}, {width}]")
            values = column[self._row_of_token, self.trained - self.offsets[:-1][self._row_of_token]]
        return values.astype(np.float32, copy=False)

    def pad(self, values: Array) -> Tensor:
        """[N, R]: values [K], one row's trained tokens side by side, 0 beyond."""
        width = int(self.counts.max(initial=0))
        if len(values) == len(self) * width:
            return torch.from_numpy(np.ascontiguousarray(values)).view(len(self), width)
        padded = np.zeros((len(self), width), values.dtype)
        padded[np.arange(width) < self.counts[:, None]] = values
        return torch.from_numpy(padded)

    def numbers(self, rows: Array) -> Array:
        """The numbers of the trained tokens of these rows, row after row."""
        return ranges(self.firsts[rows], self.counts[rows])

    def write(self, batch: DataProto, name: str, values: Array) -> DataProto:
        """The batch with values [K] as one more column, 0 at all other tokens."""
        column = np.zeros(len(self.tokens), np.float32)
        column[self.trained] = values
        result = batch.select()
        result.batch[name] = Ragged(column, self.offsets)
        return result

    @property
    def _row_of_token(self) -> Array:
        return np.repeat(np.arange(len(self)), self.counts)


def ranges(starts: Array, counts: Array) -> Array:
    """The integers start, start + 1 ... of each (start, count), one after the other."""
    ends = np.cumsum(counts)
    numbers: Array = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return numbers


def _flat(batch: DataProto, name: str, ids: Ragged) -> Array:
    column = batch.batch.ragged(name)
    if not np.array_equal(column.offsets, ids.offsets):
        raise ValueError(f"column {name!r} has other row lengths than 'input_ids'")
    return column.values
