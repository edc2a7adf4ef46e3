"""Four directions, and the answers of a model that mean one of them.

Boards are text: rows that end in a newline. A cell is an index into that text, so a move is an addition, and the
newlines are the edge.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Style = Literal["compact", "chat"]
"""How an env and a model talk. 'compact': the board alone, answered by one letter; made for tiny character models.
'chat': rules and a board, answered by `<answer>Right</answer>` or by a text whose last word is the direction."""

NAMES = {"L": "Left", "D": "Down", "R": "Right", "U": "Up"}
LETTERS = tuple(NAMES)
"""In the order of gymnasium's FrozenLake; neighbours in it are at right angles."""

ANSWERS: dict[Style, tuple[str, ...]] = {
    "compact": LETTERS,
    "chat": tuple(f"<answer>{name}</answer>" for name in NAMES.values()),
}
"""Every well-formed answer, in the order of `LETTERS`."""

_BY_WORD = {word: letter for letter, name in NAMES.items() for word in (letter.lower(), name.lower())}
_TAG = re.compile(r"<answer>([^<]*)", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+")


def check_style(style: str) -> None:
    if style not in get_args(Style):
        raise ValueError(f"style must be one of {', '.join(get_args(Style))}, got '{style}'")


def answer(letter: str, style: Style) -> str:
    """Return the answer that means this direction."""
    return ANSWERS[style][LETTERS.index(letter)]


def parse(text: str, style: Style) -> str | None:
    """Return the letter of the direction that an answer means; None when it means none."""
    if style == "compact":
        letter = text.strip()
        return letter if letter in NAMES else None
    tags = _TAG.findall(text)
    words = _WORD.findall(tags[-1] if tags else text)
    if not words or (tags and len(words) > 1):
        return None
    return _BY_WORD.get(words[-1].lower())


def deltas(width: int) -> dict[str, int]:
    """Return what each move adds to a cell of a board with rows of this width."""
    stride = width + 1
    return {"L": -1, "D": stride, "R": 1, "U": -stride}
