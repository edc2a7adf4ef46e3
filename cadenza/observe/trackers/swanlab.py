"""SwanLab. `SWANLAB_PROJECT` names the project, `SWANLAB_MODE=offline` keeps everything on this machine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.observe.trackers import kept_id, service_package

swanlab = service_package("swanlab")

ID_LENGTH = 21
"""Characters of an id of SwanLab."""


class SwanLab:
    """A resumed run goes on under its id. SwanLab keeps the first value of a step that happens again."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        directory = path / "swanlab"
        directory.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "cadenza"),
            experiment_name=path.name,
            logdir=str(directory),
            config=dict(config),
            id=kept_id(path, "swanlab", lambda: uuid.uuid4().hex[:ID_LENGTH]),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        swanlab.finish()
