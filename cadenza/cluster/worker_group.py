"""The running workers of one cluster: what a backend makes, and how their answers are awaited.

Invariant: no wait is endless. A call ends with all answers, with the first failure of any rank, when its time is up, or
when what carries the workers is gone (`WorkerGroup.check_alive`). Ranks that compute together hang when one of them
fails, so nobody waits for the rest of them.
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
"""Between two checks that what carries the workers is alive, while no answer comes from them."""
GRACE_SECONDS = 1.0
"""After the first failure, for others that come with it."""
ROOT_CAUSE_SECONDS = 15.0
"""After a rank lost its peers: the one that died is named rather than those that lost their connection to it."""


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """What a backend starts."""

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
        """Start them all, or raise."""

    async def submit(self, method: str, calls: Sequence[RankCall]) -> Sequence[asyncio.Future[Any]]:
        """Make the calls; a future for the answer to each."""

    def worker_handles(self) -> Sequence[WorkerHandle]:
        """Each worker, to be asked by itself, by rank."""

    async def check_alive(self) -> None:
        """Raise if what carries the workers is gone."""

    async def close(self) -> None:
        """End them, started or not, with a deadline of its own."""


Backend: TypeAlias = Callable[[WorkerLaunch], WorkerGroup]


class BackgroundTasks:
    """Calls under way, kept until they end, also when nobody waits for them any more."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_mark_retrieved)
        return task

    def cancel(self) -> None:
        """Nobody is interested any more, the one who says so excepted."""
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
    """All answers in order, or the first failure, as the worker raised it and with a note of where that was."""
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
    """Wait a little for the failures that come with the first one, and longer where those so far explain nothing."""
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
    """The failure that explains the others: a worker that is lost, else the one of the lowest rank; the loss of a peer
    explains nothing."""
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
    """A failure that nobody waits for any more is no noise in the log."""
    if not future.cancelled():
        future.exception()
