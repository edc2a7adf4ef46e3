"""The running workers of one cluster: what a backend implements, and how answers are awaited.

Invariant: no wait is endless. A call ends with all answers, with the first failure of any rank, when its time is up, or
when the system that runs the workers is gone (`WorkerGroup.check_alive`). Ranks that compute together hang when one of
them fails, so a call does not wait for the others after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cadenza.cluster.dispatch import RankCall
from cadenza.cluster.placement import Place, Placement
from cadenza.cluster.worker import Worker, WorkerLost
from cadenza.errors import DeadlinePassed, OtherRanksLost

if TYPE_CHECKING:
    from cadenza.cluster.worker_handle import WorkerHandle

ALIVE_CHECK_SECONDS = 5.0
"""Between two calls of `check_alive`, while no answer comes."""
GRACE_SECONDS = 1.0
"""After the first failure of a rank, for failures of other ranks that come with it."""
ROOT_CAUSE_SECONDS = 15.0
"""After a rank lost its connection to others, for the failure of the rank that died: that one is named."""


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """The workers that a backend starts."""

    placement: Placement
    worker_class: type[Worker]
    init: Mapping[str, Any]
    seconds: float
    """How long the start may take."""

    @property
    def places(self) -> tuple[Place, ...]:
        return self.placement.places


class WorkerGroup(Protocol):
    """The running workers of one cluster."""

    async def open(self) -> None:
        """Start all workers, or raise."""

    async def submit(self, method: str, calls: Sequence[RankCall]) -> Sequence[asyncio.Future[Any]]:
        """Make the calls, and return a future for the answer to each."""

    def worker_handles(self) -> Sequence[WorkerHandle]:
        """A handle for each worker, by rank."""

    async def check_alive(self) -> None:
        """Raise if the system that runs the workers is gone: the Ray head, say."""

    async def close(self) -> None:
        """End all workers, started or not. It has a deadline of its own."""


Backend: TypeAlias = Callable[[WorkerLaunch], WorkerGroup]


class BackgroundTasks:
    """Tasks under way. The set keeps a task until it ends, also when its result is not awaited any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_mark_retrieved)
        return task

    def cancel(self) -> None:
        """Cancel all tasks but the one that calls this."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()


async def gather_answers(
    what: str,
    places: Sequence[Place],
    futures: Sequence[asyncio.Future[Any]],
    *,
    seconds: float,
    check_alive: Callable[[], Awaitable[None]],
) -> list[Any]:
    """Returns all answers in order, or raises the first failure as the worker raised it, with a note that names it."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    waiting = set(futures)
    while waiting:
        wait_seconds = min(ALIVE_CHECK_SECONDS, max(ends - loop.time(), 0.0))
        done, waiting = await asyncio.wait(waiting, timeout=wait_seconds, return_when=asyncio.FIRST_EXCEPTION)
        if any(_error(future) for future in done):
            await _wait_for_root_cause(futures)
            raise _root_failure(what, places, futures)
        if waiting and loop.time() >= ends:
            late = [str(place) for place, future in zip(places, futures, strict=True) if future in waiting]
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            raise DeadlinePassed(f"{what}: no answer within {max(seconds, 0):g} s from {'; '.join(late[:3])}{more}")
        if waiting and not done:
            try:
                await check_alive()
            except Exception as error:
                error.add_note(f"while {what} was under way")
                raise
    return [future.result() for future in futures]


async def _wait_for_root_cause(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait GRACE_SECONDS for failures that come with the first one; up to ROOT_CAUSE_SECONDS while all failures so far
    are `OtherRanksLost`, which do not say why."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + ROOT_CAUSE_SECONDS
    while waiting := [future for future in futures if not future.done()]:
        errors = [_error(future) for future in futures if future.done()]
        is_unexplained = all(error is None or isinstance(error, OtherRanksLost) for error in errors)
        if not is_unexplained or loop.time() >= ends:
            await asyncio.wait(waiting, timeout=GRACE_SECONDS)
            return
        await asyncio.wait(waiting, timeout=ends - loop.time(), return_when=asyncio.FIRST_COMPLETED)


def _root_failure(what: str, places: Sequence[Place], futures: Sequence[asyncio.Future[Any]]) -> BaseException:
    """The failure that explains the others: that of a lost worker, else that of the lowest rank. `OtherRanksLost`
    explains nothing and comes last."""
    failures = [
        (place, error)
        for place, future in zip(places, futures, strict=True)
        if future.done() and (error := _error(future)) is not None
    ]
    failures.sort(key=lambda failure: (not isinstance(failure[1], WorkerLost), isinstance(failure[1], OtherRanksLost)))
    place, error = failures[0]
    error.add_note(f"in {what}, {place}")
    for other, consequence in failures[1:4]:
        error.add_note(f"{other} failed too: {type(consequence).__name__}: {consequence}")
    if len(failures) > 4:
        error.add_note(f"and {len(failures) - 4} more")
    return error


def _error(future: asyncio.Future[Any]) -> BaseException | None:
    return WorkerLost("the call was cancelled") if future.cancelled() else future.exception()


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """So that asyncio does not log a failure that is not awaited any more."""
    if not future.cancelled():
        future.exception()
