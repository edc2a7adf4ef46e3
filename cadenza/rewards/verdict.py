"""The verdict in what a judge wrote: a number on a scale, or a word that stands for one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cadenza.rewards.fenced import last_block


def by_json(reply: str, field: str) -> Any:
    """The field of the last JSON object in a reply; None if there is none."""
    block = last_block(reply, ("json",))
    text = reply if block is None else block
    decoder = json.JSONDecoder()
    found = None
    place = text.find("{")
    while place >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
        else:
            found = value.get(field) if isinstance(value, dict) and field in value else found
        place = text.find("{", place)
    return found


def as_value(said: Any, scale: tuple[float, float], labels: Mapping[str, float] | None) -> float | None:
    """The verdict as a value: by its label, or its place on the scale from 0 to 1. None for what is neither."""
    if said is None:
        return None
    if labels is not None:
        word = str(said).strip().strip(".*\"'").casefold()
        return next((value for label, value in labels.items() if label.casefold() == word), None)
    try:
        number = float(said)
    except (TypeError, ValueError):
        return None
    low, high = scale
    return (number - low) / (high - low) if low <= number <= high else None
