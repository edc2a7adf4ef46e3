"""The transport between two processes that talk all the time: ordered messages both ways, in few calls.

Every pair of processes of a run uses it: scheduler and env worker, scheduler and sampler, client and replica.

Invariant: each message arrives once and in the order in which it was sent, or the channel is lost. Then the calling end
is told (`on_lost`), and the called end if its mailbox has an `on_lost`: one without never notices a silent caller.
The end that calls (`Channel`) sends what came up within `linger` seconds in one call. The other end (`Mailbox`) answers
with its outbox; while that is empty the call waits there. A newer call releases it, so that one call at a time waits.
```
Channel.send --outbox, once per linger--> exchange() --> on_message
on_message <-- outbox of the Mailbox <-- waits for Mailbox.send, a newer call, or POLL_SECONDS
```
Calls may overtake each other on the way: they are numbered, and so are the answers.

The calling end is lost when a call fails or takes too long; the called end when no call came for too long. Neither end
comes back: a caller that starts again needs a new `Channel` and a new `Mailbox`. A mailbox may be dropped when it is
lost: if its caller comes back after all, it meets a new one, which misses the first call and refuses it.

No lost message is sent again, on purpose. A call mostly fails because the other process has died, and what it had
received died with it: messages alone would not bring its work back. So there is one way out of every loss: the owner of
the channel fails what was open (`on_lost`), and the scheduler issues the work again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.errors import DeadlinePassed, InfrastructureError

POLL_SECONDS = 10.0
"""After this time a waiting call comes back empty: no wait is endless."""
LINGER_SECONDS = 0.002
"""What is sent within this time shares a call."""

ExchangeCall = Callable[[int, list[Any]], Awaitable[tuple[int, Sequence[Any]]]]


class Resequencer:
    """Puts numbered batches of messages, which may overtake each other on the way, back into order."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, Sequence[Any]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the first batch has arrived."""
        return self._next > 0

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
        grace_seconds: float = 60.0,
        linger: float = LINGER_SECONDS,
        is_expecting: Callable[[], bool] = lambda: True,
    ) -> None:
        """`call` is `Mailbox.exchange` of the other end. `grace_seconds` is how long the other end may be silent beyond
        POLL_SECONDS. `on_lost` is called once, with what ended the channel; not after `close`. With a `linger` of 0
        there is one call for each iteration of the event loop in which something was sent. While `is_expecting()` is
        false the channel polls once in POLL_SECONDS only, so that the other end knows that this one lives."""
        self._call = call
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_call_seconds = POLL_SECONDS + grace_seconds
        self._linger = linger
        self._is_expecting = is_expecting
        self._outbox: list[Any] = []
        self._number = 0
        self._calls_in_flight = 0
        self._timer: asyncio.TimerHandle | None = None
        """For the next call, if one is scheduled."""
        self._is_closed = False
        self._incoming = Resequencer()
        self._tasks = BackgroundTasks()

    def open(self) -> None:
        """Begin to listen. A channel that is not opened begins with the first message that is sent."""
        self._flush()

    def send(self, message: Any) -> None:
        """Send a message with the next call. A channel that is closed or lost sends nothing: its owner settles what was
        open."""
        if self._is_closed:
            return
        self._outbox.append(message)
        if len(self._outbox) == 1:
            self._schedule(self._linger)

    def close(self) -> None:
        """Send and receive nothing more; unsent messages are dropped. The other end notices the silence."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tasks.cancel()

    def _schedule(self, seconds: float) -> None:
        """Make the next call after this time at the latest."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._flush)

    def _flush(self) -> None:
        self._timer = None
        messages, self._outbox = self._outbox, []
        number, self._number = self._number, self._number + 1
        self._calls_in_flight += 1
        self._tasks.begin(self._exchange(number, messages))

    async def _exchange(self, number: int, messages: list[Any]) -> None:
        try:
            async with asyncio.timeout(self._max_call_seconds):
                number, incoming = await self._call(number, messages)
        except TimeoutError:
            self._end(DeadlinePassed(f"no answer within {self._max_call_seconds:g} s"))
            return
        except Exception as error:  # noqa: BLE001 - whatever ends a call ends the channel, and its owner is told
            self._end(error)
            return
        finally:
            self._calls_in_flight -= 1
        try:
            for message in self._incoming.accept(number, incoming):
                if self._is_closed:
                    return
                self._on_message(message)
        except Exception as error:  # noqa: BLE001 - what was not received is not sent again: the channel is lost
            self._end(error)
            return
        if not self._calls_in_flight and self._timer is None and not self._is_closed:
            self._schedule(self._linger if self._is_expecting() else POLL_SECONDS)

    def _end(self, error: Exception) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost(error)


class Mailbox:
    """The end that is called, for one caller: it keeps outgoing messages until a call fetches them."""

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None] | None = None,
        *,
        max_silence_seconds: float = 60.0,
    ) -> None:
        """`on_lost` is called once, when no call has come for `max_silence_seconds` (more than POLL_SECONDS). After
        that every call is refused, so that the caller is told too. Without `on_lost` a mailbox waits for ever."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_silence_seconds = max_silence_seconds
        self._outbox: list[Any] = []
        self._number = 0
        self._incoming = Resequencer()
        self._waiter: asyncio.Future[None] | None = None
        self.last_call = 0.0
        """When the caller was last heard of."""
        self._is_lost = False
        if on_lost is not None:
            loop = asyncio.get_running_loop()
            self.last_call = loop.time()
            loop.call_later(max_silence_seconds, self._check_silence)

    def send(self, message: Any) -> None:
        """Keep a message for the next answer. A mailbox that is lost keeps nothing."""
        if not self._is_lost:
            self._outbox.append(message)
            self._release_waiter()

    async def exchange(self, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """Take what was sent, and return the outbox; while that is empty, wait for a message."""
        self._refuse_if_lost()
        loop = asyncio.get_running_loop()
        self.last_call = loop.time()
        self._release_waiter()
        for message in self._incoming.accept(number, messages):
            self._on_message(message)
        if not self._outbox:
            self._waiter = waiter = loop.create_future()
            released, _ = await asyncio.wait([waiter], timeout=POLL_SECONDS)
            if not released and not self._incoming.has_begun:
                self._lose()
            self._refuse_if_lost()
        outgoing, self._outbox = self._outbox, []
        number, self._number = self._number, self._number + 1
        return number, outgoing

    def _refuse_if_lost(self) -> None:
        if self._is_lost:
            silence = f"it was silent for {self._max_silence_seconds:g} s"
            cause = silence if self._incoming.has_begun else "its first call is missing"
            raise InfrastructureError(f"the mailbox gave its caller up: {cause}")

    def _release_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        """One timer for all calls: where calls came meanwhile it is set again for the rest of the time."""
        loop = asyncio.get_running_loop()
        left = self.last_call + self._max_silence_seconds - loop.time()
        if left > 0:
            loop.call_later(left, self._check_silence)
        else:
            self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._outbox.clear()
            self._release_waiter()
            if self._on_lost is not None:
                self._on_lost()
