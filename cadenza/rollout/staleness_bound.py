"""The rules by which no group is trained too late: how many groups may start, and which cut leaves none behind.

Invariant: let B be the groups of a batch, A the ceiling of alpha (`config.max_staleness`), R the extra groups, v the
published version. After the cut for v, of the groups that are started and not consumed,

    none began at or before v - A, and at most k*B + R began at or before v - A + k, for k = 1..A.

If batches for later versions were already taken, those groups are subtracted from the limit (`max_unconsumed`). Then no
group is ever trained more than A versions after it began, and nothing has to be thrown away for it (docs/staleness.md
has the proof). Two rules keep it: `max_started` (reserve before a group starts) and `may_cut` (take the oldest whole
groups, and only when what is left still fits). They know counts only; the groups are those of the queue
(group_queue.py).
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

        bound.max_started()  # 4: a batch, and one ahead
        bound.begin(0)       # four times, as groups start
        bound.make_ready(0)  # three times, as groups are whole
        bound.may_cut(2)     # True: the two that are left fit into the batch of version 1
        bound.consume(0)     # twice, as the batch takes them
        bound.advance(1)     # and then max_started() is 6
    """

    def __init__(self, config: RolloutConfig, *, is_training: bool) -> None:
        """A validation has no bound: its batches are all there is to wait for."""
        self.version = 0
        """Newest fully published version: what a batch is cut for."""
        self.consumed = 0
        self.consumed_for_earlier_versions = 0
        """Of `consumed`, the groups that count for batches of versions before this one. The others count for this
        version, or for later ones whose batches were taken ahead."""
        self._consumed_at_publication = 0
        """`consumed` when this version was published."""
        self.awaited_groups: float | None = None
        """Groups of the batch that a caller waits for; None while no caller waits."""
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

    def make_ready(self, begun_version: int) -> None:
        """A group that began at this version is whole, and may be taken."""
        self.ready[begun_version] += 1

    def consume(self, begun_version: int) -> None:
        """A batch takes a group that began at this version."""
        self.consumed += 1
        self.end(begun_version, was_ready=True)

    def end(self, begun_version: int, *, was_ready: bool) -> None:
        """A group that began at this version is consumed, or ends otherwise."""
        if was_ready:
            self.ready[begun_version] -= 1
        self.unconsumed[begun_version] -= 1
        if not self.unconsumed[begun_version]:
            del self.unconsumed[begun_version]
            self.ready.pop(begun_version, None)

    def clear(self) -> None:
        """No group is left."""
        self.unconsumed.clear()
        self.ready.clear()

    def advance(self, version: int) -> None:
        """A version is published. Batches that were taken ahead of it count for it; not more than the bound allows, or
        larger batches than configured would count up for ever."""
        self.version = version
        self._consumed_at_publication = self.consumed
        least = self.consumed - max(1, self._max_staleness) * self._per_batch
        self.consumed_for_earlier_versions = min(
            self.consumed, max(self.consumed_for_earlier_versions + self._per_batch, least)
        )

    def restore(self, version: int, consumed: int, consumed_for_earlier_versions: int) -> None:
        """Count on from these."""
        self.version, self.consumed = version, consumed
        self.consumed_for_earlier_versions = consumed_for_earlier_versions
        self._consumed_at_publication = consumed

    def begin_pass(self) -> None:
        """The tasks begin anew. The last batch may have been short. It counts as a whole one, or groups would begin in
        what is left of it, which no batch of this version takes."""
        self.consumed_for_earlier_versions -= (self.consumed_for_earlier_versions - self.consumed) % self._per_batch

    # -- rules ---------------------------------------------------------------------------------------------------

    def max_started(self) -> float:
        """Total groups that may have been started since the run began, consumed ones included; compare with
        `GroupQueue.started`."""
        if not self._is_training:
            return self.consumed + (self.awaited_groups or 0)
        most: float = self.consumed_for_earlier_versions + self._reserved
        if self.awaited_groups is not None:  # a batch of another size, or a second one for the same version
            most = max(most, self.consumed + self.awaited_groups)
        if self.awaited_groups is not None or self.max_unconsumed(self.version, self.consumed):
            most += self._extra_groups  # else they would begin after the last cut that could take them
        return most

    def may_cut(self, groups: float, *, if_all_were_ready: bool = False) -> bool:
        """Whether taking the oldest `groups` ready groups leaves the invariant intact."""
        if not self._waits:
            return True
        consumed = self.consumed + groups
        ready = self.unconsumed if if_all_were_ready else self.ready
        left = 0.0
        for begun_version in sorted(self.unconsumed):
            taken = min(groups, ready[begun_version])
            groups -= taken
            left += self.unconsumed[begun_version] - taken
            if left > self.max_unconsumed(begun_version, consumed) + self._extra_groups:
                return False
        return True

    def max_unconsumed(self, begun_version: int, consumed: float) -> float:
        """Returns how many groups that began at `begun_version` or before may be unconsumed, if `consumed` groups were
        consumed by now: as many as the batches to come can take before those of `begun_version` are too old."""
        batches = begun_version + self._max_staleness - self.version + 1  # this version's own is the first of them
        return max(batches * self._per_batch - (consumed - self.consumed_for_earlier_versions), 0)

    def is_surplus(self, begun_version: int) -> bool:
        """Whether no later batch can take a group that began at this version, in time: there were extra groups."""
        return self._waits and self._extra_groups > 0 and not self.max_unconsumed(begun_version, self.consumed)

    def oldest_to_keep(self) -> int:
        """Under 'drop', groups that began before this version are too old for the one at which the next batch will be
        trained. None is too old under 'wait'."""
        if not self._drops:
            return 0
        ahead = min((self.consumed - self.consumed_for_earlier_versions) // self._per_batch, self._max_staleness)
        return self.version + ahead - self._max_staleness

    def check(self, groups: float) -> None:
        """Raise `StalenessError` if some unconsumed group can no longer be trained within `max_staleness`, even if the
        next batch takes the oldest `groups` groups: the program published too often, or took too little."""
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
        batches = (self.consumed - self._consumed_at_publication) // self._per_batch
        if not self._is_training or self._has_warned or batches < self._max_staleness + UNPUBLISHED_BATCHES:
            return
        self._has_warned = True
        logger.warning(
            "%d batches were taken of version %d, and no weights were published since: publish after each train step "
            "(suspend, sampler.load_weights(version + 1), resume), or the policy that generates never learns",
            batches, self.version,
        )  # fmt: skip
