"""Plain functions in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Barrier, Event, get_ident
from typing import Any
from weakref import ref

import pytest
from builders import simulate

from cadenza.errors import DeadlinePassed
from cadenza.off_loop import DaemonThreadPool, as_async, done_before, with_deadline


class Model:
    """Something large."""

    def close(self) -> str:
        return "closed"

    def fail(self) -> str:
        raise OSError("no room")


@pytest.mark.parametrize("method", [Model.close, Model.fail])
def test_a_thread_lets_go_of_what_it_called_before_it_tells_the_result(method: Callable[[Model], str]) -> None:
    """The waiter may end the interpreter when it has the result: the thread must not free the model then."""
    model, is_told, begin = Model(), Event(), Event()
    watched, alive = ref(model), []

    def told(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            error.__traceback__ = None  # it knows what failed
        alive.append(watched() is not None)
        is_told.set()

    def work(model: Model) -> str:
        begin.wait(10)
        return method(model)

    future = DaemonThreadPool().submit(work, model)
    future.add_done_callback(told)
    del model
    begin.set()
    assert is_told.wait(10)
    assert alive == [False]


def test_calls_one_after_the_other_run_in_one_thread() -> None:
    """What a thread frees is of use to its own next call only: the C library keeps a heap for each thread."""
    pool, idle = DaemonThreadPool(), Barrier(8)
    for waiting in [pool.submit(idle.wait, 10) for _ in range(8)]:  # eight threads, all idle afterwards
        waiting.result(10)
    assert len({pool.submit(get_ident).result(10) for _ in range(100)}) == 1


def test_a_call_that_does_not_return_holds_up_no_other() -> None:
    pool, end = DaemonThreadPool(), Event()
    hung = pool.submit(end.wait, 10)
    assert pool.submit(lambda: "done").result(10) == "done"
    end.set()
    assert hung.result(10)


def test_a_plain_function_that_does_not_return_in_time_is_late_and_not_cancelled() -> None:
    """The future of a thread is cancelled at once, unlike a task: that must not hide the deadline."""
    end = Event()

    async def main() -> None:
        with pytest.raises(DeadlinePassed, match=r"no answer within reward_seconds 0\.01"):
            await with_deadline(0.01, as_async(end.wait)(), "reward_seconds")

    try:
        asyncio.run(main())
    finally:
        end.set()


@pytest.mark.parametrize("kind", ["future", "event"])
@pytest.mark.parametrize("first", ["task", "end", "cancellation"])
def test_a_wait_for_a_task_ends_with_the_task_or_with_the_end_and_leaves_nothing_running(kind: str, first: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        end: Any = asyncio.Event() if kind == "event" else loop.create_future()
        task = asyncio.ensure_future(asyncio.sleep(1.0, "done"))
        waiting = asyncio.ensure_future(done_before(end, task))
        if first == "end":
            loop.call_later(0.5, end.set if kind == "event" else lambda: end.set_result(None))
        elif first == "cancellation":
            loop.call_later(0.5, waiting.cancel)
        await asyncio.wait([waiting])
        if first == "task":
            assert (waiting.result(), task.result()) == (True, "done")
        else:
            assert waiting.cancelled() if first == "cancellation" else waiting.result() is False
            await asyncio.wait([task])
            assert task.cancelled()
        assert kind == "event" or not end.cancelled()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulate(main)
