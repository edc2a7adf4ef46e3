"""The rollout scheduler: tasks in, batches out.

It owns three things and lets them talk: the group queue decides what runs and what a batch is, the slots (an env worker
in this process, or a fleet of them in others) run it, the sampler (shared, owned by the inference cluster) generates.
Every task of it lives in one task group; when something there fails for good, a caller that waits for a batch gets the
error, and the ledger is balanced.

    get_batch waits for: a cut (a whole group, a published version, the end of the tasks), or the error that ends all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.data import DataProto
from cadenza.errors import InfrastructureError
from cadenza.observe.events import EventSink
from cadenza.off_loop import done_before
from cadenza.rollout import snapshot, token_bundles
from cadenza.rollout.collate import collate
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig, not_whole_groups
from cadenza.rollout.env_worker import EnvWorker
from cadenza.rollout.failures import RolloutError, SchedulerClosed, Stalled, TrajectoriesLost, logger
from cadenza.rollout.fleet import EnvFleet
from cadenza.rollout.group_queue import GroupQueue, Mode
from cadenza.rollout.ledger import Group, Ledger
from cadenza.rollout.metrics import rollout_metrics
from cadenza.rollout.model import Codec, prompt_tokens
from cadenza.rollout.records import Trajectory
from cadenza.rollout.sampler import NoReplicas, Sampler
from cadenza.rollout.slot_pool import SlotPool, SlotSettings


class InferenceCluster(Protocol):
    """What the scheduler needs of the inference cluster."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def codec(self) -> Codec: ...


class RolloutResources(Protocol):
    """What the scheduler needs of the resource manager: its devices and its backend."""

    @property
    def devices(self) -> Sequence[int]: ...

    @property
    def backend(self) -> str:
        """Where env workers run: 'embedded' or 'ray'."""
        ...


Collator = Callable[[list[Trajectory]], DataProto]


CLOCK_NOISE = 1e-6
"""Seconds below which a deadline counts as passed: a wait for so little may end before the clock moves."""


