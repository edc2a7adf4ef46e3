"""Training of a reward model: its config, its worker and its role."""

from __future__ import annotations

from pathlib import Path

from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_roles import ExampleRoles, ExampleWorker
from cadenza.run.role_names import ACTOR
from cadenza.run.workers import ModelSpec
from cadenza.training.pairs import PairConfig
from cadenza.training.reward_model import RewardModelLearner
from cadenza.training.strategy import ParallelStrategy


class RewardModelConfig(ExampleConfig):
    """A run that learns to score answers."""

    actor: PairConfig = PairConfig()
    """How the reward model learns."""


class RewardModelWorker(ExampleWorker):
    """A classifier that learns from pairs."""

    learner: RewardModelLearner
    _config: PairConfig

    def __init__(self, model_spec: ModelSpec, config: PairConfig, pad_token_id: int, failures: Path | None) -> None:
        super().__init__(model_spec, config, failures)
        self._pad = pad_token_id

    def make(self, strategy: ParallelStrategy) -> RewardModelLearner:
        module, seed = self._model_spec.build(pad_token_id=self._pad), self._model_spec.seed
        return RewardModelLearner(module, self._config, seed, failures=self._failures, strategy=strategy)


class RewardModelRoles(ExampleRoles):
    """The reward model."""

    async def start(self) -> None:
        pad = self.codec.tokenizer.pad_token_id
        self.actor = await self.start_trainers(
            ACTOR,
            RewardModelWorker,
            config=self.config.actor,
            pad_token_id=self.codec.end_token_id if pad is None else pad,
            failures=self.failures,
        )
