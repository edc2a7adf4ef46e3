"""Supervised fine-tuning: its worker and its role. Its config is that of every run on rows."""

from __future__ import annotations

from pathlib import Path

from cadenza.cluster import dispatch
from cadenza.data import DataProto
from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_pipeline import ExampleRoles
from cadenza.run.role_names import ACTOR
from cadenza.run.workers import LearnerWorker, ModelSpec
from cadenza.training import Supervised, SupervisedConfig
from cadenza.training.strategy import ParallelStrategy


class SftConfig(ExampleConfig):
    """A run that learns to say what the rows say."""


class SftWorker(LearnerWorker):
    """A model that learns from examples."""

    learner: Supervised
    _config: SupervisedConfig

    def __init__(self, model_spec: ModelSpec, config: SupervisedConfig, failures: Path | None) -> None:
        self._model_spec, self._config, self._failures = model_spec, config, failures

    def make(self, strategy: ParallelStrategy) -> Supervised:
        spec = self._model_spec
        return Supervised(spec.build(), self._config, spec.seed, failures=self._failures, strategy=strategy)

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        """One train step; what it says is of all ranks."""
        return self.learner.train(batch)

    @dispatch("split")
    def evaluate(self, batch: DataProto) -> DataProto:
        """By row, `loss`, `tokens` and `exact`."""
        return self.learner.evaluate(batch)


class SftRoles(ExampleRoles):
    """The model that is trained."""

    async def start(self) -> None:
        self.actor = await self.start_trainers(ACTOR, SftWorker, config=self.config.actor, failures=self.failures)
