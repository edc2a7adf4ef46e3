"""What every kind of source does: raw rows by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from cadenza.datasets.curriculum import Curriculum


class Source(Protocol):
    """Rows as they are stored, from 0. Reading one never reads the others."""

    checked_rows: int
    """How many can be read before a run without that anyone waits."""
    curriculum: Curriculum | None
    """Decides how hard the rows are, where they are made on demand."""

    @property
    def words(self) -> str:
        """What identifies the rows: where they are, how many, a digest."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Raises `RowError` for what cannot be read."""

    def place(self, number: int) -> str:
        """Where a row stands, for messages."""

    def close(self) -> None: ...
