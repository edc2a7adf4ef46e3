"""The rules by which no group is trained too late: how many groups may start, and which cut leaves none behind.

Invariant: let B be the groups of a batch, A the ceiling of alpha, R the extra groups, v the published version.
After the cut for v, of the groups that are started and not consumed,

    none began at or before v - A, and at most k*B + R began at or before v - A + k, for k = 1..A.

Batches taken ahead of their version move this along (`still_trainable`). Then no group is ever trained more than A
versions after it began, and nothing has to be thrown away for it (docs/staleness.md has the proof). Two rules keep it:
`limit` (reserve before a group starts) and `may_cut` (take the oldest whole groups, and only when what is left still
fits). They know counts only; the groups are those of the queue (group_queue.py).
"""

from __future__ import annotations

import math
from collections import Counter

from cadenza.rollout.config import RolloutConfig
from cadenza.rollout.failures import StalenessError, logger

UNPUBLISHED_BATCHES = 3
"""Batches of one version, beyond those that asynchrony allows, after which a warning says that none is published."""


class StalenessBound:
    """Counts started and unconsumed groups by the version at which they began, and decides by these counts.

    With batches of 2 groups, alpha 1, and version 0 published:

        bound.limit()        # 4: a batch, and one ahead
        bound.begin(0)       # four times, as groups start
        bound.make_ready(0)  # three times, as groups are whole
        bound.may_cut(2)     # True: the two that are left fit into the batch of version 1
        bound.consume(0)     # twice, as the batch takes them
        bound.advance(1)     # and then limit() is 6
    """

    def __init__(self, config: RolloutConfig, *, is_training: bool) -> None:
        """A validation has no bound: its batches are all there is to wait for."""
        self.version = 0
        """Newest fully published version: what a batch is cut for."""
        self.consumed = 0
        self.in_earlier_batches = 0
        """Groups that the batches of all versions before this one hold."""
        self._consumed_before_version = 0
        """Groups consumed when this version was published."""
        self.wanted: float | None = None
        """Groups that a caller waits for."""
        self.unconsumed: Counter[int] = Counter()
        """Started and unconsumed groups by the version at which they began."""
        self.ready: Counter[int] = Counter()
        """Those of them that a batch may take."""
        self._has_warned = False
        self._config = config
        self._is_training = is_training
        self._waits = is_training and config.staleness == "wait"
        self._drops = is_training and config.staleness == "drop"
        self._per_batch = config.groups_per_batch
        self._max_staleness = config.max_staleness
        self._reserved = config.groups_per_batch + math.floor(config.alpha * config.groups_per_batch)
        """Groups that may start for this version and ahead of the next ones."""
        self._extra_groups = config.extra_groups

    # -- counts --------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """A group starts at this version."""
        self.unconsumed[version] += 1

    def make_ready(self, begun: int) -> None:
        """A group that began at this version is whole, and may be taken."""
        self.ready[begun] += 1

    def consume(self, begun: int) -> None:
        """A batch takes a group that began at this version."""
        self.consumed += 1
        self.end(begun, was_ready=True)

    def end(self, begun: int, *, was_ready: bool) -> None:
        """A group that began at this version is consumed, or ends otherwise."""
        if was_ready:
            self.ready[begun] -= 1
        self.unconsumed[begun] -= 1
        if not self.unconsumed[begun]:
            del self.unconsumed[begun]
            self.ready.pop(begun, None)

    def clear(self) -> None:
        """No group is left."""
        self.unconsumed.clear()
        self.ready.clear()

    def advance(self, version: int) -> None:
        """A version is published. Batches that were taken ahead of it count for it; not more than the bound allows, or
        larger batches than configured would count up for ever."""
        self.version = version
        self._consumed_before_version = self.consumed
        least = self.consumed - max(1, self._max_staleness) * self._per_batch
        self.in_earlier_batches = min(self.consumed, max(self.in_earlier_batches + self._per_batch, least))

    def restore(self, version: int, consumed: int, in_earlier_batches: int) -> None:
        """Count on from these."""
        self.version, self.consumed, self.in_earlier_batches = version, consumed, in_earlier_batches
        self._consumed_before_version = consumed

    def begin_pass(self) -> None:
        """The tasks begin anew. The last batch may have been short. It counts as a whole one, or groups would begin in
        what is left of it, which no batch of this version takes."""
        self.in_earlier_batches -= (self.in_earlier_batches - self.consumed) % self._per_batch

    # -- rules ---------------------------------------------------------------------------------------------------

    def limit(self) -> float:
        """How many groups may have been started by now."""
        if not self._is_training:
            return self.consumed + (self.wanted or 0)
        limit: float = self.in_earlier_batches + self._reserved
        if self.wanted is not None:  # a batch of another size, or a second one for the same version
            limit = max(limit, self.consumed + self.wanted)
        if self.wanted is not None or self.still_trainable(self.version, self.consumed):
            limit += self._extra_groups  # else they would begin after the last cut that could take them
        return limit

    def may_cut(self, groups: float, *, if_all_were_ready: bool = False) -> bool:
        """Whether taking the oldest `groups` ready groups leaves the invariant intact."""
        if not self._waits:
            return True
        consumed = self.consumed + groups
        ready = self.unconsumed if if_all_were_ready else self.ready
        left = 0.0
        for begun in sorted(self.unconsumed):
            taken = min(groups, ready[begun])
            groups -= taken
            left += self.unconsumed[begun] - taken
            if left > self.still_trainable(begun, consumed) + self._extra_groups:
                return False
        return True

    def still_trainable(self, begun: int, consumed: float) -> float:
        """Groups that the batches to come can still take of those that began at or before a version, in time."""
        batches = begun + self._max_staleness - self.version + 1  # this version's own is the first of them
        return max(batches * self._per_batch - (consumed - self.in_earlier_batches), 0)

    def is_surplus(self, begun: int) -> bool:
        """Whether no later batch can take a group that began at this version, in time: there were extra groups."""
        return self._waits and self._extra_groups > 0 and not self.still_trainable(begun, self.consumed)

    def oldest_to_keep(self) -> int:
        """Under 'drop', groups that began before this version are too old for the one at which the next batch will be
        trained. None is too old under 'wait'."""
        if not self._drops:
            return 0
        ahead = min((self.consumed - self.in_earlier_batches) // self._per_batch, self._max_staleness)
        return self.version + ahead - self._max_staleness

    def check(self, groups: float) -> None:
        """Raise when the program leaves groups that no batch can hold any more."""
        if not self._waits:
            return
        oldest = self.version - self._max_staleness
        if min(self.unconsumed, default=oldest) < oldest or not self.may_cut(groups, if_all_were_ready=True):
            raise StalenessError(
                f"groups begun at versions {dict(self.unconsumed)} cannot all be trained within max_staleness "
                f"{self._max_staleness} of version {self.version} by batches of {groups:g} groups: with "
                f"staleness 'wait' every published version must take {self._per_batch} groups (batch_size "
                f"{self._config.batch_size}); take whole batches, publish once per batch, ask for no more than "
                f"{self._max_staleness} batches ahead of a publication, or set staleness to 'drop'"
            )

    def warn_if_never_published(self) -> None:
        """Say once that batch after batch is taken of one version: the program may have forgotten to publish."""
        batches = (self.consumed - self._consumed_before_version) // self._per_batch
        if not self._is_training or self._has_warned or batches < self._max_staleness + UNPUBLISHED_BATCHES:
            return
        self._has_warned = True
        logger.warning(
            "%d batches were taken of version %d, and no weights were published since: publish after each train step "
            "(suspend, sampler.load_weights(version + 1), resume), or the policy that generates never learns",
            batches, self.version,
        )  # fmt: skip
