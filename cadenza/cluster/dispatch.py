"""How the data of a call travels to the workers and back.

    mode         ranks that are called   what each gets                  what the caller gets back
    broadcast    all                     the same arguments              a list, by rank
    split        all                     its replica's share of rows     the rows, or a list by replica
    rank_zero    rank 0                  the arguments                   its answer

Rows are cut into one chunk for each data-parallel rank; the tensor-parallel ranks of a replica get the same chunk, and
only the first of them answers.

Invariant of split: all chunks have the same number of rows, so that ranks which compute together stay in step, and
every chunk has rows of its own as long as there are any. Where the rows do not divide evenly, a chunk ends with one row
too many. It is a copy, and the column `is_padding`, which every chunk has, marks it: a loss must not count it (training
does not), and what a worker answers for it is dropped. So no row ever comes back, or is counted, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from cadenza.cluster.placement import Place
from cadenza.data import IS_PADDING, DataProto

Method = TypeVar("Method", bound=Callable[..., Any])
Gather = Callable[[list[Any]], Any]
_SPEC_ATTRIBUTE = "__cadenza_dispatch__"


class DispatchMode(StrEnum):
    """Which ranks are called, and with what; see the table at the head of this module."""

    BROADCAST = "broadcast"
    SPLIT = "split"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True, slots=True)
class DispatchSpec:
    """How a method marked with `dispatch` is called: its mode, and how its answers are gathered."""

    mode: DispatchMode
    gather: Gather | None


def dispatch(mode: str, *, gather: Gather | None = None) -> Callable[[Method], Method]:
    """Mark a worker's method as one that the controller may call. `gather` makes one value of the list of answers."""
    if mode not in list(DispatchMode):
        raise ValueError(f"dispatch mode must be one of {', '.join(DispatchMode)}, got {mode!r}")
    spec = DispatchSpec(DispatchMode(mode), gather)
    if gather is not None and spec.mode is DispatchMode.RANK_ZERO:
        raise ValueError("rank_zero has one answer: gather does nothing for it")

    def marked(method: Method) -> Method:
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return marked


def dispatch_spec_of(method: object) -> DispatchSpec | None:
    """The spec that `dispatch` gave a method, or None."""
    found = getattr(method, _SPEC_ATTRIBUTE, None)
    return found if isinstance(found, DispatchSpec) else None


@dataclass(frozen=True, slots=True)
class RankCall:
    """The call of a worker method at one rank. An argument that several ranks get is the same object in their calls, so
    that a backend sends it once."""

    rank: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    wants_answer: bool = True
    """Whether its answer is wanted."""


class DispatchCall:
    """One call of a marked method on all its ranks: cuts the arguments for each rank, and gathers the answers."""

    def __init__(
        self, spec: DispatchSpec, places: Sequence[Place], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._spec = spec
        self._places = places
        self._rows: list[int] = []
        """Real rows of each chunk, if rows were cut."""
        match spec.mode:
            case DispatchMode.BROADCAST:
                self.calls = [RankCall(place.rank, args, kwargs) for place in places]
            case DispatchMode.RANK_ZERO:
                self.calls = [RankCall(0, args, kwargs)]
            case DispatchMode.SPLIT:
                shares = self._shares([*args, *kwargs.values()])
                self.calls = [
                    RankCall(
                        place.rank,
                        tuple(shares[place.data_rank][: len(args)]),
                        dict(zip(kwargs, shares[place.data_rank][len(args) :], strict=True)),
                        wants_answer=place.tensor_rank == 0,
                    )
                    for place in places
                ]

    def gather(self, answers: Mapping[int, Any]) -> Any:
        """What the caller gets for the answers, by rank."""
        values = [answers[call.rank] for call in self.calls if call.wants_answer]
        if self._spec.mode is DispatchMode.RANK_ZERO:
            return values[0]
        if self._rows and all(isinstance(value, DataProto) for value in values):
            values = [self._without_padding(number, value) for number, value in enumerate(values)]
            if self._spec.gather is None:
                return DataProto.concat(values) if len(values) > 1 else values[0]
        return values if self._spec.gather is None else self._spec.gather(values)

    def _shares(self, values: list[Any]) -> list[list[Any]]:
        """The arguments of each data-parallel rank. A DataProto without columns is about all rows, and every rank gets
        it, like any other value."""
        chunks = self._places[0].data_ranks
        tables = [value for value in values if isinstance(value, DataProto) and value.columns]
        if not tables:
            raise TypeError("a split method needs a DataProto with rows among its arguments")
        rows = {len(table) for table in tables}
        if len(rows) > 1:
            raise ValueError(
                f"the arguments of a split method have {sorted(rows)} rows: they must have the same number"
            )
        if rows == {0}:
            raise ValueError("the batch has no rows to split")
        (count,) = rows
        self._rows = [count // chunks + (chunk < count % chunks) for chunk in range(chunks)]
        cut = {id(table): split_rows(table, self._rows) for table in tables}
        return [[cut[id(value)][chunk] if id(value) in cut else value for value in values] for chunk in range(chunks)]

    def _without_padding(self, number: int, answer: DataProto) -> DataProto:
        """An answer without its rows for padding."""
        real, size = self._rows[number], max(self._rows)
        if len(answer) != size:
            raise ValueError(
                f"replica {number} answered a chunk of {size} rows with {len(answer)}: a split method answers row by "
                "row; for anything else give dispatch a gather="
            )
        if IS_PADDING in answer.batch and not np.array_equal(answer.batch.numpy(IS_PADDING), np.arange(size) >= real):
            raise ValueError(f"replica {number} changed the order of its rows, or their mark {IS_PADDING!r}")
        kept = answer[:real]
        if IS_PADDING in kept.batch:
            del kept.batch[IS_PADDING]
        return kept


def split_rows(table: DataProto, counts: Sequence[int]) -> list[DataProto]:
    """Chunks with `counts` rows each, made as long as the longest: a shorter one ends with a copy that is marked."""
    if IS_PADDING in table.columns:
        raise ValueError(f"the batch has a column {IS_PADDING!r} already: unpad it before it is split")
    size = max(counts)
    ends = [0, *np.cumsum(counts).tolist()]
    chunks = []
    for start, stop in pairwise(ends):
        if stop - start == size:
            chunk = table[start:stop]
        else:
            own = np.arange(start, stop)
            chunk = table[np.append(own, np.full(size - len(own), start if len(own) else 0))]
        chunk.batch[IS_PADDING] = np.arange(size) >= stop - start
        chunks.append(chunk)
    return chunks
