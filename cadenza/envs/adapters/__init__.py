"""Environments of other libraries. Each is imported on first use, because its library is an extra."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Gymnasium", "TextArena"]

if TYPE_CHECKING:
    from cadenza.envs.adapters.gymnasium import Gymnasium
    from cadenza.envs.adapters.textarena import TextArena
else:  # Hidden from type checkers, which would otherwise accept any attribute.
    _HOME = {"Gymnasium": "cadenza.envs.adapters.gymnasium", "TextArena": "cadenza.envs.adapters.textarena"}

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def extra(package: str) -> Any:
    """Import an optional package; raises `ImportError` with the install command when it is missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"{package} is not installed; pip install 'cadenza[envs]'", name=package) from None
