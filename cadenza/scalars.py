"""What counts as a number where user code returns one."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def as_number(value: Any) -> float | None:
    """A number or a bool, also of numpy or as a tensor without axes, as a float; None for everything else. Text is no
    number, also where it reads like one: a reward of "1" is a bug more often than a 1."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
