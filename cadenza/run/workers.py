"""The workers of a run: each holds one model, in the controller's process or in one of its own.

What they are sent and what they answer are numbers: a batch comes without objects and `meta_info`, and the new columns
go back alone. Directories are named by absolute paths and must be visible from every node.

Several workers of a role hold the same weights. Those that train meet before they have a model, each gets the whole
batch and computes its share of it (training/strategy.py); columns are computed by rows that are split among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from cadenza.cluster import Worker, dispatch
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.cluster.weight_transfer import BUCKET_BYTES, BroadcastGroups, StoredWeights, WeightBroadcast, WeightLayout
from cadenza.data import DataProto
from cadenza.inference.torch_engine import TorchReplica
from cadenza.run.cold_start_config import ColdStartConfig
from cadenza.run.config import ConfigError
from cadenza.run.engines import EngineConfig
from cadenza.run.engines.torch import torch_options
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
from cadenza.training.checkpoint import Checkpointable, load_weights
from cadenza.training.learner import LearnerConfig
from cadenza.training.models import is_adapted, save_model
from cadenza.training.process_group import ProcessGroup, Rendezvous, RendezvousAddress
from cadenza.training.strategy import ParallelStrategy, load_strategy


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What every worker needs to make its model, wherever it runs. The same one gives the same weights."""

    model: ModelConfig
    vocab_size: int
    end_token_id: int | None
    seed: int
    threads: int | None
    """Of torch; None is its own choice."""

    def build(self, *, path: Path | None = None, seed_offset: int = 0, pad_token_id: int | None = None) -> nn.Module:
        """The model, or the one at `path` without an adapter; another `seed_offset` gives other weights. With
        `pad_token_id` it is a classifier."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        config = self.model if path is None else self.model.model_copy(update={"path": str(path), "lora": None})
        try:
            return load_model(
                config,
                self.vocab_size,
                self.seed + seed_offset,
                eos_token_id=self.end_token_id,
                pad_token_id=pad_token_id,
            )
        except ValueError as error:  # it does not fit the tokenizer
            raise ConfigError(str(error)) from error


class Trainable(Checkpointable, Protocol):
    """What a worker trains: an actor, a critic, a learner from examples."""

    def train(self, batch: DataProto) -> dict[str, float]: ...


class LearnerWorker(Worker):
    """What workers that train have in common. They are made in two steps: `open_rendezvous`, then `build`. A subclass
    has `make`."""

    learner: Trainable
    _config: LearnerConfig
    _strategy: ParallelStrategy
    _rendezvous: Rendezvous | None = None

    def __init__(self, model_spec: ModelSpec, config: LearnerConfig, failures: Path | None = None) -> None:
        """`failures` is the directory for batches with a loss that is not finite."""
        self._model_spec, self._config, self._failures = model_spec, config, failures

    @dispatch("rank_zero")
    def open_rendezvous(self) -> RendezvousAddress:
        """Where the ranks find each other: on the node of the first."""
        self._rendezvous = Rendezvous(
            self.place.node.partition("/")[0]
        )  # what follows tells nodes of one address apart
        return self._rendezvous.address

    @dispatch("broadcast")
    def build(self, where: RendezvousAddress | None, members: Sequence[str]) -> None:
        """Join the others and make the model; alone if there is no rendezvous."""
        ranks = None
        if where is not None:
            place = self.place
            ranks = ProcessGroup(self._rendezvous or where, place.rank, members, tensor_ranks=place.tensor_ranks)
        self._strategy = load_strategy(self._config.strategy)(ranks, precision=self._config.precision)
        try:
            self.learner = self.make(self._strategy)
        except ConfigError:
            raise
        except ValueError as error:  # the model does not fit the ranks
            raise ConfigError(f"{self.place.role}: {error}") from error

    def make(self, strategy: ParallelStrategy) -> Trainable:
        """Make the model, and what trains it."""
        raise NotImplementedError

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        """One train step; what it says is of all ranks."""
        return self.learner.train(batch)

    @dispatch("broadcast")
    def save(self, directory: Path) -> None:
        """Write weights and training state, as files of a checkpoint."""
        self._strategy.save(directory, self.learner)

    @dispatch("broadcast")
    def load_state(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        self._strategy.load(directory, self.learner)

    @dispatch("broadcast")
    def save_model(self, directory: Path) -> None:
        """Write the policy as it is now, for a reference."""
        weights = self._strategy.gather_full(self.learner.module.state_dict(keep_vars=True))
        if not self._strategy.is_first:
            return
        try:
            save_model(directory, self.learner.module, weights)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the reference could not be saved to {directory}: {error}") from error

    @dispatch("broadcast", gather=sum)
    def offload(self) -> int:
        """Free the devices until `reload`; the bytes."""
        return self.learner.offload()

    @dispatch("broadcast")
    def reload(self) -> None:
        """Take weights and optimizer back to the devices."""
        self.learner.reload()

    def close(self) -> None:
        if hasattr(self, "_strategy"):
            self._strategy.ranks.close()


class PolicyWorker(LearnerWorker):
    """A policy that is trained, and under an adapter the reference too. A subclass has `make_policy`."""

    def __init__(
        self, model_spec: ModelSpec, config: LearnerConfig, reference: ReferenceConfig, failures: Path | None = None
    ) -> None:
        super().__init__(model_spec, config, failures)
        self._reference_config = reference

    def make(self, strategy: ParallelStrategy) -> Trainable:
        module = self._model_spec.build()
        learner = self.make_policy(module, strategy)
        adapted = is_adapted(module)
        self._reference = Reference(module, self._reference_config, strategy=strategy) if adapted else None
        return learner

    def make_policy(self, module: nn.Module, strategy: ParallelStrategy) -> Trainable:
        """Make what trains the model."""
        raise NotImplementedError

    @dispatch("split")
    def ref_logprobs(self, batch: DataProto) -> DataProto:
        """The column `ref_logprobs` of the model under the adapter."""
        assert self._reference is not None
        return self._reference.logprobs(batch).select(["ref_logprobs"])


class ActorWorker(PolicyWorker):
    """The policy that is trained on rollouts, and published."""

    bucket_bytes = BUCKET_BYTES
    """Of what is published, so much at once."""
    learner: Actor
    _config: ActorConfig

    def __init__(
        self, model_spec: ModelSpec, config: ActorConfig, reference: ReferenceConfig, failures: Path | None = None
    ) -> None:
        super().__init__(model_spec, config, reference, failures)
        self._broadcast_groups = BroadcastGroups()

    def make_policy(self, module: nn.Module, strategy: ParallelStrategy) -> Actor:
        return Actor(module, self._config, self._model_spec.seed, failures=self._failures, strategy=strategy)

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def cold_start(self, examples: DataProto, settings: ColdStartConfig) -> dict[str, float]:
        """Learn from examples; what the last batch said."""
        module, seed = self.learner.module, self._model_spec.seed
        trainer = Supervised(module, settings.trainer, seed, failures=self._failures, strategy=self._strategy)
        return deque(trainer.fit(examples, passes=settings.passes), maxlen=1).pop()

    @dispatch("split")
    def logprobs(self, batch: DataProto) -> DataProto:
        """The column `old_logprobs`: what the policy says of the batch now."""
        return self.learner.logprobs(batch).select(["old_logprobs"])

    @dispatch("broadcast")
    def add(self, chunk: DataProto) -> None:
        """Add the gradients of one chunk of a train step."""
        self.learner.add(chunk)

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def finish(self) -> dict[str, float]:
        """The end of a train step that came in chunks; what it says is of all ranks."""
        return self.learner.finish()

    @dispatch("rank_zero")
    def module(self) -> nn.Module:
        """The live module, for an engine in the same process."""
        return self.learner.module

    @dispatch("broadcast", gather=lambda found: found[0])
    def store_weights(self) -> StoredWeights | None:
        """Put what is published into the object store. Ranks with shards gather them, and the first one answers."""
        weights = self.learner.weights()
        return StoredWeights.put(weights, self.bucket_bytes) if self._strategy.is_first else None

    @dispatch("broadcast", gather=lambda found: found[0])
    def open_broadcast(self, receivers: int) -> WeightBroadcast | None:
        """Where so many others hear what is published."""
        weights = self.learner.weights()
        return (
            self._broadcast_groups.open(WeightLayout.of(weights, self.bucket_bytes), receivers)
            if self._strategy.is_first
            else None
        )

    @dispatch("broadcast", gather=lambda found: found[0])
    def send_weights(self, broadcast: WeightBroadcast) -> None:
        """Send the weights to every receiver of the broadcast."""
        weights = self.learner.weights()
        if self._strategy.is_first:
            broadcast.send(weights, self._broadcast_groups)

    @dispatch("broadcast")
    def load_weights(self, directory: Path) -> None:
        """Those of a checkpoint, without its training state."""
        load_weights(directory, self.learner.module)


class CriticWorker(LearnerWorker):
    """A critic, with a model of its own."""

    learner: Critic
    _config: CriticConfig

    def make(self, strategy: ParallelStrategy) -> Critic:
        module, seed = self._model_spec.build(seed_offset=1), self._model_spec.seed
        return Critic(module, self._config, seed, failures=self._failures, strategy=strategy)

    @dispatch("split")
    def values(self, batch: DataProto) -> DataProto:
        """The column `values`."""
        return self.learner.values(batch).select(["values"])


class ReferenceWorker(Worker):
    """A policy that does not change. It is loaded when the policy is what it should be measured against."""

    def __init__(self, model_spec: ModelSpec, config: ReferenceConfig) -> None:
        self._model_spec, self._config = model_spec, config
        self._reference: Reference

    @dispatch("broadcast")
    def load(self, directory: Path) -> None:
        """The policy that `save_model` wrote."""
        self._reference = Reference(self._model_spec.build(path=directory), self._config)

    @dispatch("split")
    def logprobs(self, batch: DataProto) -> DataProto:
        """The column `ref_logprobs`."""
        return self._reference.logprobs(batch).select(["ref_logprobs"])


class InferenceWorker(ReplicaWorker):
    """A replica in a process of its own. It has no weights to speak of before some are loaded."""

    def __init__(self, model_spec: ModelSpec, engine: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        name = f"torch-{self.place.data_rank}"
        options = torch_options(engine, eos_token_ids)
        self._replica = TorchReplica(model_spec.build(), name=name, devices=self.place.devices, **options)
        super().__init__(self._replica)

    def close(self) -> None:
        self._replica.close()
