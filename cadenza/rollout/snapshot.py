"""A snapshot of the rollouts: what a killed run needs to go on, from the queue to the disk and back.

    save:     queue, ledger, domains -> SavedState -> snapshot_format.py -> disk
    restore:  disk -> snapshot_format.py -> SavedState -> a fresh queue

Invariant: a saved state is the account of one moment, and it adds up. A restore takes the life that went on
after that moment for not lived: what ran then is `cancelled` (cause `restart`), what finished is there.

Why a member that ran gets the next attempt number, in a group that goes on: number and group name an attempt, and this
one has its fate. A group of which nothing was finished is another matter: it ends as a whole and its task is drawn
anew as a new group, whose attempts begin at 0. The key of the sampling randomness knows the task and not the group, so
they write the same tokens again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cadenza.rollout.failures import logger
from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.ledger import Attempt, AttemptState, Group, GroupState, Ledger
from cadenza.rollout.records import Task, Trajectory, Turn
from cadenza.rollout.snapshot_format import (
    FORMAT,
    STATE_FILE,
    SavedAttempt,
    SavedDomain,
    SavedGroup,
    SavedState,
    SavedSums,
    SavedTask,
    SavedTrajectory,
    SnapshotError,
    read_state,
    read_turns,
    write,
)
from cadenza.rollout.tasks import Domain

_MUST_MATCH = ("group_size", "batch_size", "alpha", "staleness", "extra_members", "extra_after", "extra_groups", "seed")
"""Settings that the saved groups depend on: their shape, how old they may become, their randomness."""


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
        queue.bound.consumed_for_earlier_versions,
        {domain.name: _saved_domain(domain, positions[domain.name]) for domain in domains},
        _saved_sums(queue),
        [_saved_group(group, positions[group.task.domain], lost) for group in groups],
        queue.pass_counts.start,
    )
    if lost:
        logger.warning("the info of finished rollouts is saved without %s: JSON cannot hold them", sorted(lost))
    write(
        directory, state, [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    )


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
        group.id, group.task.domain, SavedTask(positions[group.task.id], group.task.id), group.begun_version,
        group.opened, group.state, group.batch_version, attempts, finished, group.tries_used, group.extra_begun,
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


# -- restore -----------------------------------------------------------------------------------------------------------


def restore(directory: Path, queue: GroupQueue) -> list[Group]:
    """Bring a fresh queue to the saved state; returns the groups that are cut and not collated. A state that does not
    fit is refused before anything is changed."""
    state = read_state(directory)
    for name, domain in queue.domains.all.items():
        domain.tasks.go_back_to(str(state.config.get(f"domains.{name}.tasks", "")))
    _check_settings(directory / STATE_FILE, state.config, _settings_to_match(queue))
    # The time between the two lives does not count.
    clock_offset = asyncio.get_running_loop().time() - state.time
    turns = read_turns(directory, clock_offset, sum(t.turns for group in state.groups for _, t in group.finished))
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
        raise SnapshotError(f"{directory / STATE_FILE} is damaged: {error!r} in its groups") from error
    for name, saved in state.domains.items():
        domain = domains[name]
        domain.drawn, domain.started = saved.drawn, saved.started
        domain.rested, domain.resting = saved.rested, dict(saved.resting)
    _restore_sums(queue.ledger, state.sums, clock_offset)
    queue.staleness.update(state.sums.staleness)
    uncollated = [group for group in groups if group.state is GroupState.CLOSED]
    pending = [group for group in groups if group.state is not GroupState.CLOSED]
    queue.restore(state.version, state.consumed, state.consumed_for_earlier_versions, state.pass_start, pending)
    for name, tasks in again.items():
        domains[name].to_redraw.extend(tasks)
    queue.ledger.check()
    return uncollated


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


def _find(domain: Domain, saved: SavedTask) -> Task:
    task = domain.tasks.at(saved.place)
    if task is None or task.id != saved.id:
        raise SnapshotError(
            f"domains.{domain.name}.tasks[{saved.place}] was '{saved.id}' when the run was saved, and is "
            f"{'not there' if task is None else repr(task.id)} now: the order of the tasks must not change"
        )
    return task


def _group(saved: SavedGroup, task: Task, turns: Iterator[Turn], clock_offset: float) -> Group:
    group = Group(saved.id, task, saved.begun_version, saved.opened + clock_offset)
    group.tries_used, group.extra_begun = saved.tries, saved.extra_begun
    group.batch_version = saved.batch_version
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
