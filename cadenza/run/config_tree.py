"""Trees of plain values, as YAML gives them: read, merge and cut by 'a.b' keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def value_at(tree: Any, key: str) -> Any:
    """The value at 'a.b'; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The tree without 'a.b'."""
    first, _, rest = key.partition(".")
    return {
        name: without(value, rest) if name == first else value for name, value in tree.items() if rest or name != first
    }


def merged_trees(below: Mapping[str, Any], above: Mapping[str, Any], *, empty_replaces: bool = True) -> dict[str, Any]:
    """Mappings are merged, anything else is replaced; by an empty mapping too, unless `empty_replaces` is false."""
    merged = dict(below)
    for key, value in above.items():
        is_merged = isinstance(value, Mapping) and (value or not empty_replaces)
        if is_merged and isinstance(merged.get(key), Mapping):
            merged[key] = merged_trees(merged[key], value, empty_replaces=empty_replaces)
        else:
            merged[key] = value
    return merged
