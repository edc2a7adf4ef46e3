"""MLflow. `MLFLOW_TRACKING_URI` names the server or directory, `MLFLOW_EXPERIMENT_NAME` the experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cadenza.observe.trackers import kept_id, service_package

mlflow = service_package("mlflow")

PARAM_LENGTH = 500
"""Characters that MLflow takes of a parameter."""
BATCH = 100
"""Parameters that MLflow takes at once; of metrics it takes 1,000."""


class Mlflow:
    """A resumed run goes on under its id; a step that happens again adds a second value to its curve."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        self._client = mlflow.MlflowClient()
        self._run_id = kept_id(path, "mlflow", lambda: self._create_run(path.name, config))
        if resume is not None:
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        found = [mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create_run(self, name: str, config: Mapping[str, Any]) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cadenza")
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        params = [mlflow.entities.Param(key, value[:PARAM_LENGTH]) for key, value in _flat(config)]
        for start in range(0, len(params), BATCH):
            self._client.log_batch(run_id, params=params[start : start + BATCH])
        return run_id


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of the config as 'a.b' and text."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
