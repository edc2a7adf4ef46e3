"""The workers of a run: each holds one model, in the controller's process or in one of its own.

What they are sent and what they answer are numbers: a batch comes without objects and `meta_info`, and the new columns
go back alone. Directories are named by absolute paths and must be visible from every node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from cadenza.cluster import Worker, dispatch
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.cluster.shipping import Broadcast, Layout, Lines, Stored
from cadenza.data import DataProto
from cadenza.inference.torch_engine import TorchReplica
from cadenza.pipelines.config import ConfigError, EngineConfig, WarmStart
from cadenza.training import (
    Actor,
    ActorConfig,
    CheckpointError,
    Critic,
    CriticConfig,
    ModelConfig,
    Reference,
    ReferenceConfig,
    Supervised,
    load_model,
)
from cadenza.training.checkpoint import Part, load_part, load_weights, save_part
from cadenza.training.models import is_adapted, save_model
from cadenza.training.supervised import Pair


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What every worker needs to make its model, wherever it runs. The same one gives the same weights."""

    model: ModelConfig
    vocab_size: int
    end_token_id: int | None
    seed: int
    threads: int | None
    """Of torch; None is its own choice."""

    def build(self, *, path: Path | None = None, other: int = 0) -> nn.Module:
        """The model, or the one at `path` of the same form; `other` models have other weights."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        config = self.model if path is None else self.model.model_copy(update={"path": str(path)})
        try:
            return load_model(config, self.vocab_size, self.seed + other, eos_token_id=self.end_token_id)
        except ValueError as error:  # it does not fit the tokenizer
            raise ConfigError(str(error)) from error


class LearnerWorker(Worker):
    """What workers that train have in common."""

    part: Part

    @dispatch("rank_zero")
    def save(self, directory: Path) -> None:
        """Write weights and training state, as a part of a checkpoint."""
        save_part(directory, self.part)

    @dispatch("broadcast")
    def load_state(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        load_part(directory, self.part)


class ActorWorker(LearnerWorker):
    """The policy that is trained, and under an adapter the reference too."""

    def __init__(
        self, blueprint: Blueprint, config: ActorConfig, reference: ReferenceConfig, failures: Path | None
    ) -> None:
        self._seed, self._failures = blueprint.seed, failures
        self._lines = Lines()
        self.part = self.actor = Actor(blueprint.build(), config, blueprint.seed, failures=failures)
        self._reference = Reference(self.actor.module, reference) if is_adapted(self.actor.module) else None

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def warm_start(self, pairs: Sequence[Pair], plan: WarmStart) -> dict[str, float]:
        """Learn from examples; what the last batch said."""
        trainer = Supervised(self.actor.module, plan.trainer, self._seed, failures=self._failures)
        return deque(trainer.fit(pairs, passes=plan.passes), maxlen=1).pop()

    @dispatch("split")
    def logprobs(self, batch: DataProto) -> DataProto:
        """The column `old_logprobs`: what the policy says of the batch now."""
        return self.actor.logprobs(batch).select(["old_logprobs"])

    @dispatch("split")
    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """The column `ref_logprobs` of the model under the adapter."""
        assert self._reference is not None
        return self._reference.logprobs(batch).select(["ref_logprobs"])

    @dispatch("split", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        """One train step."""
        return self.actor.train(batch)

    @dispatch("rank_zero")
    def module(self) -> nn.Module:
        """The live module, for an engine in the same process."""
        return self.actor.module

    @dispatch("rank_zero")
    def store_weights(self) -> Stored:
        """Put what is published into the object store."""
        return Stored.put(self.actor.weights())

    @dispatch("rank_zero")
    def open_broadcast(self, receivers: int) -> Broadcast:
        """Where so many others hear what is published."""
        return self._lines.open(Layout.of(self.actor.weights()), receivers)

    @dispatch("rank_zero")
    def send_weights(self, broadcast: Broadcast) -> None:
        """Send what is published to everybody who waits there for it."""
        broadcast.send(self.actor.weights(), self._lines)

    @dispatch("broadcast")
    def load_weights(self, directory: Path) -> None:
        """Those of a checkpoint, without its training state."""
        load_weights(directory, self.actor.module)

    @dispatch("rank_zero")
    def save_model(self, directory: Path) -> None:
        """Write the policy as it is now, for a reference."""
        try:
            save_model(directory, self.actor.module)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the reference could not be saved to {directory}: {error}") from error


class CriticWorker(LearnerWorker):
    """A critic, with a model of its own."""

    def __init__(self, blueprint: Blueprint, config: CriticConfig, failures: Path | None) -> None:
        self.part = self.critic = Critic(blueprint.build(other=1), config, blueprint.seed, failures=failures)

    @dispatch("split")
    def values(self, batch: DataProto) -> DataProto:
        """The column `values`."""
        return self.critic.values(batch).select(["values"])

    @dispatch("split", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        """One train step."""
        return self.critic.train(batch)


class ReferenceWorker(Worker):
    """A policy that does not change. It is loaded when the policy is what it should be measured against."""

    def __init__(self, blueprint: Blueprint, config: ReferenceConfig) -> None:
        self._blueprint, self._config = blueprint, config
        self._reference: Reference

    @dispatch("broadcast")
    def load(self, directory: Path) -> None:
        """The policy that `save_model` wrote."""
        self._reference = Reference(self._blueprint.build(path=directory), self._config)

    @dispatch("split")
    def logprobs(self, batch: DataProto) -> DataProto:
        """The column `ref_logprobs`."""
        return self._reference.logprobs(batch).select(["ref_logprobs"])


class InferenceWorker(ReplicaWorker):
    """A replica in a process of its own. It has no weights to speak of before some are loaded."""

    def __init__(self, blueprint: Blueprint, engine: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        name = f"torch-{self.place.data_rank}"
        options = engine_options(engine, eos_token_ids)
        self._replica = TorchReplica(blueprint.build(), name=name, devices=self.place.devices, **options)
        super().__init__(self._replica)

    def close(self) -> None:
        self._replica.close()


def engine_options(engine: EngineConfig, eos_token_ids: frozenset[int]) -> Mapping[str, Any]:
    """What a replica is told."""
    return {"eos_token_ids": eos_token_ids, **engine.model_dump()}
