"""Rows of different lengths without padding: flat values [T] and offsets [N+1].

Row i is `values[offsets[i]:offsets[i+1]]`. Columns about the same tokens have equal offsets, so their padded
views [N, L] agree in L without being told. Padding exists only in the view: made once, to the longest row.

A column that repeats few values over long spans (masks, the version per token) can be kept as runs; it then
costs a few bytes per row to ship, and its padded view is written in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

# Measured: below this width one boolean-mask copy beats a slice copy per row.
_MASK_COPY_WIDTH = 512


@dataclass(frozen=True, slots=True)
class _RunLengths:
    """Run r repeats `values[r]` `counts[r]` times; row i owns the runs `offsets[i]:offsets[i+1]`."""

    values: Array
    counts: Array
    offsets: Array

    def slice(self, start: int, stop: int) -> _RunLengths:
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return _RunLengths(self.values[a:b], self.counts[a:b], self.offsets[start : stop + 1] - a)

    def take(self, rows: Array) -> _RunLengths:
        return _RunLengths(
            _take_rows(self.values, self.offsets, rows),
            _take_rows(self.counts, self.offsets, rows),
            _offsets(np.diff(self.offsets)[rows]),
        )


class Ragged:
    """An immutable ragged column. `pad` fills the right of the padded view: 0 for ids, -1 for versions."""

    def __init__(self, values: Array, offsets: npt.ArrayLike, *, pad: float = 0) -> None:
        if values.ndim != 1:
            raise ValueError(f"ragged values must be flat [T], got shape {list(values.shape)}")
        self.offsets: Array = _checked_offsets(offsets, len(values))
        self.dtype = values.dtype
        self.pad = _pad_scalar(pad, values.dtype)
        self._flat: Array | None = values
        self._runs: _RunLengths | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[npt.ArrayLike], *, dtype: npt.DTypeLike | None = None, pad: float = 0) -> Ragged:
        """One row per 1-D array. Without `dtype` the rows must be arrays that agree on one."""
        if dtype is None and not rows:
            raise ValueError("no rows, so no dtype: pass dtype=")
        if dtype is None and not all(isinstance(row, np.ndarray) for row in rows):
            raise TypeError("rows that are not numpy arrays have no dtype of their own: pass dtype=")
        arrays: list[Array] = [np.asarray(row, dtype) for row in rows]
        for i, row in enumerate(arrays):
            if row.ndim != 1:
                raise ValueError(f"row {i} of a ragged column must be 1-D, got shape {list(row.shape)}")
            if row.dtype != arrays[0].dtype:
                raise TypeError(f"row {i} is {row.dtype}, row 0 is {arrays[0].dtype}: pass dtype=")
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(values, _offsets(np.array([len(row) for row in arrays], np.int64)), pad=pad)

    @classmethod
    def from_runs(cls, values: Array, counts: npt.ArrayLike, offsets: npt.ArrayLike, *, pad: float = 0) -> Ragged:
        """`values[r]` stands for `counts[r]` tokens in sequence; a run may go on over the end of a row."""
        repeats = np.asarray(counts, np.int64)
        if values.ndim != 1 or repeats.shape != values.shape:
            raise ValueError(f"runs need one count per value, got {list(values.shape)} and {list(repeats.shape)}")
        if repeats.size and repeats.min() < 0:
            raise ValueError(f"run counts must be >= 0, got {repeats.min()}")
        ends = np.cumsum(repeats)
        checked = _checked_offsets(offsets, int(ends[-1]) if len(ends) else 0)
        edges = np.union1d(ends, checked)  # cut at every row's end, so that rows can be taken apart
        inside = edges[:-1]
        runs = _RunLengths(
            values[np.searchsorted(ends, inside, side="right")],
            np.diff(edges),
            np.searchsorted(edges, checked),
        )
        return cls._of_runs(runs, checked, pad)

    @classmethod
    def from_padded(cls, padded: Array, offsets: npt.ArrayLike, *, pad: float = 0) -> Ragged:
        """The inverse of `padded`: what lies beyond the end of a row is dropped."""
        starts = np.asarray(offsets, np.int64)
        lengths = np.diff(starts)
        expected = [len(lengths), int(lengths.max(initial=0))]
        if list(padded.shape) != expected:
            raise ValueError(f"expected a padded array of shape {expected}, got {list(padded.shape)}")
        return cls(padded[np.arange(expected[1]) < lengths[:, None]], starts, pad=pad)

    @classmethod
    def concat(cls, chunks: Sequence[Ragged]) -> Ragged:
        """All rows of `chunks`, in order."""
        first = chunks[0]
        for chunk in chunks[1:]:
            if chunk.dtype != first.dtype or not same_scalar(chunk.pad, first.pad):
                raise ValueError(
                    f"ragged {chunk.dtype} padded with {chunk.pad} does not continue "
                    f"{first.dtype} padded with {first.pad}"
                )
        offsets = _offsets(np.concatenate([chunk.lengths for chunk in chunks]))
        if all(isinstance(chunk, Positions) for chunk in chunks):
            return Positions(offsets)
        runs = [chunk._runs for chunk in chunks if chunk._runs is not None]
        if len(runs) < len(chunks):
            return cls(np.concatenate([chunk.values for chunk in chunks]), offsets, pad=first.pad)
        joined = _RunLengths(
            np.concatenate([r.values for r in runs]),
            np.concatenate([r.counts for r in runs]),
            _offsets(np.concatenate([np.diff(r.offsets) for r in runs])),
        )
        return cls._of_runs(joined, offsets, first.pad)

    @classmethod
    def _of_runs(cls, runs: _RunLengths, offsets: Array, pad: float) -> Ragged:
        ragged = cls(runs.values[:0], np.zeros(1, np.int64), pad=pad)
        ragged.offsets, ragged._flat, ragged._runs = offsets, None, runs
        return ragged

    @property
    def values(self) -> Array:
        """Flat values [T]; runs are expanded on the first read."""
        if self._flat is None:
            assert self._runs is not None
            self._flat = np.repeat(self._runs.values, self._runs.counts)
        return self._flat

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    @property
    def width(self) -> int:
        """L of the padded view: the longest row."""
        return int(self.lengths.max(initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes that travel: as stored, without the padded view."""
        if self._runs is None:
            return int(self.values.nbytes + self.offsets.nbytes)
        runs = self._runs
        return int(runs.values.nbytes + runs.counts.nbytes + runs.offsets.nbytes + self.offsets.nbytes)

    @cached_property
    def padded(self) -> Array:
        """[N, L], padded on the right. Shares memory with `values` when all rows are equally long."""
        rows, width, lengths = len(self), self.width, self.lengths
        if self._runs is not None:
            after = self._runs.offsets[1:]
            values = np.insert(self._runs.values, after, self.pad)
            return np.repeat(values, np.insert(self._runs.counts, after, width - lengths)).reshape(rows, width)
        values = self.values
        if len(values) == rows * width:
            return values.reshape(rows, width)
        padded = np.full((rows, width), self.pad, self.dtype)
        if width < _MASK_COPY_WIDTH:
            padded[np.arange(width) < lengths[:, None]] = values
        else:
            bounds = self.offsets.tolist()
            for row, start, stop in zip(padded, bounds, bounds[1:], strict=False):
                row[: stop - start] = values[start:stop]
        return padded

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows start..stop, sharing memory."""
        offsets = self.offsets[start : stop + 1] - self.offsets[start]
        if self._runs is not None:
            return self._of_runs(self._runs.slice(start, stop), offsets, self.pad)
        return Ragged(self.values[self.offsets[start] : self.offsets[stop]], offsets, pad=self.pad)

    def take(self, rows: Array) -> Ragged:
        """The rows at these indices, in this order."""
        offsets = _offsets(self.lengths[rows])
        if self._runs is not None:
            return self._of_runs(self._runs.take(rows), offsets, self.pad)
        return Ragged(_take_rows(self.values, self.offsets, rows), offsets, pad=self.pad)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a ragged column with {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """NaN equals NaN: the question is whether the same column came back."""
        if not isinstance(other, Ragged):
            return NotImplemented
        return (
            same_scalar(self.pad, other.pad)
            and np.array_equal(self.offsets, other.offsets)
            and same_array(self.values, other.values)
        )

    def __repr__(self) -> str:
        shape = f"ragged {self.dtype} [{len(self)}, {self.width}]"
        if not len(self):
            return shape
        return f"{shape}, lengths {self.lengths.min()}..{self.width} (mean {self.lengths.mean():.1f})"

    def __getstate__(self) -> dict[str, object]:
        """Without the views made from it: runs travel as runs, and padding does not travel."""
        flat = None if self._runs is not None else self._flat
        return {
            "offsets": self.offsets,
            "dtype": self.dtype,
            "pad": self.pad,
            "_flat": flat,
            "_runs": self._runs,
        }

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)


class Positions(Ragged):
    """0, 1, 2 ... in every row. Only the offsets are kept."""

    def __init__(self, offsets: npt.ArrayLike) -> None:
        starts = np.asarray(offsets, np.int64)
        super().__init__(np.empty(0, np.int32), starts[:1])
        self.offsets = _checked_offsets(starts, int(starts[-1]))
        self._flat = None

    @property
    def values(self) -> Array:
        if self._flat is None:
            longest = np.arange(self.width, dtype=np.int32)
            self._flat = np.concatenate([longest[:length] for length in self.lengths] or [longest])
        return self._flat

    @property
    def nbytes(self) -> int:
        return int(self.offsets.nbytes)

    @cached_property
    def padded(self) -> Array:
        positions, lengths = np.arange(self.width, dtype=np.int32), self.lengths[:, None]
        if len(lengths) and lengths.min() == self.width:
            return np.tile(positions, (len(lengths), 1))
        return np.where(positions < lengths, positions, self.pad)

    def slice(self, start: int, stop: int) -> Ragged:
        return Positions(self.offsets[start : stop + 1] - self.offsets[start])

    def take(self, rows: Array) -> Ragged:
        return Positions(_offsets(self.lengths[rows]))

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"_flat": None}


def same_array(a: Array, b: Array) -> bool:
    """Same dtype, shape and content, where NaN equals NaN."""
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _take_rows(values: Array, offsets: Array, rows: Array) -> Array:
    if not len(rows):
        return values[:0]
    bounds = zip(offsets[:-1][rows].tolist(), offsets[1:][rows].tolist(), strict=True)
    return np.concatenate([values[start:stop] for start, stop in bounds])


def _checked_offsets(offsets: npt.ArrayLike, total: int) -> Array:
    checked = np.asarray(offsets, np.int64)
    if checked.ndim != 1 or not len(checked) or checked[0] != 0:
        raise ValueError(f"offsets must be [N+1] and start at 0, got {checked!r}")
    if np.any(checked[1:] < checked[:-1]):
        raise ValueError(f"offsets must not decrease, got {checked!r}")
    if checked[-1] != total:
        raise ValueError(f"offsets end at {checked[-1]}, there are {total} values")
    return checked


def _pad_scalar(pad: float, dtype: np.dtype[Any]) -> Any:
    if dtype.kind not in "biuf":
        raise TypeError(f"a ragged column holds numbers or bools, got {dtype}")
    if not _fits(pad, dtype):
        raise ValueError(f"pad {pad} does not fit {dtype}")
    return dtype.type(pad)


def _fits(pad: float, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return True
    if dtype.kind == "b":
        return pad in (0, 1)
    limits = np.iinfo(dtype)
    return bool(limits.min <= pad <= limits.max and int(pad) == pad)


def same_scalar(a: Any, b: Any) -> bool:
    """NaN equals NaN."""
    return bool(a == b or (a != a and b != b))
