"""Constraints on a text that a program can check: one small function each, by the name that rows give.

A function gets the response and the arguments of the row, and says whether the response keeps to the constraint. A new
one is a function here and a line in `CONSTRAINTS`.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence

from cadenza.rewards.fenced import last_block
from cadenza.rewards.language import SCRIPTS, language_of

BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)])\s+\S", re.MULTILINE)


def _within(count: int, at_least: int | None, at_most: int | None, exactly: int | None) -> bool:
    if at_least is None and at_most is None and exactly is None:
        raise ValueError("it needs at_least, at_most or exactly")
    low, high = (at_least or 0, float("inf") if at_most is None else at_most)
    return low <= count <= high and exactly in (None, count)


def _counted(count: Callable[[str], int]) -> Callable[..., bool]:
    """A constraint on how many of something a text has."""

    def constraint(
        text: str, at_least: int | None = None, at_most: int | None = None, exactly: int | None = None
    ) -> bool:
        return _within(count(text), at_least, at_most, exactly)

    return constraint


def words_of(text: str) -> list[str]:
    """The words: letters and digits, with apostrophes and hyphens inside."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text)


def sentences_of(text: str) -> list[str]:
    """The sentences: they end with . ! ? or … before white space, or with the paragraph."""
    pieces = re.split(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n\s*\n", text)  # noqa: RUF001 - Chinese sentences end so
    return [piece for piece in pieces if re.search(r"\w", piece)]


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs: pieces between empty lines or rules (`***`)."""
    return [piece for piece in re.split(r"\n\s*\n|^\s*\*{3}\s*$", text, flags=re.MULTILINE) if piece.strip(" \n*")]


def occurrences(text: str, phrase: str) -> int:
    """How often a phrase stands in the text as whole words, in any case."""
    inside = r"\s+".join(map(re.escape, phrase.split()))
    return len(re.findall(rf"(?<!\w){inside}(?!\w)", text, re.IGNORECASE))


def _include(text: str, keywords: Sequence[str]) -> bool:
    return all(occurrences(text, keyword) for keyword in keywords)


def _exclude(text: str, keywords: Sequence[str]) -> bool:
    return not any(occurrences(text, keyword) for keyword in keywords)


def _frequency(
    text: str, keyword: str, at_least: int | None = None, at_most: int | None = None, exactly: int | None = None
) -> bool:
    return _within(occurrences(text, keyword), at_least, at_most, exactly)


def _letter_frequency(
    text: str, letter: str, at_least: int | None = None, at_most: int | None = None, exactly: int | None = None
) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter must be one letter, got {letter!r}")
    return _within(text.casefold().count(letter.casefold()), at_least, at_most, exactly)


def _case(text: str, case: str) -> bool:
    if case not in ("upper", "lower"):
        raise ValueError(f"case must be 'upper' or 'lower', got {case!r}")
    has_letters = text.upper() != text.lower()
    return has_letters and text == (text.upper() if case == "upper" else text.lower())


def _capital_words(text: str) -> int:
    return sum(1 for word in words_of(text) if word.upper() == word and word.lower() != word)


def _bullets(text: str) -> int:
    return len(BULLET.findall(text))


def _placeholders(text: str) -> int:
    return len(re.findall(r"\[[^\[\]\n]+\]", text))


def _highlights(text: str) -> int:
    return len(re.findall(r"\*\*[^*\n]+\*\*|(?<!\*)\*[^*\s][^*\n]*\*(?!\*)", text))


def _headings(text: str) -> int:
    return len(re.findall(r"^#{1,6} +\S", text, re.MULTILINE))


def _starts_with(text: str, phrase: str) -> bool:
    return text.strip().casefold().startswith(phrase.strip().casefold())


def _ends_with(text: str, phrase: str) -> bool:
    return text.strip().strip("\"'\u201d\u2019").casefold().endswith(phrase.strip().casefold())


def _postscript(text: str, marker: str = "P.S.") -> bool:
    return re.search(rf"^\s*{re.escape(marker)}\s*\S", text, re.MULTILINE | re.IGNORECASE) is not None


def _title(text: str) -> bool:
    return re.search(r"<<[^<>\n]*\w[^<>\n]*>>", text) is not None


def _quoted(text: str) -> bool:
    whole = text.strip()
    pairs = (('"', '"'), ("“", "”"), ("«", "»"), ("„", "“"))
    return len(whole) > 1 and any(whole.startswith(a) and whole.endswith(b) for a, b in pairs)


def _json(text: str) -> bool:
    block = last_block(text, ("json",))
    try:
        json.loads(text if block is None else block)
    except (ValueError, RecursionError):
        return False
    return True


def _one_of(text: str, options: Sequence[str]) -> bool:
    return text.strip().rstrip(".").casefold() in {option.strip().rstrip(".").casefold() for option in options}


def _language(text: str, language: str) -> bool:
    known = sorted({code for codes in SCRIPTS.values() for code in codes})
    if language not in known:
        raise ValueError(f"language must be one of {', '.join(known)}, got {language!r}")
    return language_of(text) == language


def _repeats_prompt(text: str, prompt: str) -> bool:
    return text.strip().casefold().startswith(prompt.strip().casefold())


def _paragraph_starts(text: str, number: int, word: str) -> bool:
    paragraphs = paragraphs_of(text)
    if not 0 < number <= len(paragraphs):
        return False
    return (words_of(paragraphs[number - 1]) or [""])[0].casefold() == word.casefold()


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in re.split(r"^\s*\*{6}\s*$", text, flags=re.MULTILINE)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "words": _counted(lambda text: len(words_of(text))),
    "sentences": _counted(lambda text: len(sentences_of(text))),
    "paragraphs": _counted(lambda text: len(paragraphs_of(text))),
    "characters": _counted(lambda text: len(text.strip())),
    "lines": _counted(lambda text: sum(1 for line in text.splitlines() if line.strip())),
    "bullets": _counted(_bullets),
    "placeholders": _counted(_placeholders),
    "highlights": _counted(_highlights),
    "headings": _counted(_headings),
    "capital_words": _counted(_capital_words),
    "include": _include,
    "exclude": _exclude,
    "frequency": _frequency,
    "letter_frequency": _letter_frequency,
    "case": _case,
    "starts_with": _starts_with,
    "ends_with": _ends_with,
    "paragraph_starts": _paragraph_starts,
    "postscript": _postscript,
    "title": _title,
    "quoted": _quoted,
    "json": _json,
    "one_of": _one_of,
    "language": _language,
    "repeats_prompt": _repeats_prompt,
    "two_responses": _two_responses,
    "no_commas": lambda text: not any(comma in text for comma in ",，、،"),  # noqa: RUF001 - of other scripts
    "no_digits": lambda text: not any(letter.isdigit() for letter in text),
    "ascii": lambda text: bool(text) and set(text) <= set(string.printable),
}
"""Every constraint by its name."""
