"""What a dataset holds: counts, lengths, rendered prompts, duplicates, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.datasets.dataset import ENDLESS, Dataset
from cadenza.datasets.errors import RowError
from cadenza.datasets.rows import Message, Row, fingerprint

SAMPLED = 1_000
"""Rows that are looked at where there is no end to them."""
_EXAMPLES = 5


class PromptCodec(Protocol):
    """What is needed of a `TextCodec`."""

    tokenizer: Any

    def encode(self, observation: Sequence[Message], *, first: bool) -> Sequence[int] | NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the rendered prompts, in tokens."""

    min: int
    median: int
    p95: int
    max: int
    total: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model sees it."""

    place: str
    text: str
    """With special tokens and generation prompt."""
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text of each token."""
    fields: dict[str, Any]
    """What else the row has: the answer, for one."""


@dataclass(frozen=True, slots=True)
class DatasetReport:
    source: str
    rows: int | None
    """That are used; None when there is no end to them."""
    examined: int
    epochs: int | None
    lengths: Lengths | None
    """None without rows."""
    prompts: tuple[RenderedPrompt, ...]
    duplicates: int
    """Rows whose messages are those of an earlier row."""
    duplicate_places: tuple[tuple[str, str], ...]
    """The first of them, each with the row that it repeats."""
    refused: dict[str, int]
    """By reason."""
    refused_places: tuple[tuple[str, str], ...]
    """(place, what is wrong) of the first ones."""
    token_counts: NDArray[np.int64]
    """Of the prompt of each row that was examined."""
    fingerprints: NDArray[np.uint64]
    """A number for the messages of each row that was examined: rows of two datasets can be compared."""


def describe_dataset(dataset: Dataset, codec: PromptCodec, *, shown: int = 3) -> DatasetReport:
    """Look at every row; for those refused to be counted and not raised, the dataset is opened with `examine`."""
    endless = len(dataset) == ENDLESS
    count = SAMPLED if endless else len(dataset)
    lengths = np.zeros(count, np.int64)
    fingerprints = np.zeros(count, np.uint64)
    prompts = []
    for index in range(count):
        row = dataset.row(index)
        tokens = _encoded(codec, row, dataset.place(dataset.number(index)))
        lengths[index] = len(tokens)
        fingerprints[index] = fingerprint(row["messages"])
        if index < shown:
            prompts.append(_rendered(codec, tokens, row, dataset.place(dataset.number(index))))
    repeated, places = _duplicates(dataset, fingerprints)
    return DatasetReport(
        source=dataset.source,
        rows=None if endless else count,
        examined=count,
        epochs=dataset.config.epochs,
        lengths=_lengths(lengths) if count else None,
        prompts=tuple(prompts),
        duplicates=repeated,
        duplicate_places=places,
        refused={str(reason): number for reason, number in dataset.refused_counts.items()},
        refused_places=tuple(dataset.refused),
        token_counts=lengths,
        fingerprints=fingerprints,
    )


def _encoded(codec: PromptCodec, row: Row, place: str) -> list[int]:
    try:
        return [int(token) for token in codec.encode(row["messages"], first=True)]
    except ValueError as error:  # the chat template does not take these messages
        raise RowError(place, "wrong type", str(error)) from error


def _rendered(codec: PromptCodec, tokens: list[int], row: Row, place: str) -> RenderedPrompt:
    def text(ids: list[int]) -> str:
        found: str = codec.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return found

    fields = {name: value for name, value in row.items() if name not in ("messages", "prompt")}
    return RenderedPrompt(place, text(tokens), tuple(tokens), tuple(text([token]) for token in tokens), fields)


def _duplicates(dataset: Dataset, fingerprints: NDArray[np.uint64]) -> tuple[int, tuple[tuple[str, str], ...]]:
    """How many, and the places of the first ones with those of what they repeat."""
    _, first, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
    originals = first[inverse]
    repeated = np.flatnonzero(originals != np.arange(len(fingerprints)))
    places = [
        (dataset.place(dataset.number(int(index))), dataset.place(dataset.number(int(originals[index]))))
        for index in repeated[:_EXAMPLES]
    ]
    return len(repeated), tuple(places)


def _lengths(lengths: NDArray[np.int64]) -> Lengths:
    low, middle, high, longest = np.quantile(lengths, (0, 0.5, 0.95, 1), method="inverted_cdf")
    return Lengths(int(low), int(middle), int(high), int(longest), int(lengths.sum()))
