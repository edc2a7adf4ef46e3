"""Direct preference optimisation: its config, its worker and its roles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cadenza.cluster import dispatch
from cadenza.data import DataProto
from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_pipeline import ExampleRoles
from cadenza.run.role_names import ACTOR, REFERENCE
from cadenza.run.workers import LearnerWorker, ModelSpec, ReferenceWorker
from cadenza.training import Reference, ReferenceConfig
from cadenza.training.dpo import Dpo, DpoConfig
from cadenza.training.learner import LearnerConfig
from cadenza.training.models import is_adapted
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


class DpoWorker(LearnerWorker):
    """A policy that learns from pairs, and under an adapter the reference too."""

    learner: Dpo
    _config: DpoConfig

    def __init__(
        self, model_spec: ModelSpec, config: DpoConfig, reference: ReferenceConfig, failures: Path | None
    ) -> None:
        self._model_spec, self._config, self._reference_config, self._failures = model_spec, config, reference, failures

    def make(self, strategy: ParallelStrategy) -> Dpo:
        module, seed = self._model_spec.build(), self._model_spec.seed
        learner = Dpo(module, self._config, seed, failures=self._failures, strategy=strategy)
        adapted = is_adapted(module)
        self._reference = Reference(module, self._reference_config, strategy=strategy) if adapted else None
        return learner

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        """One train step; what it says is of all ranks."""
        return self.learner.train(batch)

    @dispatch("split")
    def values(self, batch: DataProto) -> DataProto:
        """The logprob of each answer, and that of the reference: `value` and `reference`."""
        return self.learner.values(batch)

    @dispatch("split")
    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """The column `ref_logprobs` of the model under the adapter."""
        assert self._reference is not None
        return self._reference.logprobs(batch).select(["ref_logprobs"])


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
