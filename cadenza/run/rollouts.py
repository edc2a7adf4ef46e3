"""The rollouts of a run: schedulers for training and validation, their snapshots, and what a step took of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.data import DataProto
from cadenza.inference.codec import TextCodec
from cadenza.inference.replica import ReplicaStats
from cadenza.rollout import snapshot
from cadenza.rollout.collate import collate
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.model import prompt_tokens
from cadenza.rollout.records import Trajectory
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.tasks import Domains
from cadenza.rollout.trace import RunStep, trace_groups
from cadenza.run.agentic_roles import AgenticRoles
from cadenza.run.episodes import EpisodeStats, RolloutMode
from cadenza.run.inference import Inference
from cadenza.run.role_names import ACTOR
from cadenza.run.roles import absolute_path
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.run.tokenizer import load_run_codec
from cadenza.training.checkpoint import CheckpointError, step_of


class NoEpisodes(RolloutError):
    """Every task of a validation was given up."""

    def __str__(self) -> str:
        return "the validation has no episode: all of its tasks were given up, see the errors above"


@contextmanager
def named_as_validation() -> Iterator[None]:
    """Errors of the scheduler raised within say that it was the validation's, which has tasks of its own."""
    try:
        yield
    except RolloutError as error:
        raise type(error)(f"in the validation: {error}") from error


def scheduler_for(
    mode: RolloutMode,
    config: RolloutRunConfig,
    inference: Inference,
    *,
    reward_processes: Sequence[WorkerHandle],
    beside: RolloutScheduler | None = None,
) -> RolloutScheduler:
    """The scheduler of a run. Its batches tell of their episodes in `meta_info["episodes"]`, and those of the training
    how long everything in them took in `meta_info["trace"]`. What user code raises is shown once by it and by the one
    `beside` it. `reward_processes` are those of `devices.reward`."""
    rollout, envs = (train_configs if mode == "train" else validation_configs)(config)

    def collator(trajectories: list[Trajectory]) -> DataProto:
        batch = collate(trajectories)
        batch.meta_info["episodes"] = EpisodeStats.of(trajectories, config.samples)
        if mode == "train":
            batch.meta_info["trace"] = trace_groups(trajectories)
        return batch

    scheduler = RolloutScheduler(
        rollout, envs, inference.resources, inference, mode, collator, reward_processes=reward_processes
    )
    if beside is not None:
        scheduler.queue.errors.share_log(beside.queue.errors)
    return scheduler


def step_request(step: int) -> DataProto:
    """What `get_batch` is asked with."""
    return DataProto(meta_info={"global_step": step})


def train_configs(config: RolloutRunConfig) -> tuple[RolloutConfig, EnvManagerConfig]:
    return config.rollout.model_copy(update={"seed": config.seed}), config.env_manager


def validation_configs(config: RolloutRunConfig) -> tuple[RolloutConfig, EnvManagerConfig]:
    """Tasks that are not trained, each tried `validation.samples` times; a group is the tries at one of them."""
    settings = config.validation
    assert settings is not None
    patience = config.rollout.model_dump(include={"stall_seconds", "error_budget", "max_attempts"})
    rollout = RolloutConfig(
        batch_size=settings.samples,
        group_size=settings.samples,
        seed=config.seed + 1,
        slice_tokens=config.rollout.tokens_per_slice,  # turns of both wait in one queue
        **patience,
    )
    return rollout, config.validation_env_manager(settings)


def check_tasks(config: RolloutRunConfig, codec: TextCodec) -> None:
    """Raise what is wrong with the rows of a run; nothing stays open."""
    found = [("train", train_configs(config))]
    if config.validation is not None:
        found.append(("val", validation_configs(config)))
    for mode, (rollout, envs) in found:
        Domains(envs, mode, rollout.seed, prompt_tokens(codec)).close()


