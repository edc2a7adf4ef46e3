"""Admission, assembly of groups, and the cut of batches.

Invariant: a group ends once: consumed by a batch, or with another fate (`end_group`), and then another may begin. Which
groups may start and which batch may be cut is decided by counts (staleness_bound.py); this file keeps the groups.

    a free slot --issue()--> attempt runs --put()--> group whole --filter--> ready --cut()--> batch
         ^                        |                     |
         +---- on_work() <--- fail(): next try    filtered: ended, the next task may begin
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from cadenza.datasets import DataError
from cadenza.observe.events import EventSink
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import RolloutError, SchedulerClosed, Stalled, TasksUnreadable, UserErrors
from cadenza.rollout.group_filter import GroupFilterRunner
from cadenza.rollout.ledger import Attempt, AttemptState, Group, GroupState, Ledger, LedgerError
from cadenza.rollout.model import TokenCounter
from cadenza.rollout.outages import Outages
from cadenza.rollout.pass_counts import PassCounts, PassStart
from cadenza.rollout.records import Fate, Trajectory
from cadenza.rollout.staleness_bound import StalenessBound
from cadenza.rollout.task_sources import CountTokens
from cadenza.rollout.tasks import Domains

Mode = Literal["train", "val"]


class GroupQueue:
    """Decides what runs next, assembles groups, and cuts batches: what a scheduler keeps of its groups.

        with queue.awaiting(groups=2):          # `get_batch` waits for two groups
            attempt = queue.issue(slot=0)        # a slot is free: which attempt to run, None for none
            queue.release_slot(attempt)          # its episode is over, another attempt may have the slot
            queue.mark_scoring(attempt)
            queue.put(attempt, trajectory)       # or queue.fail(attempt, "env: crashed"): the next try is issued
            batch = queue.cut()                  # the two oldest whole groups; None while there is nothing to cut

    `GroupQueueManager` (group_queue_manager.py) is the same for workers that are no part of Cadenza.
    """

    def __init__(
        self,
        config: RolloutConfig,
        env_manager_config: EnvManagerConfig,
        mode: Mode = "train",
        *,
        events: EventSink | None = None,
        count_tokens: CountTokens | None = None,
    ) -> None:
        self.config = config
        self.mode = mode
        self.ledger = Ledger(config.history, events)
        self.domains = Domains(env_manager_config, mode, config.seed, count_tokens)
        self.outages = Outages(self.domains, config.group_size)
        self.errors = UserErrors(config.error_budget)
        self.bound = StalenessBound(config, is_training=mode == "train")
        self.started = 0
        """Groups admitted, without those that were filtered, retired, stale or surplus."""
        self.staleness: Counter[int] = Counter()
        """Trained trajectories by staleness."""
        self.last_end_time = 0.0
        """When an attempt last finished or failed."""
        self.on_stop: Callable[[Attempt], None] = lambda attempt: None
        """Called with an attempt that got its fate while it ran. Set by the slot pool, which ends its run."""
        self.on_work: Callable[[], None] = lambda: None
        """Called when there may be work. Set by the owner of the slots, which asks `issue` for free ones."""
        self.start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = asyncio.create_task
        """Set by the scheduler: runs the coroutine of a filter in its task group."""
        self._filter = GroupFilterRunner(config, env_manager_config, self)
        self._group_size = config.group_size
        self._members = config.group_size + config.extra_members
        self._initial_members = config.group_size if config.extra_after else self._members
        """Members that begin with the group."""
        self._extra_threshold = max(config.group_size - config.extra_members, 1)
        """Finished members at which the `extra_after` timer starts."""
        self.pass_counts = PassCounts(self.ledger, self.errors)
        self._change: asyncio.Future[None] | None = None
        self._ready: list[tuple[int, Group]] = []
        """A heap of whole groups, the oldest first; some may have ended since."""
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
        if self.started >= self.bound.max_started():
            return None
        try:
            drawn = self.outages.draw(self._now()) if self.outages.pauses else self.domains.draw()
        except DataError as error:  # no other row can be trusted either
            self.end_run(TasksUnreadable(str(error)))
            return None
        if drawn is None:
            self._wake()
            return None
        domain, task = drawn
        version = self.bound.version
        group = self.ledger.open(task, version, self._now())
        if self.outages.pauses:
            self.outages.begin(domain, group)
        domain.started += 1
        domain.running += 1
        domain.pending.extend([(group, member) for member in range(1, self._initial_members)])
        self.started += 1
        self.bound.begin(version)
        return self.ledger.issue(group, 0, slot, self._now())

    def release_slot(self, attempt: Attempt) -> None:
        """The env of this attempt is closed: its slot and its env do not count for the domain any more."""
        self.domains.all[attempt.group.task.domain].running -= 1

    def mark_scoring(self, attempt: Attempt) -> None:
        """The episode is over, and its reward is being computed."""
        self.ledger.mark_scoring(attempt)

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The episode is finished and has its reward."""
        self.last_end_time = self._now()
        self._failed_in_a_row = 0
        if self.outages.failures:
            self.outages.record_success(attempt.group.task.domain, self.last_end_time)
        self.ledger.finish(attempt, trajectory, self.last_end_time)
        group = attempt.group
        if not self._is_whole(group):
            if self._initial_members < self._members and len(group.finished) == self._extra_threshold:
                patience = self.config.extra_after * (self.last_end_time - group.opened)
                asyncio.get_running_loop().call_later(patience, self._start_extra_members, group)
            return
        self._filter.judge(group)
        if self.config.extra_members:
            for loser in group.live:
                if loser not in group.finished:
                    self.ledger.close(loser, Fate.SURPLUS, "the group was whole before", self.last_end_time)
                    self.on_stop(loser)

    def fail(
        self, attempt: Attempt, cause: str, detail: str = "", *, tries_used: float = 1.0, outage: bool = False
    ) -> None:
        """The attempt is lost. The next try is issued, unless the task had its tries. `tries_used` is how much of
        `max_attempts` this failure uses: 0.25 if infrastructure failed, inf if a retry cannot help. `outage`: what the
        reward needs is out of service, and after many in a row the domain is paused."""
        self.last_end_time = self._now()
        if attempt.state is AttemptState.FINISHED:
            raise LedgerError(f"{attempt.key} has finished, and fails now: {cause} {detail}")
        self.ledger.close(attempt, Fate.FAILED, cause, self.last_end_time, detail)
        group, member = attempt.group, attempt.member
        self._failed_in_a_row += 1
        if error := self.errors.exceeded():
            self.end_run(error)
        elif self._failed_in_a_row > self._max_failed_in_a_row and not self._leave_out_paused():
            self.end_run(
                Stalled(f"the last {self._failed_in_a_row} attempts all failed; the last one: {cause} {detail}")
            )
        if outage and self._error is None:
            self._on_outage(group, f"{cause} {detail}".rstrip())
        if group.state is not GroupState.OPEN or self._error is not None:
            return
        group.tries_used = group.tries_used or {}
        group.tries_used[member] = group.tries_used.get(member, 0.0) + tries_used
        if group.tries_used[member] >= self.config.max_attempts:
            given_up = sum(tries >= self.config.max_attempts for tries in group.tries_used.values())
            if self._members - given_up < self._group_size:
                self.end_group(group, Fate.CANCELLED, "task retired")
                failures = sum(a.member == member and a.fate is Fate.FAILED for a in group.attempts)
                group.cause += f", member {member} failed {failures} x"
            elif self._initial_members < self._members:
                self._start_extra_members(group)  # no other member can replace it
            return
        self.domains.all[group.task.domain].pending.appendleft((group, member))
        self.on_work()

    def _on_outage(self, group: Group, reason: str) -> None:
        """A reward failed as infrastructure. If its domain is paused by it, the open groups of the domain end, for a
        batch would wait for their tries; their tasks are drawn once more, before new ones. A probe ends for good."""
        name = group.task.domain
        if name in self.outages.pauses:
            if group.state is GroupState.OPEN and self.outages.end_probe(group, self._now()):
                self.end_group(group, Fate.CANCELLED, "domain paused")
        elif self.outages.record_failure(name, reason, self._now()) and self.outages.is_any_healthy:
            self._end_open_groups([name], redraw=True)

    def _leave_out_paused(self) -> bool:
        """Whether a validation goes on without the domains that are paused: what they have left is given up."""
        names = self.outages.leave_out_paused() if self.mode == "val" else []
        if names:
            self._failed_in_a_row = 0
            self._end_open_groups(names, redraw=False)
        return bool(names)

    def _end_open_groups(self, names: list[str], *, redraw: bool) -> None:
        for group in self.ledger.open_groups():
            if group.task.domain in names and group.state is GroupState.OPEN:
                if redraw:  # before the end, which may draw
                    self.domains.all[group.task.domain].to_redraw.append(group.task)
                self.end_group(group, Fate.CANCELLED, "domain paused")

    # -- what the controller asks --------------------------------------------------------------------------------

    def advance(self, version: int) -> None:
        """A version is fully published."""
        if version < self.version:
            raise ValueError(f"version must not go back: it is {self.version}, got {version}")
        if version == self.version:
            return
        self.bound.advance(version)
        self._drop_stale()
        self._wake()
        self.on_work()

    @property
    def version(self) -> int:
        """Newest fully published version: what a batch is cut for."""
        return self.bound.version

    @property
    def consumed(self) -> int:
        """Groups that batches took."""
        return self.bound.consumed

    @property
    def ready_groups(self) -> int:
        """Whole groups that no batch has taken."""
        return self.bound.ready.total()

    @property
    def token_counter(self) -> TokenCounter:
        """Books the tokens that the model writes for an attempt: the ledger."""
        return self.ledger

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for a batch."""
        return self.bound.awaited_groups is not None

    @contextmanager
    def awaiting(self, groups: int | None) -> Iterator[None]:
        """Declare that a caller wants `groups` groups (None: all that remain); inside the block more groups may
        start."""
        if self.bound.awaited_groups is not None:
            raise RuntimeError("a batch is already being taken; await it first")
        self.bound.awaited_groups = math.inf if groups is None else groups
        try:
            self.on_work()
            yield
        finally:
            self.bound.awaited_groups = None  # before the slots look for work: `max_started` falls with it
            self.on_work()

    def refuse_endless_tasks(self) -> None:
        """Raise unless the tasks of all domains run out some time."""
        if endless := self.domains.endless:
            raise ValueError(
                f"batch_size -1 means until the tasks run out, but those of {endless} never do; "
                "set domains.<name>.tasks, or ask for a number"
            )

    def changed(self) -> asyncio.Future[None]:
        """Resolves when `cut` should be tried again."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def cut(self) -> list[Group] | None:
        """Take the batch that is wanted, if it is there: the oldest whole groups. Fewer only when the tasks ran
        out."""
        if self._error is not None:
            raise self._error
        bound = self.bound
        assert bound.awaited_groups is not None
        groups = bound.awaited_groups
        self._drop_stale()
        ready = bound.ready.total()
        bound.check(groups)
        if ready < groups:
            if not self.domains.exhausted or bound.unconsumed.total() > ready:
                return None
            groups = ready
            if not groups:
                self.pass_counts.raise_if_all_failed(self.consumed)
        elif not bound.may_cut(groups):
            return None
        batch: list[Group] = []
        now = self._now()
        bound.awaited_groups = None
        while len(batch) < groups:
            _, group = heapq.heappop(self._ready)
            if group.state is GroupState.READY:
                self._consume(group, now)
                batch.append(group)
        self._end_surplus()
        self.errors.since_batch = 0
        bound.warn_if_never_published()
        return batch

    def reset(self) -> None:
        """Start the next pass over the tasks. Cancels nothing: raises while groups are open. The tasks come in the same
        order; the ledger counts on. Sampling randomness is keyed by the task, so that the same weights write the same
        answers again."""
        if self._error is not None:
            raise self._error
        if groups := self.ledger.open_groups():
            raise RolloutError(
                f"reset begins the tasks anew, but {len(groups)} groups of this pass over them are open, the oldest is "
                f"g{groups[0].id} of task '{groups[0].task.id}': take batches until get_batch returns None before"
            )
        self.bound.begin_pass()
        self.domains.begin_pass()
        self.pass_counts.begin(self.consumed)
        self.on_work()

    def redraw_lost_group(self, group: Group) -> None:
        """End an open group whose finished trajectories were lost with their node; its task is drawn anew."""
        self.domains.all[group.task.domain].to_redraw.append(group.task)  # before the end, which may draw
        self.end_group(group, Fate.FAILED, "lost with its node")

    def end_run(self, error: RolloutError) -> None:
        """End the run: everything that is not consumed is cancelled, and a caller that waits for a batch gets the
        error."""
        if self._error is not None:
            return
        self._error = error
        now = self._now()
        cause = "shutdown" if isinstance(error, SchedulerClosed) else type(error).__name__
        for group in self.ledger.open_groups():
            self._filter.cancel(group)
            for attempt in self.ledger.close_group(group, Fate.CANCELLED, cause, now):
                self.on_stop(attempt)
        self._ready.clear()
        self.bound.clear()
        self._wake()

    # -- over a restart ------------------------------------------------------------------------------------------

    @property
    def fatal_error(self) -> RolloutError | None:
        """What `end_run` ended the run with, a `SchedulerClosed` after a shutdown; None while it goes on."""
        return self._error

    def restore(
        self,
        version: int,
        consumed: int,
        consumed_for_earlier_versions: int,
        pass_start: PassStart,
        groups: list[Group],
    ) -> None:
        """Go on from the groups that were open in the process that wrote the snapshot. What ran in it is cancelled. A
        group keeps its order and its age if members of it are finished, and only the others are issued again, under the
        next number; else its task is drawn anew, before all others."""
        bound, self.started, self.pass_counts.start = self.bound, consumed, pass_start
        bound.restore(version, consumed, consumed_for_earlier_versions)
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
            bound.begin(group.begun_version)
            if group.state is GroupState.READY:
                heapq.heappush(self._ready, (group.id, group))
                bound.make_ready(group.begun_version)
            elif not self._is_whole(group):
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
            if group.state is GroupState.OPEN and self._is_whole(group):
                self._filter.judge(group)

    # -- rules ---------------------------------------------------------------------------------------------------

    def _consume(self, group: Group, now: float) -> None:
        fate = Fate.TRAINED if self.mode == "train" else Fate.VALIDATED
        if not self._is_whole(group) or any(a.state is not AttemptState.FINISHED for a in group.finished):
            raise LedgerError(f"g{group.id} is cut, but {len(group.finished)} of {self._group_size} members are whole")
        group.batch_version = version = self.bound.version
        self.bound.consume(group.begun_version)
        if self.mode == "train":
            bound = self.config.max_staleness
            for attempt in group.finished:
                staleness = max(version - attempt.oldest, 0) if attempt.oldest >= 0 else 0
                if staleness > bound:
                    raise LedgerError(f"{attempt.key} has staleness {staleness}, above {bound}")
                self.staleness[staleness] += 1
        self.ledger.close_group(group, fate, "", now)

    def _drop_stale(self) -> None:
        """End groups that are too old for the version at which the next batch will be trained."""
        oldest = self.bound.oldest_to_keep()
        if min(self.bound.unconsumed, default=oldest) < oldest:
            for group in self.ledger.open_groups():
                if group.begun_version < oldest:
                    self.end_group(group, Fate.STALE, "older than max_staleness")

    def _end_surplus(self) -> None:
        """End extra groups that no later batch can take in time."""
        if self.config.extra_groups:
            for group in self.ledger.open_groups():
                if self.bound.is_surplus(group.begun_version):
                    self.end_group(group, Fate.SURPLUS, "the batch was full before")

    # -- groups --------------------------------------------------------------------------------------------------

    def _is_whole(self, group: Group) -> bool:
        """Whether as many members have finished as a group has in a batch."""
        return len(group.finished) == self._group_size

    def _start_extra_members(self, group: Group) -> None:
        """The group still waits for its last members: extra ones begin, before all others, and once."""
        if group.state is GroupState.OPEN and self._error is None and not group.extra_begun:
            group.extra_begun = True
            pending = self.domains.all[group.task.domain].pending
            pending.extendleft((group, member) for member in range(self._members - 1, self._initial_members - 1, -1))
            self.on_work()

    def _record(self, group: Group) -> None:
        """Tell the domain what came of a group that is judged. Not before: a group that is saved while its filter
        looks at it is judged anew after the restart, and must count once."""
        domain = self.domains.all[group.task.domain]
        if domain.follows_results:
            scores = [attempt.reward for attempt in group.finished]
            success = sum(attempt.success for attempt in group.finished) / len(scores)
            domain.record(group.task, scores, success)

    def make_ready(self, group: Group) -> None:
        """A batch may take the group."""
        self._record(group)
        self.ledger.advance(group, GroupState.READY)
        heapq.heappush(self._ready, (group.id, group))
        self.bound.make_ready(group.begun_version)
        self._wake()

    def end_group(self, group: Group, fate: Fate, cause: str) -> None:
        """End a group that no batch will hold; another may begin at once."""
        if fate is Fate.FILTERED:
            self._record(group)
        self._filter.cancel(group)
        self.bound.end(group.begun_version, was_ready=group.state is GroupState.READY)
        self.started -= 1
        self.domains.all[group.task.domain].started -= 1
        for attempt in self.ledger.close_group(group, fate, cause, self._now()):
            self.on_stop(attempt)
        self._wake()
        self.on_work()

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
