"""Reinforcement learning in environments: the controller program.

    publish the weights -> (validate) -> a batch of whole groups -> advantages -> train -> publish ...
                              lend the shared devices | take them back

A batch may be trained in chunks, each as soon as its groups are whole: then the gradients of all chunks are one update.
With `rollout.alpha` 0 this is on-policy, and one seed is one run. With alpha above 0 the same program is asynchronous:
the next batches are generated while one is trained. Devices that `devices` gives to the actor and to replicas generate
from the last use of the actor to the next one, if that pays (rollout/sharing.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cadenza.data import DataProto
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.sharing import SharedDevices
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.agentic_roles import AgenticRoles
from cadenza.run.config import RunConfig
from cadenza.run.episodes import EpisodeStats, RolloutMode, sample_of
from cadenza.run.inference import Inference
from cadenza.run.pipeline import STOPPED, Pipeline
from cadenza.run.rollouts import (
    NoEpisodes,
    RolloutSnapshots,
    check_rollouts,
    discarded_tokens,
    scheduler_for,
    step_request,
    step_trace,
)


class AgenticPipeline(Pipeline):
    """Reinforcement learning in environments."""

    config_class, roles_class = AgenticConfig, AgenticRoles
    config: AgenticConfig
    roles: AgenticRoles
    rollouts: RolloutScheduler
    inference: Inference
    shared: SharedDevices | None = None
    """None where no device generates and trains alternately."""
    _snapshots: RolloutSnapshots
    _trained_chunks: tuple[DataProto, ...] = ()
    """The chunks of the batch of this step so far."""

    async def program(self) -> None:
        async for step in self.steps():
            await self.publish()
            await self.validate(step)
            await self.checkpoint(step)
            await self.lend()
            async for chunk in self.batch_chunks(step):
                chunk = await self.advantages(chunk)
                await self.learn(chunk)
            if self.progress.ended:
                break
            await self.finish_step()
        if self.config.validation is not None:
            await self.publish()
            await self.validate(self.progress.step, last=True)

    async def publish(self) -> None:
        """The newest weights to the replicas. Turns under way go on from the tokens they have. The version is the
        number of batches that were trained."""
        version, sampler = self.progress.step, self.inference.sampler
        if version == sampler.version:
            return
        with self.timed("publish"):
            with self.timed("deliver"):  # generation goes on meanwhile
                weights = await self.inference.deliver_weights()
            await self.rollouts.suspend()
            if self.config.is_exact:
                self._snapshots.take(version)
            await sampler.load_weights(version, weights)
            await self.rollouts.resume()

    async def validate(self, step: int, *, last: bool = False) -> None:
        """Measure the policy on tasks that are not trained, if it is time. Generation for training goes on."""
        settings = self.config.validation
        if settings is None or (step % settings.every and not last):
            return
        if self.progress.validated == step:  # before the run was resumed, or its tasks ran out
            self.stop_at_target()
            return
        with self.timed("validate"):
            validator = scheduler_for("val", self.config, self.inference)
            try:
                batch = await self.unless_stopped(lambda: validator.get_batch(step_request(step), -1))
            finally:
                await validator.shutdown()
        if batch is None:
            raise NoEpisodes
        episodes: EpisodeStats = batch.meta_info["episodes"]
        self._write_samples(step, "val", episodes)
        self.log(step, episodes.metrics("val"))
        self.progress.validated = step
        self.record_success(episodes.success)

    async def batch_chunks(self, step: int) -> AsyncIterator[DataProto]:
        """The next batch of whole groups, in its chunks. A batch that was begun is taken to its end, which comes early
        where the tasks run out."""
        for size in self.config.chunk_sizes:
            get_chunk = partial(self.rollouts.get_batch, step_request(step), size)
            chunk = await (get_chunk() if self._trained_chunks else self.unless_stopped(get_chunk))
            if chunk is None:
                if not self._trained_chunks:
                    self.progress.ended = "the tasks ran out"
                return
            await self.take_back()
            yield chunk

    async def lend(self) -> None:
        """Let the shared devices generate until the batch is there, if that pays."""
        if self.shared is not None:
            with self.timed("expand"):
                await self.shared.lend()

    async def take_back(self) -> None:
        """The actor is needed: let it have its devices."""
        if self.shared is not None:
            with self.timed("shrink"):
                await self.shared.take_back()

    async def advantages(self, batch: DataProto) -> DataProto:
        """What the estimator makes of the scores."""
        with self.timed("advantages"):
            batch, metrics = await self.roles.advantages(batch)
        self.add_metrics("train", metrics)
        return batch

    async def learn(self, chunk: DataProto) -> None:
        """One train step, or one chunk of it."""
        with self.timed("train"):
            self.add_metrics("train", await self.roles.learn(chunk))
        self._trained_chunks += (chunk,)

    async def finish_step(self) -> None:
        """The end of a train step: its last update, its metrics, samples and trace."""
        chunks, self._trained_chunks = self._trained_chunks, ()
        with self.timed("train"):
            self.add_metrics("train", await self.roles.finish(chunks))
        stats = (await self.inference.sampler.stats()).values()
        episodes = EpisodeStats.merge([chunk.meta_info["episodes"] for chunk in chunks], self.config.samples)
        self.metrics |= chunks[-1].meta_info["metrics"] | discarded_tokens(stats)
        self.metrics |= episodes.staleness(self.progress.step) | episodes.metrics("train")
        self.metrics["time/wait"] = sum(chunk.meta_info["wait_seconds"] for chunk in chunks)
        if self.shared is not None:
            self.metrics |= self.shared.metrics()
        metrics = self.end_step(samples=episodes.count, tokens=episodes.tokens)
        self._write_samples(self.progress.step, "train", episodes)
        generating = len(self.inference.sampler.devices)
        self.run.trace(step_trace(self.config, self.progress.step, metrics, chunks, stats, generating))
        if self.config.validation is None:  # of the weights before: good enough to stop, not to choose a checkpoint
            self.record_success(episodes.success, choose=False)

    def _write_samples(self, step: int, mode: RolloutMode, episodes: EpisodeStats) -> None:
        for trajectory in episodes.shown:
            self.run.sample(sample_of(trajectory, self.roles.codec, step=step, mode=mode))

    # -- from where, to where --------------------------------------------------------------------------------------

    async def start(self) -> None:
        if (settings := self.config.warm_start) is not None:
            self.log(0, await self.roles.warm_start(settings))
        if self.config.needs_reference:
            await self.roles.freeze_reference(self.run.path / "reference")

    @asynccontextmanager
    async def opened(self, checkpoint: Path | None) -> AsyncIterator[None]:
        async with self.roles.inference() as self.inference:
            self.rollouts = scheduler_for("train", self.config, self.inference)
            self._snapshots = RolloutSnapshots(self.run.path / ".rollouts", self.rollouts)
            if checkpoint is not None:
                self.rollouts.restore(checkpoint / "rollouts")
            if devices := self.config.shared_devices:
                groups, roles = self.config.rollout.groups_per_batch, self.roles
                self.shared = SharedDevices(self.rollouts, devices, groups, offload=roles.offload, reload=roles.reload)
            try:
                yield
            finally:
                await self.rollouts.shutdown()
                self._snapshots.close()

    async def restore(self, checkpoint: Path) -> None:
        if self.config.needs_reference:
            await self.roles.load_reference(self.run.path / "reference")
        await super().restore(checkpoint)

    def state(self) -> dict[str, Any]:
        return {"estimator": self.roles.estimator.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.roles.estimator.load_state(state["estimator"])

    async def save(self) -> None:
        await self.take_back()
        await super().save()

    def save_files(self, directory: Path) -> None:
        """A run that the user stops keeps what is finished; else exactness is worth more."""
        stopped = self.progress.ended == STOPPED
        self._snapshots.save(directory / "rollouts", self.progress.step, as_they_are=stopped)

    @classmethod
    async def check_checkpoint(cls, config: RunConfig, checkpoint: Path) -> None:
        assert isinstance(config, AgenticConfig)
        await check_rollouts(config, checkpoint)
