# ruff: noqa: RUF001, RUF002 - the signs of mathematics look like letters
"""Mathematics as people write it, made fit for a LaTeX parser: 2 1/2, 1e5, 3×10⁴, sqrt(2), π, 1 000, 12 km/h."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

Rewrite: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str]]

MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+?)(?<!\\)\$", re.DOTALL)
"""Formulas in a text."""
UNIT = re.compile(r"\\text(?:bf|rm)?\s*\{[^}]*\}(?:\^\{?\d\}?)?")
"""A unit or another word inside a formula."""
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
"""Signs of Unicode, and what LaTeX has for them."""
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _recurring_as_fraction(found: re.Match[str]) -> str:
    """0.1\\overline{6} is 15/90: all digits less those before the bar, over as many nines and zeros."""
    whole, fixed, repeated = found.groups()
    top = int(f"{whole or 0}{fixed}{repeated}") - int(f"{whole or 0}{fixed}")
    return rf"\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


REWRITES: Sequence[Rewrite] = (
    (r"\\varnothing", r"\\emptyset"),
    (r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _recurring_as_fraction),
    (r"√\s*\(?([\w.]+)\)?", r"\\sqrt{\1}"),
    (r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<!\\)\bcbrt\s*\(([^()]*)\)", r"\\sqrt[3]{\1}"),
    (r"(?<![\\A-Za-z])(pi|theta|alpha|beta|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
    (r"^(-?[\d.,]+)\s*[A-Za-z]{2,}(?:[\s/][A-Za-z]+)*(?:\^\{?\d\}?)?$", r"\1"),  # 12 km/h, after pi: 2pi has no unit
    (r"(?:\*\*|\^)\s*\(([^()]*)\)", r"^{\1}"),  # x**(n+1), 2^(1/2)
    (r"(?<=[\w)])\*\*(-?\w+)", r"^{\1}"),  # x**2
    (r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r" \\cdot "),  # 2*x
    (r"(\d(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\cdot 10^{\2}"),  # 1e5
    (r"(\d)\s*[xX]\s*(?=10\^)", r"\1 \\cdot "),  # 3 x 10^4
    (r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d ]*\d)", lambda found: found[1].replace(" ", "")),  # 1 000 000
    (r"(?<![\w./])(-?)(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", r"\1(\2+\\frac{\3}{\4})"),  # 2 1/2
)
"""What is written otherwise in LaTeX, in the order in which it is rewritten."""


def as_latex(text: str) -> str:
    """The mathematics of an answer in the LaTeX that the parser reads."""
    latex = re.sub(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda found: "^{" + found[0].translate(POWERS) + "}", text)
    latex = trimmed(latex.translate(SIGNS))
    if inside := [next(group for group in found.groups() if group) for found in MATH.finditer(latex)]:
        latex = ", ".join(inside)
    if re.search(r"[\dA-Za-z]", without_words := UNIT.sub(" ", latex)):
        latex = without_words
    for pattern, replacement in REWRITES:
        latex = re.sub(pattern, replacement, latex)
    return latex


def trimmed(text: str) -> str:
    """The text without what surrounds an answer and is no part of it: white space, emphasis, dots, currency."""
    bare = text.strip().strip("*_`").strip()
    bare = re.sub(r"(?<!\d)\\?[$€£](?=\s*-?[\d.]+)(?![^$]*\$)", "", bare)  # a price, not a formula
    return re.sub(r"[.,;]+$", "", bare).strip()
