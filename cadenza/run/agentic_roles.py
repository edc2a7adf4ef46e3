"""The roles of a run in environments: actor, critic, reference, rewards, replicas. The estimator needs no worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from cadenza.cluster import Cluster, ResourceManager
from cadenza.cluster.placement import format_devices
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.data import DataProto
from cadenza.off_loop import COMPUTE_POOL, as_async
from cadenza.rollout.reward_process import RewardProcess
from cadenza.run.cold_start import cold_start_examples
from cadenza.run.cold_start_config import ColdStartConfig
from cadenza.run.config import ConfigError
from cadenza.run.engines import find_engine
from cadenza.run.inference import Inference, InferenceSpec, open_inference
from cadenza.run.role_names import ACTOR, CRITIC, REFERENCE, REWARD
from cadenza.run.roles import Roles, local_or_hub
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.run.tokenizer import check_vocabulary
from cadenza.run.workers import ActorWorker, CriticWorker, ReferenceWorker
from cadenza.training import Estimator, ReferenceConfig


class AgenticRoles(Roles):
    """Actor, critic, reference, rewards and estimator; the replicas live inside `async with roles.inference()`."""

    config: RolloutRunConfig
    actor: Cluster[ActorWorker]
    critic: Cluster[CriticWorker] | None = None
    reward_processes: Sequence[WorkerHandle] = ()
    """One on each of `devices.reward`; none where the rewards have no devices."""

    def __init__(self, config: RolloutRunConfig, *, failures: Path | None = None) -> None:
        super().__init__(config, failures=failures)
        self.estimator = Estimator(config.estimator)
        if config.teacher is not None:
            check_vocabulary("reference.path", config.teacher, self.codec)

    async def start(self) -> None:
        config = self.config
        temperature = {"temperature": config.env_manager.sampling.temperature or 1.0}
        policy = config.actor.model_copy(update=temperature)
        reference = (config.reference or ReferenceConfig()).model_copy(update=temperature)
        self.actor = await self.start_trainers(
            ACTOR, ActorWorker, config=policy, reference=reference, failures=self.failures
        )
        if config.critic is not None:
            self.critic = await self.start_trainers(CRITIC, CriticWorker, config=config.critic, failures=self.failures)
        if REFERENCE in self.device_map:
            self.reference = await self.start_cluster(REFERENCE, ReferenceWorker, config=reference)
        if REWARD in self.device_map:
            rewards = Cluster(REWARD, RewardProcess, self.device_map[REWARD])
            self.reward_processes = (await self._stack.enter_async_context(rewards)).worker_handles

    def check_resources(self, resources: ResourceManager) -> None:
        config = self.config
        if not config.shared_devices:
            return
        try:
            find_engine(config.engine.kind).check_sharing(getattr(resources, "kind", None))
        except ValueError as error:
            raise ConfigError(
                f"devices: actor and inference cannot alternate on {format_devices(config.shared_devices)}: {error}. "
                "Give them devices of their own, or all of them to both"
            ) from error

    def inference(self) -> AbstractAsyncContextManager[Inference]:
        """The engines with the policy in them."""
        config = self.config
        return open_inference(
            InferenceSpec(self.actor, self.device_map, self.codec, self.model_spec, config.engine, config.sampler)
        )

    async def cold_start(self, settings: ColdStartConfig) -> dict[str, float]:
        """Learn from examples; what the last batch said."""
        examples = await cold_start_examples(self.config, settings, self.codec)
        metrics = await self.actor.cold_start(examples, settings)
        return {f"cold_start/{name}": value for name, value in metrics.items()}

    async def freeze_reference(self, directory: Path) -> None:
        """A teacher is not what the policy was at first."""
        await (super().freeze_reference(directory) if self.config.teacher is None else self.load_reference(directory))

    async def load_reference(self, directory: Path) -> None:
        if self.reference is None or (teacher := self.config.teacher) is None:
            await super().load_reference(directory)
        else:
            await self.reference.load(local_or_hub(teacher))

    async def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The batch with its advantages, and whatever columns they need."""
        if self.reference is not None:
            batch = await _with_column(self.reference.logprobs, batch)
        elif self.config.needs_reference:
            batch = await _with_column(self.actor.ref_logprobs, batch)
        if self.config.estimator.needs_old_logprobs:
            batch = await _with_column(self.actor.logprobs, batch)
        if self.critic is not None:
            batch = await _with_column(self.critic.values, batch)
        found: tuple[DataProto, dict[str, float]] = await as_async(self.estimator.advantages, COMPUTE_POOL)(batch)
        return found

    async def learn(self, batch: DataProto) -> dict[str, float]:
        """One train step, or a chunk of one, which has no metrics before its end."""
        batch = _tensors_only(batch)
        if self.config.batch_parts > 1:
            await self.actor.add(batch)
            return {}
        metrics: dict[str, float] = await self.actor.train(batch)
        if self.critic is not None:
            metrics |= {f"critic_{name}": value for name, value in (await self.critic.train(batch)).items()}
        return metrics

    async def finish(self, chunks: Sequence[DataProto]) -> dict[str, float]:
        """The end of a train step that came in these chunks; what is to be said of them together."""
        if self.config.batch_parts == 1:
            return {}
        metrics: dict[str, float] = await self.actor.finish()
        whole = DataProto.concat([_tensors_only(chunk) for chunk in chunks])
        batch_metrics: dict[str, float] = await as_async(self.estimator.metrics, COMPUTE_POOL)(whole)
        return metrics | batch_metrics

    async def offload(self) -> None:
        """Weights and optimizers off the shared devices."""
        for cluster in self._trainers_on_shared_devices():
            await cluster.offload()

    async def reload(self) -> None:
        """Back to them."""
        for cluster in self._trainers_on_shared_devices():
            await cluster.reload()

    def _trainers_on_shared_devices(self) -> list[Cluster[ActorWorker | CriticWorker]]:
        shared = set(self.config.shared_devices)
        return [
            cluster
            for role, cluster in self.trainers.items()
            if shared & set(self.device_map.roles[role].device_numbers)
        ]


async def _with_column(ask: Callable[[DataProto], Awaitable[DataProto]], batch: DataProto) -> DataProto:
    """The batch with a column that a worker computes."""
    return batch.union(await ask(_tensors_only(batch)))


def _tensors_only(batch: DataProto) -> DataProto:
    """What workers need of a batch."""
    return batch.select(non_tensor_batch_keys=(), meta_info_keys=())
