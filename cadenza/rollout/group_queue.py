"""Admission, assembly of groups, and the cut of batches.

Invariant: a group ends once: consumed by a batch, or with another fate (`end_group`), and then another may begin. Which
groups may start and which batch may be cut is decided by counts (staleness_bound.py); this file keeps the groups.

    a free slot --issue()--> attempt runs --put()--> group whole --filter--> ready --take()--> batch
         ^                        |                     |
         +---- refill() <---- fail(): next try    filtered: handed back to its domain
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from cadenza.observe.events import EventSink
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import NothingFinished, RolloutError, SchedulerClosed, Stalled, UserErrors, logger
from cadenza.rollout.group_filter import GroupFilterRunner
from cadenza.rollout.ledger import Attempt, AttemptCopy, AttemptState, Group, GroupState, Ledger, LedgerError
from cadenza.rollout.records import Fate, Trajectory
from cadenza.rollout.remote_attempts import MAX_WAITING, RemoteAttempts, WaitingWorkers
from cadenza.rollout.staleness_bound import StalenessBound
from cadenza.rollout.task_sources import CountTokens
from cadenza.rollout.tasks import Domains

Mode = Literal["train", "val"]
UNPUBLISHED_BATCHES = 3
"""Batches of one version, beyond those that asynchrony allows, after which a warning says that none is published."""


@dataclass(frozen=True, slots=True)
class PassStart:
    """The counts when a pass over the tasks began."""

    whole: int = 0
    """Groups consumed, or whole and filtered."""
    failed: int = 0
    """Attempts failed."""


class GroupQueueManager:
    """Buffers finished episodes, assembles groups, cuts batches.

    A scheduler has one and calls it directly. It also runs as an actor, for a program that brings workers of its own:

        queue = ray.remote(GroupQueueManager).remote(RolloutConfig(batch_size=8, group_size=4), env_manager_config)
        attempt = ray.get(queue.next_attempt.remote())       # a worker: which task to run; None when there is no more
        queue.put.remote(attempt, trajectory)                # or queue.fail.remote(attempt, "env: crashed")
        groups = ray.get(queue.take.remote(2))               # the controller: two whole groups, the oldest first
        queue.advance.remote(1)                              # after weights were published; queue.reset.remote()

    A worker far away has a copy of its attempt, and a lease: without a word for `lease_seconds` the attempt fails and
    is issued anew, so that a worker that vanishes costs its own attempt. One that takes longer calls `renew`, which
    answers whether to go on. `put` and `fail` of a copy also free its slot; what comes of an attempt that has its fate
    already is dropped. The calls need a running event loop, the constructor does not.
    """

    def __init__(
        self,
        config: RolloutConfig,
        env_manager_config: EnvManagerConfig,
        mode: Mode = "train",
        *,
        events: EventSink | None = None,
        count_tokens: CountTokens | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`max_waiting` calls of `next_attempt` may wait, further ones are refused: each takes one of the concurrent
        calls of an actor, of which Ray allows 1,000 unless `max_concurrency` says more."""
        self.config = config
        self.mode = mode
        self.ledger = Ledger(config.history, events)
        self.domains = Domains(env_manager_config, mode, config.seed, count_tokens)
        self.errors = UserErrors(config.error_budget)
        self.bound = StalenessBound(config, is_training=mode == "train")
        self.started = 0
        """Groups admitted, without those that were filtered, retired, stale or surplus."""
        self.staleness: Counter[int] = Counter()
        """Trained trajectories by staleness."""
        self.last_end_time = 0.0
        """When an attempt last finished or failed."""
        self.stop: Callable[[Attempt], None] = lambda attempt: None
        """Set by the slot pool: ends the run of an attempt that has its fate."""
        self._workers = WaitingWorkers(max_waiting)
        """In `next_attempt`."""
        self._remote_attempts = RemoteAttempts(env_manager_config.lease_seconds, self._expire)
        """Attempts that `next_attempt` gave out and whose slots are not free yet."""
        self.refill: Callable[[], None] = self._workers.wake_next
        """Set by the owner of the slots: there may be work."""
        self.spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = asyncio.create_task
        """Set by the scheduler: runs the coroutine of a filter in its task group."""
        self._filter = GroupFilterRunner(config, env_manager_config, self)
        self._group_size = config.group_size
        self._members = config.group_size + config.extra_members
        self._initial_members = config.group_size if config.extra_after else self._members
        """Members that begin with the group."""
        self._extra_threshold = max(config.group_size - config.extra_members, 1)
        """Members after which extra ones may be called for."""
        self._consumed_before_version = 0
        """Groups consumed when this version was published."""
        self.before_pass = PassStart()
        self._warned_unpublished = False
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
        if self.started >= self.bound.limit():
            return None
        drawn = self.domains.draw()
        if drawn is None:
            self._wake()
            return None
        domain, task = drawn
        version = self.bound.version
        group = self.ledger.open(task, version, self._now())
        domain.started += 1
        domain.running += 1
        domain.pending.extend([(group, member) for member in range(1, self._initial_members)])
        self.started += 1
        self.bound.begin(version)
        return self.ledger.issue(group, 0, slot, self._now())

    async def next_attempt(self, slot: int = 0) -> Attempt | None:
        """Waits for the next attempt to run, for a worker without a `refill` callback. None when the tasks ran out, or
        the run has ended. Its lease begins now."""
        while (attempt := self.issue(slot)) is None:
            if self._error is not None or (self.domains.exhausted and not self.bound.unconsumed):
                self._workers.wake_next()
                return None
            await self._workers.wait()
        self._workers.wake_next()
        self._remote_attempts.begin(attempt)
        return attempt

    def renew(self, attempt: Attempt) -> bool:
        """The worker of an attempt that `next_attempt` gave out makes progress: its lease begins anew. Returns whether
        it should go on; False when the attempt has its fate."""
        return self._remote_attempts.renew(attempt)

    def slot_freed(self, attempt: Attempt) -> None:
        """The env of this attempt is gone."""
        self.domains.all[attempt.group.task.domain].running -= 1

    def await_reward(self, attempt: Attempt) -> None:
        """The episode is over; its reward comes later."""
        self.ledger.await_reward(attempt)

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The episode is finished and has its reward."""
        if isinstance(attempt, AttemptCopy) or attempt in self._remote_attempts:
            if (original := self._end_remote(attempt, trajectory.response_tokens, len(trajectory.turns))) is None:
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
        if isinstance(attempt, AttemptCopy) or attempt in self._remote_attempts:
            if (original := self._end_remote(attempt, attempt.tokens, attempt.turns)) is None:
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
                self.end_group(group, Fate.CANCELLED, "task retired")
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
        self._consumed_before_version = self.consumed
        self.bound.advance(version)
        self._drop_stale()
        self._wake()
        self.refill()

    @property
    def version(self) -> int:
        """Newest fully published version: what a batch is cut for."""
        return self.bound.version

    @property
    def consumed(self) -> int:
        """Groups that batches took."""
        return self.bound.consumed

    @property
    def ready(self) -> int:
        """Whole groups that no batch has taken."""
        return self.bound.ready.total()

    @property
    def is_demanded(self) -> bool:
        """Whether a caller waits for a batch."""
        return self.bound.demand is not None

    @contextmanager
    def demanding(self, groups: int | None) -> Iterator[None]:
        """While a caller waits for a batch of so many groups, or of all that the tasks give, admission counts it."""
        if self.bound.demand is not None:
            raise RuntimeError("a batch is already being taken; await it first")
        self.bound.demand = math.inf if groups is None else groups
        try:
            self.refill()
            yield
        finally:
            self.bound.demand = None  # before the slots look for work: the limit falls with it
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
        bound = self.bound
        assert bound.demand is not None
        groups = bound.demand
        self._drop_stale()
        ready = bound.ready.total()
        bound.check(groups)
        if ready < groups:
            if not self.domains.exhausted or bound.unconsumed.total() > ready:
                return None
            groups = ready
            if not groups:
                self._raise_if_all_failed()
        elif not bound.may_cut(groups):
            return None
        batch: list[Group] = []
        now = self._now()
        bound.demand = None
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
        """Begin the next pass over the tasks: the same ones in the same order. The ledger counts on; sampling
        randomness is keyed by the task, so that the same weights write the same answers again. Refused while groups are
        open."""
        if self._error is not None:
            raise self._error
        if groups := self.ledger.open_groups():
            raise RolloutError(
                f"reset begins the tasks anew, but {len(groups)} groups of this pass over them are open, the oldest is "
                f"g{groups[0].id} of task '{groups[0].task.id}': take batches until get_batch returns None before"
            )
        self.bound.begin_pass()
        self.domains.restart()
        self.before_pass = PassStart(self._whole_groups, self.ledger.fates[Fate.FAILED])
        self.errors.first = ""
        self.refill()

    def lose_group(self, group: Group) -> None:
        """End an open group whose finished trajectories were lost with their node; its task is drawn anew."""
        self.end_group(group, Fate.FAILED, "lost with its node")

    def fatal(self, error: RolloutError) -> None:
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
                self.stop(attempt)
        self._ready.clear()
        self.bound.clear()
        self._wake()
        self._workers.wake_next()
        self._remote_attempts.close()

    # -- over a restart ------------------------------------------------------------------------------------------

    @property
    def end_error(self) -> RolloutError | None:
        """What ended the run."""
        return self._error

    def restore(self, version: int, consumed: int, base: int, before_pass: PassStart, groups: list[Group]) -> None:
        """Go on from the groups that an earlier life of the run had open. What ran in it is cancelled. A group keeps
        its order and its age if members of it are finished, and only the others are issued again, under the next
        number; else its task is drawn anew, before all others."""
        bound = self.bound
        bound.version, bound.consumed, bound.base, self.started = version, consumed, base, consumed
        self._consumed_before_version, self.before_pass = consumed, before_pass
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
            bound.begin(group.begun)
            if group.state is GroupState.READY:
                heapq.heappush(self._ready, (group.id, group))
                bound.make_ready(group.begun)
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

    @property
    def _whole_groups(self) -> int:
        """Groups that were consumed, or whole and filtered."""
        return self.consumed + self.ledger.groups_closed[Fate.FILTERED]

    def _raise_if_all_failed(self) -> None:
        """The tasks ran out: raise if attempts failed and no group of this pass over them was ever whole. A task that
        fails while others are consumed is retired, and no more is made of it."""
        failed = self.ledger.fates[Fate.FAILED] - self.before_pass.failed
        if not failed or self._whole_groups > self.before_pass.whole:
            return
        causes = {cause: count for (fate, cause), count in self.ledger.causes.items() if fate is Fate.FAILED}
        often = max(causes, key=lambda cause: causes[cause])
        reason = f"The first error was {self.errors.first}" if self.errors.first else f"Most often: {often}"
        raise NothingFinished(
            f"the tasks ran out without one whole group: {failed} attempts failed. {reason}; mend it and run again "
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
        self.bound.consumed += 1
        self.bound.end(group.begun, was_ready=True)
        if self.mode == "train":
            for attempt in group.finished:
                staleness = max(self.version - attempt.oldest, 0) if attempt.oldest >= 0 else 0
                if staleness > self.config.max_staleness:
                    raise LedgerError(f"{attempt.key} has staleness {staleness}, above {self.config.max_staleness}")
                self.staleness[staleness] += 1
        self.ledger.close_group(group, fate, "", now)

    def _drop_stale(self) -> None:
        """End groups that are too old for the version at which the next batch will be trained."""
        oldest = self.bound.oldest_to_keep()
        if min(self.bound.unconsumed, default=oldest) < oldest:
            for group in self.ledger.open_groups():
                if group.begun < oldest:
                    self.end_group(group, Fate.STALE, "older than max_staleness")

    def _end_surplus(self) -> None:
        """End extra groups that no later batch can take in time."""
        if self.config.extra_groups:
            for group in self.ledger.open_groups():
                if self.bound.is_surplus(group.begun):
                    self.end_group(group, Fate.SURPLUS, "the batch was full before")

    # -- groups --------------------------------------------------------------------------------------------------

    def _start_extra_members(self, group: Group) -> None:
        """The group still waits for its last members: extra ones begin, before all others, and once."""
        if group.state is GroupState.OPEN and self._error is None and not group.extra_begun:
            group.extra_begun = True
            pending = self.domains.all[group.task.domain].pending
            pending.extendleft((group, member) for member in range(self._members - 1, self._initial_members - 1, -1))
            self.refill()

    def _on_group_whole(self, group: Group) -> None:
        """The group is whole: to the filters."""
        self.domains.all[group.task.domain].record(group.task, [attempt.reward for attempt in group.finished])
        self._filter.judge(group)

    def make_ready(self, group: Group) -> None:
        """A batch may take the group."""
        self.ledger.advance(group, GroupState.READY)
        heapq.heappush(self._ready, (group.id, group))
        self.bound.make_ready(group.begun)
        self._wake()

    def end_group(self, group: Group, fate: Fate, cause: str) -> None:
        """End a group that no batch will hold; another may begin at once."""
        self._filter.cancel(group)
        self.bound.end(group.begun, was_ready=group.state is GroupState.READY)
        self.started -= 1
        self.domains.all[group.task.domain].started -= 1
        for attempt in self.ledger.close_group(group, fate, cause, self._now()):
            self.stop(attempt)
        self._wake()
        self.refill()

    def _end_remote(self, attempt: Attempt, tokens: int, turns: int) -> Attempt | None:
        """A worker elsewhere is done with an attempt: its slot is free, its tokens are booked. Returns the attempt;
        None if it has its fate, or if the worker has spoken of it before."""
        original = self._remote_attempts.end(attempt)
        if original is None:
            return None
        self.slot_freed(original)
        self._workers.wake_next()
        if original is not attempt:
            original.turns = turns
        self.ledger.add_tokens(original, tokens - original.tokens)
        return original if original.fate is None else None

    def _expire(self, attempt: Attempt) -> None:
        """The worker of an attempt is silent: its slot is free. It counts against the task, for a task that always ends
        its worker must be retired."""
        detail = f"no word from its worker within lease_seconds {self._remote_attempts.seconds:g}"
        self.slot_freed(attempt)
        if attempt.fate is None:
            logger.warning("%s of task '%s' failed: %s", attempt.key, attempt.group.task.id, detail)
            self.fail(attempt, "worker: lease expired", detail)
        self._workers.wake_next()

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
