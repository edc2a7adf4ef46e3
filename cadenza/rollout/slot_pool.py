"""What a scheduler, its group queue and its slots need of each other, in whichever process the slots are.

scheduler --SlotSettings, StartTask--> SlotPool: `EnvWorker` (env_worker.py) or `EnvFleet` (fleet.py)
SlotPool --issue, release_slot, await_reward, put, fail--> AttemptQueue: `GroupQueue`, or a `RemoteQueue` that stands
                                                           for it in the process of an env worker
AttemptQueue --on_work, on_stop--> SlotPool
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from cadenza.rollout.ledger import Attempt
from cadenza.rollout.model import Codec, TokenCounter
from cadenza.rollout.records import Trajectory

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Starts a task of this name, in the task group of the run."""


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """What slots need to know of the run beside the envs, in whichever process they are."""

    codec: Codec
    backend: str
    """Where workers of their own are started: 'embedded' or 'ray'."""
    seed: int
    max_reward_tries: int
    slice_tokens: int
    is_training: bool


class ErrorCounter(Protocol):
    """Where exceptions of user code are counted."""

    def add(self, origin: str, error: BaseException) -> None: ...


class AttemptQueue(Protocol):
    """Gives slots their attempts and takes the results: the group queue, or what stands for it in another
    process."""

    on_stop: Callable[[Attempt], None]
    on_work: Callable[[], None]

    @property
    def ledger(self) -> TokenCounter: ...

    @property
    def errors(self) -> ErrorCounter: ...

    def issue(self, slot: int) -> Attempt | None: ...

    def release_slot(self, attempt: Attempt) -> None: ...

    def await_reward(self, attempt: Attempt) -> None: ...

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None: ...

    def fail(self, attempt: Attempt, cause: str, detail: str = "", *, weight: float = 1.0) -> None: ...


class SlotPool(Protocol):
    """What the scheduler needs of the slots: an env worker in its own process (env_worker.py), or a fleet
    of them in others (fleet.py)."""

    busy: int

    @property
    def leaked_envs(self) -> int: ...

    @property
    def expired(self) -> int: ...

    @property
    def stop_seconds(self) -> float: ...

    async def open(self) -> None: ...

    async def drain(self) -> None: ...

    def fill(self) -> None: ...

    def close(self) -> None: ...
