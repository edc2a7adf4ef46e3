"""One scheduler as the monitor sees it: its stream of events, the batches it returned, and when each was possible.

Invariant: the view follows from the events and the world alone. It keeps its own list of groups that are whole and have
passed their filter, so it knows the instant at which a batch is possible without asking the scheduler. It asks the
ledger one thing: whether a group without a running member still exists.

    events -> groups, fates      ask() .. update_possible() -> since when a batch is possible      returned() -> checks
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cadenza.data import DataProto
from cadenza.observe.events import Event
from cadenza.rollout.ledger import Ledger, LedgerError
from cadenza.rollout.outages import MIN_FAILURES
from cadenza.rollout.records import Fate
from cadenza.simulation.fuzzing.batch_checks import BatchChecks

if TYPE_CHECKING:
    from cadenza.simulation.fuzzing.monitor import Monitor

FATES = frozenset(fate.value for fate in Fate)


class _GroupView:
    """The state of one group, as far as the events tell."""

    __slots__ = ("begun_version", "finished", "hit", "id", "live", "open", "ready")

    def __init__(self, id: int, begun_version: int) -> None:
        self.id = id
        self.begun_version = begun_version
        self.finished = 0
        self.live = 0
        self.open = True
        self.ready = math.inf
        """Time at which it was whole and had passed its filter."""
        self.hit = False
        """An attempt of it has failed."""


class _CutSnapshot(NamedTuple):
    """The groups at the moment at which a batch was cut."""

    time: float
    since: float
    """Time from which on the batch was possible."""
    ready: dict[int, float]
    """Time at which each ready group became ready."""
    begun_versions: dict[int, int]
    """Version at which each open group began."""
    exhausted: bool
    """The tasks have run out."""
    version: int
    ahead: int
    """Groups consumed before for this version, or for later ones."""


class SchedulerView:
    """Follows one scheduler from outside: the sink of its events, and the checks of its batches."""

    def __init__(
        self,
        monitor: Monitor,
        name: str,
        *,
        group_size: int,
        per_batch: int,
        bound: int,
        extra_groups: int,
        staleness: str,
        tasks: int | None,
        filtered: bool,
    ) -> None:
        self.monitor = monitor
        self.name = name
        self.group_size = group_size
        self.per_batch = per_batch
        self.bound = bound
        self.extra_groups = extra_groups
        self.staleness = staleness
        self.tasks = tasks
        self.filtered = filtered
        self.ledger: Ledger | None = None
        self.metrics: Callable[[], dict[str, float]] = dict
        self.closing = False
        """The controller has asked for the shutdown."""
        self.ended_by = ""
        """Name of the error that ended the scheduler before the shutdown."""
        self.fates: Counter[str] = Counter()
        self.batches = BatchChecks(self)
        self._states: dict[str, str] = {}
        self._groups: dict[int, _GroupView] = {}
        self._ready: dict[int, _GroupView] = {}
        self._ahead = 0
        """Groups consumed beyond the batches of the versions published before."""
        self._consumed: set[int] = set()
        self._awaited_groups = 0.0
        self._since = math.inf
        self._cut: _CutSnapshot | None = None

    @property
    def issued(self) -> int:
        return len(self._states)

    # -- the stream ----------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        self.monitor.log_event(self.name, event)
        kind = event.kind
        if kind == "issue":
            self._issue(event.subject)
        elif kind == "finish":
            self._finish(event)
        elif kind in FATES:
            self._close(event)
        elif kind == "open":
            number = int(event.subject[1:])
            self._groups[number] = _GroupView(number, self.monitor.version)
            self.update_possible()

    def _issue(self, key: str) -> None:
        if key in self._states:
            self.violate(1, f"{key} was issued twice")
        self._states[key] = "running"
        self._group(key).live += 1
        if self.name == "train":
            self.monitor.world.injector.on_moment("issue")
            self.monitor.notify_issued(len(self._states))

    def _finish(self, event: Event) -> None:
        key, group = event.subject, self._group(event.subject)
        if self._states.get(key) != "running":
            self.violate(1, f"{key} finished, but it is {self._states.get(key)}")
        self._states[key] = "finished"
        group.finished += 1
        if group.finished == self.group_size and not self.filtered:
            self._make_ready(group, event.time)

    def _close(self, event: Event) -> None:
        key, fate = event.subject, event.kind
        state, group = self._states.get(key), self._group(key)
        if state is None or state in FATES:
            self.violate(1, f"{key} became {fate}, but it is {state or 'not issued'}")
            return
        if fate in ("trained", "validated") and self._cut is None:
            self._cut = self._snapshot(event.time)
        if fate in ("trained", "validated") and group.id not in self._consumed:
            self._consumed.add(group.id)
            self._ahead += 1
        self._states[key] = fate
        self.fates[fate] += 1
        group.live -= 1
        self._explain(event, group)
        if fate == "failed" and state == "running":
            group.hit = True
        elif fate != "surplus" or state == "finished" or group.finished < self.group_size:
            group.open = False
            self._ready.pop(group.id, None)
        self.update_possible()

    def _explain(self, event: Event, group: _GroupView) -> None:
        """Check that the world has a reason for this fate."""
        key, fate = event.subject, event.kind
        world, scenario = self.monitor.world, self.monitor.scenario
        train = self.name == "train"
        match fate:
            case "failed" if (self.name, key) not in world.faults_hit:
                self.violate(5, f"{key} failed, although no fault met it")
            case "cancelled" if not self.closing and event.detail.isidentifier():
                self.ended_by = event.detail
            case "cancelled" if event.detail == "domain paused" and world.outages_hit[self.name] >= MIN_FAILURES:
                pass
            case "cancelled" if not self.closing and not group.hit:
                self.violate(5, f"{key} was cancelled, although its task was not retired: {event.detail}")
            case "filtered" if world.verdicts.get(group.id) is not False:
                self.violate(1, f"{key} is filtered, although the filter did not say so")
            case "surplus" if not (train and (scenario.extra_members or scenario.extra_groups)):
                self.violate(1, f"{key} is surplus, although nothing redundant was started")
            case "stale" if self.staleness != "drop":
                self.violate(3, f"{key} is stale under policy '{self.staleness}'")

    def filter_decided(self, number: int, keep: bool, delay: float) -> None:
        """The filter has decided; the scheduler can know the verdict after `delay` seconds."""
        group = self._groups[number]
        if not keep or not group.open:
            return
        loop = asyncio.get_running_loop()
        self._make_ready(group, loop.time() + delay)
        if delay:
            loop.call_later(delay, self.update_possible)

    def _make_ready(self, group: _GroupView, when: float) -> None:
        group.ready = when
        self._ready[group.id] = group
        self.update_possible()

    def _group(self, key: str) -> _GroupView:
        return self._groups[int(key[1 : key.index(".")])]

    # -- the cut -------------------------------------------------------------------------------------------------------

    def published(self) -> None:
        """A new version is published: the next batches are cut for it."""
        self._ahead = max(0, min(self._ahead - self.per_batch, max(1, self.bound) * self.per_batch))
        self.update_possible()

    def ask(self, groups: int | None) -> None:
        """The controller calls `get_batch`."""
        self._awaited_groups = math.inf if groups is None else groups
        self._cut = None
        self._since = math.inf
        self.update_possible()

    def withdraw(self) -> None:
        """The controller has given up waiting for its batch."""
        self._awaited_groups = 0.0

    def update_possible(self) -> None:
        """Note since when a batch is possible, after any change."""
        if not self._awaited_groups or self._cut is not None:
            return
        now = asyncio.get_running_loop().time()
        if not self._possible(now):
            self._since = math.inf
        elif self._since > now:
            self._since = now

    def _possible(self, now: float) -> bool:
        ready = [number for number, group in self._ready.items() if group.ready <= now]
        if len(ready) >= self._awaited_groups:
            taken = sorted(ready)[: int(self._awaited_groups)]
            return self._leaves_too_old(taken, self._snapshot(now)) is None
        return self._exhausted() and len(ready) == len(self._open())

    def _open(self) -> list[_GroupView]:
        """Return the groups that have not ended. The ledger is asked about those without a running member: a group that
        waits for a slot after a failed attempt may end without an event."""
        found = [group for group in self._groups.values() if group.open]
        if self.ledger is not None and any(not group.live for group in found):
            known = {group.id for group in self.ledger.open_groups()}
            for group in found:
                group.open = group.live > 0 or group.id in known
        return [group for group in found if group.open]

    def _exhausted(self) -> bool:
        return self.tasks is not None and len(self._groups) >= self.tasks

    def _leaves_too_old(self, taken: Sequence[int], cut: _CutSnapshot) -> str | None:
        """Say why the staleness rule `wait` forbids to take these groups; None when it does not. The groups left that
        began at or before a version must fit into the batches that can still train them within the bound."""
        if self.name != "train" or self.staleness != "wait":
            return None
        left = [version for number, version in cut.begun_versions.items() if number not in set(taken)]
        for k in range(self.bound + 1):
            oldest = cut.version - self.bound + k
            capacity = (k + 1) * self.per_batch - cut.ahead - len(taken)
            old, limit = sum(version <= oldest for version in left), max(capacity, 0) + self.extra_groups
            if old > limit:
                return f"{old} groups begun at or before version {oldest} are left, {limit} may be"
        return None

    def _snapshot(self, now: float) -> _CutSnapshot:
        ready = {number: group.ready for number, group in self._ready.items() if group.ready <= now}
        begun_versions = {g.id: g.begun_version for g in self._open()}
        return _CutSnapshot(
            time=now,
            since=self._since,
            ready=ready,
            begun_versions=begun_versions,
            exhausted=self._exhausted(),
            version=self.monitor.version,
            ahead=self._ahead,
        )

    def returned(self, batch: DataProto | None) -> None:
        """`get_batch` has returned: check the batch and the moment of its cut."""
        now = asyncio.get_running_loop().time()
        groups = [] if batch is None else self.batches.check(batch)
        cut = self._cut or self._snapshot(now)
        if batch is not None and self._cut is None:
            self.violate(1, "a batch came back, but no attempt became trained or validated")
        if min(cut.since, cut.time) < now:
            waited = f"was possible at {cut.since:.4f} s, cut at {cut.time:.4f} s, returned at {now:.4f} s"
            self.violate(4, f"the batch of groups {groups} {waited}")
        youngest = max(groups, default=-1)
        for number, ready in cut.ready.items():
            if ready < cut.time and number < youngest and number not in groups:
                self.violate(4, f"g{number}, ready at {ready:.4f} s, was left behind for g{youngest}")
        for number in groups:
            if number not in cut.ready:
                self.violate(2, f"g{number} is in the batch, but it was not whole, or not through its filter")
        if len(groups) < self._awaited_groups:
            rest = sorted(set(cut.begun_versions) - set(groups))
            if not cut.exhausted or rest:
                self.violate(
                    4, f"{len(groups)} of {self._awaited_groups} groups, although tasks or groups {rest} are left"
                )
        elif problem := self._leaves_too_old(groups, cut):
            self.violate(3, f"the batch was cut too early: {problem}")
        self._awaited_groups = 0.0
        if self.ledger is not None:
            self._check_ledger(self.ledger)

    # -- the ledger ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check what must hold after the shutdown."""
        if live := [key for key, state in self._states.items() if state not in FATES]:
            self.violate(1, f"{len(live)} attempts have no fate after the shutdown: {live[:5]}")
        consumed = self.fates["trained"] + self.fates["validated"]
        returned = len(self.batches.seen)
        if consumed != returned:
            self.violate(1, f"{consumed} attempts were trained or validated, {returned} came back in batches")
        if self.ended_by and not self.monitor.controller_failed:
            self.violate(5, f"{self.ended_by} ended the schedule, but the controller was not told")
        if busy := self.metrics().get("slots/busy"):
            self.violate(5, f"{busy} slots are taken after the shutdown")
        if self.ledger is not None:
            self._check_ledger(self.ledger)
            if self.ledger.live:
                self.violate(1, f"the ledger says that {self.ledger.live} attempts live after the shutdown")

    def _check_ledger(self, ledger: Ledger) -> None:
        try:
            ledger.check()
        except LedgerError as error:
            self.violate(1, str(error))
        booked = {fate.value: count for fate, count in ledger.fates.items() if count}
        if booked != self.fates or ledger.issued != len(self._states):
            seen = f"{len(self._states)} issued and {dict(self.fates)} were seen"
            self.violate(1, f"the ledger has {ledger.issued} issued and {booked}, {seen}")

    def violate(self, invariant: int, message: str) -> None:
        self.monitor.violate(invariant, f"{self.name}: {message}")
