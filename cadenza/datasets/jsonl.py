"""JSON lines: an index of where the lines begin, over mapped files.

A million rows cost 8 MB of index, and no row is in memory before it is asked for. Opening reads each file once, in
pieces, for the index and for the digest.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cadenza.datasets.curriculum import Curriculum
from cadenza.datasets.errors import DataError, RowError

_PIECE = 1 << 20
_BLANK = np.frombuffer(b" \t\r\n", np.uint8)


class JsonLines:
    """The objects of one or more files, one a line. Empty lines do not count as rows, but as lines."""

    checked_rows = 10_000
    curriculum: Curriculum | None = None

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [_File(path) for path in paths]
        self._first = np.cumsum([0, *(len(file.starts) for file in self._files)])

    @property
    def words(self) -> str:
        return ", ".join(f"{f.path} ({len(f.starts)} rows, {f.size} bytes, digest {f.digest})" for f in self._files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        file, row = self._find(number)
        try:
            value = msgspec.json.decode(file.line(row))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RowError(self.place(number), "malformed", f"the line is no JSON: {error}") from error
        if not isinstance(value, dict):
            message = f"a row is an object with fields, got {_KINDS.get(type(value), 'null')}"
            raise RowError(self.place(number), "malformed", message)
        return value

    def place(self, number: int) -> str:
        file, row = self._find(number)
        return f"{file.path} line {file.line_number(row)}"

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _find(self, number: int) -> tuple[_File, int]:
        which = int(np.searchsorted(self._first, number, side="right")) - 1
        return self._files[which], number - int(self._first[which])


_KINDS = {str: "text", int: "a number", float: "a number", bool: "true or false", list: "a list"}


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        digest = blake2b(digest_size=8)
        newlines = [np.array([-1])]
        for offset, piece in self._pieces():
            digest.update(piece)
            newlines.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + offset)
        self.digest = digest.hexdigest()
        starts = np.concatenate(newlines)
        del newlines
        starts += 1
        self._line_numbers: NDArray[np.int64] | None = None
        """Of the rows, where some lines are empty."""
        rows = self._rows(starts)
        if len(rows) < len(starts):
            dense = len(rows) > 0 and rows[-1] == len(rows) - 1  # no more than nothing after the last newline
            self._line_numbers = None if dense else rows + 1
            starts = starts[rows]
        self.starts: NDArray[np.int64] = starts
        """Where each row begins."""
        if self._bytes is not None and self._bytes[:3] == b"\xef\xbb\xbf" and len(starts):
            self.starts[0] += 3  # a byte order mark

    def line(self, row: int) -> bytes:
        assert self._bytes is not None
        start = int(self.starts[row])
        end = self._bytes.find(b"\n", start)
        return self._bytes[start : end if end >= 0 else self.size]

    def line_number(self, row: int) -> int:
        return row + 1 if self._line_numbers is None else int(self._line_numbers[row])

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        for offset in range(0, self.size, _PIECE):
            assert self._bytes is not None
            yield offset, self._bytes[offset : offset + _PIECE]

    def _rows(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which lines hold a row. A line is looked at as a whole only if it begins with a blank."""
        filled = starts < self.size
        for offset, piece in self._pieces():
            begin, end = np.searchsorted(starts, (offset, offset + len(piece)))
            first_bytes = np.frombuffer(piece, np.uint8)[starts[begin:end] - offset]
            for line in begin + np.flatnonzero(np.isin(first_bytes, _BLANK)):
                filled[line] = self._has_text(int(starts[line]))
        return np.flatnonzero(filled)

    def _has_text(self, start: int) -> bool:
        assert self._bytes is not None
        end = self._bytes.find(b"\n", start)
        return bool(self._bytes[start : end if end >= 0 else self.size].strip())


def open_jsonl(paths: Sequence[Path]) -> JsonLines:
    """The rows of these files; raises `DataError` if one of them cannot be read."""
    try:
        return JsonLines(paths)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