async def validate_checkpoint(config: RolloutRunConfig, checkpoint: Path) -> tuple[DataProto, int]:
    """The batch of a validation with the weights of a checkpoint, and their version."""
    version = int(step_of(checkpoint))
    async with AgenticRoles(config) as roles:
        await roles.actor.load_weights(absolute_path(checkpoint))
        async with roles.inference() as inference:
            if version:
                await inference.sampler.load_weights(version, await inference.deliver_weights())
            scheduler = scheduler_for("val", config, inference, reward_processes=roles.reward_processes)
            try:
                with named_as_validation():
                    batch = await scheduler.get_batch(step_request(version), -1)
            finally:
                await scheduler.shutdown()
    if batch is None:
        raise NoEpisodes
    batch.meta_info["codec"] = roles.codec
    return batch, version


# -- snapshots ---------------------------------------------------------------------------------------------------------


async def check_rollouts(config: RolloutRunConfig, checkpoint: Path) -> None:
    """Raise unless the rollouts in a checkpoint fit the config; changes nothing."""
    queue = GroupQueue(*train_configs(config), "train", count_tokens=prompt_tokens(load_run_codec(config)))
    try:
        snapshot.restore(checkpoint / "rollouts", queue)
    finally:
        queue.domains.close()


class RolloutSnapshots:
    """The rollouts in the checkpoints of a run.

    A group that is saved half finished goes on, but with new attempts, which write other tokens. So a run that is to be
    exact takes a snapshot before each batch is begun, and its checkpoints hold that one.
    """

    def __init__(self, directory: Path, rollouts: RolloutScheduler) -> None:
        self._directory, self._rollouts = directory, rollouts
        self._step: int | None = None
        """The step before which the snapshot was taken."""

    def take(self, step: int) -> None:
        """Remember the rollouts as they are between two steps."""
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._directory.mkdir()
            self._rollouts.save(self._directory)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the rollouts could not be saved to {self._directory}: {error}") from error
        self._step = step

    def save(self, directory: Path, step: int, *, as_they_are: bool) -> None:
        """Write the rollouts after `step` into a checkpoint: those of the snapshot, or `as_they_are` with what was
        finished since."""
        if as_they_are or self._step != step:
            directory.mkdir()
            self._rollouts.save(directory)
        else:
            shutil.copytree(self._directory, directory)

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


# -- what a step took --------------------------------------------------------------------------------------------------


def discarded_tokens(stats: Iterable[ReplicaStats]) -> dict[str, float]:
    """Tokens that replicas generated in vain, by cause."""
    found: dict[str, float] = {}
    for replica in stats:
        for cause, tokens in replica.discarded.items():
            name = f"tokens_discarded/{cause}"
            found[name] = found.get(name, 0) + tokens
    return found


def step_trace(
    config: RolloutRunConfig,
    step: int,
    metrics: Mapping[str, float],
    chunks: Sequence[DataProto],
    stats: Iterable[ReplicaStats],
    generating: int,
) -> bytes:
    """What a step asked of the machine and took of it, for `cadenza simulate`. `generating` is the devices that
    generate."""
    costs = None
    for replica in stats:
        if replica.costs is not None:
            limits = {"kv_capacity": replica.kv_capacity, "max_running": config.engine.max_running}
            costs = {**replica.costs._asdict(), **limits}
    return RunStep(
        step=step,
        gpus=_devices_in_use(config, generating),
        seconds=metrics["time/step"],
        wait_seconds=metrics["time/wait"],
        publish_seconds=metrics.get("time/publish", 0.0),
        groups=[group for chunk in chunks for group in chunk.meta_info["trace"]],
        cost=costs,
    ).encode()


def _devices_in_use(config: RolloutRunConfig, generating: int) -> int:
    """Devices that work at the same time."""
    actor = config.devices.get(ACTOR)
    training = len(actor.device_numbers) if actor else 1
    if config.shared_devices:
        return training + generating - len(config.shared_devices)
    return max(training, generating) if config.rollout.alpha == 0 else training + generating
