"""An env worker in a process of its own: it runs the attempts that are leased to it.

Invariant: every lease ends with one `SlotFreed`, when its env is closed, and with at most one result: a record or a
failure, and none if it was stopped. The scheduler's books are the ones that count; here is a copy of what is under way.
```
scheduler (fleet.py) --AttemptLease, StopAttempt, Granted--> exchange --> EnvWorker: env <-> model --requests--> replica
                     <--AskForGrant, ReleaseGrant, TrajectoryRecord, AttemptFailed, SlotFreed, EnvWorkerCounters--
```
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from cadenza.cluster.channel import Mailbox
from cadenza.cluster.worker import Worker
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.env_worker import EnvWorker
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.grants import GrantClient, GrantDenied, Granted, make_replica_entries
from cadenza.rollout.ledger import Attempt, AttemptState, Group
from cadenza.rollout.records import Fate, Task, Trajectory
from cadenza.rollout.sampler import ReplicaAddress
from cadenza.rollout.slot_pool import SlotSettings
from cadenza.rollout.token_bundles import BundleArrays, TrajectoryRecord, pack


class AttemptLease(NamedTuple):
    """The env worker may run this attempt, in one of its slots."""

    id: int
    group: int
    task: Task
    member: int
    number: int


class StopAttempt(NamedTuple):
    """The attempt has its fate: end it."""

    id: int
    fate: Fate
    cause: str


class AttemptFinished(NamedTuple):
    """The attempt has its reward. It travels as a `TrajectoryRecord`, and its tokens in the bundle."""

    attempt: Attempt
    trajectory: Trajectory


class AttemptFailed(NamedTuple):
    """The attempt is lost."""

    id: int
    cause: str
    detail: str
    tries_used: float
    outage: bool
    stage: str


class SlotFreed(NamedTuple):
    """The env of the attempt is closed: its slot is free."""

    id: int
    turns: int
    tokens: int


class UserCodeRaised(NamedTuple):
    """User code raised."""

    origin: str
    kind: str
    text: str
    """The traceback, the first time."""


class EnvWorkerCounters(NamedTuple):
    """Sums since the start."""

    leaked_envs: int = 0
    expired_leases: int = 0
    judge_calls: int = 0
    judge_tokens: int = 0


class EnvWorkerCrashed(NamedTuple):
    """The env worker cannot go on, by a bug or for want of what it needs: the end of the run."""

    text: str


@dataclass(frozen=True, slots=True)
class EnvWorkerSpec:
    """What an env worker needs to know at its start."""

    name: str
    config: EnvManagerConfig
    settings: SlotSettings
    replicas: Sequence[ReplicaAddress]
    namespace: int


class RemoteQueue:
    """In an env worker's process it stands for the group queue and the ledger, and sends them what happens."""

    events = None

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.on_stop: Callable[[Attempt], None] = lambda attempt: None
        self.on_work: Callable[[], None] = lambda: None
        self._send = send
        self._leases: deque[AttemptLease] = deque()
        self._attempts: dict[int, Attempt] = {}
        self._shown: set[str] = set()

    @property
    def token_counter(self) -> RemoteQueue:
        return self

    @property
    def errors(self) -> RemoteQueue:
        return self

    def receive(self, message: AttemptLease | StopAttempt) -> None:
        if isinstance(message, AttemptLease):
            self._leases.append(message)
            self.on_work()
        elif (attempt := self._attempts.get(message.id)) is not None and attempt.fate is None:
            attempt.fate, attempt.cause = message.fate, message.cause
            if attempt.state is AttemptState.SCORING:
                del self._attempts[attempt.id]
            self.on_stop(attempt)

    def issue(self, slot: int) -> Attempt | None:
        if not self._leases:
            return None
        lease = self._leases.popleft()
        now = asyncio.get_running_loop().time()
        attempt = Attempt(lease.id, Group(lease.group, lease.task, 0, now), lease.member, lease.number, slot, now)
        self._attempts[lease.id] = attempt
        return attempt

    def add_tokens(self, attempt: Attempt, count: int) -> None:
        attempt.tokens += count

    def mark_scoring(self, attempt: Attempt) -> None:
        attempt.state = AttemptState.SCORING

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        if trajectory.info:
            try:
                _check_sendable(trajectory.info)
            except Exception as error:  # noqa: BLE001 - user code decides what a pickle raises
                text = f"'info' cannot be sent to the scheduler, give it plain values: {error}"
                self.add(f"info of domain '{attempt.group.task.domain}'", TypeError(text))
                self.fail(attempt, "info: TypeError", text[:200])
                return
        attempt.state = AttemptState.FINISHED
        del self._attempts[attempt.id]
        self._send(AttemptFinished(attempt, trajectory))

    def fail(
        self, attempt: Attempt, cause: str, detail: str = "", *, tries_used: float = 1.0, outage: bool = False
    ) -> None:
        attempt.fate, attempt.cause = Fate.FAILED, cause
        if attempt.state is AttemptState.SCORING:
            del self._attempts[attempt.id]
        self._send(AttemptFailed(attempt.id, cause, detail, tries_used, outage, attempt.stage))

    def end_run(self, error: RolloutError) -> None:
        self._send(EnvWorkerCrashed(str(error)))

    def release_slot(self, attempt: Attempt) -> None:
        if attempt.fate is not None:
            del self._attempts[attempt.id]
        self._send(SlotFreed(attempt.id, attempt.turns, attempt.tokens))

    def add(self, origin: str, error: BaseException) -> None:
        kind = type(error).__name__
        text = "" if f"{origin} {kind}" in self._shown else "".join(traceback.format_exception(error))
        self._shown.add(f"{origin} {kind}")
        self._send(UserCodeRaised(origin, kind, text))


