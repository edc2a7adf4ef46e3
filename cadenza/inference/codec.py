"""Between text and tokens, exact over many turns.

Invariant: what the model wrote is never tokenised again. A context is prompts and responses as the model saw them, and
a prompt holds what is missing between the last token that the model wrote and the next one that it is to write.

    chat    system, message, "assistant:" | Hi [end] | message, "assistant:" | Ho         the second answer is cut off,
            [end] message, "assistant:" | ...                                             so the third prompt ends it
    plain   board | R [end] | board | L | [end] board | ...

So in a context every answer is followed by its end token, the model's own or the prompt's, and turns stay apart. Under
`max_tokens=1` an answer of one letter costs one generated token, and one more prompt token if the context goes on.

A template is 'chat' (that of the tokenizer) or 'plain' (the text as it is, answered by text and the eos token). The
built-in tokenizer is plain. It has a token for each printable ASCII character, the newline and the end, and `UNKNOWN`
for everything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cadenza.inference.replica import Tokens

Template = Literal["chat", "plain"]
Messages = Sequence[Mapping[str, str]]
"""Each with 'role' and 'content'."""

END, UNKNOWN = "<eos>", "\ufffd"
CHARACTERS = (END, UNKNOWN, "\n", *map(chr, range(32, 127)))
"""The vocabulary of the built-in tokenizer, in the order of the ids."""

_CACHED = 1024
"""Encoded observations that a codec remembers: the members of a group ask for the same ones."""
_IDS = bytes(CHARACTERS.index(chr(c)) if chr(c) in CHARACTERS else 1 for c in range(256))
_TEXTS = {i: "" if text == END else text for i, text in enumerate(CHARACTERS)}
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_WAY_OUT = "take another tokenizer, or template 'plain'"


class TokenizerNotFound(FileNotFoundError):
    """The configured tokenizer cannot be loaded."""


class TemplateError(ValueError):
    """The chat template is missing, or does not do what a conversation needs."""


class TextCodec:
    """Text to tokens and back, in the plain form; `load_codec` makes it."""

    template: Template = "plain"

    def __init__(self, tokenizer: Any, name: str, end_token_id: int, system: str | None) -> None:
        self.tokenizer = tokenizer
        """That of transformers."""
        self.name = name
        self.system = system
        self.end_token_id = end_token_id
        """Ends an answer."""
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset({end_token_id} if eos is None else {end_token_id, eos})
        """Where an engine stops."""
        self.vocab_size = len(tokenizer)
        bos = tokenizer.bos_token_id
        self._start: list[int] = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
        self._encoded: dict[Any, Tokens] = {}

    def encode(self, observation: str | Messages, *, first: bool, last: int | None = None) -> Tokens:
        """Tokens to append to the context before the model speaks; `first` when the context is empty.

        `last` is the last token of the context. Unless it is the end token, the prompt ends the answer before. None
        stands for an answer that ended by itself.
        """
        cut = not first and last is not None and last != self.end_token_id
        key = observation if isinstance(observation, str) else tuple(tuple(m.items()) for m in _messages(observation))
        known = self._encoded.get((key, first, cut))
        if known is None:
            if len(self._encoded) >= _CACHED:
                self._encoded.clear()
            tokens = self._first_prompt(observation) if first else self._next_prompt(observation)
            known = np.array(tokens if first or cut else tokens[1:], np.int32)
            known.flags.writeable = False  # many contexts share it
            self._encoded[key, first, cut] = known
        return known

    def encode_answer(self, text: str, *, max_tokens: int | None = None) -> Tokens:
        """The tokens of an answer as the model should write it. Under `max_tokens`, an answer that fills them is cut
        before its end token and needs none: the engine stops there."""
        tokens = self._answer_ids(text)
        if max_tokens is not None and len(tokens) > max_tokens + 1:
            raise ValueError(f"the answer {text!r} has {len(tokens) - 1} tokens, more than max_tokens {max_tokens}")
        return np.array(tokens[:max_tokens], np.int32)

    def encode_text(self, text: str) -> Tokens:
        """The tokens of a text as it is, without a role or an end."""
        return np.array(self._ids(text), np.int32)

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        """The text, without special tokens: what an env reads."""
        ids = [token for token in map(int, tokens) if token not in self.eos_token_ids]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer; `load_codec` and `AutoTokenizer.from_pretrained` read it."""
        self.tokenizer.save_pretrained(str(directory))

    def _first_prompt(self, observation: str | Messages) -> list[int]:
        text = self._text(observation)
        return self._start + self._ids(text if self.system is None else f"{self.system}\n{text}")

    def _next_prompt(self, observation: str | Messages) -> list[int]:
        """The end token, and what follows it."""
        return [self.end_token_id, *self._ids(self._text(observation))]

    def _answer_ids(self, text: str) -> list[int]:
        """With its end token."""
        return [*self._ids(text), self.end_token_id]

    def _text(self, observation: str | Messages) -> str:
        if isinstance(observation, str):
            return observation
        return "\n".join(message["content"] for message in _messages(observation))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


