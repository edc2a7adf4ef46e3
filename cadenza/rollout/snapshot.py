"""The state of the rollouts on disk: what a killed run needs to go on.

    rollouts.json    the position in the order of the tasks, the counters, the open groups and their attempts
    turns/           the tokens of finished members, one row per turn (a `DataProto`)

Invariant: a saved state is the account of one moment, and it adds up. A restore takes the life that went on
after that moment for not lived: what ran then is `cancelled` (cause `restart`), what finished is there.

Why a member that ran gets the next attempt number, in a group that goes on: number and group name an attempt, and this
one has its fate. A group of which nothing was finished is another matter: it ends as a whole and its task is drawn
anew as a new group, whose attempts begin at 0. The key of the sampling randomness knows the task and not the group, so
they write the same tokens again. Tasks are saved as positions in the order, never as data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cadenza.data import DataProto, Ragged
from cadenza.inference.replica import Span
from cadenza.rollout.collate import FINISH
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.ledger import Attempt, AttemptState, Group, GroupState, Ledger
from cadenza.rollout.pass_counts import PassStart
from cadenza.rollout.records import Fate, Task, Trajectory, Turn
from cadenza.rollout.tasks import Domain

FORMAT = 1
_STATE, _TURNS = "rollouts.json", "turns"
_MUST_MATCH = ("group_size", "batch_size", "alpha", "staleness", "extra_members", "extra_after", "extra_groups", "seed")
"""Settings that the saved groups depend on: their shape, how old they may become, their randomness."""


class SnapshotError(RolloutError):
    """A saved state is damaged, or belongs to another config."""


class SavedTask(msgspec.Struct, frozen=True):
    """A task, to be found again."""

    place: int
    """In the order of its domain."""
    id: str
    """What must stand there."""


class SavedTrajectory(msgspec.Struct, frozen=True):
    """A finished episode, without its tokens."""

    seed: int
    turns: int
    """Rows of `turns/` that are its own."""
    terminated: bool
    truncated: bool
    score: float
    info: dict[str, Any] | None
    """What JSON can hold of it."""
    started: float
    ended: float
    final: str | None = None


class SavedAttempt(msgspec.Struct, frozen=True):
    id: int
    member: int
    number: int
    slot: int
    started: float
    ended: float
    fate: Fate | None
    cause: str
    detail: str
    tokens: int
    turns: int


class SavedGroup(msgspec.Struct, frozen=True):
    id: int
    domain: str
    task: SavedTask
    begun: int
    opened: float
    state: GroupState
    """CLOSED when it was cut for a batch that was not returned yet."""
    trained: int
    attempts: list[SavedAttempt]
    finished: list[tuple[int, SavedTrajectory]]
    """Which of the attempts, in the order in which they finished."""
    tries: dict[int, float] | None
    extra_begun: bool = False


class SavedDomain(msgspec.Struct, frozen=True):
    drawn: int
    started: int
    last: str | None
    """The task that was drawn last: another one at its position means that the order has changed."""
    again: list[SavedTask]
    rested: int = 0
    resting: dict[int, int] = msgspec.field(default_factory=dict)
    source: dict[str, Any] = msgspec.field(default_factory=dict)
    """The state of the source itself: of a curriculum."""


class SavedSums(msgspec.Struct, frozen=True):
    """The sums of the ledger."""

    issued: int
    fates: dict[Fate, int]
    tokens: dict[Fate, int]
    causes: list[tuple[Fate, str, int]]
    lost_tokens: dict[str, int]
    groups_opened: int
    groups_closed: dict[Fate, int]
    staleness: dict[int, int]
    origin: float


class SavedState(msgspec.Struct, frozen=True):
    format: int
    config: dict[str, Any]
    """What must be the same when it is restored."""
    time: float
    """Loop time of the saving: all times here are of that clock."""
    version: int
    consumed: int
    base: int
    domains: dict[str, SavedDomain]
    sums: SavedSums
    groups: list[SavedGroup]
    pass_start: PassStart = PassStart()


# -- save --------------------------------------------------------------------------------------------------------------


def save(directory: Path, queue: GroupQueue, uncollated: Sequence[Group] = ()) -> None:
    """Write the state into a directory that exists. `uncollated` groups are cut, but their batch was not returned."""
    groups = [*queue.ledger.open_groups(), *uncollated]
    domains = queue.domains.all.values()
    tasks = [group.task for group in groups] + [task for domain in domains for task in domain.to_redraw]
    positions = {
        domain.name: _positions(domain, {task.id for task in tasks if task.domain == domain.name}) for domain in domains
    }
    lost: set[str] = set()
    state = SavedState(
        FORMAT,
        _settings_to_match(queue),
        asyncio.get_running_loop().time(),
        queue.version,
        queue.consumed,
        queue.bound.in_earlier_batches,
        {domain.name: _saved_domain(domain, positions[domain.name]) for domain in domains},
        _saved_sums(queue),
        [_saved_group(group, positions[group.task.domain], lost) for group in groups],
        queue.pass_counts.start,
    )
    if lost:
        logger.warning("the info of finished rollouts is saved without %s: JSON cannot hold them", sorted(lost))
    _columns([turn for trajectory in _trajectories(groups) for turn in trajectory.turns]).to_disk(directory / _TURNS)
    (directory / _STATE).write_bytes(msgspec.json.encode(state))


def _settings_to_match(queue: GroupQueue) -> dict[str, Any]:
    """What a saved state and a config must agree on, by the name of the setting."""
    settings: dict[str, Any] = {"mode": queue.mode} | {name: getattr(queue.config, name) for name in _MUST_MATCH}
    return settings | {f"domains.{name}.tasks": domain.tasks.description for name, domain in queue.domains.all.items()}


def _positions(domain: Domain, ids: set[str]) -> dict[str, int]:
    """Where these tasks stand. They were drawn not long ago, so the search goes backwards."""
    positions: dict[str, int] = {}
    for position in range(domain.drawn - 1, -1, -1):
        if len(positions) == len(ids):
            break
        id = domain.tasks.id_at(position)
        if id is not None and id in ids:
            positions[id] = position
    return positions


def _saved_domain(domain: Domain, positions: dict[str, int]) -> SavedDomain:
    last = domain.tasks.id_at(domain.drawn - 1) if domain.drawn else None
    again = [SavedTask(positions[task.id], task.id) for task in domain.to_redraw]
    return SavedDomain(
        domain.drawn, domain.started, last, again,
        domain.rested, domain.resting, domain.tasks.state(),
    )  # fmt: skip


def _saved_sums(queue: GroupQueue) -> SavedSums:
    ledger = queue.ledger
    return SavedSums(
        ledger.issued,
        dict(ledger.fates),
        dict(ledger.tokens),
        [(fate, cause, count) for (fate, cause), count in ledger.causes.items()],
        dict(ledger.lost_tokens),
        ledger.groups_opened,
        dict(ledger.groups_closed),
        dict(queue.staleness),
        ledger.origin,
    )


def _saved_group(group: Group, positions: dict[str, int], lost: set[str]) -> SavedGroup:
    attempts = [
        SavedAttempt(a.id, a.member, a.number, a.slot, a.started, a.ended, a.fate, a.cause, a.detail, a.tokens, a.turns)
        for a in group.attempts
    ]
    numbers = {attempt.id: number for number, attempt in enumerate(group.attempts)}
    finished = [
        (numbers[attempt.id], _saved_trajectory(attempt.trajectory, lost))
        for attempt in group.finished
        if attempt.trajectory is not None
    ]
    return SavedGroup(
        group.id, group.task.domain, SavedTask(positions[group.task.id], group.task.id), group.begun, group.opened,
        group.state, group.trained, attempts, finished, group.weighted_tries, group.extra_begun,
    )  # fmt: skip


def _saved_trajectory(trajectory: Trajectory, lost: set[str]) -> SavedTrajectory:
    info = None if trajectory.info is None else _as_json(trajectory.info, lost)
    return SavedTrajectory(
        trajectory.seed, len(trajectory.turns), bool(trajectory.terminated), bool(trajectory.truncated),
        float(trajectory.score), info, trajectory.started, trajectory.ended, trajectory.final,
    )  # fmt: skip


def _as_json(info: dict[str, object], lost: set[str]) -> dict[str, Any]:
    """What JSON can hold of an info; arrays become lists. The names of the rest go to `lost`."""
    kept = {}
    for name, value in info.items():
        try:
            kept[str(name)] = msgspec.to_builtins(value, enc_hook=_from_numpy, str_keys=True)
        except (TypeError, ValueError, RecursionError):
            lost.add(str(name))
    return kept


def _from_numpy(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _trajectories(groups: Iterable[Group]) -> Iterator[Trajectory]:
    return (a.trajectory for group in groups for a in group.finished if a.trajectory is not None)


def _columns(turns: list[Turn]) -> DataProto:
    """Turns as rows."""
    columns: dict[str, Any] = {
        "prompt": Ragged.from_rows([turn.prompt for turn in turns], dtype=np.int32),
        "response": Ragged.from_rows([turn.response for turn in turns], dtype=np.int32),
        "logprobs": Ragged.from_rows([turn.logprobs for turn in turns], dtype=np.float32),
        "span_versions": Ragged.from_rows([[span.version for span in turn.spans] for turn in turns], dtype=np.int64),
        "span_lengths": Ragged.from_rows([[span.length for span in turn.spans] for turn in turns], dtype=np.int64),
        "finish": np.array([FINISH[turn.finish] for turn in turns], np.int8),
        "fresh": np.array([turn.fresh for turn in turns], np.bool_),
        "asked": np.array([turn.asked for turn in turns], np.float64),
        "answered": np.array([turn.answered for turn in turns], np.float64),
        "reward": np.array([turn.reward for turn in turns], np.float64),
    }
    return DataProto(columns, {}, {})


# -- restore -----------------------------------------------------------------------------------------------------------


def restore(directory: Path, queue: GroupQueue) -> list[Group]:
    """Bring a fresh queue to the saved state; returns the groups that are cut and not collated. A state that does not
    fit is refused before anything is changed."""
    state = _read(directory / _STATE)
    _check_settings(directory / _STATE, state.config, _settings_to_match(queue))
    # The time between the two lives does not count.
    clock_offset = asyncio.get_running_loop().time() - state.time
    turns = _turns(directory / _TURNS, clock_offset, sum(t.turns for group in state.groups for _, t in group.finished))
    domains = queue.domains.all
    for name, saved in state.domains.items():
        if saved.source:
            domains[name].tasks.load_state(saved.source)
        if saved.last is not None:
            _find(domains[name], SavedTask(saved.drawn - 1, saved.last))
    again = {name: [_find(domains[name], task) for task in saved.again] for name, saved in state.domains.items()}
    try:
        groups = [
            _group(saved, _find(domains[saved.domain], saved.task), turns, clock_offset) for saved in state.groups
        ]
    except LookupError as error:
        raise SnapshotError(f"{directory / _STATE} is damaged: {error!r} in its groups") from error
    for name, saved in state.domains.items():
        domain = domains[name]
        domain.drawn, domain.started = saved.drawn, saved.started
        domain.rested, domain.resting = saved.rested, dict(saved.resting)
    _restore_sums(queue.ledger, state.sums, clock_offset)
    queue.staleness.update(state.sums.staleness)
    uncollated = [group for group in groups if group.state is GroupState.CLOSED]
    pending = [group for group in groups if group.state is not GroupState.CLOSED]
    queue.restore(state.version, state.consumed, state.base, state.pass_start, pending)
    for name, tasks in again.items():
        domains[name].to_redraw.extend(tasks)
    queue.ledger.check()
    return uncollated


def _read(path: Path) -> SavedState:
    try:
        data = path.read_bytes()
        written = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if written != FORMAT:
            raise SnapshotError(f"{path} has format {written}, this version of cadenza reads {FORMAT}")
        return msgspec.json.decode(data, type=SavedState)
    except (OSError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error


def _check_settings(path: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    differences = [
        f"{name} was {saved.get(name, 'not there')} and is {present.get(name, 'not there')}"
        for name in {**saved, **present}
        if saved.get(name) != present.get(name)
    ]
    if differences:
        raise SnapshotError(
            f"{path} belongs to another config: {'; '.join(differences)}. Go on with the config of the saved run, or "
            "begin a new run from its weights"
        )


def _turns(path: Path, clock_offset: float, expected: int) -> Iterator[Turn]:
    try:
        table = DataProto.from_disk(path).batch
        ragged = {
            name: list(table.ragged(name))
            for name in ("prompt", "response", "logprobs", "span_versions", "span_lengths")
        }
        dense = {name: table.numpy(name).tolist() for name in ("finish", "fresh", "asked", "answered", "reward")}
    except Exception as error:  # a damaged file fails in many ways, and all mean the same
        raise SnapshotError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if len(dense["finish"]) != expected:
        raise SnapshotError(f"{path} holds {len(dense['finish'])} turns, but {_STATE} beside it counts {expected}")
    reasons = {number: finish for finish, number in FINISH.items()}
    spans = [
        tuple(map(Span, versions.tolist(), lengths.tolist()))
        for versions, lengths in zip(ragged["span_versions"], ragged["span_lengths"], strict=True)
    ]
    return (
        Turn(
            ragged["prompt"][row], ragged["response"][row], ragged["logprobs"][row], spans[row],
            reasons[dense["finish"][row]], dense["fresh"][row], dense["asked"][row] + clock_offset,
            dense["answered"][row] + clock_offset, dense["reward"][row],
        )
        for row in range(expected)
    )  # fmt: skip


def _find(domain: Domain, saved: SavedTask) -> Task:
    task = domain.tasks.at(saved.place)
    if task is None or task.id != saved.id:
        raise SnapshotError(
            f"domains.{domain.name}.tasks[{saved.place}] was '{saved.id}' when the run was saved, and is "
            f"{'not there' if task is None else repr(task.id)} now: the order of the tasks must not change"
        )
    return task


def _group(saved: SavedGroup, task: Task, turns: Iterator[Turn], clock_offset: float) -> Group:
    group = Group(saved.id, task, saved.begun, saved.opened + clock_offset)
    group.weighted_tries, group.extra_begun = saved.tries, saved.extra_begun
    group.trained = saved.trained
    # A filter that ran is lost: the group is whole, and goes to it again.
    group.state = GroupState.OPEN if saved.state is GroupState.FILTERING else saved.state
    for record in saved.attempts:
        attempt = Attempt(record.id, group, record.member, record.number, record.slot, record.started + clock_offset)
        attempt.ended = record.ended + clock_offset
        attempt.fate, attempt.cause, attempt.detail = record.fate, record.cause, record.detail
        attempt.tokens, attempt.turns = record.tokens, record.turns
        if record.fate is not None:
            attempt.state = AttemptState.CLOSED
        group.attempts.append(attempt)
    for number, episode in saved.finished:
        attempt = group.attempts[number]
        trajectory = Trajectory(
            attempt.id, task, group.id, attempt.member, attempt.number, attempt.slot, episode.seed,
            [next(turns) for _ in range(episode.turns)], episode.terminated, episode.truncated, episode.score,
            episode.info, episode.final, episode.started + clock_offset, episode.ended + clock_offset,
            attempt.ended,
        )  # fmt: skip
        if attempt.fate is None:
            attempt.state = AttemptState.FINISHED
        attempt.oldest, attempt.newest = trajectory.versions or (-1, -1)
        attempt.reward = trajectory.score
        attempt.trajectory = trajectory
        group.finished.append(attempt)
    return group


def _restore_sums(ledger: Ledger, sums: SavedSums, clock_offset: float) -> None:
    """Count on from these sums. Live attempts are counted when their groups come back."""
    ledger.issued, ledger.groups_opened = sums.issued, sums.groups_opened
    ledger.origin = sums.origin + clock_offset
    ledger.fates.update(sums.fates)
    ledger.tokens.update(sums.tokens)
    ledger.causes.update({(fate, cause): count for fate, cause, count in sums.causes})
    ledger.lost_tokens.update(sums.lost_tokens)
    ledger.groups_closed.update(sums.groups_closed)
