"""The base of every config: frozen, typed, and loud about keys it does not know."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Config(BaseModel):
    """A config object belongs to the thing it configures; unknown keys fail and name the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key in cls.model_fields:
                continue
            near = nearest_key(str(key), list(cls.model_fields))
            hint = f"did you mean '{near}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
            raise ValueError(f"{cls.__name__} has no key '{key}'; {hint}")
        return values


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that was very likely meant, or None: a wrong hint is worse than the list of all.

    It begins with the same letter and is spelled almost alike, or is the initials ('lr' for 'learning_rate'), or goes
    on where this one ends ('heartbeat_seconds' for 'heartbeat').
    """
    if (initials := "".join(word[:1] for word in key.split("_"))) in known and "_" in key:
        return initials
    longer = [name for name in known if name.startswith(f"{key}_")]
    if len(longer) == 1:
        return longer[0]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return near[0] if near and near[0][0] == key[:1] else None


def load_object(path: str) -> Any:
    """The object that 'package.module:name' means."""
    module, separator, name = path.partition(":")
    if not separator or not module or not name:
        raise ValueError(f"'{path}' does not name an object; write it as 'package.module:name'")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"'{path}' cannot be loaded: {error}") from error
    return found


def import_from_working_directory() -> None:
    """Let what a config names as 'module:name' lie in the working directory."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
