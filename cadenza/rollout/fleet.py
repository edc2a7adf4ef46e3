"""SlotPool in other processes: a fleet of env workers.

Invariant: as in env_worker.py, a slot is free or runs one attempt, and it is freed once. Here the queue and its ledger
decide; an env worker only tells. One that dies, or is silent, costs the attempts that ran on it: they fail as
infrastructure and are tried again on the others, what was granted to it is given back, and another takes its place.
What it finished before is kept: that belongs to the scheduler.

    fill() --AttemptLease--> env worker: env, play, reward --SlotFreed, TrajectoryRecord--> put()
    wakes fill: a vacated slot, a handed-back or retried group, a published version, a taken batch, a new worker
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from cadenza.cluster.channel import Channel
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.env_worker_process import EnvWorkerCrashed, EnvWorkerCounters, EnvWorkerProcess, AttemptFailed, AttemptLease, EnvWorkerSpec, UserCodeRaised, StopAttempt, SlotFreed
from cadenza.rollout.env_worker import sampling_key
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.grants import ReplicaAddress, GrantServer, addresses
from cadenza.rollout.group_queue import GroupQueueManager
from cadenza.rollout.ledger import Attempt, AttemptState
from cadenza.rollout.model import Codec
from cadenza.rollout.token_bundles import TokenBundle, TrajectoryRecord, LazyTrajectory
from cadenza.rollout.sampler import Sampler
from cadenza.rollout.sampler_client import SamplerClient

START_SECONDS = 600.0
RETRY_SECONDS = 60.0
"""Between two tries to start a worker in the place of one that died."""
MAX_LOSSES = 3
"""Of every worker, in a row and without one trajectory in between, before the run ends."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class NoEnvWorkers(RolloutError):
    """No env worker is left, and none can be started."""


class _ReceivedRecord(NamedTuple):
    record: TrajectoryRecord
    parcel: TokenBundle


class _RemoteAttempt:
    """An attempt on its worker."""

    __slots__ = ("attempt", "is_vacated")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.is_vacated = False


class _FleetWorker:
    """One env worker, as the fleet knows it."""

    def __init__(self, number: int, slots: range) -> None:
        self.number = number
        self.free = list(reversed(slots))
        self.runs: dict[int, _RemoteAttempt] = {}
        self.counters = EnvWorkerCounters(0, 0)
        self.peer: WorkerHandle | None = None
        self.wire: Channel
        self.clerk: GrantServer


