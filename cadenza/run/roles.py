"""The roles of a run: who computes what, where, and nothing about when.

Each role is a cluster of workers (workers.py), in this process or on Ray; the estimator is the controller's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from cadenza.cluster import Cluster, DeviceMap, PlacementError, ResourceManager, Worker
from cadenza.cluster.placement import AUTO, format_devices
from cadenza.data import DataProto
from cadenza.inference.codec import TokenizerNotFound, load_codec
from cadenza.off_loop import as_async
from cadenza.run.config import ConfigError, RunConfig, WarmStartConfig
from cadenza.run.inference import Inference, InferenceSpec, open_inference
from cadenza.run.warm_start import warm_start_pairs
from cadenza.run.workers import ActorWorker, CriticWorker, LearnerWorker, ModelSpec, ReferenceWorker
from cadenza.training import Estimator, ReferenceConfig
from cadenza.training.strategy import load_strategy


class Roles:
    """The tokenizer, and the clusters of workers: actor, critic, reference, replicas. They live inside `async with`."""

    actor: Cluster[ActorWorker]
    critic: Cluster[CriticWorker] | None = None
    reference: Cluster[ReferenceWorker] | None = None
    """None also where the actor has it, under its adapter."""

    def __init__(self, config: RunConfig, *, failures: Path | None = None) -> None:
        """`failures` is where a batch goes whose loss is not finite."""
        self.config = config
        self._failures = absolute_path(failures) if failures and config.backend == "ray" else failures
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
        self.estimator = Estimator(config.estimator)
        self._model_spec = ModelSpec(
            config.model,
            self.codec.vocab_size,
            self.codec.end_token_id,
            config.seed,
            config.threads or (1 if config.model.path is None else None),
        )
        if self._model_spec.threads is not None:
            torch.set_num_threads(self._model_spec.threads)
        self._map: DeviceMap
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _start(self) -> None:
        config = self.config
        temperature = {"temperature": config.envs.sampling.temperature or 1.0}
        policy = config.actor.model_copy(update=temperature)
        reference = (config.reference or ReferenceConfig()).model_copy(update=temperature)
        self._map = self._place_roles()
        self.actor = await self._start_trainers(
            "actor", ActorWorker, config=policy, reference=reference, failures=self._failures
        )
        if config.critic is not None:
            self.critic = await self._start_trainers(
                "critic", CriticWorker, config=config.critic, failures=self._failures
            )
        if "reference" in self._map:
            self.reference = await self._start_cluster("reference", ReferenceWorker, config=reference)

    def _place_roles(self) -> DeviceMap:
        """Who gets which devices."""
        config = self.config
        roles = {role: config.devices.get(role, "0") for role in config.role_names}
        if open_roles := [role for role, given in config.devices.items() if given.devices == AUTO]:
            raise ConfigError(
                f"devices: 'auto' of {', '.join(open_roles)} is for `cadenza plan CONFIG`, which says what to name here"
            )
        on_ray = config.backend == "ray"
        try:
            resources = ResourceManager.on_ray() if on_ray else ResourceManager(config.device_count)
            self._stack.push_async_callback(resources.shutdown)
            placed = resources.place(roles)
        except PlacementError as error:
            raise ConfigError(f"devices: {error}") from error
        if config.shared_devices and config.engine.kind == "vllm" and getattr(resources, "kind", None) == "CPU":
            raise ConfigError(
                f"devices: actor and inference cannot alternate on {format_devices(config.shared_devices)}: vLLM "
                "cannot sleep on a CPU. Give them devices of their own, or all of them to both"
            )
        return placed

    async def _start_cluster(self, role: str, worker: type[Worker], **init: Any) -> Cluster[Any]:
        cluster = Cluster(role, worker, self._map[role], model_spec=self._model_spec, **init)
        return await self._stack.enter_async_context(cluster)

    async def _start_trainers(self, role: str, worker: type[LearnerWorker], **init: Any) -> Cluster[Any]:
        """Workers that train one model together."""
        cluster = await self._start_cluster(role, worker, **init)
        needs_processes = load_strategy(init["config"].strategy).needs_processes
        where = await cluster.open_rendezvous() if needs_processes or cluster.world_size > 1 else None
        await cluster.build(where, [str(place) for place in cluster.places])
        return cluster

    # -- what the controller asks for ------------------------------------------------------------------------------

    async def warm_start(self, settings: WarmStartConfig) -> dict[str, float]:
        """Learn from examples; what the last batch said."""
        pairs = await as_async(warm_start_pairs)(self.config, settings, self.codec)
        metrics = await self.actor.warm_start(pairs, settings)
        return {f"warm_start/{name}": value for name, value in metrics.items()}

    async def freeze_reference(self, directory: Path) -> None:
        """The policy as it is now is what KL is measured against. It is kept for whoever resumes the run, unless it
        is the model under an adapter."""
        if self.reference is not None:
            await self.actor.save_model(absolute_path(directory))
            await self.load_reference(directory)

    async def load_reference(self, directory: Path) -> None:
        if self.reference is not None:
            await self.reference.load(absolute_path(directory))

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
        found: tuple[DataProto, dict[str, float]] = await as_async(self.estimator.advantages)(batch)
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
        batch_metrics: dict[str, float] = await as_async(self.estimator.metrics)(whole)
        return metrics | batch_metrics

    async def offload(self) -> None:
        """Weights and optimizers off the shared devices."""
        await self._call_on_shared_devices("offload")

    async def reload(self) -> None:
        """Back to them."""
        await self._call_on_shared_devices("reload")

    async def _call_on_shared_devices(self, call: str) -> None:
        for role, cluster in (("actor", self.actor), ("critic", self.critic)):
            if cluster is not None and set(self._map.roles[role].device_numbers) & set(self.config.shared_devices):
                await getattr(cluster, call)()

    async def save(self, directory: Path) -> None:
        """Write the files of actor and critic into a checkpoint."""
        await self.actor.save(absolute_path(directory))
        if self.critic is not None:
            await self.critic.save(absolute_path(directory) / "critic")

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        await self.actor.load_state(absolute_path(directory))
        if self.critic is not None:
            await self.critic.load_state(absolute_path(directory) / "critic")

    def inference(self) -> AbstractAsyncContextManager[Inference]:
        """The engines with the policy in them."""
        config = self.config
        return open_inference(
            InferenceSpec(self.actor, self._map, self.codec, self._model_spec, config.engine, config.sampler)
        )


def absolute_path(directory: Path) -> Path:
    """The directory by a name that means the same in other processes."""
    return directory.absolute()


async def _with_column(ask: Callable[[DataProto], Awaitable[DataProto]], batch: DataProto) -> DataProto:
    """The batch with a column that a worker computes."""
    return batch.union(await ask(_tensors_only(batch)))


def _tensors_only(batch: DataProto) -> DataProto:
    """What workers need of a batch."""
    return batch.select(non_tensor_batch_keys=(), meta_info_keys=())
