"""Environments by name. The built-in ones are imported on first use."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from cadenza.config import load_object

Factory = Callable[..., Any]
F = TypeVar("F", bound=Factory)

BUILT_IN = {
    "frozenlake": "cadenza.envs.frozenlake:FrozenLake",
    "sokoban": "cadenza.envs.sokoban:Sokoban",
    "gymnasium": "cadenza.envs.adapters.gymnasium:Gymnasium",
    "textarena": "cadenza.envs.adapters.textarena:TextArena",
}

_factories: dict[str, Factory] = {}


def env(name: str) -> Callable[[F], F]:
    """Register a class (or a factory) as the environment `name`."""

    def register(factory: F) -> F:
        if name in BUILT_IN:
            raise ValueError(f"env '{name}' is built in, as {BUILT_IN[name]}; choose another name")
        known = _factories.get(name)
        if known is not None and known is not factory and known.__qualname__ != factory.__qualname__:
            raise ValueError(f"env '{name}' is registered already, as {known.__module__}.{known.__qualname__}")
        _factories[name] = factory
        return factory

    return register


def registered() -> list[str]:
    """Return the names of the known environments."""
    return sorted({*_factories, *BUILT_IN})


def find_factory(spec: str | Factory) -> Factory:
    """Return the factory of a registered name, of 'module:name', or of a class."""
    if callable(spec):
        return spec
    if spec in _factories:
        return _factories[spec]
    if spec in BUILT_IN or ":" in spec:
        factory = load_object(BUILT_IN.get(spec, spec))
        if not callable(factory):
            raise ValueError(f"env '{spec}' is a {type(factory).__name__}, not a class or function")
        return factory  # type: ignore[no-any-return]
    near = difflib.get_close_matches(spec, registered(), n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known envs: {', '.join(registered())}"
    raise ValueError(f"env '{spec}' is not registered; {hint} (or write 'package.module:Class')")
