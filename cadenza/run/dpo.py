"""Direct preference optimisation: its config, its worker and its roles."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from cadenza.data import DataProto
from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_roles import ExampleRoles, ExampleWorker
from cadenza.run.role_names import ACTOR, REFERENCE
from cadenza.run.workers import PolicyWorker, ReferenceWorker
from cadenza.training import ReferenceConfig
from cadenza.training.dpo import Dpo, DpoConfig
from cadenza.training.learner import LearnerConfig
from cadenza.training.strategy import ParallelStrategy


class DpoRunConfig(ExampleConfig):
    """A run that learns which of two answers is preferred. The reference is the model that it begins with."""

    actor: DpoConfig = DpoConfig()

    @property
    def learners(self) -> Mapping[str, LearnerConfig | None]:
        return {ACTOR: self.actor, REFERENCE: None}

    @property
    def role_names(self) -> tuple[str, ...]:
        """Under an adapter, the actor is the reference too."""
        return (ACTOR, REFERENCE) if self.model.lora is None else (ACTOR,)

    @property
    def reference(self) -> ReferenceConfig:
        """The reference computes as the actor does."""
        actor = self.actor
        return ReferenceConfig(token_budget=actor.token_budget, packing=actor.packing, precision=actor.precision)


class DpoWorker(PolicyWorker, ExampleWorker):
    """A policy that learns from pairs, and under an adapter the reference too."""

    learner: Dpo
    _config: DpoConfig

    def make_policy(self, module: nn.Module, strategy: ParallelStrategy) -> Dpo:
        return Dpo(module, self._config, self._model_spec.seed, failures=self._failures, strategy=strategy)


class DpoRoles(ExampleRoles):
    """The policy, and the reference."""

    config: DpoRunConfig

    async def start(self) -> None:
        config = self.config
        self.actor = await self.start_trainers(
            ACTOR, DpoWorker, config=config.actor, reference=config.reference, failures=self.failures
        )
        if REFERENCE in self.device_map:
            self.reference = await self.start_cluster(REFERENCE, ReferenceWorker, config=config.reference)

    async def with_reference(self, batch: DataProto) -> DataProto:
        """The batch with the column `ref_logprobs`."""
        ask = self.actor.ref_logprobs if self.reference is None else self.reference.logprobs
        return batch.union(await ask(batch.select(meta_info_keys=())))
