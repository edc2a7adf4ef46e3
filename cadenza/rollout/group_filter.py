"""The group filter of a run (`rollout.group_filter`): whether a whole group is worth training.

Invariant: a group that went to the filter is told of once: kept, filtered, failed or lost; or not at all, if it ended
meanwhile. Other groups do not wait for it.

    begin(group) -> a task: load the turns, call the filter under its deadline -> queue.make_ready, or queue.end_group
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from cadenza.config import load_object
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, raise_if_cancelled
from cadenza.off_loop import as_async, with_deadline
from cadenza.rollout import token_bundles
from cadenza.rollout.config import RolloutConfig
from cadenza.rollout.failures import FilterLimit, RolloutError, UserErrors
from cadenza.rollout.ledger import Group
from cadenza.rollout.records import Fate, Trajectory

GroupFilter = Callable[[list[Trajectory]], Awaitable[bool]]


class FilteredQueue(Protocol):
    """What the filter tells of a group."""

    errors: UserErrors
    start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

    def make_ready(self, group: Group) -> None: ...

    def end_group(self, group: Group, fate: Fate, cause: str) -> None: ...

    def lose_group(self, group: Group) -> None: ...

    def fatal(self, error: RolloutError) -> None: ...


class GroupFilterRunner:
    """Runs the filter on whole groups, each in a task of its own."""

    def __init__(self, config: RolloutConfig, seconds: float, queue: FilteredQueue) -> None:
        """One call of the filter may take so many `seconds`."""
        self._filter: GroupFilter | None = None
        if (chosen := config.group_filter) is not None:
            self._filter = as_async(load_object(chosen) if isinstance(chosen, str) else chosen)
        self._seconds = seconds
        self._max_filtered = config.max_filtered
        self._queue = queue
        self._filtered_in_a_row = 0
        self._tasks: dict[Group, asyncio.Task[None]] = {}
        """Of the groups that the filter looks at."""

    @property
    def is_set(self) -> bool:
        """Whether the run has a filter."""
        return self._filter is not None

    def begin(self, group: Group) -> None:
        """The group is whole: the filter looks at it."""
        self._tasks[group] = self._queue.start_task(self._run(group))

    def cancel(self, group: Group) -> None:
        """Stop the filter of a group that ends without it."""
        if (task := self._tasks.pop(group, None)) is not None:
            task.cancel()

    async def _run(self, group: Group) -> None:
        trajectories = [attempt.trajectory for attempt in group.finished if attempt.trajectory is not None]
        try:
            await token_bundles.load(trajectories)
        except InfrastructureError:
            if self._tasks.pop(group, None) is not None:
                self._queue.lose_group(group)
            return
        try:
            keep = await self._ask(trajectories)
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
            self._on_filtered(group)

    async def _ask(self, trajectories: list[Trajectory]) -> Any:
        """The verdict of the filter."""
        assert self._filter is not None
        keep: Any = await with_deadline(self._seconds, self._filter(trajectories), "reward_seconds")
        if inspect.isawaitable(keep):  # a plain function that returns what an async one gives
            keep = await with_deadline(self._seconds, keep, "reward_seconds")
        if keep is None or keep != keep:
            raise TypeError(f"group_filter returned {keep!r}; return True to keep the group, False to filter it")
        return keep

    def _on_error(self, group: Group, error: BaseException) -> None:
        errors = self._queue.errors
        errors.add("group_filter", error)
        self._queue.end_group(group, Fate.FAILED, f"group_filter raised {type(error).__name__}")
        if exceeded := errors.exceeded():
            self._queue.fatal(exceeded)

    def _on_filtered(self, group: Group) -> None:
        self._filtered_in_a_row += 1
        self._queue.end_group(group, Fate.FILTERED, "group_filter")
        if self._filtered_in_a_row >= self._max_filtered:
            self._queue.fatal(
                FilterLimit(
                    f"{self._filtered_in_a_row} groups in a row were filtered (max_filtered); the last task was "
                    f"'{group.task.id}': the filter keeps nothing, or the tasks are all too easy or too hard"
                )
            )
