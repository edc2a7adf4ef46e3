"""Attempts that workers outside the scheduler run: `GroupQueueManager.next_attempt` gives them out, `put` and `fail`
end them.

Invariant: the slot of each attempt is freed once: by the first word of its worker, or by the end of its lease, also
when the attempt has had its fate for long.

    next_attempt waits for: an attempt to issue, or the end of the tasks or of the run; woken one after the other
    a lease ends `lease_seconds` after next_attempt or the last renew: on_expired(attempt)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cadenza.rollout.failures import RolloutError
from cadenza.rollout.ledger import Attempt

MAX_WAITING = 800
"""Calls of `next_attempt` that may wait. A Ray actor runs 1,000 calls at once by default, and `put`, `take` and
`advance` must find their way in."""


class RemoteAttempts:
    """The leases of the attempts that were given out. All are equally long, so the oldest ends first: one timer."""

    def __init__(self, lease_seconds: float, on_expired: Callable[[Attempt], None]) -> None:
        self.lease_seconds = lease_seconds
        self._on_expired = on_expired
        self._leases: dict[int, tuple[float, Attempt]] = {}
        """By the id of the attempt: when its lease ends; the first one ends first."""
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt.id in self._leases

    def begin(self, attempt: Attempt) -> None:
        """The attempt goes to a worker."""
        loop = asyncio.get_running_loop()
        self._leases[attempt.id] = loop.time() + self.lease_seconds, attempt
        if self._timer is None:
            self._timer = loop.call_later(self.lease_seconds, self._expire_due)

    def renew(self, attempt: Attempt) -> bool:
        """The worker of the attempt, or of its copy, lives. Whether it should go on: False when the attempt has its
        fate, or lost its lease."""
        if (original := self.end(attempt)) is None:
            return False
        self.begin(original)
        return original.fate is None

    def end(self, attempt: Attempt) -> Attempt | None:
        """The worker is done. Returns the original of its copy; None if it was done before, or lost its lease."""
        _, original = self._leases.pop(attempt.id, (0.0, None))
        return original

    def close(self) -> None:
        """Nothing expires any more."""
        self._leases.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        due = [attempt for deadline, attempt in self._leases.values() if deadline <= loop.time()]
        for attempt in due:
            del self._leases[attempt.id]
        if self._leases:
            first, _ = next(iter(self._leases.values()))
            self._timer = loop.call_at(first, self._expire_due)
        for attempt in due:
            self._on_expired(attempt)


class WaitingWorkers:
    """Workers that wait for an attempt. Each one that was woken looks, and wakes the next if there may be more: a
    change costs one look, however many wait."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    def enter(self) -> None:
        """Refuse a worker beyond `max_waiting`."""
        if len(self._waiting) >= self._max_waiting:
            raise RolloutError(
                f"{self._max_waiting} calls of next_attempt wait already, and the actor must also take those of put, "
                "take and advance: ask with fewer workers, or make it with options(max_concurrency=N) and "
                "GroupQueueManager(..., max_waiting=less than N)"
            )

    async def wait(self, *, as_first: bool) -> None:
        """Until there may be an attempt. A worker that was woken and found none waits on as the first."""
        woken = asyncio.get_running_loop().create_future()
        if as_first:
            self._waiting.appendleft(woken)
        else:
            self._waiting.append(woken)
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():
                self.wake_next()
            elif woken in self._waiting:
                self._waiting.remove(woken)
            raise

    def wake_next(self) -> None:
        """There may be an attempt, or it is the end."""
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return
