"""Admission, assembly of groups, and the cut of batches.

Invariant: let B be the groups of a batch, A the ceiling of alpha, R the extra groups, v the published version.
After the cut for v, of the groups that are started and not consumed,

    none began at or before v - A, and at most k*B + R began at or before v - A + k, for k = 1..A.

Batches taken ahead of their version move this along (`_remaining_demand`). Then no group is ever trained more than A
versions after it began, and nothing has to be thrown away for it (docs/staleness.md has the proof). Two rules keep it,
and both are here: `_limit` (reserve before a group starts) and `_may_cut` (take the oldest whole groups, and only when
what is left still fits).

    a free slot --issue()--> attempt runs --put()--> group whole --filter--> ready --take()--> batch
         ^                        |                     |
         +---- refill() <---- fail(): next try    filtered: handed back to its domain
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from cadenza.config import load_object
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, raise_if_cancelled
from cadenza.observe.events import EventSink
from cadenza.off_loop import as_async, with_deadline
from cadenza.rollout import token_bundles
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import (
    FilterLimit,
    NothingFinished,
    RolloutError,
    SchedulerClosed,
    StalenessError,
    Stalled,
    UserErrors,
    logger,
)
from cadenza.rollout.ledger import Attempt, AttemptCopy, AttemptState, Group, GroupState, Ledger, LedgerError
from cadenza.rollout.records import Fate, Trajectory
from cadenza.rollout.tasks import Domains

Mode = Literal["train", "val"]
UNPUBLISHED_BATCHES = 3
"""Batches of one version, beyond those that asynchrony allows, after which a warning says that none is published."""
GroupFilter = Callable[[list[Trajectory]], Awaitable[bool]]


class GroupQueueManager:
    """Buffers finished episodes, assembles groups, cuts batches.

    A scheduler has one and calls it directly. It also runs as an actor, for a program that brings workers of its own:

        queue = ray.remote(GroupQueueManager).remote(RolloutConfig(batch_size=8, group_size=4), env_manager_config)
        attempt = ray.get(queue.next_attempt.remote())       # a worker: which task to run; None when there is no more
        queue.put.remote(attempt, trajectory)                # or queue.fail.remote(attempt, "env: crashed")
        groups = ray.get(queue.take.remote(2))               # the controller: two whole groups, the oldest first
        queue.advance.remote(1)                              # after weights were published; queue.reset.remote()

    A worker far away has a copy of its attempt. `put` and `fail` of a copy also free its slot; what comes of an attempt
    that has its fate already is dropped. The calls need a running event loop, the constructor does not.
    """

    def __init__(
        self,
        config: RolloutConfig,
        env_manager_config: EnvManagerConfig,
        mode: Mode = "train",
        *,
        events: EventSink | None = None,
    ) -> None:
        self.config = config
        self.mode = mode
        self.ledger = Ledger(config.history, events)
        self.domains = Domains(env_manager_config)
        self.errors = UserErrors(config.error_budget)
        self.version = 0
        """Newest fully published version: what a batch is cut for."""
        self.started = 0
        """Groups admitted, without those that were filtered, retired, stale or surplus."""
        self.consumed = 0
        self.staleness: Counter[int] = Counter()
        """Trained trajectories by staleness."""
        self.last_end_time = 0.0
        """When an attempt last finished or failed."""
        self.stop: Callable[[Attempt], None] = lambda attempt: None
        """Set by the slot pool: ends the run of an attempt that has its fate."""
        self._work = asyncio.Event()
        """Wakes those that wait in `next_attempt`."""
        self.refill: Callable[[], None] = self._wake_workers
        """Set by the owner of the slots: there may be work."""
        self.spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = asyncio.create_task
        """Set by the scheduler: runs the coroutine of a filter in its task group."""
        self._filter: GroupFilter | None = None
        if config.group_filter is not None:
            group_filter = config.group_filter
            self._filter = as_async(load_object(group_filter) if isinstance(group_filter, str) else group_filter)
        self._filter_tasks: dict[Group, asyncio.Task[None]] = {}
        """Filters that run."""
        self._filter_seconds = env_manager_config.reward_seconds
        self._group_size = config.group_size
        self._members = config.group_size + config.extra_members
        self._initial_members = config.group_size if config.extra_after else self._members
        """Members that begin with the group."""
        self._extra_threshold = max(config.group_size - config.extra_members, 1)
        """Members after which extra ones may be called for."""
        self.base = 0
        """Groups that the batches of all versions before this one hold."""
        self._consumed_before_version = 0
        """Groups consumed when this version was published."""
        self._whole_before_epoch = self._failed_before_epoch = 0
        """Groups consumed or filtered, and attempts failed, when this epoch of the tasks began."""
        self._remote_attempts: set[int] = set()
        """Attempts that `next_attempt` gave out and whose slots are not free yet."""
        self._warned_unpublished = False
        self._demand: float | None = None
        """Groups that a waiting `take` still wants."""
        self._change: asyncio.Future[None] | None = None
        self._ready: list[tuple[int, Group]] = []
        self._ready_by_version: Counter[int] = Counter()
        self._unconsumed: Counter[int] = Counter()
        """Started and unconsumed groups by the version at which they began."""
        self._filtered_in_a_row = 0
        self._failed_in_a_row = 0
        self._max_failed_in_a_row = 100 + 4 * config.max_attempts * env_manager_config.slots
        self._error: RolloutError | None = None

    # -- what slots ask ------------------------------------------------------------------------------------------

    def issue(self, slot: int) -> Attempt | None:
        """The attempt that a free slot should run now: the oldest group's missing member, else a new group's."""
        if self._error is not None:
            return None
        while (domain := self.domains.waiting()) is not None:
            group, member = domain.pending.popleft()
            if group.state is GroupState.OPEN:
                domain.running += 1
                return self.ledger.issue(group, member, slot, self._now())
        if self.started >= self._limit():
            return None
        drawn = self.domains.draw()
        if drawn is None:
            self._wake()
            return None
        domain, task = drawn
        group = self.ledger.open(task, self.version, self._now())
        domain.started += 1
        domain.running += 1
        domain.pending.extend([(group, member) for member in range(1, self._initial_members)])
        self.started += 1
        self._unconsumed[self.version] += 1
        return self.ledger.issue(group, 0, slot, self._now())

    async def next_attempt(self, slot: int = 0) -> Attempt | None:
        """Waits for the next attempt to run, for a worker without a `refill` callback. None when the tasks ran out, or
        the run has ended."""
        while (attempt := self.issue(slot)) is None:
            if self._error is not None or (self.domains.exhausted and not self._unconsumed):
                return None
            await self._work.wait()
        self._remote_attempts.add(attempt.id)
        return attempt

    def slot_freed(self, attempt: Attempt) -> None:
        """The env of this attempt is gone."""
        self.domains.all[attempt.group.task.domain].running -= 1

    def await_reward(self, attempt: Attempt) -> None:
        """The episode is over; its reward comes later."""
        self.ledger.await_reward(attempt)

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The episode is finished and has its reward."""
        if isinstance(attempt, AttemptCopy):
            if (original := self._end_copy(attempt)) is None:
                return
            attempt = original
            self.ledger.await_reward(attempt)
        self.last_end_time = self._now()
        self._failed_in_a_row = 0
        self.ledger.finish(attempt, trajectory, self.last_end_time)
        group = attempt.group
        if len(group.finished) < self._group_size:
            if self._initial_members < self._members and len(group.finished) == self._extra_threshold:
                patience = self.config.extra_after * (self.last_end_time - group.opened)
                asyncio.get_running_loop().call_later(patience, self._start_extra_members, group)
            return
        self._on_group_whole(group)
        if self.config.extra_members:
            for loser in group.live:
                if loser not in group.finished:
                    self.ledger.close(loser, Fate.SURPLUS, "the group was whole before", self.last_end_time)
                    self.stop(loser)

    def fail(self, attempt: Attempt, cause: str, detail: str = "", *, weight: float = 1.0) -> None:
        """The attempt is lost. The next try is issued, unless the task had its tries; `weight` says how much of a try
        this one was."""
        if isinstance(attempt, AttemptCopy):
            if (original := self._end_copy(attempt)) is None:
                return
            attempt = original
        self.last_end_time = self._now()
        if attempt.state is AttemptState.FINISHED:
            raise LedgerError(f"{attempt.key} has finished, and fails now: {cause} {detail}")
        self.ledger.close(attempt, Fate.FAILED, cause, self.last_end_time, detail)
        group, member = attempt.group, attempt.member
        self._failed_in_a_row += 1
        if error := self.errors.exceeded():
            self.fatal(error)
        elif self._failed_in_a_row > self._max_failed_in_a_row:
            self.fatal(Stalled(f"the last {self._failed_in_a_row} attempts all failed; the last one: {cause} {detail}"))
        if group.state is not GroupState.OPEN or self._error is not None:
            return
        group.tries = group.tries or {}
        group.tries[member] = group.tries.get(member, 0.0) + weight
        if group.tries[member] >= self.config.max_attempts:
            given_up = sum(tries >= self.config.max_attempts for tries in group.tries.values())
            if self._members - given_up < self._group_size:
                self._end_unconsumed(group, Fate.CANCELLED, "task retired")
                failures = sum(a.member == member and a.fate is Fate.FAILED for a in group.attempts)
                group.cause += f", member {member} failed {failures} x"
            elif self._initial_members < self._members:
                self._start_extra_members(group)  # no other member can replace it
            return
        self.domains.all[group.task.domain].pending.appendleft((group, member))
        self.refill()

    # -- what the controller asks --------------------------------------------------------------------------------

    def advance(self, version: int) -> None:
        """A version is fully published."""
        if version < self.version:
            raise ValueError(f"version must not go back: it is {self.version}, got {version}")
        if version == self.version:
            return
        self.version = version
        self._consumed_before_version = self.consumed
        # Batches that were taken ahead of their version count for it; not more than the bound allows, or larger
        # batches than configured would count up for ever.
        per_batch = self.config.groups_per_batch
        ahead = max(1, self.config.max_staleness) * per_batch
        self.base = min(self.consumed, max(self.base + per_batch, self.consumed - ahead))
        self._drop_stale()
        self._wake()
        self.refill()

    @property
    def ready(self) -> int:
        """Whole groups that no batch has taken."""
        return self._ready_by_version.total()

    @contextmanager
    def demanding(self, groups: int | None) -> Iterator[None]:
        """While a caller waits for a batch of so many groups, or of all that the tasks give, admission counts it."""
        if self._demand is not None:
            raise RuntimeError("a batch is already being taken; await it first")
        self._demand = math.inf if groups is None else groups
        try:
            self.refill()
            yield
        finally:
            self._demand = None  # before the slots look for work: the limit falls with it
            self.refill()

    async def take(self, groups: int | None = None) -> list[list[Trajectory]]:
        """Waits for a batch of so many groups, or of all that the tasks give, and hands over its trajectories group by
        group. Fewer, or none, when the tasks ran out."""
        if groups is None:
            self.refuse_endless_tasks()
        with self.demanding(groups):
            while (batch := self.cut()) is None:
                await self.changed()
        taken: list[list[Trajectory]] = []
        for group in batch:
            attempts = sorted(group.finished, key=lambda attempt: attempt.member)
            taken.append([attempt.trajectory for attempt in attempts if attempt.trajectory is not None])
            for attempt in attempts:
                attempt.trajectory = None
        return taken

    def refuse_endless_tasks(self) -> None:
        """Raise unless the tasks of all domains run out some time."""
        if endless := self.domains.endless:
            raise ValueError(
                f"batch_size -1 means until the tasks run out, but those of {endless} never do; "
                "set domains.<name>.tasks, or ask for a number"
            )

    def changed(self) -> asyncio.Future[None]:
        """Resolves when `cut` may have something to say."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def cut(self) -> list[Group] | None:
        """Take the batch that is demanded, if it is there: the oldest whole groups. Fewer only when the tasks ran
        out."""
        if self._error is not None:
            raise self._error
        assert self._demand is not None
        groups = self._demand
        self._drop_stale()
        ready = self._ready_by_version.total()
        self._check_ages(groups)
        if ready < groups:
            if not self.domains.exhausted or self._unconsumed.total() > ready:
                return None
            groups = ready
            if not groups:
                self._raise_if_all_failed()
        elif not self._may_cut(groups):
            return None
        batch: list[Group] = []
        now = self._now()
        self._demand = None
        while len(batch) < groups:
            _, group = heapq.heappop(self._ready)
            if group.state is GroupState.READY:
                self._consume(group, now)
                batch.append(group)
        self._end_surplus()
        self.errors.since_batch = 0
        self._warn_if_never_published()
        return batch

    def reset(self) -> None:
        """Begin the next epoch: the same tasks in the same order. The ledger counts on; sampling randomness is keyed by
        the task, so that the same weights write the same answers again. Refused while groups are open."""
        if self._error is not None:
            raise self._error
        if groups := self.ledger.open_groups():
            raise RolloutError(
                f"reset begins the tasks anew, but {len(groups)} groups of this epoch are open, the oldest is "
                f"g{groups[0].id} of task '{groups[0].task.id}': take batches until get_batch returns None before"
            )
        self.domains.restart()
        self._whole_before_epoch = self._whole_groups
        self._failed_before_epoch = self.ledger.fates[Fate.FAILED]
        self.errors.first = ""
        self.refill()

    def lose_group(self, group: Group) -> None:
        """End an open group whose finished trajectories were lost with their node; its task is drawn anew."""
        self._end_unconsumed(group, Fate.FAILED, "lost with its node")

    def fatal(self, error: RolloutError) -> None:
        """End the run: everything that is not consumed is cancelled, and a caller that waits for a batch gets the
        error."""
        if self._error is not None:
            return
        self._error = error
        now = self._now()
        cause = "shutdown" if isinstance(error, SchedulerClosed) else type(error).__name__
        for group in self.ledger.open_groups():
            self._cancel_filter(group)
            for attempt in self.ledger.close_group(group, Fate.CANCELLED, cause, now):
                self.stop(attempt)
        self._ready.clear()
        self._ready_by_version.clear()
        self._unconsumed.clear()
        self._wake()
        self._wake_workers()

    # -- over a restart ------------------------------------------------------------------------------------------

    @property
    def end_error(self) -> RolloutError | None:
        """What ended the run."""
        return self._error

    def restore(self, version: int, consumed: int, base: int, groups: list[Group]) -> None:
        """Go on from the groups that an earlier life of the run had open. What ran in it is cancelled. A group keeps
        its order and its age if members of it are finished, and only the others are issued again, under the next
        number; else its task is drawn anew, before all others."""
        self.version, self.consumed, self.base, self.started = version, consumed, base, consumed
        self._consumed_before_version = consumed
        now = self._now()
        for group in groups:
            self.ledger.readmit(group)
            domain = self.domains.all[group.task.domain]
            if not group.finished:
                self.ledger.close_group(group, Fate.CANCELLED, "restart", now)
                domain.started -= 1
                domain.to_redraw.append(group.task)
                continue
            self.started += 1
            self._unconsumed[group.begun] += 1
            if group.state is GroupState.READY:
                heapq.heappush(self._ready, (group.id, group))
                self._ready_by_version[group.begun] += 1
            elif len(group.finished) < self._group_size:
                for attempt in group.live:
                    if attempt not in group.finished:
                        self.ledger.close(attempt, Fate.CANCELLED, "restart", now)
                there = {attempt.member for attempt in group.finished}
                is_late = len(there) >= self._extra_threshold or group.extra_begun
                group.extra_begun = is_late and self._initial_members < self._members
                wanted = self._members if is_late else self._initial_members
                domain.pending.extend((group, member) for member in range(wanted) if member not in there)

    def filter_restored(self) -> None:
        """Send restored groups that are whole and not filtered yet to the filter; called once, when the run starts."""
        for group in self.ledger.open_groups():
            if group.state is GroupState.OPEN and len(group.finished) == self._group_size:
                self._on_group_whole(group)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _limit(self) -> float:
        """How many groups may have been started by now."""
        config = self.config
        if self.mode == "val":
            return self.consumed + (self._demand or 0)
        limit: float = self.base + config.groups_per_batch + math.floor(config.alpha * config.groups_per_batch)
        if self._demand is not None:  # a batch of another size, or a second one for the same version
            limit = max(limit, self.consumed + self._demand)
        if self._demand is not None or self._remaining_demand(self.version, self.consumed):
            limit += config.extra_groups  # else they would begin after the last cut that could take them
        return limit

    def _may_cut(self, groups: float, *, if_all_were_ready: bool = False) -> bool:
        """Whether taking the oldest `groups` ready groups leaves the invariant intact."""
        if self.mode == "val" or self.config.staleness == "drop":
            return True
        consumed = self.consumed + groups
        ready = self._unconsumed if if_all_were_ready else self._ready_by_version
        left = 0.0
        for begun in sorted(self._unconsumed):
            taken = min(groups, ready[begun])
            groups -= taken
            left += self._unconsumed[begun] - taken
            if left > self._remaining_demand(begun, consumed) + self.config.extra_groups:
                return False
        return True

    def _remaining_demand(self, begun: int, consumed: float) -> float:
        """Groups that the batches to come can still take of those that began at or before a version, in time."""
        batches = begun + self.config.max_staleness - self.version + 1  # this version's own is the first of them
        return max(batches * self.config.groups_per_batch - (consumed - self.base), 0)

    def _check_ages(self, groups: float) -> None:
        """Raise when the program leaves groups that no batch can hold any more."""
        if self.mode == "val" or self.config.staleness == "drop":
            return
        oldest = self.version - self.config.max_staleness
        if min(self._unconsumed, default=oldest) < oldest or not self._may_cut(groups, if_all_were_ready=True):
            raise StalenessError(
                f"groups begun at versions {dict(self._unconsumed)} cannot all be trained within max_staleness "
                f"{self.config.max_staleness} of version {self.version} by batches of {groups:g} groups: with "
                f"staleness 'wait' every published version must take {self.config.groups_per_batch} groups (batch_size "
                f"{self.config.batch_size}); take whole batches, publish once per batch, ask for no more than "
                f"{self.config.max_staleness} batches ahead of a publication, or set staleness to 'drop'"
            )

    @property
    def _whole_groups(self) -> int:
        """Groups that were consumed, or whole and filtered."""
        return self.consumed + self.ledger.groups_closed[Fate.FILTERED]

    def _raise_if_all_failed(self) -> None:
        """The tasks ran out: raise if attempts failed and no group of this epoch was ever whole. A task that fails
        while others are consumed is retired, and no more is made of it."""
        failed = self.ledger.fates[Fate.FAILED] - self._failed_before_epoch
        if not failed or self._whole_groups > self._whole_before_epoch:
            return
        causes = {cause: count for (fate, cause), count in self.ledger.causes.items() if fate is Fate.FAILED}
        often = max(causes, key=lambda cause: causes[cause])
        reason = f"The first error was {self.errors.first}" if self.errors.first else f"Most often: {often}"
        raise NothingFinished(
            f"the tasks ran out without one whole group: {failed} attempts failed. {reason}; correct it and run again "
            "(the log has more of it, `why` tells of the attempts of a task)"
        )

    def _warn_if_never_published(self) -> None:
        """Say once that batch after batch is taken of one version: the program may have forgotten to publish."""
        batches = (self.consumed - self._consumed_before_version) // self.config.groups_per_batch
        if self.mode == "val" or self._warned_unpublished or batches < self.config.max_staleness + UNPUBLISHED_BATCHES:
            return
        self._warned_unpublished = True
        logger.warning(
            "%d batches were taken of version %d, and no weights were published since: publish after each train step "
            "(suspend, sampler.load_weights(version + 1), resume), or the policy that generates never learns",
            batches, self.version,
        )  # fmt: skip

    def _consume(self, group: Group, now: float) -> None:
        fate = Fate.TRAINED if self.mode == "train" else Fate.VALIDATED
        whole = all(attempt.state is AttemptState.FINISHED for attempt in group.finished)
        if len(group.finished) != self._group_size or not whole:
            raise LedgerError(f"g{group.id} is cut, but {len(group.finished)} of {self._group_size} members are whole")
        group.trained = self.version
        self.consumed += 1
        self._ready_by_version[group.begun] -= 1
        self._remove_unconsumed(group)
        if self.mode == "train":
            for attempt in group.finished:
                staleness = max(self.version - attempt.oldest, 0) if attempt.oldest >= 0 else 0
                if staleness > self.config.max_staleness:
                    raise LedgerError(f"{attempt.key} has staleness {staleness}, above {self.config.max_staleness}")
                self.staleness[staleness] += 1
        self.ledger.close_group(group, fate, "", now)

    def _drop_stale(self) -> None:
        """Under 'drop', end groups that are too old for the version at which the next batch will be trained."""
        if self.mode == "val" or self.config.staleness == "wait":
            return
        ahead = (self.consumed - self.base) // self.config.groups_per_batch
        oldest = min(self.version + ahead, self.version + self.config.max_staleness) - self.config.max_staleness
        if min(self._unconsumed, default=oldest) < oldest:
            for group in self.ledger.open_groups():
                if group.begun < oldest:
                    self._end_unconsumed(group, Fate.STALE, "older than max_staleness")

    def _end_surplus(self) -> None:
        """End extra groups that no later batch can take in time."""
        if self.mode == "val" or self.config.staleness == "drop" or not self.config.extra_groups:
            return
        for group in self.ledger.open_groups():
            if not self._remaining_demand(group.begun, self.consumed):
                self._end_unconsumed(group, Fate.SURPLUS, "the batch was full before")

    # -- groups --------------------------------------------------------------------------------------------------

    def _start_extra_members(self, group: Group) -> None:
        """The group still waits for its last members: extra ones begin, before all others, and once."""
        if group.state is GroupState.OPEN and self._error is None and not group.extra_begun:
            group.extra_begun = True
            pending = self.domains.all[group.task.domain].pending
            pending.extendleft((group, member) for member in range(self._members - 1, self._initial_members - 1, -1))
            self.refill()

    def _on_group_whole(self, group: Group) -> None:
        """The group is whole: to the filter, if there is one."""
        if self._filter is None:
            self._make_ready(group)
        else:
            self.ledger.advance(group, GroupState.FILTERING)
            self._filter_tasks[group] = self.spawn(self._run_filter(group, self._filter))

    async def _run_filter(self, group: Group, group_filter: GroupFilter) -> None:
        """Run the filter on a whole group; other groups do not wait for it."""
        trajectories = [attempt.trajectory for attempt in group.finished if attempt.trajectory is not None]
        try:
            await token_bundles.load(trajectories)
        except InfrastructureError:
            if self._filter_tasks.pop(group, None) is not None:
                self.lose_group(group)
            return
        try:
            keep = await with_deadline(self._filter_seconds, group_filter(trajectories), "reward_seconds")
            if inspect.isawaitable(keep):  # a plain function that returns what an async one gives
                keep = await with_deadline(self._filter_seconds, keep, "reward_seconds")
            if keep is None or keep != keep:
                raise TypeError(f"group_filter returned {keep!r}; return True to keep the group, False to filter it")
        except USER_CODE_ERRORS as error:  # counted, shown once, bounded by a budget
            raise_if_cancelled(error)
            if self._filter_tasks.pop(group, None) is not None:
                self.errors.add("group_filter", error)
                self._end_unconsumed(group, Fate.FAILED, f"group_filter raised {type(error).__name__}")
                if exceeded := self.errors.exceeded():
                    self.fatal(exceeded)
            return
        if self._filter_tasks.pop(group, None) is None:
            return
        if keep:
            self._make_ready(group)
            return
        self._filtered_in_a_row += 1
        self._end_unconsumed(group, Fate.FILTERED, "group_filter")
        if self._filtered_in_a_row >= self.config.max_filtered:
            self.fatal(
                FilterLimit(
                    f"{self._filtered_in_a_row} groups in a row were filtered (max_filtered); the last task was "
                    f"'{group.task.id}': the filter keeps nothing, or the tasks are all too easy or too hard"
                )
            )

    def _make_ready(self, group: Group) -> None:
        self._filtered_in_a_row = 0
        self.ledger.advance(group, GroupState.READY)
        heapq.heappush(self._ready, (group.id, group))
        self._ready_by_version[group.begun] += 1
        self._wake()

    def _end_unconsumed(self, group: Group, fate: Fate, cause: str) -> None:
        """End a group that no batch will hold; another may begin at once."""
        if group.state is GroupState.READY:
            self._ready_by_version[group.begun] -= 1
        self._cancel_filter(group)
        self._remove_unconsumed(group)
        self.started -= 1
        self.domains.all[group.task.domain].started -= 1
        for attempt in self.ledger.close_group(group, fate, cause, self._now()):
            self.stop(attempt)
        self._wake()
        self.refill()

    def _cancel_filter(self, group: Group) -> None:
        """Stop the filter of a group that ends without it."""
        if (filter_task := self._filter_tasks.pop(group, None)) is not None:
            filter_task.cancel()

    def _remove_unconsumed(self, group: Group) -> None:
        self._unconsumed[group.begun] -= 1
        if not self._unconsumed[group.begun]:
            del self._unconsumed[group.begun]
            self._ready_by_version.pop(group.begun, None)

    def _end_copy(self, copy: AttemptCopy) -> Attempt | None:
        """A worker elsewhere is done with an attempt: its slot is free. Returns the attempt; None if it has its fate,
        or if the worker has spoken of it before."""
        if copy.id not in self._remote_attempts:
            return None
        self._remote_attempts.discard(copy.id)
        self.slot_freed(copy)
        self._wake_workers()
        return self.ledger.original(copy)

    def _wake_workers(self) -> None:
        self._work.set()
        self._work.clear()

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
