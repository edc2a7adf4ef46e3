"""JSON lines: an index of where the lines begin.

A million rows cost 8 MB of index, and no row is in memory before it is asked for. Opening reads each file once, in
pieces, for the index and for the digest.
"""

from __future__ import annotations

import codecs
import os
import re
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
_BLOCK = 1 << 16
"""Bytes that have a digest of their own: what is read again to check a row of a file that was written to. It divides
_PIECE."""
_IS_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))


class JsonLines:
    """The objects of one or more files, one a line. Empty lines do not count as rows, but as lines."""

    checked_rows = 10_000
    curriculum: Curriculum | None = None

    def __init__(self, paths: Sequence[Path], as_of: str = "") -> None:
        """`as_of` are the `words` of rows that a run began with: a file that has grown since has the rows of then."""
        self._files = [_File(path, _size_then(path, as_of)) for path in paths]
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
    that it had when it was opened: a row that was written anew since then is refused, and so is a file that was cut.
    A file that a new one replaced under its name is still the old one here."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Of a file that has grown since a run began with it, `size` is how many bytes it had then."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._stamp = self._new_stamp()
        self._checked: set[int] | None = None
        """Blocks that were compared since the file was last written to; None if it was not since it was opened."""
        self.size = self._stamp[0] if size is None else min(size, self._stamp[0])
        digest = blake2b(digest_size=8)
        blocks: list[bytes] = []
        begins, suspects = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        for offset in range(0, self.size, _PIECE):
            piece = os.pread(self._descriptor, min(_PIECE, self.size - offset), offset)
            digest.update(piece)
            blocks += [_digest(piece[begin : begin + _BLOCK]) for begin in range(0, len(piece), _BLOCK)]
            text = np.frombuffer(piece, np.uint8)
            found = np.flatnonzero(text == ord("\n")) + 1
            begins.append(found + offset)
            # A line may be empty if it begins with a blank, or where this piece ends.
            suspects.append(found[_IS_BLANK[text.take(found, mode="clip")] | (found == len(text))] + offset)
        self.digest = digest.hexdigest()
        self._blocks = blocks
        self._lines = np.concatenate([*begins, np.array([self.size])])
        """Where each line begins, and the end of the last one."""
        del begins
        self._row_lines = self._filled_lines(np.concatenate(suspects))
        self.rows = len(self._lines) - 1 if self._row_lines is None else len(self._row_lines)

    def row(self, row: int) -> bytes:
        """The line of a row; raises `DataError` if it is not the one that the file had when it was opened."""
        if (stamp := self._new_stamp()) != self._stamp:
            self._stamp, self._checked = stamp, set()
        line = self.line_number(row) - 1
        if self._checked is not None:
            self._check_content(line, self._checked)
        return self._line(line)

    def line_number(self, row: int) -> int:
        return row + 1 if self._row_lines is None else int(self._row_lines[row]) + 1

    def close(self) -> None:
        self._descriptor = -1  # the number may soon be that of another file
        self._close()

    def _new_stamp(self) -> tuple[int, int]:
        """The size, and when it was last written: what changes with the content."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _check_content(self, line: int, checked: set[int]) -> None:
        """Raise unless the blocks with this line are what they were: rows that are added behind harm none."""
        size = self._stamp[0]
        begin, end = map(int, self._lines[line : line + 2])
        for block in range(begin // _BLOCK, (max(end, begin + 1) - 1) // _BLOCK + 1):
            if block in checked:
                continue
            place = block * _BLOCK
            now = os.pread(self._descriptor, min(_BLOCK, self.size - place), place)
            if size < self.size or _digest(now) != self._blocks[block]:
                raise DataError(
                    f"{self.path} was changed while it is read: it had {self.size} bytes with digest {self.digest}, "
                    f"and has now {size} bytes with other rows. Put it back and resume the run, or train the new rows "
                    "in a run of their own. A new version of a file that a run reads gets another name, or replaces it "
                    "by a rename"
                )
            checked.add(block)

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


def _digest(block: bytes) -> bytes:
    return blake2b(block, digest_size=8).digest()


def _size_then(path: Path, words: str) -> int | None:
    """The bytes that a file had, if it still begins with them."""
    found = re.search(rf"{re.escape(str(path))} \(\d+ rows, (\d+) bytes, digest (\w+)\)", words)
    if found is None:
        return None
    size, digest = int(found[1]), blake2b(digest_size=8)
    with path.open("rb") as file:
        for offset in range(0, size, _PIECE):
            digest.update(file.read(min(_PIECE, size - offset)))
    return size if digest.hexdigest() == found[2] else None


def open_jsonl(paths: Sequence[Path], as_of: str = "") -> JsonLines:
    """The rows of these files, or those that they had before they grew (see `JsonLines`); raises `DataError` if one of
    them cannot be read."""
    try:
        return JsonLines(paths, as_of)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
