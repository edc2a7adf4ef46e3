"""What a consumer of a DataProto relies on, checked where a batch is handed over, not deep in a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from cadenza.data.columns import StoredColumn, describe
from cadenza.data.proto import DataProto
from cadenza.data.ragged import Ragged

Kind = Literal["dense", "ragged", "object"]


class SchemaError(ValueError):
    """A batch that does not keep its schema; the message has one line per column at fault."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column's contract."""

    dtypes: tuple[str, ...]
    """The dtypes it may have, the expected one first; empty for object columns."""
    kind: Kind = "dense"
    ndim: int = 1
    """Axes of its tensor: 1 for [N]. Ragged columns have 2."""
    required: bool = True
    family: str | None = None
    """Ragged columns of one family describe the same tokens and so have equal row lengths."""

    def fits(self, column: StoredColumn) -> bool:
        if isinstance(column, Ragged):
            return self.kind == "ragged" and column.dtype.name in self.dtypes
        if column.dtype == object:
            return self.kind == "object"
        return self.kind == "dense" and column.ndim == self.ndim and column.dtype.name in self.dtypes

    def __str__(self) -> str:
        if self.kind == "object":
            return "object [N]"
        axes = ["N", "L", *(f"D{i}" for i in range(2, self.ndim))][: self.ndim]
        return f"{'ragged ' if self.kind == 'ragged' else ''}{' or '.join(self.dtypes)} [{', '.join(axes)}]"


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns that must, or may, be there. Columns it does not name are allowed."""

    columns: Mapping[str, Column]

    def check(self, data: DataProto) -> None:
        """Raise a SchemaError that names every column at fault, what it is and what it should be."""
        stored = data.columns
        problems = self._misaligned(stored)
        for name, expected in self.columns.items():
            if name not in stored and expected.required:
                problems.append(f"column {name!r}: expected {expected}, it is missing")
            elif name in stored and not expected.fits(stored[name]):
                problems.append(f"column {name!r}: expected {expected}, got {describe(stored[name])}")
        if problems:
            raise SchemaError("\n".join(problems))

    def _misaligned(self, stored: Mapping[str, StoredColumn]) -> list[str]:
        """Masks and ids that disagree in their lengths would be trained on shifted tokens."""
        leaders: dict[str, tuple[str, Ragged]] = {}
        problems = []
        for name, expected in self.columns.items():
            column = stored.get(name)
            if expected.family is None or not isinstance(column, Ragged):
                continue
            leader, lead = leaders.setdefault(expected.family, (name, column))
            for row in (column.lengths != lead.lengths).nonzero()[0][:1]:
                lengths = f"{column.lengths[row]} tokens, but {leader!r} has {lead.lengths[row]}"
                problems.append(f"column {name!r}, row {row}: {lengths}")
        return problems


def _tokens(*dtypes: str, required: bool = True) -> Column:
    return Column(dtypes, "ragged", ndim=2, required=required, family="tokens")


_MASK = _tokens("bool", "int8", "uint8")
_ID = Column(("int64", "int32"))
_SCORE = Column(("float32", "float64"))

TRAIN_BATCH = Schema(
    MappingProxyType(
        {
            "input_ids": _tokens("int32", "int64"),
            "attention_mask": _MASK,
            "position_ids": _tokens("int32", "int64"),
            "response_mask": _MASK,
            "prompt_mask": _MASK,
            "scores": _SCORE,
            "traj_group_id": _ID,
            "traj_id": _ID,
            "env_ids": _ID,
            "step_scores": Column(("float32", "float64"), "ragged", ndim=2),
            "turns": _ID,
            "episode_scores": _SCORE,
            "infer_logprobs": _tokens("float32", required=False),
            "versions": _tokens("int32", "int64", required=False),
            "turn_ids": _tokens("int32", "int64", required=False),
            "is_padding": Column(("bool",), required=False),
        }
    )
)
"""What `RolloutScheduler.get_batch` hands to training."""
