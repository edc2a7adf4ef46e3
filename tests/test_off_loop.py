"""Plain functions in threads of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any
from weakref import ref

import pytest

from cadenza.off_loop import DaemonThreadPool


class Model:
    """Something large."""

    def close(self) -> str:
        return "closed"

    def fail(self) -> str:
        raise OSError("no room")


@pytest.mark.parametrize("method", [Model.close, Model.fail])
def test_a_thread_lets_go_of_what_it_called_before_it_tells_the_result(method: Callable[[Model], str]) -> None:
    """Whoever hears the result may end the interpreter: the thread must not free the model then."""
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
