"""From a row as it is stored to a row as it is trained: our names, and messages.

The messages come from, in this order: the template; `messages`; `prompt`, which is text or messages itself. Where a
row has both `messages` and `prompt`, the one that `fields` names counts. All fields of the source stay, under their own
names too. The system message and the worked examples of the config come before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

from cadenza.config import nearest_key
from cadenza.datasets.config import DataConfig, template_fields
from cadenza.datasets.errors import RowError

Message = dict[str, Any]
"""With 'role' and 'content', both text."""
Row = dict[str, Any]
"""A row with 'messages' and all its fields."""
RowCheck: TypeAlias = Callable[[Row], str | None]
"""What is wrong with a row besides; None where nothing is."""


class RowReader:
    """Makes rows as one config says. `required` are fields that each row must have besides those the config names; with
    `answered` each has an `answer` that a response can be compared with; `check` is asked about each row at last."""

    def __init__(
        self,
        config: DataConfig,
        required: Iterable[str] = (),
        *,
        answered: bool = False,
        check: RowCheck | None = None,
    ) -> None:
        self._config = config
        self._check = check
        self._answered = answered
        self.required = dict.fromkeys([*required, *(["answer"] if answered else [])])
        """Names of ours, in their order."""
        self._few_shot: list[Message] = [
            {"role": role, "content": text}
            for example in config.few_shot
            for role, text in (("user", example.prompt), ("assistant", example.answer))
        ]
        self._shown = () if config.template is None else tuple(dict.fromkeys(template_fields(config.template)))

    def read(self, raw: Mapping[str, Any], place: str) -> Row:
        """The row, or a `RowError` that says what it lacks."""
        row = dict(raw)
        for ours, theirs in self._config.fields.items():
            row[ours] = _reach(raw, theirs, place, ours)
        for name in (*self._shown, *self.required):
            if row.get(name) is None:
                raise _missing(raw, name, place, null=name in row)
        if self._answered:
            check_answer(row, place)
        row["messages"] = self._messages(row, place)
        if self._check is not None and (problem := self._check(row)) is not None:
            raise RowError(place, "cannot be scored", problem)
        return row

    def _messages(self, row: Row, place: str) -> list[Message]:
        given, name = self._prompt(row, place)
        if isinstance(given, str):
            if not given.strip():
                raise RowError(place, "empty prompt", f"the field '{name}' is empty: there is nothing to ask the model")
            messages = [{"role": "user", "content": given}]
        else:
            messages = _checked(given, name, place)
        if self._config.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._config.system})
        first = int(messages[0]["role"] == "system")
        return [*messages[:first], *self._few_shot, *messages[first:]]

    def own_messages_begin(self, messages: Sequence[Message]) -> int:
        """How many messages of a row come before its own: the system message and the worked examples."""
        return int(messages[0]["role"] == "system") + len(self._few_shot)

    def _prompt(self, row: Row, place: str) -> tuple[Any, str]:
        """Text or messages, and the name of where they come from."""
        config = self._config
        if config.template is not None:
            try:
                return config.template.format_map(row), "template"
            except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
                message = f"the template cannot be filled in: {type(error).__name__}: {error}"
                raise RowError(place, "wrong type", message) from error
        names = ("prompt", "messages") if "prompt" in config.fields else ("messages", "prompt")
        for name in names:
            if row.get(name) is not None:
                return row[name], name
        raise _missing(row, "prompt", place, null="prompt" in row)


def _reach(raw: Mapping[str, Any], path: str, place: str, ours: str) -> Any:
    """The value of 'field', or inside of it of 'field.key' and 'field.0'."""
    found: Any = raw.get(path)
    if path not in raw:
        found = raw
        for key in path.split("."):
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, (list, tuple)) and re.fullmatch(r"-?\d+", key) and int(key) in _places(found):
                found = found[int(key)]
            else:
                raise _missing(raw, path, place, ours=ours)
    if found is None:
        raise _missing(raw, path, place, ours=ours, null=True)
    return found


def _places(values: Sequence[Any]) -> range:
    return range(-len(values), len(values))


def _missing(raw: Mapping[str, Any], name: str, place: str, *, ours: str | None = None, null: bool = False) -> RowError:
    meaning = "" if ours in (None, name) else f" (for '{ours}')"
    if null:
        return RowError(place, "missing field", f"the field '{name}'{meaning} is null")
    near = nearest_key(name, list(raw))
    there = f"did you mean '{near}'? " if near else ""
    names = ", ".join(raw) or "none"
    return RowError(
        place, "missing field", f"the field '{name}'{meaning} is missing; {there}the row has {names}; map it in fields"
    )


def check_answer(row: Mapping[str, Any], place: str) -> None:
    """Raise unless a row has an `answer` that is text, a number, or whatever else a table has in a cell; or a list of
    these."""
    answer = row.get("answer")
    if answer is None:
        raise _missing(row, "answer", place, null="answer" in row)
    is_list = isinstance(answer, (list, tuple))
    if is_list and not answer:
        raise RowError(place, "wrong type", "the field 'answer' is an empty list: no response can be right")
    for value in answer if is_list else (answer,):
        if value is None or isinstance(value, (Mapping, list, tuple)):
            kind, wanted = type(answer).__name__, "text, a number or a list of them"
            raise RowError(place, "wrong type", f"the field 'answer' must be {wanted}, got {kind} {answer!r:.60}")


def _checked(given: Any, name: str, place: str) -> list[Message]:
    """Messages as the chat template takes them; a table stores keys that a message does not have as null."""
    if not isinstance(given, (list, tuple)):
        kind = type(given).__name__
        raise RowError(place, "wrong type", f"the field '{name}' must be text or messages, got {kind} {given!r:.60}")
    if not given:
        raise RowError(place, "empty prompt", f"the field '{name}' has no messages: there is nothing to ask the model")
    messages = []
    for number, message in enumerate(given):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise RowError(place, "wrong type", f"{name}.{number} must be a message with role and content, got {kind}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = type(message[key]).__name__ if key in message else "nothing"
                raise RowError(place, "wrong type", f"{name}.{number}.{key} must be text, got {got}")
        messages.append({key: value for key, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise RowError(place, "empty prompt", f"the messages of '{name}' are empty: there is nothing to ask the model")
    return messages


def fingerprint(messages: list[Message]) -> int:
    """A number of 64 bits for a prompt: equal prompts have equal ones."""
    digest = blake2b(json.dumps(messages, default=str, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def require_if_present(reader: RowReader, raw: Mapping[str, Any], name: str) -> None:
    """Expect in every row what the first one has."""
    if raw.get(name) is not None:
        reader.required.setdefault(name)
