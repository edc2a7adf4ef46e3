"""Supervised fine-tuning: its worker and its role. Its config is that of every run on rows."""

from __future__ import annotations

from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_roles import ExampleRoles, ExampleWorker
from cadenza.run.role_names import ACTOR
from cadenza.training import Supervised, SupervisedConfig
from cadenza.training.strategy import ParallelStrategy


class SftConfig(ExampleConfig):
    """A run that learns to say what the rows say."""


class SftWorker(ExampleWorker):
    """A model that learns from examples."""

    learner: Supervised
    _config: SupervisedConfig

    def make(self, strategy: ParallelStrategy) -> Supervised:
        spec = self._model_spec
        return Supervised(spec.build(), self._config, spec.seed, failures=self._failures, strategy=strategy)


class SftRoles(ExampleRoles):
    """The model that is trained."""

    async def start(self) -> None:
        self.actor = await self.start_trainers(ACTOR, SftWorker, config=self.config.actor, failures=self.failures)
