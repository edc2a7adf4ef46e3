"""Failures have three kinds, decided where the knowledge is.

Infrastructure: a process, a network, a time-out. Retried elsewhere, never a reward.
Data: this task always fails. Retired after so many tries, and the ledger says so.
User code: an env, a reward or a filter raised. Shown once with its traceback, counted, bounded by a budget.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

logger = logging.getLogger("cadenza")


class RolloutError(Exception):
    """Base of what the scheduler raises to the controller. The ledger is balanced when it arrives."""


class SchedulerClosed(RolloutError):
    """The scheduler was shut down."""


class FilterLimit(RolloutError):
    """Too many groups in a row were filtered."""


class ErrorBudget(RolloutError):
    """User code raised too often."""


class StalenessError(RolloutError):
    """The program leaves groups that can no longer be trained within the bound."""


class TrajectoriesLost(RolloutError):
    """Finished trajectories are gone with the node that kept them."""


class TasksUnreadable(RolloutError):
    """The tasks are no longer those that the run began with."""


class NothingFinished(RolloutError):
    """The tasks ran out, attempts failed, and not one group came of them."""


class Stalled(RolloutError):
    """Work remains, but nothing is finished any more."""


class UserErrors:
    """The account of exceptions raised by user code."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.total = 0
        self.since_batch = 0
        self.by_origin: dict[str, int] = {}
        self.shown: set[str] = set()
        """Kinds of which a traceback is in the log. The schedulers of a run may share it (`share_log`)."""
        self.first = ""
        """The first one in words: where it was raised, its type and its text."""
        self._first_by_origin: dict[str, str] = {}
        """The first one of each key of `by_origin`, in the same words."""

    def add(self, origin: str, error: BaseException) -> None:
        """Count one, and show the first of its kind with its traceback."""
        self.count(origin, type(error).__name__, lambda: "".join(traceback.format_exception(error)))

    def count(self, origin: str, kind: str, trace: Callable[[], str]) -> None:
        """The same for an exception that is somewhere else."""
        key = f"{origin}: {kind}"
        seen = self.by_origin.get(key, 0)
        self.by_origin[key] = seen + 1
        self.total += 1
        self.since_batch += 1
        if not seen:
            text = trace()
            self._first_by_origin[key] = f"{origin}: {_last_error(kind, text)}"
            self.first = self.first or self._first_by_origin[key]
            if key not in self.shown:
                self.shown.add(key)
                logger.error("%s raised; further ones are only counted\n%s", origin, text)

    def share_log(self, other: UserErrors) -> None:
        """Show no traceback that the other has shown, and the other way round."""
        self.shown = other.shown

    def exceeded(self) -> ErrorBudget | None:
        """The error that ends the run, once more than `budget` were raised since the last batch."""
        if self.since_batch <= self.budget:
            return None
        worst = max(self.by_origin, key=lambda key: self.by_origin[key])
        told = f"most often {self._first_by_origin[worst]} ({self.by_origin[worst]} times)"
        if self.first not in ("", self._first_by_origin[worst]):
            told += f"; the first error was {self.first}"
        return ErrorBudget(
            f"user code raised {self.since_batch} times since the last batch, error_budget allows {self.budget}; "
            f"{told}. Correct the code that raises, or raise error_budget"
        )


def _last_error(kind: str, trace: str) -> str:
    """'ValueError: no board', of a traceback that ends with it. A long message is cut."""
    for line in reversed(trace.rstrip().splitlines()):
        name, colon, text = line.partition(":")
        if kind in name and line[:1] != " ":
            found = f"{kind}{colon}{text}"
            return found if len(found) <= 300 else found[:297] + "..."
    return kind
