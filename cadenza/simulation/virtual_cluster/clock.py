"""An event loop with virtual time.

Invariant: time passes only when no callback can run. Then it jumps to the next timer. When there is no timer either,
the loop raises `Deadlock`, which names every task and what it waits for. Code that takes its time from the loop runs
here unchanged, and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from cadenza.errors import USER_CODE_ERRORS

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No callback can run, and no timer is set."""


class VirtualTimeout(RuntimeError):
    """The next timer lies behind `max_time`."""


class _ClockSelector(selectors.BaseSelector):
    """The selector of the virtual loop: it moves the clock where a real one would sleep."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(self._loop.who_waits())
        if timeout > 0:
            self._loop.jump()
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError("a virtual loop has no files: simulate them, or use a real loop")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def close(self) -> None:
        return


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio with virtual time.

    `shuffle` is the seed of the order in which callbacks that are ready together run: asyncio promises no order between
    tasks, so a correct program passes under every seed. Work sent to `run_in_executor` runs inline, and its result
    arrives after `executor_cost` virtual seconds.
    """

    _ready: Any
    _scheduled: Any
    _timer_cancelled_count: int

    def __init__(
        self,
        *,
        shuffle: int | None = None,
        executor_cost: Callable[[Callable[..., Any]], float] | float = 0.0,
        max_time: float = float("inf"),
    ) -> None:
        super().__init__()
        self._now = 0.0
        self._max_time = max_time
        self._random = None if shuffle is None else random.Random(shuffle)
        self._executor_cost = executor_cost
        self._selector = _ClockSelector(self)
        self.slow_callback_duration = float("inf")

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """Move the clock to the next timer."""
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1
        if not scheduled:
            return
        when = scheduled[0]._when
        if when > self._max_time:
            raise VirtualTimeout(f"virtual time would pass {self._max_time} s\n{self.who_waits()}")
        self._now = max(self._now, when)
        self._clock_resolution = math.ulp(self._now)  # with a smaller one a timer that is due would not fire

    def run_in_executor(  # type: ignore[override]  # typeshed binds args to func by a TypeVarTuple
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `func` now, and deliver its result after its cost."""
        cost = self._executor_cost(func) if callable(self._executor_cost) else self._executor_cost
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except USER_CODE_ERRORS as error:  # the awaiting task receives the error
            self.call_later(cost, _settle, future, None, error)
        else:
            self.call_later(cost, _settle, future, result, None)
        return future

    def who_waits(self) -> str:
        """Return a text with every task and the innermost await in which it waits."""
        lines = [f"nothing can run at virtual time {self._now:.3f} s; the tasks wait:"]
        lines += sorted(f"  {task.get_name()}: {_innermost(task)}" for task in asyncio.all_tasks(self))
        return "\n".join(lines)

    def _run_once(self) -> None:
        if self._random is not None and len(self._ready) > 1:
            handles = list(self._ready)
            self._random.shuffle(handles)
            self._ready.clear()
            self._ready.extend(handles)
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, event_list: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _innermost(task: asyncio.Task[Any]) -> str:
    """Return the chain of awaits of a task, outermost first, and the future at its end."""
    chain: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and hasattr(awaited, "cr_frame"):
        frame = awaited.cr_frame
        line = f":{frame.f_lineno}" if frame is not None else ""
        chain.append(f"{awaited.__qualname__}{line}")
        awaited = awaited.cr_await
    return " > ".join(chain) + (f" waits for {awaited!r}" if awaited is not None else "")


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    shuffle: int | None = None,
    executor_cost: Callable[[Callable[..., Any]], float] | float = 0.0,
    max_time: float = float("inf"),
) -> T:
    """Run `main()` under virtual time, like `asyncio.run`."""

    def make() -> VirtualLoop:
        return VirtualLoop(shuffle=shuffle, executor_cost=executor_cost, max_time=max_time)

    with asyncio.Runner(loop_factory=make) as runner:
        return runner.run(main())
