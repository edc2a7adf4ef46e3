"""What can be wrong with data. The messages name the file, the row and the field."""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "malformed", "missing field", "wrong type", "empty prompt", "cannot be scored", "too long", "too short", "repeated"
]
"""Why a row is refused, as it is counted."""
FILTERED: frozenset[Reason] = frozenset({"too long", "too short", "repeated"})
"""Reasons for which a good row is left out because the config says so."""


class DataError(ValueError):
    """A dataset cannot be read as its config says."""


class RowError(DataError):
    """One row is refused."""

    def __init__(self, place: str, reason: Reason, message: str) -> None:
        super().__init__(place, reason, message)
        self.place = place
        """File and line, or source and row."""
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"
