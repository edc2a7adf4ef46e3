"""Slots in other processes: a fleet of env workers.

Invariant: as in env_worker.py, a slot is free or runs one attempt, and it is freed once. Here the queue and its ledger
decide; an env worker only tells. One that dies, or is silent, costs the attempts that ran on it: they fail as
infrastructure and are tried again on the others, what was granted to it is given back, and another one replaces it.
What it finished before is kept: that belongs to the scheduler.

    fill() --AttemptLease--> env worker: env, rollout function, reward --SlotFreed, TrajectoryRecord--> put()
    wakes fill: a vacated slot, a handed-back or retried group, a published version, a taken batch, a new worker
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import Any

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.off_loop import done_before, with_deadline
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.env_worker import sampling_key
from cadenza.rollout.env_worker_process import (
    AttemptFailed,
    AttemptLease,
    EnvWorkerCounters,
    EnvWorkerCrashed,
    EnvWorkerSpec,
    SlotFreed,
    StopAttempt,
    UserCodeRaised,
)
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.fleet_worker import FleetWorker, ReceivedRecord, RemoteAttempt
from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.ledger import Attempt, AttemptState
from cadenza.rollout.sampler import ReplicaAddress, Sampler
from cadenza.rollout.slot_pool import SlotSettings, StartTask
from cadenza.rollout.token_bundles import LazyTrajectory, TokenBundle, TrajectoryRecord

RETRY_SECONDS = 60.0
"""Between two tries to replace a worker that died."""
MAX_LOSSES = 3
"""Of every worker, in a row and without one trajectory in between, before the run ends."""


class NoEnvWorkers(RolloutError):
    """No env worker is left, and none can be started."""


class EnvFleet:
    """Runs attempts in the slots of env workers."""

    def __init__(
        self,
        config: EnvManagerConfig,
        settings: SlotSettings,
        queue: GroupQueue,
        sampler: Sampler,
        start_task: StartTask,
    ) -> None:
        self.config = config
        self.busy = 0
        self.lost = 0
        """Env workers that died."""
        self._queue = queue
        self._sampler = sampler
        self._start_task = start_task
        self._settings = settings
        self._namespace = sampler.allocate_ids()
        self._workers: list[FleetWorker] = []
        self._past_counters = EnvWorkerCounters()
        """Of workers that are gone."""
        self._starting = 0
        self._losses_in_a_row = 0
        self._is_closed = False
        self._draining = asyncio.Event()
        self._empty: asyncio.Future[None] | None = None
        queue.on_stop = self.stop
        queue.on_work = self.fill

    @property
    def leaked_envs(self) -> int:
        return self._past_counters.leaked_envs + sum(worker.counters.leaked_envs for worker in self._workers)

    @property
    def expired_leases(self) -> int:
        return self._past_counters.expired_leases + sum(worker.counters.expired_leases for worker in self._workers)

    @property
    def judge_calls(self) -> int:
        return self._past_counters.judge_calls + sum(worker.counters.judge_calls for worker in self._workers)

    @property
    def judge_tokens(self) -> int:
        return self._past_counters.judge_tokens + sum(worker.counters.judge_tokens for worker in self._workers)

    async def open(self) -> None:
        """Start all workers, or none is left."""
        count, each = self.config.workers, self.config.slots / self.config.workers
        bounds = [round(number * each) for number in range(count + 1)]
        workers = [
            FleetWorker(number, list(reversed(range(first, end))))
            for number, (first, end) in enumerate(pairwise(bounds))
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._start_worker(worker), name=f"start of env worker {worker.number}")
        except BaseExceptionGroup as errors:
            await self._close_rewards(workers)
            for worker in workers:
                if worker.handle is not None:
                    worker.handle.kill()
            raise errors.exceptions[0] from None
        for worker in workers:
            self._add_worker(worker)

    def fill(self) -> None:
        """Give every free slot work, as long as there is any; the emptiest worker first."""
        while self._workers:
            worker = max(self._workers, key=_free_slots)
            if not worker.free or (attempt := self._queue.issue(worker.free[-1])) is None:
                return
            worker.free.pop()
            self.busy += 1
            worker.attempts[attempt.id] = RemoteAttempt(attempt)
            attempt.stage = "env worker"
            attempt.runner = worker
            group = attempt.group
            worker.channel.send(AttemptLease(attempt.id, group.id, group.task, attempt.member, attempt.number))

    def stop(self, attempt: Attempt) -> None:
        """The attempt has its fate: end it."""
        worker = attempt.runner
        if not isinstance(worker, FleetWorker) or (remote := worker.attempts.get(attempt.id)) is None:
            return
        assert attempt.fate is not None
        worker.channel.send(StopAttempt(attempt.id, attempt.fate, attempt.cause))
        if remote.is_slot_free:
            del worker.attempts[attempt.id]

    async def drain(self) -> None:
        """Wait until every slot is free, and close the rewards."""
        self._draining.set()
        if self.busy:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty
        await self._close_rewards(self._workers)

    def close(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    @property
    def max_stop_seconds(self) -> float:
        """How long attempts that are stopped may take to end."""
        return 2 * self.config.close_seconds

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _start_worker(self, worker: FleetWorker) -> None:
        config = self.config
        slots = len(worker.free)
        domains = {name: domain.model_copy(update={"tasks": None}) for name, domain in config.domains.items()}
        spec = EnvWorkerSpec(
            name=f"env-worker-{self._namespace}-{worker.number}-{self.lost}",
            config=config.model_copy(update={"domains": domains, "slots": slots, "workers": 0}),
            settings=self._settings,
            replicas=self._addresses(),
            namespace=self._namespace,
        )
        self._starting += 1
        try:
            await worker.start(
                spec,
                self._sampler,
                on_message=lambda message: self._on_message(worker, message),
                on_lost=lambda error: self._on_worker_lost(worker, error),
            )
        finally:
            self._starting -= 1

    async def _close_rewards(self, workers: Sequence[FleetWorker]) -> None:
        """Let workers close their rewards. They end all the same, so what goes wrong is logged."""
        calls = [worker.handle.call("close_rewards") for worker in workers if worker.handle is not None]
        ends = [with_deadline(self.max_stop_seconds, call, "close_seconds") for call in calls]
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:
                logger.warning("an env worker did not close its rewards: %s", error)

    def _addresses(self) -> Sequence[ReplicaAddress]:
        known = self._sampler.addresses
        if self._settings.backend == "ray" and (
            here := [a.name for a in known if not isinstance(a.endpoint, WorkerHandle)]
        ):
            raise ValueError(
                f"env workers on Ray cannot reach the replicas {', '.join(here)}, which are in this process: "
                "set workers to 0, or start the replicas as workers of a cluster"
            )
        return known

    def _on_worker_lost(self, worker: FleetWorker, error: Exception) -> None:
        if self._is_closed:
            return
        logger.warning("env worker %d is lost with %d attempts: %s", worker.number, len(worker.attempts), error)
        self._workers.remove(worker)
        worker.close()
        self.lost += 1
        self._losses_in_a_row += 1
        self._past_counters = EnvWorkerCounters(
            *(a + b for a, b in zip(self._past_counters, worker.counters, strict=True))
        )
        slots = [remote.attempt.slot for remote in worker.attempts.values() if not remote.is_slot_free] + worker.free
        for remote in worker.attempts.values():
            if not remote.is_slot_free:
                self._queue.release_slot(remote.attempt)
                self.busy -= 1
        for remote in list(worker.attempts.values()):  # a failure may retire its task, and stop others of them
            if remote.attempt.fate is None:
                self._queue.fail(remote.attempt, "env worker lost", str(error)[:200], tries_used=0.25)
            remote.attempt.runner = None
        self._resolve_if_empty()
        if self._losses_in_a_row > MAX_LOSSES * self.config.workers:
            self._queue.end_run(
                NoEnvWorkers(f"{self._losses_in_a_row} env workers died in a row, the last one: {error}")
            )
        elif self._queue.fatal_error is None:
            successor = FleetWorker(worker.number, slots)
            self._start_task(self._replace_worker(successor), f"start of env worker {worker.number}")

    async def _replace_worker(self, worker: FleetWorker) -> None:
        """Start a worker anew, again and again, until it runs or the run ends."""
        while self._queue.fatal_error is None and not self._draining.is_set():
            try:
                if await self._unless_draining(self._start_worker(worker)):
                    self._add_worker(worker)
                    self.fill()
                    return
            except Exception as error:  # noqa: BLE001 - a node may be full, or have other versions: the next try may meet another
                if not self._workers and not self._starting:
                    self._queue.end_run(NoEnvWorkers(f"no env worker is left, and none can be started: {error}"))
                    return
                logger.error(
                    "env worker %d cannot be started again, the next try is in %g s: %s: %s",
                    worker.number,
                    RETRY_SECONDS,
                    type(error).__name__,
                    error,
                )
                await self._unless_draining(asyncio.sleep(RETRY_SECONDS))

    async def _unless_draining(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it was done; what is not is broken off."""
        doing = asyncio.ensure_future(work)
        try:
            await done_before(self._draining, doing)
        finally:
            if not doing.done():
                await asyncio.wait([doing])
        if doing.cancelled():
            return False
        doing.result()
        return True

    def _add_worker(self, worker: FleetWorker) -> None:
        if self._is_closed:
            if worker.handle is not None:
                worker.handle.kill()
        else:
            self._workers.append(worker)
            worker.channel.open()

    # -- what they tell --------------------------------------------------------------------------------------------

    def _on_message(self, worker: FleetWorker, message: Any) -> None:
        try:
            self._handle_message(worker, message)
        except Exception as error:  # noqa: BLE001 - a bug, which ends the run with its traceback
            trace = "".join(traceback.format_exception(error))
            self._queue.end_run(RolloutError(f"what env worker {worker.number} says cannot be booked:\n{trace}"))

    def _handle_message(self, worker: FleetWorker, message: Any) -> None:
        if worker.grant_server.receive(message):
            return
        if isinstance(message, ReceivedRecord):
            self._on_attempt_finished(worker, message.record, message.bundle)
        elif isinstance(message, SlotFreed):
            self._on_slot_freed(worker, message)
        elif isinstance(message, AttemptFailed):
            self._on_attempt_failed(worker, message)
        elif isinstance(message, UserCodeRaised):
            self._queue.errors.count(message.origin, message.kind, lambda: message.text)
        elif isinstance(message, EnvWorkerCounters):
            worker.counters = message
        elif isinstance(message, EnvWorkerCrashed):
            self._queue.end_run(RolloutError(f"env worker {worker.number} broke:\n{message.text}"))
        else:
            raise TypeError(f"env worker {worker.number} says {message!r}, which means nothing here")

    def _on_attempt_finished(self, worker: FleetWorker, record: TrajectoryRecord, bundle: TokenBundle) -> None:
        remote = worker.attempts.pop(record.id, None)
        if remote is None or remote.attempt.fate is not None:
            return
        attempt, group = remote.attempt, remote.attempt.group
        self._losses_in_a_row = 0
        attempt.runner = None
        trajectory = LazyTrajectory(
            id=attempt.id,
            task=group.task,
            group=group.id,
            member=attempt.member,
            attempt=attempt.number,
            slot=attempt.slot,
            seed=sampling_key(self._settings.seed, attempt),
            terminated=record.terminated,
            truncated=record.truncated,
            score=record.score,
            info=record.info,
            final=record.final,
            started=record.started + bundle.clock_offset,
            ended=record.ended + bundle.clock_offset,
            bundle=bundle,
            row=record.row,
            version_range=record.versions,
        )
        self._queue.put(attempt, trajectory)

    def _on_slot_freed(self, worker: FleetWorker, message: SlotFreed) -> None:
        remote = worker.attempts[message.id]
        attempt = remote.attempt
        remote.is_slot_free = True
        attempt.turns = message.turns
        self._queue.ledger.add_tokens(attempt, message.tokens - attempt.tokens)
        self._queue.release_slot(attempt)
        worker.free.append(attempt.slot)
        self.busy -= 1
        if attempt.fate is None:
            self._queue.mark_scoring(attempt)
            attempt.stage = "reward"
        else:
            del worker.attempts[message.id]
            attempt.runner = None
        self._resolve_if_empty()
        self.fill()

    def _on_attempt_failed(self, worker: FleetWorker, message: AttemptFailed) -> None:
        remote = worker.attempts.get(message.id)
        if remote is None or remote.attempt.fate is not None:
            return
        attempt = remote.attempt
        attempt.stage = message.stage
        if attempt.state is AttemptState.SCORING:
            del worker.attempts[message.id]
            attempt.runner = None
        self._queue.fail(attempt, message.cause, message.detail, tries_used=message.tries_used, outage=message.outage)

    def _resolve_if_empty(self) -> None:
        if not self.busy and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)


def _free_slots(worker: FleetWorker) -> int:
    return len(worker.free)
