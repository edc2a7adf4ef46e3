"""The account of every task, group and attempt.

Invariant: `issued == live + sum(fates)`, for attempts and for their tokens, after every call. An attempt gets
exactly one fate, and a second one is an error here and not a wrong sum later.

    attempt:  RUNNING (holds a slot) -> SCORING (slot free, reward runs) -> FINISHED (waits for its group) -> CLOSED
                  \\_____________________________\\_______________________________\\______________________-> CLOSED
    group:    OPEN (members run) -> FILTERING -> READY (whole, may be cut) -> CLOSED
                  \\______________________\\______________\\________________-> CLOSED
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

from cadenza.observe.events import Event, EventSink
from cadenza.rollout.records import Fate, Task, Trajectory


class AttemptState(Enum):
    RUNNING = "running"
    SCORING = "scoring"
    FINISHED = "finished"
    CLOSED = "closed"


class GroupState(Enum):
    OPEN = "open"
    FILTERING = "filtering"
    READY = "ready"
    CLOSED = "closed"


class LedgerError(AssertionError):
    """The ledger does not add up: a bug in the scheduler, never in user code."""


class Attempt:
    """One try at a trajectory."""

    __slots__ = (
        "cause", "detail", "ended", "fate", "group", "id", "last_turn", "member", "newest", "number", "oldest",
        "reward", "runner", "slot", "stage", "started", "state", "tokens", "trajectory", "turns",
    )  # fmt: skip

    def __init__(self, id: int, group: Group, member: int, number: int, slot: int, started: float) -> None:
        self.id = id
        self.group = group
        self.member = member
        self.number = number
        self.slot = slot
        self.started = started
        self.ended = started
        self.state = AttemptState.RUNNING
        self.fate: Fate | None = None
        self.cause = ""
        """Why it got its fate, in words that are counted; `detail` says more."""
        self.detail = ""
        self.tokens = 0
        """Response tokens received so far."""
        self.turns = 0
        self.last_turn = -1
        """Where the turn stands in the trajectory that was recorded last; with branches it is not always the end."""
        self.reward = 0.0
        self.oldest = -1
        """Oldest and newest version that wrote a token, -1 before the first."""
        self.newest = -1
        self.trajectory: Trajectory | None = None
        self.stage = "slot"
        """Where its code is: slot (not begun), init, reset, step, rollout, model, close, reward."""
        self.runner: object = None
        """Whatever runs it keeps its handle here; the ledger does not look at it."""

    @property
    def key(self) -> str:
        """Readable, unique: group, member, number of the try."""
        return f"g{self.group.id}.{self.member}#{self.number}"

    @property
    def success(self) -> float:
        """Of a finished one, from 0 to 1: what the env or the reward says, else the score."""
        known = None if self.trajectory is None else self.trajectory.success
        return min(max(self.reward, 0.0), 1.0) if known is None else float(known)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it becomes an `AttemptCopy`: the other attempts of its group and their tokens stay here."""
        group = self.group
        names = (self.id, self.member, self.number, self.slot, self.started)
        return _attempt_copy, (*names, self.tokens, self.turns, group.id, group.task, group.begun_version, group.opened)


class AttemptCopy(Attempt):
    """What another process has of an attempt: enough to run it, to count its tokens, and to say which one it was."""

    __slots__ = ()


