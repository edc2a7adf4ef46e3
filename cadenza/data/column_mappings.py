"""The columns of a DataProto as two mappings: `data.batch` reads as tensors, `data.non_tensor_batch` as objects.

Both hold the columns of one table, which has them as numpy (see columns.py) and holds each to the same number of rows.
Torch is imported when a tensor is first read.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from cadenza.data import columns
from cadenza.data.columns import StoredColumn
from cadenza.data.ragged import Array, Ragged

if TYPE_CHECKING:
    import torch

ColumnLike: TypeAlias = "Array | Ragged | torch.Tensor | Sequence[Array | torch.Tensor]"
"""What a tensor column is made of: an array or tensor [N, ...], or a list of 1-D ones (becomes ragged)."""

_Value = TypeVar("_Value")


class ColumnTable:
    """The columns of one DataProto, shared by its two mappings so that they hold each other to N."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredColumn] = {}
        self.objects: dict[str, Array] = {}

    def copy(self) -> ColumnTable:
        """Another table of the same columns."""
        table = ColumnTable()
        table.tensors, table.objects = dict(self.tensors), dict(self.objects)
        return table

    @property
    def columns(self) -> dict[str, StoredColumn]:
        return {**self.tensors, **self.objects}

    def check(self, name: str, column: StoredColumn, others: Collection[str]) -> None:
        """That `column` can be set as `name`, which must not be among the `others`."""
        if name in others:
            raise ValueError(f"column {name!r} is in both batch and non_tensor_batch: rename one of them")
        rows = next((len(known) for other, known in self.columns.items() if other != name), len(column))
        if len(column) != rows:
            raise ValueError(f"column {name!r} has {len(column)} rows, the batch has {rows}")


class TensorColumns(MutableMapping[str, "torch.Tensor"]):
    """`data.batch`: reads as torch tensors [N, ...], ragged columns padded to their longest row."""

    def __init__(self, table: ColumnTable, device: torch.device | None = None) -> None:
        self._table = table
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are; None is torch's own choice."""
        return self._device

    @property
    def stored(self) -> Mapping[str, StoredColumn]:
        """The columns as they are stored: reading them as tensors would pad them."""
        return self._table.tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        column = self._column(name)
        if name not in self._tensors:
            tensor = _to_tensor(columns.dense(column))
            self._tensors[name] = tensor if self._device is None else tensor.to(self._device)
        return self._tensors[name]

    def to(self, device: str | int | torch.device) -> TensorColumns:
        """The same columns, whose tensors are on `device`. A column is padded and moved when it is first read."""
        return TensorColumns(self._table.copy(), usable_device(device))

    def numpy(self, name: str) -> Array:
        """The same view without torch."""
        return columns.dense(self._column(name))

    def ragged(self, name: str) -> Ragged:
        column = self._column(name)
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is dense {columns.describe(column)}: read it with numpy()")
        return column

    def __setitem__(self, name: str, value: ColumnLike) -> None:
        column = _as_column(name, value)
        self._table.check(name, column, self._table.objects)
        self._table.tensors[name] = column
        self._tensors.pop(name, None)

    def assign_like(self, name: str, padded: Array | torch.Tensor, like: str, *, pad: float = 0) -> None:
        """Store a padded [N, L] result (advantages, logprobs) as rows of the ragged column `like`.

        Assigned densely it would keep its L when rows are cut, while `like` shrinks to the rows left.
        """
        array, family = _as_array(name, padded), self.ragged(like)
        expected = (len(family), family.width)
        if array.shape != expected:
            raise ValueError(f"column {name!r} is {list(array.shape)}, {like!r} is padded to {list(expected)}")
        self[name] = Ragged.from_padded(array, family.offsets, pad=pad)

    def __delitem__(self, name: str) -> None:
        self._column(name)
        del self._table.tensors[name]
        self._tensors.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._table.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.tensors)

    def __len__(self) -> int:
        return len(self._table.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorColumns) and columns.all_same(self._table.tensors, other._table.tensors)

    def __repr__(self) -> str:
        return listing("TensorColumns", self._table.tensors)

    def _column(self, name: str) -> StoredColumn:
        return lookup(self._table.tensors, name, "tensor column")


class ObjectColumns(MutableMapping[str, Array]):
    """`data.non_tensor_batch`: numpy object arrays [N]; any sequence of N values can be assigned."""

    def __init__(self, table: ColumnTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Array:
        return lookup(self._table.objects, name, "object column")

    def __setitem__(self, name: str, values: Sequence[object] | Array) -> None:
        column = columns.object_column(name, values)
        self._table.check(name, column, self._table.tensors)
        self._table.objects[name] = column

    def __delitem__(self, name: str) -> None:
        lookup(self._table.objects, name, "object column")
        del self._table.objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.objects)

    def __len__(self) -> int:
        return len(self._table.objects)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectColumns) and columns.all_same(self._table.objects, other._table.objects)

    def __repr__(self) -> str:
        return listing("ObjectColumns", self._table.objects)


def _as_column(name: str, value: ColumnLike) -> StoredColumn:
    """The numpy form of a tensor column. Its dtype is the caller's, never guessed from Python numbers."""
    if isinstance(value, Ragged):
        return value
    if isinstance(value, list | tuple):
        rows = [_as_array(name, row) for row in value]
        try:
            return Ragged.from_rows(rows)
        except (TypeError, ValueError) as error:
            raise type(error)(f"column {name!r}: {error}") from None
    array = _as_array(name, value)
    if array.ndim == 0:
        raise ValueError(f"column {name!r} is one value: a column has an entry per row, shape [N, ...]")
    return array


def _as_array(name: str, value: object) -> Array:
    if "torch" in sys.modules:  # otherwise it cannot be a tensor, and asking must not import torch
        import torch

        if isinstance(value, torch.Tensor):
            if value.dtype == torch.bfloat16:
                raise TypeError(f"column {name!r} is bfloat16, which numpy does not have: convert it with .float()")
            value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"column {name!r}: expected a numpy array, a torch tensor, a Ragged or a list of 1-D arrays, "
            f"got a {type(value).__name__}"
        )
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise TypeError(f"column {name!r} has dtype {value.dtype}, which no tensor has: use non_tensor_batch")
    return value


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "reading batch[name] needs torch: pip install 'cadenza[torch]'; batch.numpy(name) does not"
        ) from error
    return torch


def usable_device(device: str | int | torch.device) -> torch.device:
    """The device, if this process can put a tensor there; torch's own error if it cannot."""
    return cast("torch.device", _import_torch().empty(0, device=device).device)


def _to_tensor(array: Array) -> torch.Tensor:
    if not array.flags.writeable or min(array.strides) < 0:
        # Buffers from Ray's object store are read-only, and torch would let its user write into them.
        array = array.copy()
    return cast("torch.Tensor", _import_torch().from_numpy(array))


def listing(head: str, stored: Mapping[str, StoredColumn]) -> str:
    width = max(map(len, stored), default=0)
    return "\n".join([head, *(f"  {name:<{width}}  {columns.describe(c)}" for name, c in stored.items())])


def lookup(values: Mapping[str, _Value], name: str, kind: str) -> _Value:
    if name not in values:
        raise KeyError(f"no {kind} {name!r}, there are: {', '.join(values) or 'none'}")
    return values[name]
