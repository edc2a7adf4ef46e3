"""The final answer in a response to a mathematical question, as text. The surest place counts:

\\boxed{...} | <answer>...</answer> | #### ... | 'the answer is ...' | a response without prose
"""

from __future__ import annotations

import re
from collections import deque

from cadenza.rewards.math_latex import MATH, UNIT, trimmed

MOST_BOXES = 8
"""Boxes at the end of a response that are looked at, for some responses are nothing but boxes."""
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[^\s{]))")
LISTED = re.compile(r"[\s,$]*(?:\\text\s*\{)?\s*(?:and|or|,)\s*\}?[\s,$]*")
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"^#{4}[ \t]*(\S.*)$", re.MULTILINE)
PHRASE = re.compile(
    r"\b(?:answer|result|solutions?|total|value)\b[^.:=\n]{0,40}?(?:\bis\b|\bare\b|:|=)"
    r"\s*(?:\bis\b|:|=|\*\*)*[ \t]*(\S.*)$",
    re.IGNORECASE | re.MULTILINE,
)
PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
NAMES = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log exp sqrt frac text mod gcd lcm inf infty "
        "infinity alpha beta gamma delta theta lambda pi sigma phi omega",
    )
)
"""Words that are mathematics."""


def final_answer(response: str) -> str | None:
    """The text of the final answer; None where a parser must search the prose for it."""
    response = re.sub(r"<<[^<>]*>>", "", response.rpartition("</think>")[2])  # sums of a calculator, as in GSM8K
    for find in (_boxed, _tagged, _after_hashes, _after_phrase):
        if (found := find(response)) is not None:
            return found
    whole = trimmed(response)
    return whole if whole and "\n" not in whole and not is_prose(whole) else None


def is_prose(text: str) -> bool:
    """Whether it has words, units and names of functions aside, and is more than one of them."""
    bare = re.sub(r"\\(?:text(?:bf|rm|it)?|begin|end)\s*\{[^}]*\}|\\[A-Za-z]+", " ", text)
    words = [word for word in PROSE.findall(bare) if word.lower() not in NAMES]
    return len(words) > 1 or re.search(r"\b(?:so|it|is|we|of|to|be)\b", bare, re.IGNORECASE) is not None


def as_words(text: str) -> str | None:
    """The answer in lower case if it is words ('no solution', \\text{June 20}); None for mathematics."""
    words = plain_words(text)
    is_text = re.fullmatch(r"\s*\$?\\(?:text|mathrm|textbf|mbox)\s*\{[^}]*\}\$?\s*", text) is not None
    pattern = r"\w+(?:['-]\w+)*" if is_text else r"[^\W\d_]+(?:['-][^\W\d_]+)*"
    if not words or not all(re.fullmatch(pattern, word) for word in words.split()):
        return None
    letters = re.sub(r"[^a-z]", "", words) if words.isascii() else words
    return words if len(letters) > 2 and not NAMES.intersection(words.split()) else None


def plain_words(text: str) -> str:
    """The text in lower case, without the marks of LaTeX around it."""
    bare = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^}]*)\}", r"\1", trimmed(text)).strip(" .'\"$")
    bare = re.sub(r"(?<=[^\W\d_])!+$", "", bare)  # after a number it is a factorial
    return " ".join(bare.casefold().split())


def searchable(prose: str) -> str:
    """Prose in which a parser finds formulas: without the dot before a formula's end, and without words inside one."""
    prose = re.sub(r"[.,;]\s*(?=\\\]|\\\)|\$)", "", prose)
    return UNIT.sub(" ", re.sub(r"\\text\s*\{[^}]*\}\s*=", " ", prose))


def _boxed(response: str) -> str | None:
    """What is inside the last box, or the last ones where they are listed ('\\boxed{1} and \\boxed{2}'). A box that
    does not end holds nothing: the response was cut off before its answer was written."""
    boxes = [(found.start(), *_box_at(response, found)) for found in deque(BOX.finditer(response), MOST_BOXES)]
    if not boxes:
        return None
    texts = [boxes[-1][1]]
    for (_, text, end), (start, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if LISTED.fullmatch(response[end:start]) is None:
            break
        texts.insert(0, text)
    return ", ".join(texts)


def _box_at(response: str, opening: re.Match[str]) -> tuple[str, int]:
    """What is inside the box that begins here, its braces matched, and where it ends."""
    start = opening.end()
    if not opening[0].endswith("{"):
        word = response[start:].split()[0].strip("$.,")
        return word, start + len(word)
    depth = 1
    for place in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0) if response[place - 1] != "\\" else 0
        if depth == 0:
            return response[start:place], place + 1
    return "", len(response)


def _tagged(response: str) -> str | None:
    found = TAG.findall(response)
    return found[-1] if found else None


def _after_hashes(response: str) -> str | None:
    found = HASHES.findall(response)
    return found[-1] if found else None


def _after_phrase(response: str) -> str | None:
    """What follows the last 'the answer is', to the end of the sentence; None if that is prose too."""
    found = PHRASE.findall(response)
    if not found:
        return None
    rest = re.split(r"(?<=[^A-Z])\.\s+(?=[A-Z])|\.\s*$|\s+(?:because|since|which|where|so)\b", found[-1])[0]
    answer = trimmed(rest)
    return answer if answer and not is_prose(MATH.sub(" ", answer)) else None
