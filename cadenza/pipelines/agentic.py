"""Reinforcement learning in environments: the controller program.

    publish the weights -> (validate) -> a batch of whole groups -> advantages -> train -> publish ...
                              lend the shared devices | take them back

A batch may be trained in chunks, each as soon as its groups are whole: then the gradients of all chunks are one update.
With `rollout.alpha` 0 this is on-policy, and one seed is one run. With alpha above 0 the same program is asynchronous:
the next batches are generated while one is trained. Devices that `devices` gives to the actor and to replicas generate
from the last use of the actor to the next one, if that pays (rollout/sharing.py).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from cadenza.data import DataProto
from cadenza.observe.run import RunDirectory
from cadenza.rollout import snapshot
from cadenza.rollout.collate import collate
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.group_queue import GroupQueueManager
from cadenza.rollout.records import Trajectory
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.sharing import SharedDevices
from cadenza.rollout.trace import RunStep, TraceGroup, trace_groups
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.episodes import EpisodeStats, RolloutMode, sample_of
from cadenza.run.inference import Inference
from cadenza.run.roles import Roles, absolute_path
from cadenza.training import Checkpoints
from cadenza.training.checkpoint import CheckpointError, step_of

T = TypeVar("T")
STOPPED = "stopped"
StepListener = Callable[[int, Mapping[str, float]], None]


class RunEnded(Exception):
    """The run ends before its last step; the text says why."""


class NoEpisodes(RolloutError):
    """Every task of a validation was given up."""

    def __str__(self) -> str:
        return "validation has no episode: every task of it was given up, see the errors above"


@dataclass(slots=True)
class RunProgress:
    """How far a run is."""

    step: int = 0
    """Batches trained."""
    samples: int = 0
    """Trajectories trained."""
    success_first: float | None = None
    success_last: float | None = None
    success_best: float | None = None
    validated: int = -1
    """The step after which the policy was last measured."""
    ended: str = ""
    """Why, if not by the last step."""


class AgenticPipeline:
    """One run, from its config to its last checkpoint."""

    def __init__(self, config: RunConfig, run: RunDirectory, *, on_step: StepListener | None = None) -> None:
        self.config = config
        self.run = run
        self.progress = RunProgress()
        self.roles = Roles(config, failures=run.path / "failures")
        self.checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self.rollouts: RolloutScheduler
        self.inference: Inference
        self.shared: SharedDevices | None = None
        """None where no device generates and trains alternately."""
        self._on_step = on_step or (lambda step, metrics: None)
        self._metrics: dict[str, float] = {}
        """Of the step under way."""
        self._trained_chunks: list[DataProto] = []
        """The chunks of its batch so far."""
        self._stop = asyncio.Event()
        self._step_began = 0.0
        self._unsaved_best_score: float | None = None
        """How good the policy is, if it is the best so far and not saved yet."""
        self._saved: int | None = None
        """The step of the last checkpoint."""
        self._rollout_snapshot: tuple[int, Path] | None = None
        """The rollouts as they were between two steps, and after which one."""

    # -- the program -----------------------------------------------------------------------------------------------

    async def train(self, *, resume: Path | None = None) -> RunProgress:
        """Train until the last step, the target or a stop. A checkpoint is written at the end of each of these."""
        async with self.roles:
            await (self.start() if resume is None else self.restore(resume))
            async with self.roles.inference() as self.inference:
                self.rollouts = scheduler_for("train", self.config, self.inference)
                if resume is not None:
                    self.rollouts.restore(resume / "rollouts")
                    self.run.keep_config()
                if devices := self.config.shared_devices:
                    groups, roles = self.config.rollout.groups_per_batch, self.roles
                    self.shared = SharedDevices(
                        self.rollouts, devices, groups, offload=roles.offload, reload=roles.reload
                    )
                try:
                    await self._run_to_end()
                finally:
                    await self.rollouts.shutdown()
                    shutil.rmtree(self.run.path / ".rollouts", ignore_errors=True)
        return self.progress

    async def _run_to_end(self) -> None:
        """The program, and the checkpoint after it."""
        try:
            await self._program()
        except RunEnded as reason:
            self.progress.ended = str(reason)
        except RolloutError:  # what was learned until then is kept
            if self.progress.step and self.progress.step != self._saved:
                await self.save()
            raise
        if self.progress.step != self._saved or self._unsaved_best_score is not None or self.progress.ended == STOPPED:
            await self.save()

    async def _program(self) -> None:
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

    async def steps(self) -> AsyncIterator[int]:
        """The steps that are left."""
        while self.progress.step < self.config.steps:
            self._step_began = time.monotonic()
            yield self.progress.step

    async def publish(self) -> None:
        """The newest weights to the replicas. Turns under way go on from the tokens they have. The version is the
        number of batches that were trained."""
        version, sampler = self.progress.step, self.inference.sampler
        if version == sampler.version:
            return
        with self._timed("publish"):
            with self._timed("deliver"):  # generation goes on meanwhile
                weights = await self.inference.deliver_weights()
            await self.rollouts.suspend()
            self._snapshot_rollouts()
            await sampler.load_weights(version, weights)
            await self.rollouts.resume()

    async def validate(self, step: int, *, last: bool = False) -> None:
        """Measure the policy on tasks that are not trained, if it is time. Generation for training goes on."""
        settings = self.config.validation
        if settings is None or (step % settings.every and not last):
            return
        if self.progress.validated == step:  # before the run was resumed, or its tasks ran out
            self._stop_at_target()
            return
        with self._timed("validate"):
            validator = scheduler_for("val", self.config, self.inference)
            try:
                batch = await self._unless_stopped(lambda: validator.get_batch(_step_request(step), -1))
            finally:
                await validator.shutdown()
        if batch is None:
            raise NoEpisodes
        episodes: EpisodeStats = batch.meta_info["episodes"]
        self._write_samples(step, "val", episodes)
        self._log(step, episodes.metrics("val"))
        self.progress.validated = step
        self._record_success(episodes.success)

    async def batch_chunks(self, step: int) -> AsyncIterator[DataProto]:
        """The next batch of whole groups, in its chunks. A batch that was begun is taken to its end, which comes early
        where the tasks run out."""
        for size in self.config.chunk_sizes:
            if self._trained_chunks:
                chunk = await self.rollouts.get_batch(_step_request(step), size)
            else:
                chunk = await self._unless_stopped(partial(self.rollouts.get_batch, _step_request(step), size))
            if chunk is None:
                if not self._trained_chunks:
                    self.progress.ended = "the tasks ran out"
                return
            await self.take_back()
            yield chunk

    async def lend(self) -> None:
        """Let the shared devices generate until the batch is there, if that pays."""
        if self.shared is not None:
            with self._timed("expand"):
                await self.shared.lend()

    async def take_back(self) -> None:
        """The actor is needed: let it have its devices."""
        if self.shared is not None:
            with self._timed("shrink"):
                await self.shared.take_back()

    async def advantages(self, batch: DataProto) -> DataProto:
        """What the estimator makes of the scores."""
        with self._timed("advantages"):
            batch, metrics = await self.roles.advantages(batch)
        self._metrics |= {f"train/{name}": value for name, value in metrics.items()}
        return batch

    async def learn(self, chunk: DataProto) -> None:
        """One train step, or one chunk of it."""
        with self._timed("train"):
            metrics = await self.roles.learn(chunk)
        self._metrics |= {f"train/{name}": value for name, value in metrics.items()}
        self._trained_chunks.append(chunk)

    async def finish_step(self) -> None:
        """The end of a train step, and its metrics."""
        with self._timed("train"):
            metrics = await self.roles.finish(self._trained_chunks)
        self._metrics |= {f"train/{name}": value for name, value in metrics.items()}
        for stats in (await self.inference.sampler.stats()).values():
            for cause, tokens in stats.discarded.items():
                name = f"tokens_discarded/{cause}"
                self._metrics[name] = self._metrics.get(name, 0) + tokens
        await self._record_step()

    def stop(self) -> None:
        """End as soon as the step under way allows it."""
        self._stop.set()

    # -- from where, to where --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Weights to begin with."""
        if (settings := self.config.warm_start) is not None:
            self._log(0, await self.roles.warm_start(settings))
        if self.config.needs_reference:
            await self.roles.freeze_reference(self.run.path / "reference")

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, as if nothing had happened."""
        if self.config.needs_reference:
            await self.roles.load_reference(self.run.path / "reference")
        await self.roles.load(checkpoint)
        user = self.checkpoints.load(checkpoint, {})  # after the models: making them takes random numbers
        self.progress = RunProgress(**user["progress"])
        self.progress.ended = ""
        self._saved = self.progress.step
        self.roles.estimator.load_state(user["estimator"])

    async def checkpoint(self, step: int) -> None:
        """Save, if it is time or the policy is the best so far."""
        due = step > 0 and step % self.config.checkpoint.every == 0 and step != self._saved
        if due or self._unsaved_best_score is not None:
            with self._timed("checkpoint"):
                await self.save()

    async def save(self) -> None:
        """A checkpoint between two steps."""
        await self.take_back()
        user = {"progress": asdict(self.progress), "estimator": self.roles.estimator.state()}
        with self.checkpoints.writing(self.progress.step, score=self._unsaved_best_score, user=user) as directory:
            await self.roles.save(directory)
            self.roles.codec.save(directory)
            self._save_rollouts(directory / "rollouts")
        self._unsaved_best_score, self._saved = None, self.progress.step

    def _snapshot_rollouts(self) -> None:
        """Remember the rollouts before the next batch is begun. A group that is saved half finished goes on, but with
        new attempts, which write other tokens: a run that is to be exact goes on from here instead."""
        if not self.config.is_exact:
            return
        directory = self.run.path / ".rollouts"
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.mkdir()
            self.rollouts.save(directory)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the rollouts could not be saved to {directory}: {error}") from error
        self._rollout_snapshot = self.progress.step, directory

    def _save_rollouts(self, directory: Path) -> None:
        """A run that somebody stops keeps what is finished; else exactness is worth more."""
        if (
            self._rollout_snapshot is None
            or self._rollout_snapshot[0] != self.progress.step
            or self.progress.ended == STOPPED
        ):
            directory.mkdir()
            self.rollouts.save(directory)
        else:
            shutil.copytree(self._rollout_snapshot[1], directory)

    # -- the metrics -----------------------------------------------------------------------------------------------

    async def _record_step(self) -> None:
        """Record a step in the metrics, the samples and the display."""
        progress, infos = self.progress, [chunk.meta_info for chunk in self._trained_chunks]
        episodes = EpisodeStats.merge([info["episodes"] for info in infos], self.config.samples)
        self._trained_chunks = []
        self._metrics |= infos[-1]["metrics"] | episodes.staleness(progress.step)
        progress.step += 1
        self._write_samples(progress.step, "train", episodes)
        progress.samples += episodes.count
        seconds = time.monotonic() - self._step_began
        self._metrics |= episodes.metrics("train")
        self._metrics |= {
            "samples": progress.samples,
            "time/step": seconds,
            "time/wait": sum(info["wait_seconds"] for info in infos),
            "perf/tokens_per_second": episodes.tokens / seconds,
            "perf/samples_per_second": episodes.count / seconds,
        }
        if self.shared is not None:
            self._metrics |= self.shared.metrics()
        self._log(progress.step, self._metrics)
        self.run.trace(await self._step_trace([group for info in infos for group in info["trace"]]))
        self._metrics = {}
        if self.config.validation is None:  # of the weights before: good enough to stop, not to choose a checkpoint
            self._record_success(episodes.success, choose=False)

    async def _step_trace(self, groups: list[TraceGroup]) -> bytes:
        """What this step asked of the machine and took of it, for who wants to simulate the run."""
        metrics, costs = self._metrics, None
        for stats in (await self.inference.sampler.stats()).values():
            if stats.costs is not None:
                limits = {"kv_capacity": stats.kv_capacity, "max_running": self.config.engine.max_running}
                costs = {**stats.costs._asdict(), **limits}
        return RunStep(
            step=self.progress.step,
            gpus=self._gpus_in_use(),
            seconds=metrics["time/step"],
            wait_seconds=metrics["time/wait"],
            publish_seconds=metrics.get("time/publish", 0.0),
            groups=groups,
            cost=costs,
        ).encode()

    def _gpus_in_use(self) -> int:
        """Devices that work at the same time."""
        actor = self.config.devices.get("actor")
        training, generating = len(actor.device_numbers) if actor else 1, len(self.inference.sampler.devices)
        if self.shared is not None:
            return training + generating - len(self.shared.devices)
        return max(training, generating) if self.config.rollout.alpha == 0 else training + generating

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Adds up the time of one stage of the step, which may come several times."""
        began, name = time.monotonic(), f"time/{name}"
        yield
        self._metrics[name] = self._metrics.get(name, 0.0) + time.monotonic() - began

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(step, metrics)
        self._on_step(step, metrics)

    def _write_samples(self, step: int, mode: RolloutMode, episodes: EpisodeStats) -> None:
        for trajectory in episodes.shown:
            self.run.sample(sample_of(trajectory, self.roles.codec, step=step, mode=mode))

    def _record_success(self, success: float | None, *, choose: bool = True) -> None:
        """Remember how good the policy is, whether it is the best so far, and stop if that is enough."""
        progress = self.progress
        if success is None:
            if self.config.target is not None:
                raise ConfigError("target is a success rate, but no env says 'success' in its info: leave target out")
            return
        progress.success_last = success
        if progress.success_first is None:
            progress.success_first = success
        if progress.success_best is None or success > progress.success_best:
            progress.success_best = success
            self._unsaved_best_score = success if choose else None
        self._stop_at_target()

    def _stop_at_target(self) -> None:
        success, target = self.progress.success_last, self.config.target
        if target is not None and success is not None and success >= target:
            raise RunEnded(f"success {success:.3f} reached the target {target}")

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _unless_stopped(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await it, unless a stop comes before. What is there is not thrown away: a batch counts as trained."""
        if self._stop.is_set():
            raise RunEnded(STOPPED)
        task, stop = asyncio.ensure_future(work()), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RunEnded(STOPPED)
            return task.result()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.wait([task, stop])


async def check_rollouts(config: RunConfig, checkpoint: Path) -> None:
    """Raise unless the rollouts in a checkpoint fit the config; changes nothing."""
    snapshot.restore(checkpoint / "rollouts", GroupQueueManager(*_train_configs(config), "train"))


async def validate_checkpoint(config: RunConfig, checkpoint: Path) -> tuple[DataProto, int]:
    """The batch of a validation with the weights of a checkpoint, and their version."""
    version = int(step_of(checkpoint))
    async with Roles(config) as roles:
        await roles.actor.load_weights(absolute_path(checkpoint))
        async with roles.inference() as inference:
            if version:
                await inference.sampler.load_weights(version, await inference.deliver_weights())
            scheduler = scheduler_for("val", config, inference)
            try:
                batch = await scheduler.get_batch(_step_request(version), -1)
            finally:
                await scheduler.shutdown()
    if batch is None:
        raise NoEpisodes
    batch.meta_info["codec"] = roles.codec
    return batch, version


def scheduler_for(mode: RolloutMode, config: RunConfig, inference: Inference) -> RolloutScheduler:
    """The scheduler of a run. Its batches tell of their episodes in `meta_info["episodes"]`, and those of the training
    how long everything in them took in `meta_info["trace"]`."""
    rollout, envs = (_train_configs if mode == "train" else _validation_configs)(config)

    def collator(trajectories: list[Trajectory]) -> DataProto:
        batch = collate(trajectories)
        batch.meta_info["episodes"] = EpisodeStats.of(trajectories, config.samples)
        if mode == "train":
            batch.meta_info["trace"] = trace_groups(trajectories)
        return batch

    return RolloutScheduler(rollout, envs, inference.resources, inference, mode, collator)


def _step_request(step: int) -> DataProto:
    return DataProto(meta_info={"global_step": step})


def _train_configs(config: RunConfig) -> tuple[RolloutConfig, EnvManagerConfig]:
    return config.rollout.model_copy(update={"seed": config.seed}), config.envs


def _validation_configs(config: RunConfig) -> tuple[RolloutConfig, EnvManagerConfig]:
    """Tasks that are not trained; every episode counts, alone."""
    settings = config.validation
    assert settings is not None
    domains = settings.domains or config.envs.domains
    share, rest = divmod(settings.episodes, len(domains))
    domains = {
        name: domain
        if isinstance(domain.tasks, (list, tuple)) or (settings.domains and domain.tasks is not None)
        else domain.model_copy(update={"tasks": max(1, share + (number < rest))})
        for number, (name, domain) in enumerate(domains.items())
    }
    envs = config.envs.model_copy(
        update={
            "domains": domains,
            "first_seed": settings.first_seed,
            "sampling": settings.sampling or config.envs.sampling,
        }
    )
    patience = config.rollout.model_dump(include={"stall_seconds", "error_budget", "max_attempts"})
    slice_tokens = config.rollout.tokens_per_slice  # turns of both wait in one queue
    return RolloutConfig(batch_size=1, seed=config.seed + 1, slice_tokens=slice_tokens, **patience), envs
