"""Where else the metrics of a run go: one small module for each service.

A tracker has two methods. A factory makes it from the directory of the run, its config, and the step of the checkpoint
that a resumed run goes on from; the class itself is the usual factory:

    class Prints:
        def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None: ...
        def log(self, step: int, metrics: Mapping[str, float]) -> None: print(step, metrics)
        def close(self) -> None: ...

`trackers: [tensorboard, my_module:Prints]` in a config uses it. A module here is imported when its name is used, and
imports the package of its service then.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from cadenza.config import load_object

TRACKERS = {
    "tensorboard": "cadenza.observe.trackers.tensorboard:TensorBoard",
    "wandb": "cadenza.observe.trackers.wandb:Wandb",
    "mlflow": "cadenza.observe.trackers.mlflow:Mlflow",
    "swanlab": "cadenza.observe.trackers.swanlab:SwanLab",
    "trackio": "cadenza.observe.trackers.trackio:Trackio",
}


class Tracker(Protocol):
    """Where else the metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TrackerError(Exception):
    """A tracker could not be opened."""


TrackerFactory = Callable[[Path, Mapping[str, Any], int | None], Tracker]
"""From the directory, the config and the step to go on from."""


def check_tracker(name: str) -> str:
    """The name, unless it cannot be one: then the error lists those that there are."""
    if name not in TRACKERS and ":" not in name:
        known = ", ".join(f"'{known}'" for known in TRACKERS)
        raise ValueError(f"there is no tracker '{name}'; there are {known}, or name your own as 'module:name'")
    return name


def find_tracker(name: str) -> TrackerFactory:
    """The factory of a tracker. A package that is missing is an `ImportError` with the install command."""
    factory: TrackerFactory
    if (path := TRACKERS.get(check_tracker(name))) is None:
        factory = load_object(name)
    else:
        module, _, attribute = path.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
    return factory


def service_package(name: str) -> Any:
    """The package of a service, which is imported when its tracker is."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the tracker '{name}' needs a package that is not installed: pip install 'cadenza[{name}]', "
            "or leave it out of trackers"
        ) from error


def kept_id(path: Path, service: str, make: Callable[[], str] = lambda: uuid.uuid4().hex) -> str:
    """What the service calls this run. It is made once and kept in the run's directory, so that a resumed run goes on
    under it."""
    file = path / f".{service}-id"
    if not file.exists():
        file.write_text(make(), encoding="utf-8")
    return file.read_text(encoding="utf-8")
