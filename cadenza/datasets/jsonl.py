"""JSON lines: an index of where the lines begin.

A million rows cost 8 MB of index, and no row is in memory before it is asked for. Opening reads each file once, in
pieces, for the index and for the digest.
"""

from __future__ import annotations

import codecs
import os
import weakref
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cadenza.datasets.curriculum import Curriculum
from cadenza.datasets.errors import DataError, RowError

_PIECE = 1 << 20
_IS_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))


class JsonLines:
    """The objects of one or more files, one a line. Empty lines do not count as rows, but as lines."""

    checked_rows = 10_000
    curriculum: Curriculum | None = None

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [_File(path) for path in paths]
        self._first = np.cumsum([0, *(file.rows for file in self._files)])

    @property
    def words(self) -> str:
        return ", ".join(f"{f.path} ({f.rows} rows, {f.size} bytes, digest {f.digest})" for f in self._files)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        file, row = self._find(number)
        try:
            value = msgspec.json.decode(file.row(row))
        except msgspec.DecodeError as error:
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
    """Read by position and not mapped: a file that is cut during a run does not kill the process. Its rows are those
    that it had when it was opened: a file that was written anew since then is refused. A file that a new one replaced
    under its name is still the old one here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._stamp = self._new_stamp()
        self.size = self._stamp[0]
        digest = blake2b(digest_size=8)
        begins, suspects = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        for offset in range(0, self.size, _PIECE):
            piece = os.pread(self._descriptor, _PIECE, offset)
            digest.update(piece)
            text = np.frombuffer(piece, np.uint8)
            found = np.flatnonzero(text == ord("\n")) + 1
            begins.append(found + offset)
            # A line may be empty if it begins with a blank, or where this piece ends.
            suspects.append(found[_IS_BLANK[text.take(found, mode="clip")] | (found == len(text))] + offset)
        self.digest = digest.hexdigest()
        self._lines = np.concatenate([*begins, np.array([self.size])])
        """Where each line begins, and the end of the last one."""
        del begins
        self._row_lines = self._filled_lines(np.concatenate(suspects))
        self.rows = len(self._lines) - 1 if self._row_lines is None else len(self._row_lines)

    def row(self, row: int) -> bytes:
        """The line of a row; raises `DataError` if the file has another content than when it was opened."""
        if (stamp := self._new_stamp()) != self._stamp:
            self._check_content(stamp[0])
            self._stamp = stamp
        return self._line(self.line_number(row) - 1)

    def line_number(self, row: int) -> int:
        return row + 1 if self._row_lines is None else int(self._row_lines[row]) + 1

    def close(self) -> None:
        self._descriptor = -1  # the number may soon be that of another file
        self._close()

    def _new_stamp(self) -> tuple[int, int]:
        """The size, and when it was last written: what changes with the content."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _check_content(self, size: int) -> None:
        """Raise unless the file begins with what it was: rows that are added behind harm none."""
        digest = blake2b(digest_size=8)
        for offset in range(0, self.size, _PIECE):
            digest.update(os.pread(self._descriptor, min(_PIECE, self.size - offset), offset))
        if digest.hexdigest() != self.digest:
            raise DataError(
                f"{self.path} was changed while it is read: it had {self.size} bytes with digest {self.digest}, and "
                f"has now {size} bytes with other rows. Put it back and resume the run, or train the new rows in a run "
                "of their own. A new version of a file that a run reads gets another name, or replaces it by a rename"
            )

    def _line(self, line: int) -> bytes:
        begin, end = map(int, self._lines[line : line + 2])
        text = os.pread(self._descriptor, end - begin, begin)
        return text.removeprefix(codecs.BOM_UTF8) if line == 0 else text

    def _filled_lines(self, suspects: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The line of each row; None if no line is empty but, as usual, what follows the last newline."""
        numbers = np.unique(np.searchsorted(self._lines[:-1], suspects))
        empty = [int(line) for line in numbers if not self._line(int(line)).strip()]
        if empty and empty[-1] == len(self._lines) - 2:
            self._lines = self._lines[:-1]
            del empty[-1]
        return np.setdiff1d(np.arange(len(self._lines) - 1), empty) if empty else None


def open_jsonl(paths: Sequence[Path]) -> JsonLines:
    """The rows of these files; raises `DataError` if one of them cannot be read."""
    try:
        return JsonLines(paths)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
