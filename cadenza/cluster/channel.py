"""Two processes that talk all the time, in few calls.

Invariant: messages arrive once, in the order in which they were said, or the wire is lost and both ends know. Those who
call say what came up within `linger` in one call; the other end answers with all that it has to say, and while it has
nothing the call waits there. A newer call relieves it, so that one call at a time waits.
```
Wire.say --outbox, once per linger--> exchange() --> Box.hear
Wire.hear <----- all that is there <- waits for Box.say, a newer call, or POLL_SECONDS
```
Calls may overtake each other on the way: they are numbered, and so are the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cadenza.cluster.crew import Tasks
from cadenza.errors import DeadlinePassed

POLL_SECONDS = 10.0
"""After which a call comes back empty: no wait is endless."""
LINGER_SECONDS = 0.002
"""What is said within this time shares a call."""

Call = Callable[[int, list[Any]], Awaitable[tuple[int, Sequence[Any]]]]


class InOrder:
    """Parcels that may overtake each other, handed on by number."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Sequence[Any]] = {}

    def take(self, number: int, messages: Sequence[Any]) -> list[Any]:
        """What can be handed on now that this one is there."""
        self._early[number] = messages
        ready: list[Any] = []
        while self._next in self._early:
            ready += self._early.pop(self._next)
            self._next += 1
        return ready


class Wire:
    """The end that calls."""

    def __init__(
        self,
        call: Call,
        hear: Callable[[Any], None],
        lost: Callable[[Exception], None],
        *,
        seconds: float = 60.0,
        linger: float = LINGER_SECONDS,
    ) -> None:
        """`seconds` is how long the other end may be silent beyond POLL_SECONDS. `lost` is called once, with what
        ended the wire; not after `close`."""
        self._call = call
        self._hear = hear
        self._lost = lost
        self._seconds = POLL_SECONDS + seconds
        self._linger = linger
        self._out: list[Any] = []
        self._number = 0
        self._calls = 0
        """Under way."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._answers = InOrder()
        self._tasks = Tasks()

    def open(self) -> None:
        """Begin to listen."""
        self._send()

    def say(self, message: Any) -> None:
        """Nothing is said on a wire that is closed or lost: whoever closed it settles what was open."""
        if self._is_closed:
            return
        self._out.append(message)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._send)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tasks.cancel()

    def _send(self) -> None:
        self._timer = None
        messages, self._out = self._out, []
        number, self._number = self._number, self._number + 1
        self._calls += 1
        self._tasks.begin(self._exchange(number, messages))

    async def _exchange(self, number: int, messages: list[Any]) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                number, answers = await self._call(number, messages)
        except TimeoutError:
            self._end(DeadlinePassed(f"no answer within {self._seconds:g} s"))
            return
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            self._end(error)
            return
        finally:
            self._calls -= 1
        try:
            for message in self._answers.take(number, answers):
                if self._is_closed:
                    return
                self._hear(message)
        except Exception as error:  # noqa: BLE001 - what was not heard is not said again: the wire is lost
            self._end(error)
            return
        if not self._calls and self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._send)

    def _end(self, error: Exception) -> None:
        if not self._is_closed:
            self.close()
            self._lost(error)


class Box:
    """The end that is called, for one caller."""

    def __init__(self, hear: Callable[[Any], None]) -> None:
        self._hear = hear
        self._out: list[Any] = []
        self._number = 0
        self._heard = InOrder()
        self._waiter: asyncio.Future[None] | None = None

    def say(self, message: Any) -> None:
        self._out.append(message)
        self._relieve()

    async def exchange(self, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """Take what was said, and give what is there; if that is nothing, wait for it."""
        self._relieve()
        for message in self._heard.take(number, messages):
            self._hear(message)
        if not self._out:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([waiter], timeout=POLL_SECONDS)
        out, self._out = self._out, []
        number, self._number = self._number, self._number + 1
        return number, out

    def _relieve(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
