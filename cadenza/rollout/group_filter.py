"""The group filters of a run and of its domains: whether a whole group is worth training.

Invariant: a group that went to the filter is told of once: kept, filtered, failed or lost; or not at all, if it ended
meanwhile. Other groups do not wait for it.

    judge(group) -> by its scores, at once: outside `difficulty` of its domain -> queue.end_group
                 -> a task: load the turns, call the filters in time -> queue.make_ready, or queue.end_group
                 -> no filter -> queue.make_ready
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from cadenza.config import load_callable
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, raise_if_cancelled
from cadenza.off_loop import as_async, with_deadline
from cadenza.rollout import token_bundles
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import FilterLimit, RolloutError, UserErrors
from cadenza.rollout.ledger import Group, GroupState, Ledger
from cadenza.rollout.records import Fate, Trajectory

GroupFilter = Callable[[list[Trajectory]], Awaitable[bool]]


class FilteredQueue(Protocol):
    """What the filter tells of a group."""

    errors: UserErrors
    ledger: Ledger
    start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

    def make_ready(self, group: Group) -> None: ...

    def end_group(self, group: Group, fate: Fate, cause: str) -> None: ...

    def redraw_lost_group(self, group: Group) -> None: ...

    def end_run(self, error: RolloutError) -> None: ...


class GroupFilterRunner:
    """Runs the filter on whole groups, each in a task of its own."""

    def __init__(self, config: RolloutConfig, envs: EnvManagerConfig, queue: FilteredQueue) -> None:
        self._filters = {
            name: [_load(chosen) for chosen in (domain.group_filter, config.group_filter) if chosen is not None]
            for name, domain in envs.domains.items()
        }
        """Of each domain, its own one first."""
        self._difficulty = {name: domain.difficulty for name, domain in envs.domains.items()}
        self._seconds = envs.reward_seconds
        self._max_filtered = config.max_filtered
        self._queue = queue
        self._filtered_in_a_row = 0
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        """Of the groups that the filter looks at."""

    def judge(self, group: Group) -> None:
        """The group is whole: keep it, filter it by its scores, or let the filters look at it."""
        if (allowed := self._difficulty[group.task.domain]) is not None:
            scores = [attempt.reward for attempt in group.finished]
            if cause := _why_no_signal(scores, *allowed):
                self._on_filtered(group, cause)
                return
        if self._filters[group.task.domain]:
            self._queue.ledger.advance(group, GroupState.FILTERING)
            self._tasks[group] = self._queue.start_task(self._run(group))
        else:
            self._filtered_in_a_row = 0
            self._queue.make_ready(group)

    def cancel(self, group: Group) -> None:
        """Stop the filter of a group that ends without it."""
        if (task := self._tasks.pop(group, None)) is not None:
            task.cancel()

    async def _run(self, group: Group) -> None:
        trajectories = group.trajectories
        try:
            await token_bundles.load(trajectories)
        except InfrastructureError:
            if self._tasks.pop(group, None) is not None:
                self._queue.redraw_lost_group(group)
            return
        try:
            keep = await self._ask(self._filters[group.task.domain], trajectories)
        except USER_CODE_ERRORS as error:  # counted, shown once, bounded by a budget
            raise_if_cancelled(error)
            if self._tasks.pop(group, None) is not None:
                self._on_error(group, error)
            return
        if self._tasks.pop(group, None) is None:
            return
        if keep:
            self._filtered_in_a_row = 0
            self._queue.make_ready(group)
        else:
            self._on_filtered(group, "group_filter")

    async def _ask(self, filters: list[GroupFilter], trajectories: list[Trajectory]) -> bool:
        """Whether all filters keep the group."""
        for group_filter in filters:
            keep: Any = await with_deadline(self._seconds, group_filter(trajectories), "reward_seconds")
            if inspect.isawaitable(keep):  # a plain function that returns what an async one gives
                keep = await with_deadline(self._seconds, keep, "reward_seconds")
            if keep is None or keep != keep:
                raise TypeError(f"group_filter returned {keep!r}; return True to keep the group, False to filter it")
            if not keep:
                return False
        return True

    def _on_error(self, group: Group, error: BaseException) -> None:
        errors = self._queue.errors
        errors.add("group_filter", error)
        self._queue.end_group(group, Fate.FAILED, f"group_filter raised {type(error).__name__}")
        if exceeded := errors.exceeded():
            self._queue.end_run(exceeded)

    def _on_filtered(self, group: Group, cause: str) -> None:
        self._filtered_in_a_row += 1
        self._queue.end_group(group, Fate.FILTERED, cause)
        if self._filtered_in_a_row >= self._max_filtered:
            self._queue.end_run(
                FilterLimit(
                    f"{self._filtered_in_a_row} groups in a row were filtered (max_filtered); the last task was "
                    f"'{group.task.id}': the filter keeps nothing, or the tasks are all too easy or too hard"
                )
            )


def _load(chosen: str | Callable[..., Any]) -> GroupFilter:
    return as_async(load_callable(chosen) if isinstance(chosen, str) else chosen)


def _why_no_signal(scores: list[float], lowest: float, highest: float) -> str:
    """Why a group with these scores is not trained under a `difficulty`; empty if it is."""
    mean = sum(scores) / len(scores)
    if mean < lowest:
        return "too hard"
    if mean > highest:
        return "too easy"
    return "all scores are equal" if min(scores) == max(scores) else ""
