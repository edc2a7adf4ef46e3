"""Weights & Biases. `WANDB_PROJECT` names the project, `WANDB_MODE=offline` keeps everything on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.observe.trackers import kept_id, service_package

wandb = service_package("wandb")


class Wandb:
    """A resumed run goes on under its id; steps that happen again are drawn again."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "cadenza"),
            name=path.name,
            dir=str(path),
            config=dict(config),
            id=kept_id(path, "wandb"),
            resume="allow",
        )
        # Its own step counter only goes up, and would refuse the steps after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
