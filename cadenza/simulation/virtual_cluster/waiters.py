"""Control calls of a simulated replica that wait for an event of its engine, or for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cadenza.off_loop import resolve_future


class Waiters:
    """Futures by the name of the event that ends them; the death of the replica ends all of them with an error."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._futures: dict[str, list[asyncio.Future[None]]] = {}

    async def wait(self, event: str, seconds: float | None = None) -> None:
        """Wait for an event, or for a time."""
        future: asyncio.Future[None] = self._loop.create_future()
        futures = self._futures.setdefault(event, [])
        futures.append(future)
        timer = None if seconds is None else self._loop.call_later(seconds, resolve_future, future, None)
        try:
            await future
        finally:
            futures.remove(future)
            if timer is not None:
                timer.cancel()

    def notify(self, event: str, error: Exception | None = None) -> None:
        """End the waits for an event, with an error if there is one."""
        for future in self._futures.pop(event, ()):
            resolve_future(future, error)

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End every wait with an error of its own."""
        for event in list(self._futures):
            self.notify(event, error())
