"""Calls that run at the same time, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. The first error ends the other calls and is raised as it is, not in a group."""
    if len(calls) < 2:
        return [await call for call in calls]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
