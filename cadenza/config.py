"""The base of every config: frozen, typed, and loud about keys it does not know."""

from __future__ import annotations

import difflib
import importlib
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
            near = difflib.get_close_matches(str(key), list(cls.model_fields), n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
            raise ValueError(f"{cls.__name__} has no key '{key}'; {hint}")
        return values


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
