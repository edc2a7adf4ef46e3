"""The workers of a run in one process: who computes what, and nothing about when."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cadenza.data import DataProto
from cadenza.inference.codec import TextCodec, TokenizerNotFound, load_codec
from cadenza.inference.torch_engine import TorchReplica
from cadenza.pipelines.config import ConfigError, RunConfig, WarmStart
from cadenza.pipelines.warm_start import warm_start_pairs
from cadenza.rollout.sampler import Sampler
from cadenza.training import Actor, Critic, Estimator, Reference, ReferenceConfig, Supervised, load_model
from cadenza.training.checkpoint import CheckpointError
from cadenza.training.models import is_adapted, save_model


@dataclass(frozen=True, slots=True)
class Inference:
    """The inference cluster, as the schedulers want it."""

    sampler: Sampler
    codec: TextCodec
    engine: TorchReplica


class Parts:
    """Tokenizer, policy, and what trains it."""

    def __init__(self, config: RunConfig, *, failures: Path | None = None) -> None:
        """`failures` is where a batch goes whose loss is not finite."""
        self.config = config
        self._failures = failures
        if threads := config.threads or (1 if config.model.path is None else None):
            torch.set_num_threads(threads)
        tokenizer = config.tokenizer
        try:
            self.codec = load_codec(
                tokenizer.path or config.model.path,
                template=tokenizer.template,
                system=tokenizer.system,
                template_options=tokenizer.template_options,
            )
        except TokenizerNotFound as error:
            raise ConfigError(f"{'tokenizer' if tokenizer.path else 'model'}.path: {error}") from error
        except ValueError as error:  # it does not fit the template
            raise ConfigError(f"tokenizer: {error}") from error
        seed = config.seed
        try:
            model = load_model(config.model, self.codec.vocab_size, seed, eos_token_id=self.codec.end_token_id)
        except ValueError as error:  # it does not fit the tokenizer
            raise ConfigError(str(error)) from error
        policy = config.actor.model_copy(update={"temperature": config.envs.sampling.temperature or 1.0})
        self.actor = Actor(model, policy, seed, failures=failures)
        self.critic: Critic | None = None
        if config.critic is not None:
            body = load_model(config.model, self.codec.vocab_size, seed + 1, eos_token_id=self.codec.end_token_id)
            self.critic = Critic(body, config.critic, seed, failures=failures)
        self.reference: Reference | None = None
        self.estimator = Estimator(config.estimator)

    @property
    def trained(self) -> Mapping[str, Any]:
        """What a checkpoint holds."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def freeze_reference(self, directory: Path) -> None:
        """The policy as it is now is what KL is measured against. It is kept for whoever resumes the run, unless it
        is the model under an adapter."""
        self.reference = Reference.of(self.actor.module, self._reference_config)
        if is_adapted(self.actor.module):
            return
        try:
            save_model(directory, self.actor.module)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the reference could not be saved to {directory}: {error}") from error

    def load_reference(self, directory: Path) -> None:
        if is_adapted(self.actor.module):
            self.reference = Reference.of(self.actor.module, self._reference_config)
            return
        model = self.config.model.model_copy(update={"path": str(directory)})
        self.reference = Reference(load_model(model, self.codec.vocab_size, self.config.seed), self._reference_config)

    @property
    def _reference_config(self) -> ReferenceConfig:
        settings = self.config.reference or ReferenceConfig()
        return settings.model_copy(update={"temperature": self.actor.config.temperature})

    def warm_start(self, plan: WarmStart) -> dict[str, float]:
        """Learn from examples; what the last batch said."""
        pairs = warm_start_pairs(self.config, plan, self.codec)
        trainer = Supervised(self.actor.module, plan.trainer, self.config.seed, failures=self._failures)
        last = deque(trainer.fit(pairs, passes=plan.passes), maxlen=1).pop()
        return {f"warm_start/{name}": value for name, value in last.items()}

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The batch with its advantages, and whatever columns they need."""
        if self.reference is not None:
            batch = self.reference.logprobs(batch)
        if self.estimator.needs_old_logprobs:
            batch = self.actor.logprobs(batch)
        if self.critic is not None:
            batch = self.critic.values(batch)
        return self.estimator.advantages(batch)

    def learn(self, batch: DataProto) -> dict[str, float]:
        """One train step."""
        metrics = self.actor.train(batch)
        if self.critic is not None:
            metrics |= {f"critic_{name}": value for name, value in self.critic.train(batch).items()}
        return metrics

    @asynccontextmanager
    async def inference(self) -> AsyncIterator[Inference]:
        """The engine with the policy in it."""
        engine = self.config.engine
        replica = TorchReplica(
            self.actor.module,
            eos_token_ids=self.codec.eos_token_ids,
            max_running=engine.max_running,
            kv_tokens=engine.kv_tokens,
            prefill_tokens=engine.prefill_tokens,
            keep_kv=engine.keep_kv,
            threads=engine.threads,
        )
        sampler = Sampler([replica], self.config.sampler)
        try:
            yield Inference(sampler, self.codec, replica)
        finally:
            await sampler.close()
            replica.close()