class _CharacterCodec(TextCodec):
    """The same with the built-in tokenizer, by table."""

    def encode(self, observation: str | Messages, *, first: bool, last: int | None = None) -> Tokens:
        text = observation if isinstance(observation, str) else self._text(observation)
        if first and self.system is not None:
            text = f"{self.system}\n{text}"
        ids = _lookup(text)
        if not first and last is not None and last != self.end_token_id:
            ids = bytes((self.end_token_id,)) + ids
        return np.frombuffer(ids, np.uint8).astype(np.int32)

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        return "".join([_TEXTS.get(token, UNKNOWN) for token in ids])

    def _ids(self, text: str) -> list[int]:
        return list(_lookup(text))


class _ChatCodec(TextCodec):
    """The template of the tokenizer. What it puts between an answer and the next one is cut out of the rendering of a
    short history, behind the answer in it; that this does not depend on the history is checked once."""

    template: Template = "chat"

    _HISTORY = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Sentinel7"})
    _ANSWER = _HISTORY[1]["content"]

    def __init__(self, tokenizer: Any, name: str, system: str | None, options: Mapping[str, Any]) -> None:
        self.tokenizer, self.name = tokenizer, name
        self._options = dict(options)
        self._system_messages: Messages = () if system is None else ({"role": "system", "content": system},)
        self._history: Messages = (*self._system_messages, *self._HISTORY)
        asked = self._render(self._history[:-1])
        trail, end, end_token_id = self._answer_end()
        lead = self._text_before_answer(asked, trail + end)[len(asked) :]
        self._generation_prompt, self._answer_opening, self._answer_trailer, self._end = asked, lead, trail, end
        super().__init__(tokenizer, name, end_token_id, system)

    def _first_prompt(self, observation: str | Messages) -> list[int]:
        messages = _messages(observation)
        own = messages[0].get("role") == "system"
        return self._ids(self._render(messages if own else (*self._system_messages, *messages)))

    def _next_prompt(self, observation: str | Messages) -> list[int]:
        messages = _messages(observation)
        _, _, after = self._render((*self._history, *messages)).partition(self._ANSWER)
        if not after.startswith(self._answer_trailer + self._end):
            raise self._error(f"ends an answer otherwise when {_roles(messages)} follows", "say it in another role")
        return self._ids(after[len(self._answer_trailer) :])

    def _answer_ids(self, text: str) -> list[int]:
        """As the tokenizer sees it behind the generation prompt, if that stays the same with an answer behind it."""
        text = f"{self._answer_opening}{text}{self._answer_trailer}{self._end}"
        prompt, whole = self._ids(self._generation_prompt), self._ids(self._generation_prompt + text)
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._ids(text)

    def _render(self, messages: Messages, prompt: bool = True) -> str:
        from jinja2 import TemplateError as JinjaError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=prompt,
                **self._options,
            )
        except (JinjaError, KeyError, TypeError) as error:
            raise self._error(f"refuses messages of {_roles(messages)} ({error})", "say it in other roles") from error
        return text

    def _answer_end(self) -> tuple[str, str, int]:
        """What the template puts between an answer and its end token, and that token."""
        _, found, after = self._render(self._history, prompt=False).rpartition(self._ANSWER)
        if not found:
            raise self._error("does not show what the assistant says", _WAY_OUT)
        added = {str(token): number for number, token in self.tokenizer.added_tokens_decoder.items()}
        if self.tokenizer.eos_token is not None:
            added[self.tokenizer.eos_token] = self.tokenizer.eos_token_id
        ends = [(after.index(text), -len(text), text) for text in added if text in after]
        if not ends:
            raise self._error(f"ends an answer with {after!r}, which holds no special token", _WAY_OUT)
        at, _, end = min(ends)
        return after[:at], end, added[end]

    def _text_before_answer(self, asked: str, closing: str) -> str:
        """What stands before the first answer when the conversation goes on, checked to be what was asked before, and
        to be followed by the same text whatever the history."""
        more: Messages = ({"role": "user", "content": "Bye"},)
        once = self._render((*self._history, *more))
        twice = self._render((*self._history, *more, self._HISTORY[1], *more))
        if once.count(self._ANSWER) != 1 or twice.count(self._ANSWER) != 2:
            raise self._error("does not show every answer once", _WAY_OUT)
        before, _, after = once.partition(self._ANSWER)
        before_again, _, after_again = twice.rpartition(self._ANSWER)
        if not _continues(asked, before) or not _continues(once, before_again):
            raise self._error("changes what was said before when the conversation goes on", _WAY_OUT)
        if not after.startswith(closing) or after_again != after:
            raise self._error("goes on after an answer in more than one way", _WAY_OUT)
        return before

    def _error(self, what: str, way_out: str) -> TemplateError:
        return TemplateError(f"the chat template of {self.name} {what}: {way_out}")


