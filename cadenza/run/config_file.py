"""The config of a run from YAML and the command line.

    preset  <  file  <  key=value on the command line

What comes later wins, key by key; `key={}` on the command line empties a section of the file. The key `pipeline`
chooses the config class. Unknown keys are refused wherever they stand, with a known one that is near or with all of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cadenza.config import Config
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.config_tree import merged_trees, value_at, without
from cadenza.run.pipeline import find_pipeline


def read_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a file, with `key=value` overrides."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a config file, or go on with a run by `cadenza resume {path}`")
    if not path.is_file():
        raise ConfigError(f"there is no config file {path}")
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return build_config(values, overrides, source=str(path))


def build_config(values: Any, overrides: Sequence[str] = (), *, source: str = "config") -> RunConfig:
    """The config that a tree of plain values means."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must be a mapping of keys to values, got {type(values).__name__}")
    for override in overrides:
        values = merged_trees(values, _override(override))
    config_class = find_pipeline(
        values.get("pipeline", RunConfig.model_fields["pipeline"].default), source
    ).config_class
    if (preset := values.get("preset")) is not None:
        if not isinstance(preset, str) or preset not in config_class.presets:
            known = ", ".join(config_class.presets) or "none in this pipeline"
            raise ConfigError(f"{source}: preset '{preset}' is not known; there are {known}")
        values = merged_trees(_preset(config_class, preset, values), values, empty_replaces=False)
    values = config_class.completed(values, source)
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe_errors(error, values, source)) from error


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The resolved tree as plain values, which `build_config` reads back. The preset is resolved in it."""
    values: dict[str, Any] = config.model_dump(mode="json", fallback=_path_of, exclude={"preset"})
    return values


def _path_of(value: Any) -> str:
    """A function or class as 'module:name'."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    raise ConfigError(f"{value!r} cannot be written into a config file: name it as 'module:name'")


def _override(text: str) -> dict[str, Any]:
    """'a.b=c' as {a: {b: c}}."""
    key, separator, value = text.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise ConfigError(f"'{text}' is not an override; write key=value, as in rollout.alpha=1")
    try:
        tree: Any = _parse(value)
    except ValueError as error:
        raise ConfigError(f"the value of '{text}' is not YAML: {error}") from error
    for name in reversed(names):
        tree = {name: tree}
    found: dict[str, Any] = tree
    return found


def _preset(config_class: type[RunConfig], name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a preset sets besides these values."""
    preset = config_class.presets[name]
    for key, owner in config_class.preset_key_owners.items():
        if value_at(values, owner) not in (None, value_at(preset, owner)):
            preset = without(preset, key)
    return preset


class _Loader(yaml.SafeLoader):
    """`on`, `off`, `yes` and `no` are words here, as in YAML 1.2, and no key may stand twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML wants it
        first: [(tag, pattern) for tag, pattern in resolvers if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1} has the key '{key.value}' for the second time")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """The values in a text, or a `ValueError` of one line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _describe_errors(error: ValidationError, values: Any, source: str) -> str:
    """One line for each key: where, what, and the value. A value that could have been of several types has a
    problem with each of them."""
    problems: dict[str, tuple[list[str], str]] = {}
    for problem in error.errors():
        key = _key_path(problem["loc"], values)
        given = problem["input"]
        shown = "" if isinstance(given, (dict, Config)) or problem["type"] == "missing" else f" (got {given!r})"
        problems.setdefault(key, ([], shown))[0].append(problem["msg"].removeprefix("Value error, "))
    return "\n".join(f"{source}: {key}{' or '.join(messages)}{shown}" for key, (messages, shown) in problems.items())


def _key_path(path: tuple[int | str, ...], values: Any) -> str:
    """'a.b: '; what pydantic names beyond the keys that were given are types it tried, or a key that is missing."""
    keys: list[str] = []
    for step in path:
        if isinstance(values, Mapping):
            keys.append(str(step))
            values = values.get(step)
        elif isinstance(values, (list, tuple)) and isinstance(step, int):
            keys.append(str(step))
            values = values[step]
        else:
            break
    return f"{'.'.join(keys)}: " if keys else ""