class RolloutScheduler:
    """Manages the life of every single sample: from a task to its place in a batch.

    A synchronous program in one process; as a Ray actor the calls are the same with `.remote`:

        scheduler = RolloutScheduler(RolloutConfig(batch_size=32, group_size=8), envs, cluster.resources, cluster)
        batch = await scheduler.get_batch(batch_size=32)       # four whole groups of eight, rows by task and member
        ...                                                    # train on it
        await scheduler.suspend()                              # no token is being generated
        await cluster.sampler.load_weights(1, weights)         # the version is 1 now
        batch = await scheduler.get_batch(batch_size=32)       # opens the gate; turns go on from their tokens
        print(scheduler.why("guess/7"))                        # the life of one task, attempt by attempt
        await scheduler.shutdown()                             # what is not consumed is `cancelled`

    Nothing starts before the first call, and a cancelled `get_batch` has taken nothing.
    """

    def __init__(
        self,
        config: RolloutConfig,
        env_manager_config: EnvManagerConfig,
        resource_manager: RolloutResources,
        infer_cluster: InferenceCluster,
        mode: Mode = "train",
        collator: Collator | None = None,
        *,
        events: EventSink | None = None,
        reward_processes: Sequence[WorkerHandle] = (),
    ) -> None:
        """`reward_processes` are the workers of a cluster of `RewardProcess`, which compute the rewards; without any
        they are computed as `env_manager_config` says."""
        if mode not in ("train", "val"):
            raise ValueError(f"mode must be 'train' or 'val', got '{mode}'")
        self.config = config
        self.mode = mode
        self.sampler = infer_cluster.sampler
        codec = infer_cluster.codec
        self.queue = GroupQueue(config, env_manager_config, mode, events=events, count_tokens=prompt_tokens(codec))
        self._resources = resource_manager
        self._collate = collator or collate
        kind: Callable[..., SlotPool] = EnvFleet if env_manager_config.workers else EnvWorker
        settings = SlotSettings(
            codec=codec,
            backend=resource_manager.backend,
            seed=config.seed,
            max_reward_tries=config.max_attempts,
            slice_tokens=config.tokens_per_slice,
            is_training=mode == "train",
            reward_processes=reward_processes,
        )
        self._slots: SlotPool = kind(env_manager_config, settings, self.queue, self.sampler, self._start_task)
        self.queue.start_task = lambda coroutine: self._start_task(coroutine, "group filter")
        self._uncollated: list[Group] = []
        self._batch_lock = asyncio.Lock()
        self._suspensions = 0
        """Calls of `suspend`. `get_batch` and `resume` compare it before and after their awaits, and leave the sampler
        suspended if one came in between."""
        self._has_told_of_expand = False
        self._tasks: asyncio.TaskGroup | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        self._closing = asyncio.Event()

    # -- the controller's calls ----------------------------------------------------------------------------------

    async def get_batch(self, data: DataProto | None = None, batch_size: int = -1) -> DataProto | None:
        """Returns the next `batch_size` trajectories in whole groups, for the newest published version; -1 is
        everything until the tasks run out. The last batch may be short; None means that nothing was available. Opens
        the gate if this scheduler has suspended it. No prompts are taken from `data`: only the step label,
        `data.meta_info["global_step"]`, which the batch keeps; without `data` the label is the version."""
        groups = self._group_count(batch_size)
        labels = {} if data is None else data.meta_info
        if data is not None and not isinstance(labels.get("global_step"), int):
            raise ValueError(f"data.meta_info['global_step'] must be an int, got {labels.get('global_step')!r}")
        loop = asyncio.get_running_loop()
        asked, suspensions = loop.time(), self._suspensions
        await self._start()
        await self.sampler.refresh()
        if suspensions == self._suspensions:  # else a suspension that was asked for later is already under way
            opening = self.sampler.begin_resume(holder=self)
            if opening is not None:  # a batch that is ready does not wait for it
                opening.add_done_callback(self._on_gate_opened)
        async with self._batch_lock:
            cut = self._uncollated or await self._wait_for_batch(groups)
            if not cut:
                return None
            self._uncollated = cut  # a collator that raises loses nothing: the next call gets the same groups
            attempts = [a for group in cut for a in sorted(group.finished, key=lambda a: a.member)]
            trajectories = [a.trajectory for a in attempts if a.trajectory is not None]
            await self._load_turns(trajectories)
            batch = self._collate(trajectories)
            self._uncollated = []
            for attempt in attempts:
                attempt.trajectory = None
            version = cut[0].batch_version
            batch.meta_info.update({"global_step": version, **labels, "version": version})
            batch.meta_info["wait_seconds"] = loop.time() - asked
            batch.meta_info["metrics"] = self.metrics()
            return batch

    async def reset(self) -> None:
        """Start the next pass over the tasks. Cancels nothing: raises `RolloutError` while groups are open, so call it
        once `get_batch` has given all tasks. They come in the same order, for the next validation or the next pass of
        the training. A batch that is being taken is awaited first."""
        await self._start()
        async with self._batch_lock:
            if self._uncollated:
                raise RolloutError("reset while a batch is cut and was not handed over: call get_batch first")
            self.queue.reset()

    async def suspend(self) -> None:
        """Close the gate; returns when no token is being generated, here and in whatever shares the sampler. It
        stays closed until this scheduler resumes or takes a batch."""
        if self._closing.is_set():
            raise SchedulerClosed("the scheduler was shut down")
        self._suspensions += 1
        await self.sampler.suspend(self.config.suspend_mode, holder=self)

    async def resume(self) -> None:
        """Open the gate; turns go on from the tokens they had."""
        suspensions = self._suspensions
        await self._start()
        if suspensions == self._suspensions:
            await self.sampler.resume(holder=self)

    async def shrink_sampler(self, target_gpus: Sequence[int]) -> dict[str, Any]:
        """Take the replicas off these devices; their requests move to the others with their tokens. If none is left,
        generation waits for the next expand. Devices that are asleep already are `unchanged` in the answer."""
        self._check_devices(target_gpus)
        return await self.sampler.shrink(target_gpus)

    async def expand_sampler(self, target_gpus: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        """Bring the replicas on these devices back. Those that are active already are `unchanged` in the answer."""
        self._check_devices(target_gpus)
        return await self.sampler.expand(target_gpus, skip_load)

    async def shutdown(self) -> None:
        """End everything. What is not consumed is cancelled, envs and datasets are closed, callers that wait get
        `SchedulerClosed`."""
        self.queue.end_run(SchedulerClosed("the scheduler was shut down"))
        self.queue.domains.close()  # after `end_run` no task is drawn
        if self._on_version in self.sampler.on_version:
            self.sampler.on_version.remove(self._on_version)
            self.sampler.on_lost.remove(self._on_replica_lost)
            self.sampler.on_all_shrunk.remove(self._say_that_all_are_shrunk)
        if self.sampler.is_held_by(self):
            with suppress(NoReplicas, InfrastructureError):  # a sampler that is gone has no gate
                await self.sampler.resume(holder=self)
        self._closing.set()
        if self._run_task is not None:
            await asyncio.wait([self._run_task], timeout=self._slots.max_stop_seconds)
            self._slots.close()
            if not self._run_task.done():
                logger.error("%d attempts do not end; they are left behind", self._slots.busy)
                self._run_task.cancel()
            elif not self._run_task.cancelled() and self._started.is_set():  # else whoever started it has the error
                self._run_task.result()

    # -- over a restart ------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Write into this directory what another process needs to go on: the position in the order of the tasks, the
        finished rollouts, the counters. Generation may be under way. A batch that `get_batch` gave out counts as
        trained: save after its train step. Called on the loop."""
        if (error := self.queue.fatal_error) is not None:
            raise SchedulerClosed(f"nothing is left to save, the rollouts have ended: {error}") from error
        groups = [*self.ledger.open_groups(), *self._uncollated]
        try:
            token_bundles.load_now(trajectory for group in groups for trajectory in group.trajectories)
        except InfrastructureError:
            for group in self.ledger.open_groups():
                try:
                    token_bundles.load_now(group.trajectories)
                except InfrastructureError as error:
                    logger.error("g%d is lost with what its members had finished: %s", group.id, error)
                    self.queue.redraw_lost_group(group)
            token_bundles.load_now(trajectory for group in self._uncollated for trajectory in group.trajectories)
        snapshot.save(directory, self.queue, self._uncollated)

    def restore(self, directory: Path) -> None:
        """Go on from what `save` wrote, with the same config; before the first call. The version that was published
        then (`queue.version`), or the next one if its batch was trained, must be published before the first batch is
        asked for. Called on the loop."""
        if self._run_task is not None or self.queue.fatal_error or self.ledger.groups_opened:
            raise RuntimeError("restore goes before the first call: this scheduler has begun; make a new one")
        self._uncollated = snapshot.restore(directory, self.queue)

    # -- what an operator asks -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self.queue.ledger

    def why(self, id: str | int) -> str:
        """The life of a task, a group or an attempt."""
        story = self.ledger.why(id)
        rest = self.queue.domains.explain_rest(str(id))
        return f"{story}\n{id} {rest}" if rest else story

    def metrics(self) -> dict[str, float]:
        """All counters, flat."""
        return rollout_metrics(self.queue, self._slots, self.sampler)

    # -- inside --------------------------------------------------------------------------------------------------

    def _group_count(self, batch_size: int) -> int | None:
        if batch_size == -1:
            self.queue.refuse_endless_tasks()
            return None
        if not isinstance(batch_size, int) or batch_size <= 0:
            raise ValueError(f"batch_size must be positive, or -1 for everything, got {batch_size!r}")
        if batch_size % self.config.group_size:
            raise ValueError(not_whole_groups("batch_size", batch_size, self.config.group_size))
        return batch_size // self.config.group_size

    def _check_devices(self, gpus: Sequence[int]) -> None:
        devices = self._resources.devices
        if unknown := sorted(set(gpus) - set(devices)):
            raise ValueError(f"target_gpus {unknown} do not exist; the resource manager has {list(devices)}")

    async def _start(self) -> None:
        if self._closing.is_set():
            raise SchedulerClosed("the scheduler was shut down")
        if self._run_task is not None:
            await self._wait_until_started()
            return
        await self.sampler.refresh()
        if self._closing.is_set() or self._run_task is not None:  # another call was faster
            await self._start()
            return
        if self.sampler.version < self.queue.version:
            raise RuntimeError(
                f"the rollouts were saved at version {self.queue.version}, but the replicas have version "
                f"{self.sampler.version}: publish the saved weights first (sampler.load_weights({self.queue.version}))"
            )
        self.sampler.on_version.append(self._on_version)
        self.sampler.on_lost.append(self._on_replica_lost)
        self.sampler.on_all_shrunk.append(self._say_that_all_are_shrunk)
        self._run_task = asyncio.get_running_loop().create_task(self._run(), name=f"scheduler {self.mode}")
        await self._wait_until_started()

    async def _wait_until_started(self) -> None:
        """Wait until attempts can run, or for what prevents it."""
        assert self._run_task is not None
        if not self._started.is_set():
            await done_before(self._run_task, asyncio.ensure_future(self._started.wait()))
            if self._run_task.done():
                self._run_task.result()

    async def _run(self) -> None:
        """Keep the task group open until the end."""
        await self._slots.open()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.queue.advance(self.sampler.version)
            self.queue.filter_restored()
            self._slots.fill()
            self._started.set()
            await self._closing.wait()
            await self._slots.drain()

    def _start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self._tasks is None:
            raise RuntimeError("the scheduler has not started")
        try:
            return self._tasks.create_task(coroutine, name=name)
        except RuntimeError:  # the group is going down
            coroutine.close()
            raise

    async def _wait_for_batch(self, groups: int | None) -> list[Group]:
        """Take a batch, but notice when nothing moves any more, or when a bug ended the task group."""
        assert self._run_task is not None
        loop = asyncio.get_running_loop()
        asked, stall_seconds = loop.time(), self.config.stall_seconds
        with self.queue.awaiting(groups):
            self._has_told_of_expand = False
            while (batch := self.queue.cut()) is None:
                left = stall_seconds - (loop.time() - max(asked, self.queue.last_end_time, self.sampler.opened_at))
                if left <= CLOCK_NOISE and not self.sampler.waits_for:
                    self.queue.end_run(Stalled(self._stall_message()))
                    continue
                if self.sampler.waits_for == "expand":
                    self._say_that_all_are_shrunk()
                either: list[asyncio.Future[Any]] = [self.queue.changed(), self._run_task]
                timeout = left if left > CLOCK_NOISE else stall_seconds
                await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if self._run_task.done():
                    self.queue.end_run(SchedulerClosed("the scheduler ended"))
                    self._run_task.result()
            return batch

    def _say_that_all_are_shrunk(self) -> None:
        """Once for each `get_batch` that waits."""
        if self.queue.is_awaited and not self._has_told_of_expand:
            self._has_told_of_expand = True
            logger.warning(
                "get_batch waits for an expand: all devices of the sampler were shrunk (%s)",
                dict(self.sampler.devices),
            )

    async def _load_turns(self, trajectories: list[Trajectory]) -> None:
        """Fetch the turns to this process. A group with lost turns is dropped, and `TrajectoriesLost` is raised."""
        try:
            await token_bundles.load(trajectories)
        except InfrastructureError as error:
            whole, self._uncollated = self._uncollated, []
            for group in whole:
                with suppress(InfrastructureError):
                    await token_bundles.load(group.trajectories)
                    self._uncollated.append(group)
            raise TrajectoriesLost(
                f"{len(whole) - len(self._uncollated)} of the {len(whole)} groups of this batch are lost: {error}; "
                "the next get_batch gives the others"
            ) from error

    def _stall_message(self) -> str:
        groups, devices = self.ledger.open_groups(), dict(self.sampler.devices)
        inactive = ""
        if "active" not in devices.values():
            inactive = f"; no device of the sampler is active: {devices}; expand those that are asleep"
        names = ", ".join(f"g{group.id} ({len(group.live)} live, {group.state.value})" for group in groups[:10])
        return (
            f"no attempt ended for stall_seconds {self.config.stall_seconds}, with {self._slots.busy} slots busy and "
            f"{len(groups)} groups open: {names}; `why` tells more of each{inactive}"
        )

    def _on_gate_opened(self, opening: asyncio.Task[None]) -> None:
        error = None if opening.cancelled() else opening.exception()
        if isinstance(error, RolloutError):
            self.queue.end_run(error)

    def _on_version(self, version: int) -> None:
        if self._tasks is not None:  # else the start looks at the version, when there are slots to fill
            self.queue.advance(version)

    def _on_replica_lost(self, name: str, cause: str) -> None:
        if all(state == "lost" for state in self.sampler.devices.values()):
            self.queue.end_run(NoReplicas(f"no replica is left to generate; the last one, {name}, was lost: {cause}"))
