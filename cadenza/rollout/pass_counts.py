"""What became of a pass over the tasks: one that ends without a whole group, because attempts failed, is an error."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza.rollout.failures import NothingFinished, UserErrors
from cadenza.rollout.ledger import Ledger
from cadenza.rollout.records import Fate


@dataclass(frozen=True, slots=True)
class PassStart:
    """The counts when a pass over the tasks began."""

    whole: int = 0
    """Groups consumed, or whole and filtered."""
    failed: int = 0
    """Attempts failed."""


class PassCounts:
    """Compares the sums of the ledger with those at the start of this pass over the tasks."""

    def __init__(self, ledger: Ledger, errors: UserErrors) -> None:
        self.start = PassStart()
        self._ledger = ledger
        self._errors = errors

    def begin(self, consumed: int) -> None:
        """The next pass begins; `consumed` groups were in batches so far."""
        self.start = PassStart(self._whole(consumed), self._ledger.fates[Fate.FAILED])
        self._errors.first = ""

    def raise_if_all_failed(self, consumed: int) -> None:
        """The tasks ran out: raise if attempts failed and no group of this pass was ever whole. A task that fails while
        others are consumed is retired, and no more is made of it."""
        failed = self._ledger.fates[Fate.FAILED] - self.start.failed
        if not failed or self._whole(consumed) > self.start.whole:
            return
        causes = {cause: count for (fate, cause), count in self._ledger.causes.items() if fate is Fate.FAILED}
        often = max(causes, key=lambda cause: causes[cause])
        first, detail = self._errors.first, self._ledger.first_details.get(often)
        reason = f"The first error was {first}" if first else f"Most often: {often}{f' ({detail})' if detail else ''}"
        raise NothingFinished(
            f"the tasks ran out without one whole group: {failed} attempts failed. {reason}; correct it and run again "
            "(the log has more of it, `why` tells of the attempts of a task)"
        )

    def _whole(self, consumed: int) -> int:
        return consumed + self._ledger.groups_closed[Fate.FILTERED]