class Group:
    """The trajectories of one task."""

    __slots__ = (
        "attempts",
        "batch_version",
        "begun_version",
        "cause",
        "closed",
        "extra_begun",
        "fate",
        "finished",
        "id",
        "key64",
        "opened",
        "state",
        "task",
        "tries_used",
    )  # fmt: skip

    def __init__(self, id: int, task: Task, begun_version: int, opened: float) -> None:
        self.id = id
        self.task = task
        self.key64 = int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=8).digest(), "little")
        """The task in the key of the sampling randomness."""
        self.begun_version = begun_version
        """Published version when it was admitted: no token of it is older."""
        self.opened = opened
        self.closed = opened
        self.state = GroupState.OPEN
        self.fate: Fate | None = None
        self.cause = ""
        self.attempts: list[Attempt] = []
        self.finished: list[Attempt] = []
        """Members that count, in the order in which they finished."""
        self.tries_used: dict[int, float] | None = None
        """By member, how much of `max_attempts` its failures have used: a failure of the infrastructure uses a part of
        a try. None while no member has failed."""
        self.extra_begun = False
        """Its extra members have begun, where they begin late (`extra_after`)."""
        self.batch_version = -1
        """Published version when a batch took it; -1 until then."""

    @property
    def live(self) -> list[Attempt]:
        """Attempts without a fate."""
        return [attempt for attempt in self.attempts if attempt.fate is None]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of the finished members, in the order in which they finished; none after they were handed over."""
        return [attempt.trajectory for attempt in self.finished if attempt.trajectory is not None]


class Ledger:
    """Owns the states and fates of all tasks, groups and attempts; nothing else changes them.

        group = ledger.open(task, version, now)
        attempt = ledger.issue(group, member=0, slot=3, now=now)     # issued 1, live 1
        ledger.add_tokens(attempt, 40)
        ledger.close(attempt, Fate.FAILED, "env: crashed", now)      # issued 1, live 0, failed 1 with its 40 tokens
        retry = ledger.issue(group, member=0, slot=3, now=now)       # the next attempt of the same member
        ledger.why("guess/7")                                        # tells all of it

    Closing an attempt twice raises `LedgerError`. The lives of the last `history` attempts are kept for `why`; sums are
    of all.
    """

    def __init__(self, history: int = 100_000, events: EventSink | None = None) -> None:
        self.history = history
        self.events = events
        self.issued = 0
        self.live = 0
        self.fates: Counter[Fate] = Counter()
        self.tokens: Counter[Fate] = Counter()
        self.causes: Counter[tuple[Fate, str]] = Counter()
        """Attempts by fate and cause."""
        self.first_details: dict[str, str] = {}
        """Of each cause of a failure, what the first one said."""
        self.lost_tokens: Counter[str] = Counter()
        """Tokens of attempts that were neither trained nor validated, by cause."""
        self.origin = 0.0
        """When the first group was opened; `why` counts its seconds from there."""
        self.groups_opened = 0
        self.groups_closed: Counter[Fate] = Counter()
        self._open: dict[int, Group] = {}
        self._closed: OrderedDict[int, Group] = OrderedDict()
        self._closed_attempts = 0
        self._by_task: dict[str, list[int]] = {}

    def open(self, task: Task, version: int, now: float) -> Group:
        """Admit a task: its group begins at `version`."""
        if not self.groups_opened:
            self.origin = now
        group = Group(self.groups_opened, task, version, now)
        self.groups_opened += 1
        self._open[group.id] = group
        self._by_task.setdefault(task.id, []).append(group.id)
        if self.events is not None:
            self.events(Event(now, "open", f"g{group.id}", f"{task.id} at version {version}"))
        return group

    def readmit(self, group: Group) -> None:
        """Take up a group that an earlier life of the run had open. It and its attempts are counted already."""
        self._open[group.id] = group
        self._by_task.setdefault(group.task.id, []).append(group.id)
        self.live += len(group.live)

    def issue(self, group: Group, member: int, slot: int, now: float) -> Attempt:
        """Lease a slot to the next try at a member."""
        if group.state is not GroupState.OPEN:
            raise LedgerError(f"g{group.id} is {group.state.value}, no attempt can be issued for it")
        number = 0
        # Members are first issued in order, so that this is a first try; but not once extra ones have gone before.
        if member != len(group.attempts) or group.extra_begun:
            for earlier in group.attempts:
                if earlier.member == member:
                    if earlier.fate is None:
                        raise LedgerError(f"{earlier.key} still runs, member {member} cannot be tried again")
                    number += 1
        attempt = Attempt(self.issued, group, member, number, slot, now)
        self.issued += 1
        self.live += 1
        group.attempts.append(attempt)
        if self.events is not None:
            self.events(Event(now, "issue", attempt.key, f"slot {slot}"))
        return attempt

    def mark_scoring(self, attempt: Attempt) -> None:
        """The episode is over, its reward is not known yet."""
        self._move(attempt, AttemptState.RUNNING, AttemptState.SCORING)

    def finish(self, attempt: Attempt, trajectory: Trajectory, now: float) -> None:
        """The episode has its reward."""
        self._move(attempt, AttemptState.SCORING, AttemptState.FINISHED)
        versions = trajectory.versions
        if versions is not None:
            attempt.oldest, attempt.newest = versions
        attempt.reward = trajectory.score
        attempt.trajectory = trajectory
        attempt.ended = trajectory.scored = now
        attempt.group.finished.append(attempt)
        if self.events is not None:
            self.events(Event(now, "finish", attempt.key, f"reward {attempt.reward:.6g}"))

    def advance(self, group: Group, state: GroupState) -> None:
        """Move an open group on; only forwards."""
        order = (GroupState.OPEN, GroupState.FILTERING, GroupState.READY)
        if group.state not in order or order.index(state) <= order.index(group.state):
            raise LedgerError(f"g{group.id} cannot go from {group.state.value} to {state.value}")
        group.state = state

    def add_tokens(self, attempt: Attempt, count: int) -> None:
        """Tokens reached the attempt, perhaps after its fate did."""
        attempt.tokens += count
        if attempt.fate is not None:
            self.tokens[attempt.fate] += count
            self.lost_tokens[attempt.cause] += count

    def close(self, attempt: Attempt, fate: Fate, cause: str, now: float, detail: str = "") -> None:
        """Give an attempt its fate."""
        if attempt.fate is not None:
            raise LedgerError(f"{attempt.key} is already {attempt.fate.value}, it cannot become {fate.value}")
        if attempt.state is not AttemptState.FINISHED:
            attempt.ended = now
        attempt.state = AttemptState.CLOSED
        attempt.fate = fate
        attempt.cause = cause
        attempt.detail = detail
        self.live -= 1
        self.fates[fate] += 1
        self.tokens[fate] += attempt.tokens
        if fate is not Fate.TRAINED and fate is not Fate.VALIDATED:
            self.causes[fate, cause] += 1
            if fate is Fate.FAILED:
                self.first_details.setdefault(cause, detail)
            self.lost_tokens[cause] += attempt.tokens
            attempt.trajectory = None
        if self.events is not None:
            self.events(Event(now, fate.value, attempt.key, cause))

    def close_group(self, group: Group, fate: Fate, cause: str, now: float) -> list[Attempt]:
        """End a group; members without a fate get this one. Returns those that still ran."""
        if group.state is GroupState.CLOSED:
            raise LedgerError(f"g{group.id} is already closed")
        stopped = []
        for attempt in group.attempts:
            if attempt.fate is None:
                if attempt.state is not AttemptState.FINISHED:
                    stopped.append(attempt)
                self.close(attempt, fate, cause, now)
        group.state = GroupState.CLOSED
        group.fate = fate
        group.cause = cause
        group.closed = now
        self.groups_closed[fate] += 1
        del self._open[group.id]
        self._closed[group.id] = group
        self._closed_attempts += len(group.attempts)
        self._forget()
        return stopped

    def open_groups(self) -> list[Group]:
        """Groups without an end, oldest first."""
        return list(self._open.values())

    def check(self) -> None:
        """Raise unless everything adds up."""
        closed = sum(self.fates.values())
        if self.issued != self.live + closed:
            raise LedgerError(f"{self.issued} attempts were issued, but {self.live} live + {closed} closed")
        live = sum(len(group.live) for group in self._open.values())
        if live != self.live:
            raise LedgerError(f"{self.live} attempts should live, the open groups hold {live}")
        groups = len(self._open) + sum(self.groups_closed.values())
        if self.groups_opened != groups:
            raise LedgerError(f"{self.groups_opened} groups were opened, {groups} are known")

    def why(self, id: str | int) -> str:
        """The life of a task ('math/17'), a group ('g12'), an attempt ('g12.3#0') or a trajectory id (an int)."""
        id = id if isinstance(id, str) else int(id)
        groups = self._find(id)
        if not groups:
            return f"{id}: not known (never admitted, or older than the last {self.history} attempts)"
        lines: list[str] = []
        for group in groups:
            ended = "" if group.fate is None else f"{group.fate.value} at {group.closed - self.origin:.3f} s"
            state = ended or group.state.value
            at = f" for version {group.batch_version}" if group.batch_version >= 0 else ""
            because = f" ({group.cause})" if group.cause else ""
            lines.append(
                f"g{group.id}: task {group.task.id}, domain {group.task.domain}, "
                f"begun at version {group.begun_version} at {group.opened - self.origin:.3f} s, {state}{at}{because}"
            )
            for attempt in group.attempts:
                if id not in (attempt.key, attempt.id) and id not in (group.task.id, f"g{group.id}"):
                    continue
                lines.append("  " + _life(attempt, self.origin))
        return "\n".join(lines)

    def _find(self, id: str | int) -> list[Group]:
        everything = {**self._closed, **self._open}
        if isinstance(id, int):
            return [g for g in everything.values() if any(a.id == id for a in g.attempts)]
        if id in self._by_task:
            return [everything[number] for number in self._by_task[id]]
        head = id.partition(".")[0]
        number = head[1:]
        if head[:1] == "g" and number.isdigit() and int(number) in everything:
            group = everything[int(number)]
            if "." not in id or any(a.key == id for a in group.attempts):
                return [group]
        return []

    def _forget(self) -> None:
        while self._closed_attempts > self.history and self._closed:
            number, group = self._closed.popitem(last=False)
            self._closed_attempts -= len(group.attempts)
            numbers = self._by_task[group.task.id]
            numbers.remove(number)
            if not numbers:
                del self._by_task[group.task.id]

    def _move(self, attempt: Attempt, old: AttemptState, new: AttemptState) -> None:
        if attempt.state is not old:
            raise LedgerError(f"{attempt.key} is {attempt.state.value}, not {old.value}: it cannot be {new.value}")
        attempt.state = new


def _attempt_copy(
    id: int, member: int, number: int, slot: int, started: float, tokens: int, turns: int, *group: Any
) -> AttemptCopy:
    copy = AttemptCopy(id, Group(*group), member, number, slot, started)
    copy.tokens, copy.turns = tokens, turns
    return copy


def _life(attempt: Attempt, origin: float) -> str:
    end = f"{attempt.state.value} in {attempt.stage}" if attempt.fate is None else attempt.fate.value
    because = f" ({attempt.cause}{': ' if attempt.detail else ''}{attempt.detail})" if attempt.cause else ""
    reward = f", reward {attempt.reward:.4g}" if attempt.oldest >= 0 else ""
    versions = f", versions {attempt.oldest}..{attempt.newest}" if attempt.oldest >= 0 else ""
    return (
        f"{attempt.key} (traj_id {attempt.id}): slot {attempt.slot}, "
        f"{attempt.started - origin:.3f}-{attempt.ended - origin:.3f} s, "
        f"{attempt.turns} turns, {attempt.tokens} tokens{versions}{reward} -> {end}{because}"
    )
