"""Text made comparable: what `exact` and `fuzzy` mean by the same answer."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Sequence

from pydantic import field_validator

from cadenza.rewards.base import ConfiguredReward, answers_of
from cadenza.rewards.sample import Sample

ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)


class TextReward(ConfiguredReward):
    """The settings of rewards that compare the response with the field `answer`, or each of its texts if it is a list.
    White space around and between words never counts, nor do the forms that Unicode has of one character."""

    needs_answer = True
    extract: str | None = None
    """A regular expression for the answer in the response: its last match counts, or the first group of it. A response
    without a match has no answer. None takes the whole response."""
    ignore_case: bool = True
    ignore_punctuation: bool = False
    """Leave out every character that Unicode calls punctuation."""
    ignore_articles: bool = False
    """Leave out 'a', 'an' and 'the'."""
    numbers: bool = False
    """Compare as numbers where both are: '1,000.0' is '1000'."""

    @field_validator("extract")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        return None if pattern is None else checked_pattern(pattern)

    def extracted(self, sample: Sample) -> str | None:
        """The answer in the response as it stands there; None if there is none."""
        return sample.response if self.extract is None else last_match(self.extract, sample.response)

    def normalised(self, text: object) -> str:
        """The text in the form in which it is compared."""
        form = unicodedata.normalize("NFKC", str(text))
        if self.ignore_case:
            form = form.casefold()
        if self.numbers and (number := _number(form)) is not None:
            return number
        if self.ignore_punctuation:
            form = "".join(" " if unicodedata.category(letter).startswith("P") else letter for letter in form)
        if self.ignore_articles:
            form = ARTICLES.sub(" ", form)
        return " ".join(form.split())

    def right_texts(self, sample: Sample) -> Sequence[str]:
        """The answers that count, as they are compared."""
        return [self.normalised(answer) for answer in answers_of(sample)]


def checked_pattern(pattern: str) -> str:
    """The regular expression, or a ValueError that says what is wrong with it."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


def last_match(pattern: str, text: str) -> str | None:
    """The last match in the text, or its first group that took part; None without a match. A dot matches line ends."""
    found = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
    return next((group for group in found[0].groups() if group is not None), found[0][0]) if found else None


def _number(text: str) -> str | None:
    plain = text.strip().replace(",", "").rstrip(".")
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", plain) is None:
        return None
    sign = "-" if plain.startswith("-") else ""
    whole, _, decimals = plain.lstrip("+-").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    number = f"{whole}.{decimals}" if decimals else whole
    return number if number == "0" else sign + number
