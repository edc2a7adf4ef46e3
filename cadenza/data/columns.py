"""A stored column is a dense array [N, ...] or a Ragged: what can be asked of, and done to, either kind.

An object column is a dense array of dtype object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from cadenza.data.ragged import Array, Ragged, same_array, same_scalar

StoredColumn: TypeAlias = Array | Ragged


def describe(column: StoredColumn) -> str:
    """One phrase for tables and errors: `float32 [4]`, `ragged int32 [4, 9], lengths 2..9 (mean 5.5)`."""
    return repr(column) if isinstance(column, Ragged) else f"{column.dtype} {list(column.shape)}"


def dense(column: StoredColumn) -> Array:
    return column.padded if isinstance(column, Ragged) else column


def slice_rows(column: StoredColumn, start: int, stop: int) -> StoredColumn:
    """Shares memory."""
    return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]


def take_rows(column: StoredColumn, rows: Array) -> StoredColumn:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def concat_rows(name: str, columns: Sequence[StoredColumn]) -> StoredColumn:
    first = columns[0]
    for i, column in enumerate(columns):
        if not _continues(first, column):
            raise ValueError(
                f"concat: column {name!r} is {describe(column)} in chunk {i}, {describe(first)} in chunk 0"
            )
    if isinstance(first, Ragged):
        return Ragged.concat(cast("Sequence[Ragged]", columns))
    return np.concatenate(cast("Sequence[Array]", columns))


def same(a: StoredColumn, b: StoredColumn) -> bool:
    """Same kind, dtype and content, where NaN equals NaN."""
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return isinstance(a, Ragged) and a == b
    if a.dtype == object:
        return b.dtype == object and bool(a.tolist() == b.tolist())
    return same_array(a, b)


def all_same(a: Mapping[str, StoredColumn], b: Mapping[str, StoredColumn]) -> bool:
    return a.keys() == b.keys() and all(same(column, b[name]) for name, column in a.items())


def object_column(name: str, values: Sequence[object] | Array) -> Array:
    """One Python object per row, also when the objects are lists of one length, which np.array stacks."""
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise TypeError(f"column {name!r}: expected one object per row, got {type(values).__name__}")
    if isinstance(values, np.ndarray):
        if values.dtype == object and values.ndim == 1:
            return values
        values = values.tolist() if values.ndim == 1 else list(values)
    return np.fromiter(values, object, count=len(values))


def _continues(first: StoredColumn, column: StoredColumn) -> bool:
    if isinstance(first, Ragged) and isinstance(column, Ragged):
        return column.dtype == first.dtype and same_scalar(column.pad, first.pad)
    if isinstance(first, Ragged) or isinstance(column, Ragged):
        return False
    return column.dtype == first.dtype and column.shape[1:] == first.shape[1:]