class EnvFleet:
    """Runs attempts in the slots of env workers."""

    def __init__(
        self,
        config: EnvManagerConfig,
        queue: GroupQueueManager,
        sampler: Sampler | SamplerClient,
        codec: Codec,
        spawn: Spawn,
        *,
        backend: str,
        seed: int,
        max_reward_tries: int,
        slice_tokens: int,
    ) -> None:
        self.config = config
        self.busy = 0
        self.lost = 0
        """Env workers that died."""
        self._queue = queue
        self._sampler = sampler
        self._codec = codec
        self._spawn = spawn
        self._backend = backend
        self._seed = seed
        self._max_reward_tries = max_reward_tries
        self._slice_tokens = slice_tokens
        self._namespace = sampler.namespace()
        self._crews: list[_FleetWorker] = []
        self._past = EnvWorkerCounters(0, 0)
        """Of workers that are gone."""
        self._starting = 0
        self._losses = 0
        self._is_closed = False
        self._draining = asyncio.Event()
        self._empty: asyncio.Future[None] | None = None
        queue.stop = self.stop
        queue.refill = self.fill

    @property
    def leaked_envs(self) -> int:
        return self._past.leaked_envs + sum(crew.counters.leaked_envs for crew in self._crews)

    @property
    def expired(self) -> int:
        return self._past.expired + sum(crew.counters.expired for crew in self._crews)

    @property
    def patience(self) -> float:
        """How long attempts that are stopped may take to end."""
        return 2 * self.config.close_seconds

    async def open(self) -> None:
        """Start all workers, or none is left."""
        count, each = self.config.workers, self.config.slots / self.config.workers
        bounds = [round(number * each) for number in range(count + 1)]
        crews = [_FleetWorker(number, range(bounds[number], bounds[number + 1])) for number in range(count)]
        try:
            async with asyncio.TaskGroup() as group:
                for crew in crews:
                    group.create_task(self._start(crew), name=f"start of env worker {crew.number}")
        except BaseExceptionGroup as errors:
            for crew in crews:
                if crew.peer is not None:
                    crew.peer.kill()
            raise errors.exceptions[0] from None
        for crew in crews:
            self._join(crew)

    def fill(self) -> None:
        """Give every free slot work, as long as there is any; the emptiest worker first."""
        while self._crews:
            crew = max(self._crews, key=_room)
            if not crew.free or (attempt := self._queue.issue(crew.free[-1])) is None:
                return
            crew.free.pop()
            self.busy += 1
            crew.runs[attempt.id] = _RemoteAttempt(attempt)
            attempt.place = "env worker"
            attempt.runner = crew
            group = attempt.group
            crew.wire.send(AttemptLease(attempt.id, group.id, group.task, attempt.member, attempt.number))

    def stop(self, attempt: Attempt) -> None:
        """The attempt has its fate: end it."""
        crew = attempt.runner
        if not isinstance(crew, _FleetWorker) or (run := crew.runs.get(attempt.id)) is None:
            return
        assert attempt.fate is not None
        crew.wire.send(StopAttempt(attempt.id, attempt.fate, attempt.cause))
        if run.is_vacated:
            del crew.runs[attempt.id]

    async def drain(self) -> None:
        """Wait until every slot is free."""
        self._draining.set()
        if self.busy:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    def close(self) -> None:
        self._is_closed = True
        for crew in self._crews:
            self._end(crew)
        self._crews.clear()

    # -- workers ---------------------------------------------------------------------------------------------------

    async def _start(self, crew: _FleetWorker) -> None:
        config = self.config
        slots = len(crew.free)
        domains = {name: domain.model_copy(update={"tasks": None}) for name, domain in config.domains.items()}
        orders = EnvWorkerSpec(
            f"env-worker-{self._namespace}-{crew.number}-{self.lost}",
            config.model_copy(update={"domains": domains, "slots": slots, "workers": 0}),
            self._codec,
            self._addresses(),
            self._namespace,
            self._seed,
            self._max_reward_tries,
            self._slice_tokens,
        )
        self._starting += 1
        try:
            peer = await start_worker(
                self._backend, "env worker", crew.number, EnvWorkerProcess, {"orders": orders}, seconds=START_SECONDS
            )
        finally:
            self._starting -= 1

        async def call(number: int, messages: list[Any]) -> tuple[int, list[Any]]:
            (number, said, there), handle = await peer.call_with_bulk("exchange", number, messages)
            parcel: TokenBundle | None = None
            for place, message in enumerate(said):
                if isinstance(message, TrajectoryRecord):
                    if parcel is None:
                        parcel = TokenBundle(peer, handle, asyncio.get_running_loop().time() - there)
                    said[place] = _ReceivedRecord(message, parcel)
            return number, said

        crew.peer = peer
        crew.wire = Channel(call, lambda message: self._hear(crew, message), lambda error: self._lost(crew, error))
        crew.clerk = GrantServer(self._sampler, crew.wire.send)

    def _addresses(self) -> Sequence[ReplicaAddress]:
        sampler = self._sampler
        known = addresses(sampler) if isinstance(sampler, Sampler) else sampler.addresses
        if self._backend == "ray" and (here := [a.name for a in known if not isinstance(a.way, WorkerHandle)]):
            raise ValueError(
                f"env workers on Ray cannot reach the replicas {', '.join(here)}, which are in this process: "
                "set workers to 0, or start the replicas as workers of a cluster"
            )
        return known

    def _lost(self, crew: _FleetWorker, error: Exception) -> None:
        if self._is_closed:
            return
        logger.warning("env worker %d is lost with %d attempts: %s", crew.number, len(crew.runs), error)
        self._crews.remove(crew)
        self._end(crew)
        self.lost += 1
        self._losses += 1
        self._past = EnvWorkerCounters(*(a + b for a, b in zip(self._past, crew.counters, strict=True)))
        slots = [run.attempt.slot for run in crew.runs.values() if not run.is_vacated] + crew.free
        for run in crew.runs.values():
            if not run.is_vacated:
                self._queue.vacate(run.attempt)
                self.busy -= 1
        for run in list(crew.runs.values()):  # a failure may retire its task, and stop others of them
            if run.attempt.fate is None:
                self._queue.fail(run.attempt, "env worker lost", str(error)[:200], weight=0.25)
            run.attempt.runner = None
        self._emptied()
        if self._losses > MAX_LOSSES * self.config.workers:
            self._queue.fatal(NoEnvWorkers(f"{self._losses} env workers died in a row, the last one: {error}"))
        elif self._queue.ended is None:
            successor = _FleetWorker(crew.number, range(0))
            successor.free = slots
            self._spawn(self._replace(successor), f"start of env worker {crew.number}")

    async def _replace(self, crew: _FleetWorker) -> None:
        """Until it succeeds, or nobody needs it any more."""
        while self._queue.ended is None and not self._draining.is_set():
            try:
                if await self._unless_draining(self._start(crew)):
                    self._join(crew)
                    self.fill()
                    return
            except Exception as error:  # noqa: BLE001 - a node may be full, or have other versions: the next try may meet another
                if not self._crews and not self._starting:
                    self._queue.fatal(NoEnvWorkers(f"no env worker is left, and none can be started: {error}"))
                    return
                logger.error(
                    "env worker %d cannot be started again, the next try is in %g s: %s: %s",
                    crew.number, RETRY_SECONDS, type(error).__name__, error,
                )  # fmt: skip
                await self._unless_draining(asyncio.sleep(RETRY_SECONDS))

    async def _unless_draining(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it was done; what is not is broken off."""
        doing, draining = asyncio.ensure_future(work), asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait([doing, draining], return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait([doing])
        if doing.cancelled():
            return False
        doing.result()
        return True

    def _join(self, crew: _FleetWorker) -> None:
        if self._is_closed:
            if crew.peer is not None:
                crew.peer.kill()
        else:
            self._crews.append(crew)
            crew.wire.open()

    def _end(self, crew: _FleetWorker) -> None:
        crew.wire.close()
        crew.clerk.close("env_worker_lost")
        if crew.peer is not None:
            crew.peer.kill()

    # -- what they tell --------------------------------------------------------------------------------------------

    def _hear(self, crew: _FleetWorker, message: Any) -> None:
        try:
            self._heed(crew, message)
        except Exception as error:  # noqa: BLE001 - a bug, and nobody else would hear of it
            trace = "".join(traceback.format_exception(error))
            self._queue.fatal(RolloutError(f"what env worker {crew.number} says cannot be booked:\n{trace}"))

    def _heed(self, crew: _FleetWorker, message: Any) -> None:
        if crew.clerk.hear(message):
            return
        if isinstance(message, _ReceivedRecord):
            self._finished(crew, message.record, message.parcel)
        elif isinstance(message, SlotFreed):
            self._vacated(crew, message)
        elif isinstance(message, AttemptFailed):
            self._failed(crew, message)
        elif isinstance(message, UserCodeRaised):
            self._queue.errors.count(message.place, message.kind, lambda: message.text)
        elif isinstance(message, EnvWorkerCounters):
            crew.counters = message
        elif isinstance(message, EnvWorkerCrashed):
            self._queue.fatal(RolloutError(f"env worker {crew.number} broke:\n{message.text}"))
        else:
            raise TypeError(f"env worker {crew.number} says {message!r}, which means nothing here")

    def _finished(self, crew: _FleetWorker, record: TrajectoryRecord, parcel: TokenBundle) -> None:
        run = crew.runs.pop(record.id, None)
        if run is None or run.attempt.fate is not None:
            return
        attempt, group = run.attempt, run.attempt.group
        self._losses = 0
        attempt.runner = None
        trajectory = LazyTrajectory(
            attempt.id, group.task, group.id, attempt.member, attempt.number, attempt.slot,
            sampling_key(self._seed, attempt), [], record.terminated, record.truncated, record.score, record.info,
            record.final, record.started + parcel.later, record.ended + parcel.later, parcel, record.row,
            record.versions,
        )  # fmt: skip
        self._queue.put(attempt, trajectory)

    def _vacated(self, crew: _FleetWorker, message: SlotFreed) -> None:
        run = crew.runs[message.id]
        attempt = run.attempt
        run.is_vacated = True
        attempt.turns = message.turns
        self._queue.ledger.add_tokens(attempt, message.tokens - attempt.tokens)
        self._queue.vacate(attempt)
        crew.free.append(attempt.slot)
        self.busy -= 1
        if attempt.fate is None:
            self._queue.score(attempt)
            attempt.place = "reward"
        else:
            del crew.runs[message.id]
            attempt.runner = None
        self._emptied()
        self.fill()

    def _failed(self, crew: _FleetWorker, message: AttemptFailed) -> None:
        run = crew.runs.get(message.id)
        if run is None or run.attempt.fate is not None:
            return
        attempt = run.attempt
        attempt.place = message.place
        if attempt.state is AttemptState.SCORING:
            del crew.runs[message.id]
            attempt.runner = None
        self._queue.fail(attempt, message.cause, message.detail, weight=message.weight)

    def _emptied(self) -> None:
        if not self.busy and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)


def _room(crew: _FleetWorker) -> int:
    return len(crew.free)