def load_codec(
    path: str | Path | None = None,
    *,
    template: Template | None = None,
    system: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> TextCodec:
    """The codec over the tokenizer in a directory or on the hub; None is the built-in one.

    `template` is by default 'chat', and 'plain' for the built-in tokenizer, also when it was saved and is loaded again.
    `system` is the first message of every conversation that does not begin with a system message of its own.
    `template_options` are variables of the chat template, as `enable_thinking`.
    """
    tokenizer = _build() if path is None else _load(str(path))
    name = "the built-in tokenizer" if path is None else f"the tokenizer {path}"
    by_character = tokenizer.get_vocab() == {text: number for number, text in enumerate(CHARACTERS)}
    if template not in (None, "chat", "plain"):
        raise ValueError(f"template must be 'chat' or 'plain', got {template!r}")
    if template == "plain" or (template is None and by_character and not tokenizer.chat_template):
        if template_options:
            raise ValueError(f"template_options are for the template 'chat', got {dict(template_options)} for 'plain'")
        if tokenizer.eos_token_id is None:
            raise TemplateError(f"{name} has no eos token to end an answer with: take another tokenizer")
        form = _CharacterCodec if by_character else TextCodec
        return form(tokenizer, name, tokenizer.eos_token_id, system)
    if not tokenizer.chat_template:
        raise TemplateError(f"{name} has no chat template: {_WAY_OUT}")
    return _ChatCodec(tokenizer, name, system, template_options or {})


def _lookup(text: str) -> bytes:
    """Ids of the built-in tokenizer, a byte each."""
    if not text.isascii():
        text = _NOT_ASCII.sub("\0", text)
    return text.encode("ascii").translate(_IDS)


def _messages(observation: Any) -> Messages:
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    if not isinstance(observation, Sequence) or not all(isinstance(message, Mapping) for message in observation):
        raise TypeError(f"an observation is text or messages with 'role' and 'content', got {observation!r}")
    if not observation:
        raise ValueError("an observation of no messages says nothing to the model; give at least one")
    return observation


def _roles(messages: Messages) -> str:
    return ", ".join(message.get("role", "?") for message in messages)


def _continues(prompt: str, before: str) -> bool:
    """Whether what stands before an answer is the prompt that asked for it. The prompt may open the answer (as with
    '<think>') where the history does not, and the history may put a space between the two."""
    return prompt.startswith(before) or (before.startswith(prompt) and before[len(prompt) :].isspace())


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("tokenizers need transformers: pip install 'cadenza[models]'") from error
    return transformers


def _build() -> Any:
    """A tokenizer of transformers with a token for each character."""
    transformers = _transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {text: number for number, text in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    # UNKNOWN is no special token, so that decoding shows it. END in a text is five characters and ends nothing.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, split_special_tokens=True
    )


def _load(path: str) -> Any:
    way_out = "give a directory written by save_pretrained, or no path for the built-in tokenizer"
    # 'runs/best' looks like a name on the hub, but not where there is a directory runs.
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) and Path(path).parts[0] not in os.listdir()
    if not Path(path).is_dir() and not is_hub_name:
        raise TokenizerNotFound(f"the tokenizer {path} does not exist: {way_out}")
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a damaged tokenizer.json raises just that
        reason = f"transformers says: {error}"
        raise TokenizerNotFound(f"the tokenizer {path} cannot be loaded: {way_out}. {reason}") from error
