"""The base of every config: frozen, typed, and loud about keys it does not know."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cadenza.user_code import place_of

Seed = Annotated[int, Field(ge=0, le=2**62)]
"""What random numbers begin with. A run adds small numbers to it, and torch takes 64 bits."""
Threads = Annotated[int, Field(gt=0, le=1024)]
"""Threads of torch. With tens of thousands of them the process dies without a message."""


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
            raise ValueError(f"{cls.__name__} has no key '{key}'; {cls._hint(str(key))}")
        return values

    @classmethod
    def _hint(cls, key: str) -> str:
        """The keys that were very likely meant, here or in a section below; else all keys."""
        below = list(cls._keys_below())
        meant = [path for path in below if path.endswith(f".{key}")]
        if not meant and (near := nearest_key(key, list(cls.model_fields))):
            meant = [near]
        if not meant and (near := nearest_key(key, [path.rpartition(".")[2] for path in below])):
            meant = [path for path in below if path.endswith(f".{near}")]
        if not meant:
            return f"known keys: {', '.join(cls.model_fields)}"
        *first, last = (f"'{path}'" for path in sorted(meant, key=lambda path: path.count("."))[:4])
        return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"

    @classmethod
    def _keys_below(cls) -> Iterator[str]:
        """The keys of the sections of this config, as 'section.key'."""
        for name, field in cls.model_fields.items():
            for path, section in _sections(name, field.annotation):
                yield from (f"{path}.{key}" for key in section.key_names())
                yield from (f"{path}.{key}" for key in section._keys_below())

    @classmethod
    def key_names(cls) -> Sequence[str]:
        """The keys of this section, without those of its own sections."""
        return list(cls.model_fields)


def _sections(path: str, annotation: Any) -> Iterator[tuple[str, type[Config]]]:
    """The config classes in an annotation, with the path of their keys; in a mapping, NAME is any key."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield path, annotation
    elif get_origin(annotation) is dict:
        yield from _sections(f"{path}.NAME", get_args(annotation)[1])
    elif get_origin(annotation) not in (list, tuple):
        for one in get_args(annotation):
            yield from _sections(path, one)


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
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        where = f"; it is looked for in the working directory, {Path.cwd()}, and on PYTHONPATH" if is_missing else ""
        raise ValueError(f"'{path}' cannot be loaded: {error}{where}") from error
    except Exception as error:  # importing a module runs its code
        raise ValueError(f"'{path}' cannot be loaded: {type(error).__name__}: {error}{_place(error, path)}") from error
    return found


def load_callable(path: str) -> Any:
    """The function or class that 'package.module:name' means."""
    found = load_object(path)
    if not callable(found):
        raise ValueError(f"'{path}' is of type {type(found).__name__}; name a function or a class")
    return found


def _place(error: Exception, path: str) -> str:
    """A `SyntaxError` says its place itself."""
    return "" if isinstance(error, SyntaxError) else place_of(error, path)


def import_from_working_directory() -> None:
    """Let what a config names as 'module:name' lie in the working directory."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
