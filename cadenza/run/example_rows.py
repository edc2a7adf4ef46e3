"""From the rows of a dataset to tokens that train: conversations, and pairs of answers.

Invariant: a token trains if and only if the model should have written it: the text of an answer and the end token
behind it. The worked examples of the config (`few_shot`) are prompt. Everything is encoded as a rollout would show it
(inference/codec.py), so that what is learned here is what is asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cadenza.data import DataProto, Ragged
from cadenza.datasets import DataConfig, DataError, Dataset, RowError, open_dataset
from cadenza.inference.codec import Messages, TextCodec
from cadenza.inference.replica import Tokens
from cadenza.run.config import ConfigError
from cadenza.training.token_rows import Array

ANSWERER = "assistant"
Row = Mapping[str, Any]


class Example(NamedTuple):
    """The tokens of one text, and which of them train."""

    tokens: Tokens
    trains: Array


@dataclass(frozen=True, slots=True)
class RowForm:
    """What the rows of a pipeline are."""

    encode: Callable[[Row, TextCodec, int], list[Example]]
    """The examples of one row, of whose `messages` the first ones, so many, are prompt whatever their role; raises a
    ValueError or TypeError for a row that has none."""
    required: tuple[str, ...] = ()
    """Fields that each row must have."""


def conversation(messages: Messages, codec: TextCodec, given: int = 0) -> Example:
    """The messages as one text, of which every message of the assistant trains, but for the first `given` ones."""
    tokens: list[Tokens] = []
    trains: list[Array] = []
    asked: list[Mapping[str, str]] = []
    for number, message in enumerate(messages):
        if message["role"] != ANSWERER or number < given:
            asked.append(message)
            continue
        if not asked or asked[-1]["role"] == ANSWERER:
            raise ValueError("an assistant message must follow one of another role: put the two into one")
        answer = codec.encode_answer(message["content"])
        for piece, is_trained in ((codec.encode(asked, first=not tokens), False), (answer, True)):
            tokens.append(piece)
            trains.append(np.full(len(piece), is_trained))
        asked = []
    if asked or not tokens:
        raise ValueError(f"the last message must be the assistant's, got one of {messages[-1]['role']!r}")
    return Example(np.concatenate(tokens), np.concatenate(trains))


def supervised(row: Row, codec: TextCodec, given: int) -> list[Example]:
    """One example: the prompt and its `response`, or without one all `messages`."""
    if row.get("response") is None:
        if not any(message["role"] == ANSWERER for message in row["messages"][given:]):
            raise ValueError("the field 'response' is missing, and no message is the assistant's: map it in fields")
        return [conversation(row["messages"], codec, given)]
    return [_answered(row, "response", codec, given)]


def preference(row: Row, codec: TextCodec, given: int) -> list[Example]:
    """Two examples: the prompt with the answer that was `chosen`, and with the one that was `rejected`."""
    return [_answered(row, name, codec, given) for name in ("chosen", "rejected")]


def _answered(row: Row, name: str, codec: TextCodec, given: int) -> Example:
    answer = row[name]
    if isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer) == 1:
        (message,) = answer
        if isinstance(message, Mapping) and message.get("role") == ANSWERER:
            answer = message.get("content")
    if not isinstance(answer, str):
        raise TypeError(f"the field '{name}' must be text or one message of the assistant, got {answer!r:.60}")
    if not answer:
        raise ValueError(f"the field '{name}' is empty: there is nothing to learn")
    return conversation([*row["messages"], {"role": ANSWERER, "content": answer}], codec, given)


SUPERVISED = RowForm(supervised)
PREFERENCE = RowForm(preference, required=("chosen", "rejected"))


class ExampleRows:
    """The rows of a dataset as batches."""

    def __init__(self, dataset: Dataset, form: RowForm, codec: TextCodec) -> None:
        self._dataset, self._form, self._codec = dataset, form, codec

    def batches(self, count: int) -> Iterator[DataProto]:
        """All rows, `count` at a time."""
        position = 0
        while (batch := self.at(position, count)) is not None:
            yield batch
            position += count

    def at(self, position: int, count: int) -> DataProto | None:
        """The examples of `count` rows from a position of their order on; fewer where the rows run out, and None
        behind the last one. `meta_info` has the number of rows and the epoch."""
        found = [drawn for n in range(count) if (drawn := self._dataset.at(position + n)) is not None]
        if not found:
            return None
        encoded = [self._examples(row, number) for number, _, row in found]
        return example_batch(encoded, {"rows": len(found), "epoch": found[-1][1]})

    def close(self) -> None:
        self._dataset.close()

    def _examples(self, row: Row, number: int) -> list[Example]:
        try:
            return self._form.encode(row, self._codec, self._dataset.own_messages_begin(row))
        except (ValueError, TypeError) as error:
            raise RowError(self._dataset.place(number), "wrong type", str(error)) from error


def open_rows(key: str, data: DataConfig, form: RowForm, codec: TextCodec, *, seed: int) -> ExampleRows:
    """The rows that the config key `key` names; raises `ConfigError` for what can be known to be wrong with them."""
    try:
        dataset = open_dataset(
            data,
            key=key,
            seed=seed,
            count_tokens=lambda messages: len(codec.encode(messages, first=True)),
            required=form.required,
        )
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from error
    return ExampleRows(dataset, form, codec)


def example_batch(rows: Sequence[Sequence[Example]], meta_info: Mapping[str, Any] | None = None) -> DataProto:
    """A batch of the examples of some rows. Those of one row have the same `traj_id`, so that no update parts them."""
    found = [example for row in rows for example in row]
    columns: dict[str, Ragged | Array] = {
        "input_ids": Ragged.from_rows([example.tokens for example in found]),
        "response_mask": Ragged.from_rows([example.trains for example in found]),
        "traj_id": np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
    }
    return DataProto(columns, meta_info=dict(meta_info or {}))
