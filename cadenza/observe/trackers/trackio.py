"""Trackio. `TRACKIO_PROJECT` names the project, `TRACKIO_SPACE_ID` a Hugging Face Space instead of this machine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.observe.trackers import kept_id, service_package

trackio = service_package("trackio")


class Trackio:
    """A resumed run goes on under its name, which Trackio knows runs by; so the name has an id in it."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "cadenza"),
            name=kept_id(path, "trackio", lambda: f"{path.name}-{uuid.uuid4().hex[:6]}"),
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
