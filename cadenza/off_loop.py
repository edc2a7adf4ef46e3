"""Plain functions run off the loop, async ones on it: one rule for envs, rewards and filters."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from cadenza.errors import DeadlinePassed

T = TypeVar("T")
_Call = tuple[Future[Any], Callable[[], Any]]


class DaemonThreadPool(Executor):
    """Daemon threads, made when all others are busy. A call goes to the thread that became idle last.

    The standard pool joins its threads when the interpreter ends, and has a fixed number of them: one hung env
    would hang the exit, and enough of them the run. Here a hung thread costs itself.

    The done callbacks of a future run on the thread of its call, which counts as idle by then and may have been given
    the next one: a callback must be short, and wait for no other call of the pool.

    A thread lets go of what it called before it sets the result. The waiter may then end the interpreter, and torch
    aborts the process if tensors are freed in another thread then.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[SimpleQueue[_Call]] = []
        """The queues of the threads without work, each of one call at most; the last became idle last."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = SimpleQueue()
            Thread(target=self._run, args=(calls,), name="cadenza-off-loop", daemon=True).start()
        calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _run(self, calls: SimpleQueue[_Call]) -> None:
        while True:
            future, call = calls.get()
            is_wanted = future.set_running_or_notify_cancel()
            result, error = None, None
            try:
                result = call() if is_wanted else None
            except BaseException as raised:  # noqa: BLE001 - it belongs to the waiter of the future
                error = raised
            del call
            with self._lock:  # before the waiter knows: its next call comes to this thread
                self._idle.append(calls)
            if error is not None:
                future.set_exception(error)
            elif is_wanted:
                future.set_result(result)
            del future, result, error


THREAD_POOL = DaemonThreadPool()
"""For code that may hang or wait: envs, rewards, filters, files."""
COMPUTE_POOL = DaemonThreadPool()
"""For computations with large tensors. Few run at once, so that they use the same few threads again and again: the C
library keeps a heap for each thread, and what one thread frees is of no use to another. On the threads of all calls, a
run with a model of 135M parameters grew by a copy of its weights with every step."""
_abandoned: set[asyncio.Future[Any]] = set()
"""Calls without a waiter; kept until they end, so that they are not collected half-way."""


async def with_deadline(seconds: float, call: Awaitable[T], what: str) -> T:
    """Await user code, but not longer than this, even when it does not let itself be cancelled."""
    future = asyncio.ensure_future(call)
    if isinstance(future, asyncio.Task) and (task := asyncio.current_task()) is not None:
        future.set_name(task.get_name())  # in a list of tasks it shows as the same work
    try:
        await asyncio.wait([future], timeout=seconds)
    finally:
        is_late = not future.done()  # a future of a thread is done as soon as it is cancelled
        if is_late:
            future.cancel()
            _abandoned.add(future)
            future.add_done_callback(ignore_result)
        else:
            ignore_result(future)  # the waiter may be cancelled at the very moment at which the call ends
    if is_late:
        raise DeadlinePassed(f"no answer within {what} {seconds}")
    return future.result()


async def done_before(end: asyncio.Future[Any] | asyncio.Event, task: asyncio.Future[Any]) -> bool:
    """Wait for a task, but not beyond an end. Returns whether the task is done. If it is not, or if this wait is
    cancelled, the task is cancelled; the end never is."""
    ending = asyncio.ensure_future(end.wait()) if isinstance(end, asyncio.Event) else end
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        if ending is not end:
            ending.cancel()
        if not task.done():
            task.cancel()


def resolve_future(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Resolve a future that may be resolved already, or belong to a loop that is gone."""
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def ignore_result(future: asyncio.Future[Any]) -> None:
    """A done callback for a call without a waiter: its exception counts as retrieved."""
    _abandoned.discard(future)
    if not future.cancelled():
        future.exception()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async counts too
    )


def as_async(function: Callable[..., Any], pool: Executor = THREAD_POOL) -> Callable[..., Awaitable[Any]]:
    """The function itself if it is async, else its form that runs in a thread of the pool."""
    if is_async(function):
        return function

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:  # a future cannot carry it
            raise RuntimeError("StopIteration raised") from error

    call.__wrapped__ = function  # type: ignore[attr-defined]  # a virtual loop asks what it costs

    def off_loop(*args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(pool, call, *args)

    return off_loop
