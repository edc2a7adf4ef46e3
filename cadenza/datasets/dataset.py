"""Rows in an order that can be entered at any position.

    source -> part of it (split, limit) -> filters (lengths, unique) -> order of the epoch -> row

What is refused, and when:
- A row that is malformed, lacks a field, has one of a wrong type, or asks nothing, is an error. `open_dataset` raises
  it for the first rows of a source and its last one, and for all rows where a filter reads them anyway. A row
  behind them raises when it is drawn. With `examine=True` (`cadenza data`), all rows are read, and bad ones are left
  out.
- A row that is too long or too short, or repeats an earlier one where `unique` is set, is left out and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.datasets.config import DataConfig, Split
from cadenza.datasets.errors import DataError, Reason, RowError
from cadenza.datasets.order import EpochOrder
from cadenza.datasets.rows import Message, Row, RowReader, fingerprint
from cadenza.datasets.source import Source

logger = logging.getLogger(__name__)

CountTokens = Callable[[list[Message]], int]
"""Tokens of a rendered prompt."""
ENDLESS = (1 << 31) - 1
"""Rows of a source that always makes new ones."""
_EXAMPLES = 100
"""Refused rows that are remembered by place, of each reason."""


@dataclass(slots=True)
class Refusals:
    """Rows that are not used, and why: all of them counted, the first ones by place."""

    counts: Counter[Reason]
    examples: list[tuple[str, str]]
    """(place, what is wrong), in the order of the source."""

    def add(self, error: RowError) -> None:
        self.counts[error.reason] += 1
        if self.counts[error.reason] <= _EXAMPLES:
            self.examples.append((error.place, error.message))


class Dataset:
    """The rows of a source that are used; `open_dataset` makes it.

    dataset = open_dataset(DataConfig(path="sums.jsonl", epochs=2), key="sums", seed=0)
    dataset.row(3)["messages"]          # the fourth row that is used
    number, epoch, row = dataset.at(0)  # the first one to train; `number` is its row in the source
    """

    def __init__(
        self, config: DataConfig, source: Source, reader: RowReader, used: Used, order: EpochOrder, source_words: str
    ) -> None:
        self.config = config
        self._source, self._reader, self._used, self._order = source, reader, used, order
        self.source = source_words
        """Where the rows come from, in words: a resumed run must say the same."""

    @property
    def refused(self) -> list[tuple[str, str]]:
        """(place, what is wrong) of rows that are not used; at most 100 of each reason."""
        return self._used.refusals.examples

    @property
    def refused_counts(self) -> Counter[Reason]:
        return self._used.refusals.counts

    @property
    def count(self) -> int | None:
        """Positions of the order; None when it never ends."""
        return None if self.config.epochs is None else len(self) * self.config.epochs

    def __len__(self) -> int:
        return len(self._used)

    def row(self, index: int) -> Row:
        """The row at an index among those that are used, in the order of the source. `messages` is always there."""
        return self.source_row(self.number(index))

    def number(self, index: int) -> int:
        """The row in the source that has an index among those that are used."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source} has {len(self)} rows that are used; there is no row {index}")
        return self._used.number(index)

    def source_row(self, number: int) -> Row:
        """The row of that number in the source: what `at` said first."""
        return self._reader.read(self._source[number], self._source.place(number))

    def own_messages_begin(self, row: Mapping[str, Any]) -> int:
        """How many of a row's `messages` come before its own: the system message and the worked examples."""
        return self._reader.own_messages_begin(row["messages"])

    def place(self, number: int) -> str:
        """Where a row of the source stands, for messages."""
        return self._source.place(number)

    def at(self, position: int) -> tuple[int, int, Row] | None:
        """(row number in the source, epoch, row) at a position of the order; None behind the last one."""
        found = self.number_at(position)
        if found is None:
            return None
        number, epoch = found
        return number, epoch, self.drawn_row(number)

    def drawn_row(self, number: int) -> Row:
        """The row of that number in the source, which `number_at` said: what `at` does, in two steps."""
        if self._source.curriculum is not None:
            self._source.curriculum.draw(number)
        return self.source_row(number)

    def number_at(self, position: int) -> tuple[int, int] | None:
        """(row number in the source, epoch) at a position, without reading the row; None behind the last one."""
        if self.count is not None and position >= self.count:
            return None
        index, epoch = self._order.at(position)
        return self._used.number(index), epoch

    def record(self, number: int, success: float) -> None:
        """What came of a row of the source, from 0 to 1: what a curriculum follows."""
        if self._source.curriculum is not None:
            self._source.curriculum.record(number, success)

    @property
    def level(self) -> int | None:
        """How hard the next rows are; None without a curriculum."""
        return None if self._source.curriculum is None else self._source.curriculum.level

    def state(self) -> dict[str, Any]:
        """What a resumed run gives to `load_state`, besides its position; empty without a curriculum."""
        return {} if self._source.curriculum is None else self._source.curriculum.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on as the dataset that this state is of."""
        if bool(state) != (self._source.curriculum is not None):
            raise DataError(
                f"{self.source}: the saved state is of a dataset {'with' if state else 'without'} curriculum"
            )
        if self._source.curriculum is not None:
            self._source.curriculum.load_state(state)

    def close(self) -> None:
        """Give back files; no row can be read afterwards."""
        self._source.close()


class Used:
    """Which rows of the source are used: all of a part, or those of it that passed."""

    def __init__(self, part: range) -> None:
        self._part = part
        self._passed: NDArray[np.int32] | None = None
        self.refusals = Refusals(Counter(), [])

    def __len__(self) -> int:
        return len(self._part if self._passed is None else self._passed)

    def number(self, index: int) -> int:
        """The row in the source."""
        return self._part[index] if self._passed is None else self._part[int(self._passed[index])]

    def keep(self, rows: Iterable[tuple[int, RowError | None]]) -> None:
        """Leave out, of the rows of the part, those with an error."""
        passed = np.zeros(len(self._part), bool)
        for index, error in rows:
            if error is None:
                passed[index] = True
            else:
                self.refusals.add(error)
        if not passed.all():
            self._passed = np.flatnonzero(passed).astype(np.int32)


def part_of(config: DataConfig, count: int) -> range:
    """The rows of the source that split and limit leave."""
    part = range(count) if config.split is None else Split.parse(config.split).rows(count)
    return part[: config.limit]


def check_rows(
    config: DataConfig, source: Source, reader: RowReader, part: range, count_tokens: CountTokens | None, examine: bool
) -> Used:
    """Read as many rows as must be read before a run; raises the first error, or with `examine` counts them all."""
    used = Used(part)
    if config.filters_lengths and count_tokens is None:
        raise ValueError("min_tokens and max_tokens need count_tokens")
    if len(part) == ENDLESS or not (config.filters_lengths or config.unique or examine):
        checked = [*range(min(len(part), source.checked_rows))] + [len(part) - 1] * (len(part) < ENDLESS)
        for index in checked:
            reader.read(source[part[index]], source.place(part[index]))
        return used

    originals = _originals(source, reader, part[-1] + 1) if config.unique else None

    def verdicts() -> Iterator[tuple[int, RowError | None]]:
        for index, number in enumerate(part):
            try:
                row = reader.read(source[number], source.place(number))
            except RowError as error:
                if not examine:
                    raise
                yield index, error
                continue
            if originals is not None and (original := int(originals[number])) != number:
                message = f"the prompt is that of {source.place(original)}"
                yield index, RowError(source.place(number), "repeated", message)
                continue
            yield index, _length_error(config, row, source.place(number), count_tokens)

    used.keep(verdicts())
    if used.refusals.counts:
        counts = ", ".join(f"{count} {reason}" for reason, count in used.refusals.counts.items())
        logger.info("%s: %d of %d rows are used; %s", ", ".join(config.paths), len(used), len(part), counts)
    return used


def _originals(source: Source, reader: RowReader, stop: int) -> NDArray[np.int64]:
    """[stop], of each row of the source the first one with the same prompt. What cannot be read is its own."""

    def fingerprints() -> Iterator[int]:
        for number in range(stop):
            try:
                yield fingerprint(reader.read(source[number], source.place(number))["messages"])
            except RowError:  # it is named where it is used
                yield number

    _, first, inverse = np.unique(np.fromiter(fingerprints(), np.uint64, stop), return_index=True, return_inverse=True)
    originals: NDArray[np.int64] = first[inverse]
    return originals


def _length_error(config: DataConfig, row: Row, place: str, count_tokens: CountTokens | None) -> RowError | None:
    if not config.filters_lengths:
        return None
    assert count_tokens is not None
    tokens = count_tokens(row["messages"])
    if config.max_tokens is not None and tokens > config.max_tokens:
        return RowError(place, "too long", f"the prompt has {tokens} tokens, more than max_tokens {config.max_tokens}")
    if config.min_tokens is not None and tokens < config.min_tokens:
        return RowError(place, "too short", f"the prompt has {tokens} tokens, less than min_tokens {config.min_tokens}")
    return None
