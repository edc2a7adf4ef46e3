"""What programs that learn from rollouts share: publishing, validation, shared devices, the rollouts in checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from cadenza.data import DataProto
from cadenza.rollout.failures import logger
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.sharing import SharedDevices
from cadenza.run.agentic_roles import AgenticRoles
from cadenza.run.config import RunConfig
from cadenza.run.episodes import EpisodeStats, RolloutMode, sample_of
from cadenza.run.inference import Inference
from cadenza.run.pipeline import STOPPED, Pipeline
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.run.rollouts import (
    NoEpisodes,
    RolloutSnapshots,
    check_rollouts,
    named_as_validation,
    scheduler_for,
    step_request,
)


class RolloutPipeline(Pipeline):
    """A program whose batches come from a `RolloutScheduler`, which generates with the weights that it publishes."""

    config_class: ClassVar[type[RunConfig]] = RolloutRunConfig
    roles_class = AgenticRoles
    config: RolloutRunConfig
    roles: AgenticRoles
    rollouts: RolloutScheduler
    inference: Inference
    shared: SharedDevices | None = None
    """None where no device generates and trains alternately."""
    _snapshots: RolloutSnapshots
    _validator: RolloutScheduler | None = None
    """Of all validations: datasets, rewards and their models are opened once."""
    _validation: asyncio.Task[DataProto] | None = None
    """The one that runs, or whose figures are not booked yet. It began with the weights of `progress.validating`."""

    @asynccontextmanager
    async def opened(self, checkpoint: Path | None) -> AsyncIterator[None]:
        async with self.roles.inference() as self.inference:
            processes = self.roles.reward_processes
            self.rollouts = scheduler_for("train", self.config, self.inference, reward_processes=processes)
            self._snapshots = RolloutSnapshots(self.run.path / ".rollouts", self.rollouts)
            try:
                if checkpoint is not None:
                    self.rollouts.restore(checkpoint / "rollouts")
                if devices := self.config.shared_devices:
                    groups, roles = self.config.rollout.groups_per_batch, self.roles
                    self.shared = SharedDevices(
                        self.rollouts, devices, groups, offload=roles.offload, reload=roles.reload
                    )
                yield
            finally:
                if self._validation is not None:
                    self._validation.cancel()
                    await asyncio.wait([self._validation])
                try:
                    if self._validator is not None:
                        await self._validator.shutdown()
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
        """Measure the policy on tasks that are not trained, if it is time. Generation for training goes on; with
        `validation.beside` the program does too, and the figures come when they are there. Those of weights before the
        present ones neither choose the best checkpoint nor end the run: if they reach the target, the present ones are
        measured at once."""
        settings, progress = self.config.validation, self.progress
        if settings is None:
            return
        was_lost = progress.validating >= 0 and self._validation is None  # with the process that ran it
        is_due = last or was_lost or step % settings.every == 0
        if self._validation is not None and (is_due or self._validation.done()):
            await self._finish_validation()
        if progress.validated == step:  # before the run was resumed, or its tasks ran out
            self.stop_at_target()
            return
        if not is_due and not self.has_reached_target:
            return
        progress.validating = step
        self._validation = asyncio.get_running_loop().create_task(self._run_validation(step), name="validation")
        if last or not settings.beside or self.has_reached_target:
            with self.timed("validate"):
                await self._finish_validation()

    async def _run_validation(self, step: int) -> DataProto:
        if self._validator is None:
            self._validator = scheduler_for(
                "val",
                self.config,
                self.inference,
                reward_processes=self.roles.reward_processes,
                beside=self.rollouts,
            )
        else:
            await self._validator.reset()
        with named_as_validation():
            batch = await self._validator.get_batch(step_request(step), -1)
        if batch is None:
            raise NoEpisodes
        return batch

    async def _finish_validation(self) -> None:
        """Wait for the validation under way, and book what it found."""
        task, progress = self._validation, self.progress
        assert task is not None
        batch = await self.unless_stopped(lambda: asyncio.shield(task))
        self._validation = None
        episodes: EpisodeStats = batch.meta_info["episodes"]
        step, progress.validating = progress.validating, -1
        self.write_samples(step, "val", episodes)
        self.log(step, episodes.metrics("val"))
        self._say_what_is_missing(episodes)
        progress.validated = step
        is_present = step == progress.step
        self.record_episodes(episodes, choose=is_present)
        if is_present:
            self.stop_at_target()

    def _say_what_is_missing(self, episodes: EpisodeStats) -> None:
        """Say with the first validation which tasks it has no episodes of, and why there is no pass@k, though several
        samples ask for it."""
        settings = self.config.validation
        if settings is None or self._validator is None or self.progress.validated >= 0:
            return
        tasks = self._validator.ledger.groups_opened
        if missing := tasks - episodes.count // settings.samples:
            logger.warning(
                "%d of %d tasks of the validation gave no episode, and the metrics val/ leave them out. The warnings "
                "before this one say why",
                missing,
                tasks,
            )
        if settings.samples > 1 and not episodes.judged:
            logger.warning(
                "validation.samples is %d, but nothing says which of them are a success, so there is no pass@k; "
                "val/score is their mean. Let the reward return a bool, or Scored(success=...)",
                settings.samples,
            )

    def record_episodes(self, episodes: EpisodeStats, *, choose: bool = True) -> None:
        """Remember how good the policy is, in each domain and in all; see `record_success`."""
        for name, own in episodes.domains.items():
            self.progress.domain(name).record_success(own.success)
        self.record_success(episodes.success, choose=choose)

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
        assert isinstance(config, RolloutRunConfig)
        await check_rollouts(config, checkpoint)
