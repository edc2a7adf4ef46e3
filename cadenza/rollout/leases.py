"""A slot's right to an attempt: it expires instead of hanging. Long before that, an attempt that stands still is named.

All leases are equally long, so renewing one moves it to the end of the queue and the first in the queue expires first:
one timer for all of them, and a renewal costs a dict operation. The watch over progress reads the same queue, with one
more timer. The pause between two lines of the log doubles, so that envs whose steps always take long do not fill it.

    renew: the env answered     ask: the model is asked, the sampler keeps the deadlines
    begin_scoring, scored: the reward is computed, under its own deadline     end: the episode is over
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cadenza.rollout.failures import logger
from cadenza.rollout.ledger import Attempt, AttemptState

NO_PROGRESS_SECONDS = 30.0
"""After which an attempt is named in the log."""
UNWATCHED_SECONDS = 86_400.0
"""A lease of this length or more says that attempts may stand still: none is named."""


class _Still(NamedTuple):
    """An attempt that stands still."""

    since: float
    stage: str
    attempt: Attempt


class LeaseDeadlines:
    """Deadlines of the attempts that must show progress."""

    def __init__(
        self, lease_seconds: float, on_expired: Callable[[Attempt], None], occupants: Sequence[Attempt | None] = ()
    ) -> None:
        """`occupants` are the attempts in the slots, read when none of them makes progress."""
        self.lease_seconds = lease_seconds
        self._occupants = occupants
        self._on_expired = on_expired
        self._deadlines: dict[Attempt, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._scoring: dict[Attempt, float] = {}
        """Attempts whose reward is computed, and since when."""
        self._renewed = 0.0
        """When any of them last made progress."""
        self._named: set[Attempt] = set()
        """Attempts that the log has named or counted; each is told of once."""
        self._has_told_of_model = False
        self._pause = NO_PROGRESS_SECONDS
        """Between the next line of the log and the one after it."""
        self._quiet_until = -math.inf
        self._is_watching = lease_seconds < UNWATCHED_SECONDS and logger.isEnabledFor(logging.WARNING)
        self._watch: asyncio.TimerHandle | None = None

    def renew(self, attempt: Attempt) -> None:
        """There was progress: the whole time again. An attempt whose episode is over needs no lease."""
        if attempt.state is not AttemptState.RUNNING:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if attempt.stage == "model":
            attempt.stage = "rollout"
        self._renewed = now
        self._deadlines.pop(attempt, None)
        self._deadlines[attempt] = now + self.lease_seconds
        if self._timer is None:
            self._timer = loop.call_later(self.lease_seconds, self._expire_due)
        if self._watch is None and self._is_watching:
            self._watch = loop.call_later(NO_PROGRESS_SECONDS, self._name_those_that_stand_still)

    def ask(self, attempt: Attempt) -> None:
        """The attempt waits for the model: the sampler keeps the deadlines until `renew`."""
        if self._deadlines.pop(attempt, None) is not None:
            attempt.stage = "model"

    def begin_scoring(self, attempt: Attempt) -> None:
        """The attempt waits for its reward, which has a deadline of its own, until `scored`."""
        loop = asyncio.get_running_loop()
        self._scoring[attempt] = loop.time()
        if self._watch is None and self._is_watching:
            self._watch = loop.call_later(NO_PROGRESS_SECONDS, self._name_those_that_stand_still)

    def scored(self, attempt: Attempt) -> None:
        """The reward is there, or the attempt has its fate."""
        self._scoring.pop(attempt, None)
        self._named.discard(attempt)

    def end(self, attempt: Attempt) -> None:
        """The episode is over: no lease, and nothing to watch until `begin_scoring`."""
        self._deadlines.pop(attempt, None)
        self._named.discard(attempt)

    def close(self) -> None:
        self._deadlines.clear()
        self._scoring.clear()
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self._timer = self._watch = None

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
                self._on_expired(attempt)

    def _name_those_that_stand_still(self) -> None:
        """Name the oldest attempt without progress, and count the others."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        found, upcoming = self._find_still(now) if now >= self._quiet_until else ([], self._quiet_until)
        if found:
            oldest = min(found, key=lambda still: still.since)
            self._named.update(still.attempt for still in found if still.stage != "model")
            self._has_told_of_model |= any(still.stage == "model" for still in found)
            logger.warning("%s", self._describe(oldest, len(found) - 1, now))
            self._quiet_until = now + self._pause
            self._pause *= 2
        self._watch = None
        if upcoming < math.inf:
            self._watch = loop.call_at(max(upcoming, self._quiet_until), self._name_those_that_stand_still)

    def _find_still(self, now: float) -> tuple[list[_Still], float]:
        """Attempts without progress that were not told of, and when the next one may be due. Waiting for the model is
        no news while others make progress, and is told once only, because long answers take long."""
        found: list[_Still] = []
        upcoming = math.inf
        for times, age in ((self._deadlines, self.lease_seconds), (self._scoring, 0.0)):
            for attempt, time in times.items():  # oldest first
                if attempt in self._named:
                    continue
                if time - age + NO_PROGRESS_SECONDS > now:
                    upcoming = min(upcoming, time - age + NO_PROGRESS_SECONDS)
                    break
                found.append(_Still(time - age, attempt.stage, attempt))
        if not self._has_told_of_model:
            asked = [a for a in self._occupants if a is not None and a.stage == "model" and a.fate is None]
            if asked and self._renewed + NO_PROGRESS_SECONDS > now:
                upcoming = min(upcoming, self._renewed + NO_PROGRESS_SECONDS)
            elif asked:
                found += [_Still(self._renewed, "model", attempt) for attempt in sorted(asked, key=lambda a: a.id)]
        return found, upcoming

    def _describe(self, still: _Still, others: int, now: float) -> str:
        attempt, seconds = still.attempt, now - still.since
        end = {
            "model": "this is said once, long answers may take longer",
            "reward": "reward_seconds bounds one call of a reward",
        }.get(still.stage, f"it fails after lease_seconds {self.lease_seconds:g}")
        more = f" ({others} others make none either)" if others else ""
        return (
            f"{attempt.key} of task '{attempt.group.task.id}' makes no progress: in {still.stage} for {seconds:.0f} s"
            f"{more}; {end}"
        )