class EnvWorkerProcess(Worker):
    """The worker of the fleet: a process that runs an `EnvWorker` with many envs."""

    def __init__(self, spec: EnvWorkerSpec) -> None:
        self._spec = spec
        self._mailbox = Mailbox(self._on_message)
        self._queue = RemoteQueue(self._mailbox.send)
        self._grant_client: GrantClient | None = None
        self._envs: EnvWorker
        self._sent_counters = EnvWorkerCounters()
        self._tasks: set[asyncio.Task[None]] = set()

    async def exchange(self, number: int, messages: Sequence[Any]) -> tuple[Any, BundleArrays | None]:
        """See channel.py. The records of one answer share a bundle."""
        if self._grant_client is None:
            self._start()
        number, said = await self._mailbox.exchange(number, messages)
        envs = self._envs
        counters = EnvWorkerCounters(envs.leaked_envs, envs.expired_leases, envs.judge_calls, envs.judge_tokens)
        if counters != self._sent_counters:
            self._sent_counters = counters
            said.append(counters)
        finished: list[Trajectory] = []
        for index, message in enumerate(said):
            if isinstance(message, AttemptFinished):
                said[index] = _record(message.attempt, message.trajectory, len(finished))
                finished.append(message.trajectory)
        return (number, said, asyncio.get_running_loop().time()), pack(finished) if finished else None

    async def open_rewards(self) -> None:
        """Open the rewards of its slots, or raise what prevents it."""
        self._start()
        await self._envs.open()

    async def close_rewards(self) -> None:
        await self._envs.drain()

    def close(self) -> None:
        """Whatever still runs ends with the process; where there is none, here."""
        for task in list(self._tasks):  # this is another thread, and the loop goes on
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _start(self) -> None:
        spec = self._spec
        entries = make_replica_entries(spec.replicas, spec.name)
        self._grant_client = GrantClient(entries, spec.namespace, self._mailbox.send)
        self._envs = EnvWorker(spec.config, spec.settings, self._queue, self._grant_client, self._start_task)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Granted | GrantDenied):
            assert self._grant_client is not None
            self._grant_client.receive(message)
        else:
            self._queue.receive(message)

    def _start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mailbox.send(EnvWorkerCrashed("".join(traceback.format_exception(error))))


def _check_sendable(info: dict[str, object]) -> None:
    """Raises what pickling raises. Whatever Ray can send may be sent."""
    try:
        pickle.dumps(info)
    except Exception:
        if "ray" not in sys.modules:
            raise
        import_module("ray.cloudpickle").dumps(info)


def _record(attempt: Attempt, trajectory: Trajectory, row: int) -> TrajectoryRecord:
    return TrajectoryRecord(
        id=attempt.id,
        row=row,
        score=trajectory.score,
        terminated=trajectory.terminated,
        truncated=trajectory.truncated,
        info=trajectory.info,
        final=trajectory.final,
        started=trajectory.started,
        ended=trajectory.ended,
        versions=trajectory.versions,
    )
