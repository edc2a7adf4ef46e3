"""Two processes that talk all the time, in few calls.

Invariant: messages arrive once, in the order in which they were sent, or the channel is lost and both ends know. The
end that calls sends what came up within `linger` in one call; the other end answers with its outbox, and while that is
empty the call waits there. A newer call releases it, so that one call at a time waits.
```
Channel.send --outbox, once per linger--> exchange() --> on_message
on_message <----- all that is there <- waits for Mailbox.send, a newer call, or POLL_SECONDS
```
Calls may overtake each other on the way: they are numbered, and so are the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.errors import DeadlinePassed

POLL_SECONDS = 10.0
"""After which a call comes back empty: no wait is endless."""
LINGER_SECONDS = 0.002
"""What is sent within this time shares a call."""

ExchangeCall = Callable[[int, list[Any]], Awaitable[tuple[int, Sequence[Any]]]]


class Resequencer:
    """Puts numbered batches of messages, which may overtake each other on the way, back into order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Sequence[Any]] = {}

    def accept(self, number: int, messages: Sequence[Any]) -> list[Any]:
        """The messages that are in order now that this batch has arrived."""
        self._early[number] = messages
        ready: list[Any] = []
        while self._next in self._early:
            ready += self._early.pop(self._next)
            self._next += 1
        return ready


class Channel:
    """The end that calls: it sends messages and polls for those of the other end."""

    def __init__(
        self,
        call: ExchangeCall,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception], None],
        *,
        seconds: float = 60.0,
        linger: float = LINGER_SECONDS,
    ) -> None:
        """`seconds` is how long the other end may be silent beyond POLL_SECONDS. `on_lost` is called once, with what
        ended the channel; not after `close`."""
        self._call = call
        self._on_message = on_message
        self._on_lost = on_lost
        self._seconds = POLL_SECONDS + seconds
        self._linger = linger
        self._outbox: list[Any] = []
        self._number = 0
        self._calls = 0
        """Under way."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._answers = Resequencer()
        self._tasks = BackgroundTasks()

    def open(self) -> None:
        """Begin to listen."""
        self._flush()

    def send(self, message: Any) -> None:
        """Nothing is sent on a channel that is closed or lost: whoever closed it settles what was open."""
        if self._is_closed:
            return
        self._outbox.append(message)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._flush)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tasks.cancel()

    def _flush(self) -> None:
        self._timer = None
        messages, self._outbox = self._outbox, []
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
            for message in self._answers.accept(number, answers):
                if self._is_closed:
                    return
                self._on_message(message)
        except Exception as error:  # noqa: BLE001 - what was not received is not sent again: the channel is lost
            self._end(error)
            return
        if not self._calls and self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._flush)

    def _end(self, error: Exception) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost(error)


class Mailbox:
    """The end that is called, for one caller: it keeps outgoing messages until a call fetches them."""

    def __init__(self, on_message: Callable[[Any], None]) -> None:
        self._on_message = on_message
        self._outbox: list[Any] = []
        self._number = 0
        self._incoming = Resequencer()
        self._waiter: asyncio.Future[None] | None = None

    def send(self, message: Any) -> None:
        self._outbox.append(message)
        self._release_waiter()

    async def exchange(self, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """Take what was sent, and return the outbox; while that is empty, wait for a message."""
        self._release_waiter()
        for message in self._incoming.accept(number, messages):
            self._on_message(message)
        if not self._outbox:
            self._waiter = waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([waiter], timeout=POLL_SECONDS)
        outgoing, self._outbox = self._outbox, []
        number, self._number = self._number, self._number + 1
        return number, outgoing

    def _release_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
