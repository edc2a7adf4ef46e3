"""What a snapshot of the rollouts holds on disk, and how it is written and read.

    rollouts.json    a `SavedState`: the position in the order of the tasks, the counters, the open groups and their
                     attempts
    turns/           the tokens of finished members, one row per turn (a `DataProto`)

Invariant: what `write` has written, `read_state` and `read_turns` give back, or they raise a `SnapshotError` that names
the file. Tasks are saved as positions in the order, never as data. The names of the fields are the keys of the file,
unless a field says another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cadenza.data import DataProto, Ragged
from cadenza.inference.replica import Span
from cadenza.rollout.collate import FINISH
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.ledger import GroupState
from cadenza.rollout.pass_counts import PassStart
from cadenza.rollout.records import Fate, Turn

FORMAT = 1
STATE_FILE, _TURNS = "rollouts.json", "turns"


class SnapshotError(RolloutError):
    """A saved state is damaged, or belongs to another config."""


class SavedTask(msgspec.Struct, frozen=True):
    """A task, to be found again."""

    place: int
    """In the order of its domain."""
    id: str
    """What must stand there."""


class SavedTrajectory(msgspec.Struct, frozen=True):
    """A finished episode, without its tokens."""

    seed: int
    turns: int
    """Rows of `turns/` that are its own."""
    terminated: bool
    truncated: bool
    score: float
    info: dict[str, Any] | None
    """What JSON can hold of it."""
    started: float
    ended: float
    final: str | None = None


class SavedAttempt(msgspec.Struct, frozen=True):
    id: int
    member: int
    number: int
    slot: int
    started: float
    ended: float
    fate: Fate | None
    cause: str
    detail: str
    tokens: int
    turns: int


class SavedGroup(msgspec.Struct, frozen=True):
    id: int
    domain: str
    task: SavedTask
    begun_version: int = msgspec.field(name="begun")
    opened: float
    state: GroupState
    """CLOSED when it was cut for a batch that was not returned yet."""
    batch_version: int = msgspec.field(name="trained")
    attempts: list[SavedAttempt]
    finished: list[tuple[int, SavedTrajectory]]
    """Which of the attempts, in the order in which they finished."""
    tries: dict[int, float] | None
    extra_begun: bool = False


class SavedDomain(msgspec.Struct, frozen=True):
    drawn: int
    started: int
    last: str | None
    """The task that was drawn last: another one at its position means that the order has changed."""
    again: list[SavedTask]
    rested: int = 0
    resting: dict[int, int] = msgspec.field(default_factory=dict)
    source: dict[str, Any] = msgspec.field(default_factory=dict)
    """The state of the source itself: of a curriculum."""


class SavedSums(msgspec.Struct, frozen=True):
    """The sums of the ledger."""

    issued: int
    fates: dict[Fate, int]
    tokens: dict[Fate, int]
    causes: list[tuple[Fate, str, int]]
    lost_tokens: dict[str, int]
    groups_opened: int
    groups_closed: dict[Fate, int]
    staleness: dict[int, int]
    origin: float


class SavedState(msgspec.Struct, frozen=True):
    format: int
    config: dict[str, Any]
    """What must be the same when it is restored."""
    time: float
    """Loop time of the saving: all times here are of that clock."""
    version: int
    consumed: int
    consumed_for_earlier_versions: int = msgspec.field(name="base")
    domains: dict[str, SavedDomain]
    sums: SavedSums
    groups: list[SavedGroup]
    pass_start: PassStart = PassStart()


def write(directory: Path, state: SavedState, turns: list[Turn]) -> None:
    """Write into a directory that exists: the turns are those of the finished episodes, in the order of the state."""
    _columns(turns).to_disk(directory / _TURNS)
    (directory / STATE_FILE).write_bytes(msgspec.json.encode(state))


def read_state(directory: Path) -> SavedState:
    path = directory / STATE_FILE
    try:
        data = path.read_bytes()
        written = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if written != FORMAT:
            raise SnapshotError(f"{path} has format {written}, this version of cadenza reads {FORMAT}")
        return msgspec.json.decode(data, type=SavedState)
    except (OSError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error


def read_turns(directory: Path, clock_offset: float, expected: int) -> Iterator[Turn]:
    """The turns in the order in which they were written; their times are moved by `clock_offset`."""
    path = directory / _TURNS
    try:
        table = DataProto.from_disk(path).batch
        ragged = {
            name: list(table.ragged(name))
            for name in ("prompt", "response", "logprobs", "span_versions", "span_lengths")
        }
        dense = {name: table.numpy(name).tolist() for name in ("finish", "fresh", "asked", "answered", "reward")}
    except Exception as error:  # a damaged file fails in many ways, and all mean the same
        raise SnapshotError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if len(dense["finish"]) != expected:
        raise SnapshotError(f"{path} holds {len(dense['finish'])} turns, but {STATE_FILE} beside it counts {expected}")
    reasons = {number: finish for finish, number in FINISH.items()}
    spans = [
        tuple(map(Span, versions.tolist(), lengths.tolist()))
        for versions, lengths in zip(ragged["span_versions"], ragged["span_lengths"], strict=True)
    ]
    return (
        Turn(
            ragged["prompt"][row], ragged["response"][row], ragged["logprobs"][row], spans[row],
            reasons[dense["finish"][row]], dense["fresh"][row], dense["asked"][row] + clock_offset,
            dense["answered"][row] + clock_offset, dense["reward"][row],
        )
        for row in range(expected)
    )  # fmt: skip


def _columns(turns: list[Turn]) -> DataProto:
    """Turns as rows."""
    columns: dict[str, Any] = {
        "prompt": Ragged.from_rows([turn.prompt for turn in turns], dtype=np.int32),
        "response": Ragged.from_rows([turn.response for turn in turns], dtype=np.int32),
        "logprobs": Ragged.from_rows([turn.logprobs for turn in turns], dtype=np.float32),
        "span_versions": Ragged.from_rows([[span.version for span in turn.spans] for turn in turns], dtype=np.int64),
        "span_lengths": Ragged.from_rows([[span.length for span in turn.spans] for turn in turns], dtype=np.int64),
        "finish": np.array([FINISH[turn.finish] for turn in turns], np.int8),
        "fresh": np.array([turn.fresh for turn in turns], np.bool_),
        "asked": np.array([turn.asked for turn in turns], np.float64),
        "answered": np.array([turn.answered for turn in turns], np.float64),
        "reward": np.array([turn.reward for turn in turns], np.float64),
    }
    return DataProto(columns, {}, {})
