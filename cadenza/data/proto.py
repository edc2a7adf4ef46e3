"""DataProto: what travels between the controller and its workers.

    data.batch             tensor columns, stored as numpy: dense [N, ...] or ragged (see ragged.py)
    data.non_tensor_batch  object columns [N]: readable ids, text, JSON-like values
    data.meta_info         one plain dict about the whole batch

Invariant: every column has the same number of rows N, and a name belongs to one column only.
Torch is imported when `batch[...]` is first read; code that only moves rows never imports it.
Operations share memory where they can. To change a column, assign it: the tensor of a ragged column is a
padded view, and writing into it does not reach the rows that are sliced, shipped or saved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from cadenza.data import columns, disk
from cadenza.data.column_mappings import (
    ColumnLike,
    ColumnTable,
    ObjectColumns,
    TensorColumns,
    listing,
    lookup,
    usable_device,
)
from cadenza.data.columns import StoredColumn
from cadenza.data.ragged import Array, Ragged

if TYPE_CHECKING:
    import torch

Index: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Array | torch.Tensor"

IS_PADDING = "is_padding"
"""The column that marks the rows which `pad_to_multiple` added. A loss must not count them."""

_Value = TypeVar("_Value")


class DataProto:
    """N rows of tensor and object columns, and meta_info about all of them. See the module for the rules."""

    def __init__(
        self,
        batch: Mapping[str, ColumnLike] | None = None,
        non_tensor_batch: Mapping[str, Sequence[object] | Array] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self._table = ColumnTable()
        self.batch = TensorColumns(self._table)
        self.non_tensor_batch = ObjectColumns(self._table)
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        tensors = batch.stored if isinstance(batch, TensorColumns) else batch or {}
        for name, column in tensors.items():
            self.batch[name] = column
        for name, values in (non_tensor_batch or {}).items():
            self.non_tensor_batch[name] = values

    def __len__(self) -> int:
        """N; 0 without columns."""
        return next((len(column) for column in self._table.columns.values()), 0)

    @property
    def columns(self) -> dict[str, StoredColumn]:
        """Every column as stored, tensors first; object columns have dtype object."""
        return self._table.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor columns as stored: what shipping them costs. Object columns are not counted."""
        return sum(int(column.nbytes) for column in self._table.tensors.values())

    def __eq__(self, other: object) -> bool:
        """Same columns with the same dtype and content (NaN equals NaN), same meta_info."""
        if not isinstance(other, DataProto):
            return NotImplemented
        return (
            self.batch == other.batch
            and self.non_tensor_batch == other.non_tensor_batch
            and self.meta_info == other.meta_info
        )

    def __repr__(self) -> str:
        meta = ", ".join(self.meta_info) or "none"
        return listing(f"DataProto: {len(self)} rows, {self.nbytes:,} bytes, meta_info: {meta}", self.columns)

    def __getstate__(self) -> dict[str, Any]:
        """Numpy only, so that pickle 5 and Ray ship the buffers uncopied; padded views and tensors stay."""
        return {"tensors": self._table.tensors, "objects": self._table.objects, "meta_info": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DataProto.__init__(self, state["tensors"], state["objects"], state["meta_info"])

    def to(self, device: str | int | torch.device) -> DataProto:
        """The same batch, whose tensors `batch[...]` are on `device`, also in what is sliced or chosen from it.

        A column is padded and moved when it is first read. The stored numpy stays in host memory, and a copy in another
        process or on disk has no device.
        """
        moved = DataProto(self._table.tensors, self._table.objects, self.meta_info)
        moved.batch = TensorColumns(moved._table, usable_device(device))
        return moved

    # Rows

    def __getitem__(self, index: Index) -> DataProto:
        """Rows by int (one row), slice (shares memory), index array or bool mask."""
        if isinstance(index, str):
            raise TypeError(f"rows are indexed by numbers: read {index!r} from .batch or .non_tensor_batch")
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._slice(start, max(start, stop))
            return self._take(np.arange(start, stop, step))
        rows = np.asarray(index)
        if rows.ndim == 0 and rows.dtype.kind in "iu":
            row = int(self._checked_rows(rows[None])[0])
            return self._slice(row, row + 1)
        return self._take(self._checked_rows(rows))

    def reorder(self, indices: Sequence[int] | Array | torch.Tensor) -> DataProto:
        """All rows in another order. Only a permutation will do, so that no row is lost or counted twice."""
        rows = self._checked_rows(np.asarray(indices))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise ValueError(f"reorder needs each of the {len(self)} rows once: for other choices use data[indices]")
        return self._take(rows)

    def repeat(self, n: int, interleave: bool = True) -> DataProto:
        """Every row n times: a a b b when interleaved, else a b a b."""
        _at_least_one("repeat", n)
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, n) if interleave else np.tile(rows, n))

    def chunk(self, n: int) -> list[DataProto]:
        """n chunks whose sizes differ by at most one; the longer ones come first."""
        _at_least_one("chunk", n)
        if n > len(self):
            raise ValueError(f"cannot cut {len(self)} rows into {n} chunks: ask for fewer or pad_to_multiple({n})")
        size, longer = divmod(len(self), n)
        return [self._slice(a, b) for a, b in pairwise(i * size + min(i, longer) for i in range(n + 1))]

    def split(self, size: int) -> list[DataProto]:
        """Chunks of `size` rows in order; the last may be shorter."""
        _at_least_one("split size", size)
        return [self._slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def group_by(self, column: str) -> dict[Hashable, DataProto]:
        """Rows by the value of a column [N], in the order in which the values first appear."""
        keys = lookup(self.columns, column, "column")
        if isinstance(keys, Ragged) or keys.ndim != 1:
            raise ValueError(f"group_by: {column!r} is {columns.describe(keys)}, it needs one value per row")
        members: dict[Hashable, list[int]] = {}
        for row, value in enumerate(keys.tolist()):
            if not isinstance(value, Hashable):
                raise TypeError(f"group_by: column {column!r}, row {row} is an unhashable {type(value).__name__}")
            members.setdefault(value, []).append(row)
        return {value: self._take(np.array(rows)) for value, rows in members.items()}

    def mini_batches(
        self, size: int, *, epochs: int = 1, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[DataProto]:
        """Batches of `size` rows, `epochs` times over: in order, or with a seed shuffled anew each time."""
        _at_least_one("mini_batches size", size)
        _at_least_one("mini_batches epochs", epochs)
        if drop_last and 0 < len(self) < size:
            raise ValueError(f"mini_batches({size}, drop_last=True) drops all {len(self)} rows: use a smaller size")
        return self._mini_batches(size, epochs, seed, drop_last)

    def _mini_batches(self, size: int, epochs: int, seed: int | None, drop_last: bool) -> Iterator[DataProto]:
        rng = np.random.default_rng(seed)
        end = len(self) - len(self) % size if drop_last else len(self)
        for _ in range(epochs):
            order = None if seed is None else rng.permutation(len(self))
            for start in range(0, end, size):
                stop = min(start + size, end)
                yield self._slice(start, stop) if order is None else self._take(order[start:stop])

    def pad_to_multiple(self, k: int) -> tuple[DataProto, int]:
        """Append copies of the first rows until k divides N; the bool column `is_padding` marks them.

        The column is there also when nothing was appended, so that a loss can always ask for it.
        """
        _at_least_one("pad_to_multiple", k)
        if IS_PADDING in self.columns:
            raise ValueError(f"the batch has a column {IS_PADDING!r} already: unpad it first")
        rows, count = len(self), -len(self) % k
        padded = self._take(np.arange(rows + count) % rows) if count else self._slice(0, rows)
        padded.batch[IS_PADDING] = np.arange(rows + count) >= rows
        return padded, count

    def unpad(self, pad_count: int) -> DataProto:
        """Without padding rows and mark. The result of a worker that dropped the mark loses its last rows."""
        if not 0 <= pad_count <= len(self):
            raise ValueError(f"pad_count must be in 0..{len(self)}, the rows of the batch, got {pad_count}")
        if IS_PADDING not in self.batch:
            return self._slice(0, len(self) - pad_count)
        padding = self.batch.numpy(IS_PADDING)
        if int(padding.sum()) != pad_count:
            raise ValueError(f"unpad({pad_count}), but {IS_PADDING!r} marks {int(padding.sum())} rows")
        kept = self[~padding]
        del kept.batch[IS_PADDING]
        return kept

    @staticmethod
    def concat(chunks: Sequence[DataProto], *, on_meta_conflict: Literal["raise", "drop"] = "raise") -> DataProto:
        """All rows in order. meta_info is merged; a key with two values is an error, or dropped."""
        if not chunks:
            raise ValueError("concat needs at least one DataProto")
        first = chunks[0]
        for i, chunk in enumerate(chunks):
            differing = {*first.batch} ^ {*chunk.batch} | {*first.non_tensor_batch} ^ {*chunk.non_tensor_batch}
            if differing:
                raise ValueError(f"concat: chunk {i} and chunk 0 do not share the columns {sorted(differing)}")
        result = first._like_this({}, {}, _merged_meta("concat", chunks, on_meta_conflict))
        for name in first.batch:
            result.batch[name] = columns.concat_rows(name, [chunk.batch.stored[name] for chunk in chunks])
        for name in first.non_tensor_batch:
            result.non_tensor_batch[name] = np.concatenate([chunk.non_tensor_batch[name] for chunk in chunks])
        return result

    # Columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Only these columns and keys; None keeps all of a kind."""
        return self._like_this(
            _select_keys(self._table.tensors, batch_keys, "tensor column"),
            _select_keys(self._table.objects, non_tensor_batch_keys, "object column"),
            _select_keys(self.meta_info, meta_info_keys, "meta_info key"),
        )

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> DataProto:
        """Move these columns and keys out of this DataProto into the returned one."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for name in popped.batch:
            del self.batch[name]
        for name in popped.non_tensor_batch:
            del self.non_tensor_batch[name]
        for key in popped.meta_info:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """The columns and meta_info of both. What both have must be equal."""
        mine = self.columns
        for name, column in other.columns.items():
            if name in mine and not columns.same(mine[name], column):
                raise ValueError(f"union: column {name!r} differs between the two: rename or drop one")
        result = self.select()
        result.meta_info = _merged_meta("union", [self, other], "raise")
        for name, tensor_column in other.batch.stored.items():
            result.batch[name] = tensor_column
        for name, object_column in other.non_tensor_batch.items():
            result.non_tensor_batch[name] = object_column
        return result

    def rename(self, mapping: Mapping[str, str]) -> DataProto:
        """Columns under new names, in their old order."""
        for old in mapping:
            lookup(self.columns, old, "column")
        names = [mapping.get(name, name) for name in self.columns]
        for new in mapping.values():
            if names.count(new) > 1:
                raise ValueError(f"rename: two columns would be called {new!r}")
        return self._like_this(
            {mapping.get(name, name): column for name, column in self._table.tensors.items()},
            {mapping.get(name, name): column for name, column in self._table.objects.items()},
            self.meta_info,
        )

    # Disk

    def to_disk(self, directory: str | Path) -> None:
        """Write a new `directory`, whole or not at all: safetensors and JSON, nothing pickled."""
        disk.write(Path(directory), disk.SavedColumns(self._table.tensors, self._table.objects, self.meta_info))

    @staticmethod
    def from_disk(directory: str | Path) -> DataProto:
        return DataProto(*disk.read(Path(directory)))

    # Behind the operations

    def _slice(self, start: int, stop: int) -> DataProto:
        return self._map(lambda column: columns.slice_rows(column, start, stop))

    def _take(self, rows: Array) -> DataProto:
        return self._map(lambda column: columns.take_rows(column, rows))

    def _map(self, change: Callable[[StoredColumn], StoredColumn]) -> DataProto:
        return self._like_this(
            {name: change(column) for name, column in self._table.tensors.items()},
            {name: cast("Array", change(column)) for name, column in self._table.objects.items()},
            self.meta_info,
        )

    def _like_this(
        self, tensors: Mapping[str, StoredColumn], objects: Mapping[str, Array], meta_info: Mapping[str, Any]
    ) -> DataProto:
        """Other columns, on the same device."""
        result = DataProto(tensors, objects, meta_info)
        result.batch = TensorColumns(result._table, self.batch.device)
        return result

    def _checked_rows(self, rows: Array) -> Array:
        """Row numbers >= 0, from row numbers or a mask."""
        if rows.ndim != 1:
            raise ValueError(f"row indices must be 1-D, got shape {list(rows.shape)}")
        if rows.dtype == np.bool_:
            if len(rows) != len(self):
                raise IndexError(f"the mask has {len(rows)} rows, the batch has {len(self)}")
            return np.flatnonzero(rows)
        if rows.size and rows.dtype.kind not in "iu":
            raise TypeError(f"row indices must be integers or bools, got {rows.dtype}")
        numbers = rows.astype(np.int64)
        outside = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} is outside the batch of {len(self)} rows")
        return np.where(numbers < 0, numbers + len(self), numbers)


def _select_keys(values: Mapping[str, _Value], names: Iterable[str] | None, kind: str) -> dict[str, _Value]:
    return dict(values) if names is None else {name: lookup(values, name, kind) for name in names}


def _at_least_one(what: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{what} must be >= 1, got {number}")


def _merged_meta(what: str, chunks: Sequence[DataProto], conflict: Literal["raise", "drop"]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    dropped: set[str] = set()
    for chunk in chunks:
        for key, value in chunk.meta_info.items():
            known = merged.setdefault(key, value)
            if known is value or known == value:
                continue
            if conflict == "raise":
                raise ValueError(f"{what}: meta_info[{key!r}] is {known!r} and {value!r}: pop it first")
            dropped.add(key)
    return {key: value for key, value in merged.items() if key not in dropped}
