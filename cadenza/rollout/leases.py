"""A slot's right to an attempt: it expires instead of hanging.

All leases are equally long, so renewing one moves it to the end of the queue and the first in the queue expires first:
one timer for all of them, and a renewal costs a dict operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cadenza.rollout.ledger import Attempt, AttemptState


class LeaseDeadlines:
    """Deadlines of the attempts that must show progress."""

    def __init__(self, seconds: float, expire: Callable[[Attempt], None]) -> None:
        self.seconds = seconds
        self._expire = expire
        self._deadlines: dict[Attempt, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def renew(self, attempt: Attempt) -> None:
        """There was progress: the whole time again. An attempt whose episode is over needs no lease."""
        if attempt.state is not AttemptState.RUNNING:
            return
        loop = asyncio.get_running_loop()
        self._deadlines.pop(attempt, None)
        self._deadlines[attempt] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._expire_due)

    def drop(self, attempt: Attempt) -> None:
        """Somebody else keeps a deadline for it, or it is over."""
        self._deadlines.pop(attempt, None)

    def close(self) -> None:
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire_due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        expired = []
        for attempt, deadline in self._deadlines.items():
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._expire_due)
                break
            expired.append(attempt)
        for attempt in expired:
            self._deadlines.pop(attempt, None)
        for attempt in expired:
            if attempt.state is AttemptState.RUNNING:
                self._expire(attempt)
