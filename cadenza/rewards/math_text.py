# ruff: noqa: RUF001, RUF002 - the signs of mathematics look like letters
"""The final answer in a response, and mathematics as people write it made fit for a LaTeX parser. It needs no package.

final_answer(response) -> the text of the answer, surest place first:
    \\boxed{...} | <answer>...</answer> | #### ... | 'the answer is ...' | a response without prose | None
as_latex(text) -> the same mathematics in LaTeX: 2 1/2, 1e5, 3×10⁴, sqrt(2), π, 1 000
"""

from __future__ import annotations

import re
from collections import deque

MOST_BOXES = 8
"""Boxes at the end of a response that are looked at, for some responses are nothing but boxes."""
UNIT = re.compile(r"\\text(?:bf|rm)?\s*\{[^}]*\}(?:\^\{?\d\}?)?")
RECURRING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
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
MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+?)(?<!\\)\$", re.DOTALL)
NAMES = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log exp sqrt frac text mod gcd lcm inf infty "
        "infinity alpha beta gamma delta theta lambda pi sigma phi omega",
    )
)
"""Words that are mathematics."""
SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "θ": r"\theta ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\neq ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "½": "1/2",
        "¼": "1/4",
        "¾": "3/4",
        "⅓": "1/3",
        "⅔": "2/3",
        "’": "'",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
    }
)  # fmt: skip
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def final_answer(response: str) -> str | None:
    """The text of the final answer; None where a parser must search the prose for it."""
    response = re.sub(r"<<[^<>]*>>", "", response.rpartition("</think>")[2])  # sums of a calculator, as in GSM8K
    for find in (_boxed, _tagged, _after_hashes, _after_phrase):
        if (found := find(response)) is not None:
            return found
    whole = _trimmed(response)
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
    bare = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^}]*)\}", r"\1", _trimmed(text)).strip(" .'\"$")
    bare = re.sub(r"(?<=[^\W\d_])!+$", "", bare)  # after a number it is a factorial
    return " ".join(bare.casefold().split())


def as_latex(text: str) -> str:
    """The mathematics of an answer in the LaTeX that the parser reads."""
    latex = re.sub(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: "^{" + found[0].translate(POWERS) + "}", text)
    latex = _trimmed(latex.translate(SIGNS))
    if inside := [next(group for group in found.groups() if group) for found in MATH.finditer(latex)]:
        latex = ", ".join(inside)
    latex = RECURRING.sub(_recurring_as_fraction, latex.replace(r"\varnothing", r"\emptyset"))
    if re.search(r"[\dA-Za-z]", without_text := UNIT.sub(" ", latex)):
        latex = without_text  # a unit, or a word before the number
    latex = re.sub(r"√\s*\(?([\w.]+)\)?", r"\\sqrt{\1}", latex)
    latex = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", latex)
    latex = re.sub(r"(?<!\\)\bcbrt\s*\(([^()]*)\)", r"\\sqrt[3]{\1}", latex)
    latex = re.sub(r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z])", r"\\\1 ", latex)
    latex = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty ", latex)
    latex = re.sub(r"^(-?[\d.,]+)\s*[A-Za-z]{2,}(?:[\s/][A-Za-z]+)*(?:\^\{?\d\}?)?$", r"\1", latex)  # a unit
    latex = re.sub(r"\*\*\s*\(([^()]*)\)|\^\s*\(([^()]*)\)", lambda found: f"^{{{found[1] or found[2]}}}", latex)
    latex = re.sub(r"(?<=[\w)])\*\*(-?\w+)", r"^{\1}", latex)
    latex = re.sub(r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r" \\cdot ", latex)
    latex = re.sub(r"(\d(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}", latex)
    latex = re.sub(r"(\d)\s*[xX]\s*(?=10\^)", r"\1 \\cdot ", latex)
    latex = re.sub(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d ]*\d)", lambda found: found[1].replace(" ", ""), latex)
    return re.sub(r"(?<![\w./])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", r"\1(\2+\\frac{\3}{\4})", latex)


def searchable(prose: str) -> str:
    """Prose in which a parser finds formulas: without the dot before a formula's end, and without words inside one."""
    prose = re.sub(r"[.,;]\s*(?=\\\]|\\\)|\$)", "", prose)
    return UNIT.sub(" ", re.sub(r"\\text\s*\{[^}]*\}\s*=", " ", prose))


def _recurring_as_fraction(found: re.Match[str]) -> str:
    """0.1\\overline{6} is 15/90: all digits less those before the bar, over as many nines and zeros."""
    whole, fixed, repeated = found.groups()
    top = int(f"{whole or 0}{fixed}{repeated}") - int(f"{whole or 0}{fixed}")
    return rf"\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


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
    answer = _trimmed(rest)
    return answer if answer and not is_prose(MATH.sub(" ", answer)) else None


def _trimmed(text: str) -> str:
    """The text without what surrounds an answer and is no part of it: white space, emphasis, dots, currency."""
    trimmed = text.strip().strip("*_`").strip()
    trimmed = re.sub(r"(?<!\d)\\?[$€£](?=\s*-?[\d.]+)(?![^$]*\$)", "", trimmed)  # a price, not a formula
    return re.sub(r"[.,;]+$", "", trimmed).strip()
