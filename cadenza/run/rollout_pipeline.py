"""What programs that learn from rollouts share: publishing, validation, shared devices, the rollouts in checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.sharing import SharedDevices
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.agentic_roles import AgenticRoles
from cadenza.run.config import RunConfig
from cadenza.run.episodes import EpisodeStats, RolloutMode, sample_of
from cadenza.run.inference import Inference
from cadenza.run.pipeline import STOPPED, Pipeline
from cadenza.run.rollouts import NoEpisodes, RolloutSnapshots, check_rollouts, scheduler_for, step_request


class RolloutPipeline(Pipeline):
    """A program whose batches come from a `RolloutScheduler`, which generates with the weights that it publishes."""

    config_class, roles_class = AgenticConfig, AgenticRoles
    config: AgenticConfig
    roles: AgenticRoles
    rollouts: RolloutScheduler
    inference: Inference
    shared: SharedDevices | None = None
    """None where no device generates and trains alternately."""
    _snapshots: RolloutSnapshots

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
            validator = scheduler_for("val", self.config, self.inference, beside=self.rollouts)
            try:
                batch = await self.unless_stopped(lambda: validator.get_batch(step_request(step), -1))
            finally:
                await validator.shutdown()
        if batch is None:
            raise NoEpisodes
        episodes: EpisodeStats = batch.meta_info["episodes"]
        self.write_samples(step, "val", episodes)
        self.log(step, episodes.metrics("val"))
        self.progress.validated = step
        self.record_success(episodes.success)

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

    def write_samples(self, step: int, mode: RolloutMode, episodes: EpisodeStats) -> None:
        """Write some episodes of a batch out as text."""
        for trajectory in episodes.shown:
            self.run.sample(sample_of(trajectory, self.roles.codec, step=step, mode=mode))

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
