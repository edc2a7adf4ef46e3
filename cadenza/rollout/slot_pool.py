"""What a scheduler, its group queue and its slots need of each other, in whichever process the slots are.

scheduler --SlotSettings, StartTask--> SlotPool: `EnvWorker` (env_worker.py) or `EnvFleet` (fleet.py)
SlotPool --issue, release_slot, mark_scoring, put, fail, end_run--> AttemptQueue: `GroupQueue`, or a `RemoteQueue` that
                                                                  stands for it in the process of an env worker
AttemptQueue --on_work, on_stop--> SlotPool
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.rollout.failures import RolloutError
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
    reward_processes: Sequence[WorkerHandle]
    """Those of `devices.reward`, which compute the rewards; empty where the rewards have no devices."""


class ErrorCounter(Protocol):
    """Where exceptions of user code are counted."""

    def add(self, origin: str, error: BaseException) -> None: ...


class AttemptQueue(Protocol):
    """Gives slots their attempts and takes the results: the group queue, or what stands for it in another
    process."""

    on_stop: Callable[[Attempt], None]
    """Set by the slots: ends an attempt that got its fate while it ran."""
    on_work: Callable[[], None]
    """Set by the slots: asks `issue` for the free ones."""

    @property
    def token_counter(self) -> TokenCounter:
        """Books the tokens that the model writes for an attempt."""
        ...

    @property
    def errors(self) -> ErrorCounter: ...

    def issue(self, slot: int) -> Attempt | None:
        """Returns the attempt that a free slot should run now; None for none."""
        ...

    def release_slot(self, attempt: Attempt) -> None:
        """The env of the attempt is closed, and its slot is free."""
        ...

    def mark_scoring(self, attempt: Attempt) -> None:
        """The episode is over, and its reward is being computed, without a slot."""
        ...

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The episode is finished and has its reward."""
        ...

    def fail(
        self, attempt: Attempt, cause: str, detail: str = "", *, tries_used: float = 1.0, outage: bool = False
    ) -> None:
        """The attempt is lost. `tries_used` is how much of `max_attempts` this failure uses: 0.25 if infrastructure
        failed, inf if a retry cannot help. `outage`: what the reward needs is out of service."""
        ...

    def end_run(self, error: RolloutError) -> None:
        """End the run with this error: no attempt can succeed any more."""
        ...


class SlotPool(Protocol):
    """What the scheduler needs of the slots: an env worker in its own process (env_worker.py), or a fleet of
    them in others (fleet.py)."""

    busy: int
    """Slots that hold an attempt."""

    @property
    def leaked_envs(self) -> int:
        """Envs whose `close` failed or did not return in time."""
        ...

    @property
    def expired_leases(self) -> int:
        """Leases that ran out."""
        ...

    @property
    def judge_calls(self) -> int:
        """Questions of rewards to the policy."""
        ...

    @property
    def judge_tokens(self) -> int:
        """Tokens that the policy wrote to answer them; no attempt has them on its account."""
        ...

    async def open(self) -> None:
        """Start workers and open rewards, or raise what prevents it."""
        ...

    async def drain(self) -> None:
        """Wait until no slot in another process is busy, then close the rewards. Slots in this process are tasks of the
        scheduler, which waits for them itself."""
        ...

    def fill(self) -> None:
        """Give every free slot work, as long as there is any."""
        ...

    def close(self) -> None:
        """End what still runs: leases, workers."""
        ...

    @property
    def max_stop_seconds(self) -> float:
        """How long attempts that are stopped may take to end."""
        ...
