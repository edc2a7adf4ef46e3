"""Where turns wait: at the gate, in a queue for KV-cache capacity, and beside it for the routing rule.

Invariant of the queue: the turn whose answer has had the fewest slices is first, and of these the oldest group; a turn
that leaves it, by a cancellation too, lets the next one look. A turn for which the routing rule named no replica waits
beside the queue: it holds up no other.
No wait is endless: the first in the queue looks again every RETRY_SECONDS, whatever happens meanwhile, and so does
every turn beside it.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque

from cadenza.rollout.router import RouteRequest

RETRY_SECONDS = 5.0


class Gate:
    """Open or closed. A hundred thousand turns may wait for it, and each of them holds nothing but a future."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[asyncio.Future[None]] = []

    def open(self) -> None:
        """All go on, in the order in which they came."""
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        self.is_open = False

    def opening(self) -> asyncio.Future[None]:
        """What comes when it is opened."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return waiter


class WaitQueue:
    """Turns that wait for KV-cache capacity, ordered by `RouteRequest.priority`: the lower, the earlier."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, RouteRequest, asyncio.Future[None]]] = []
        self._woken: dict[int, RouteRequest] = {}
        """Turns that were woken and have not asked the router again yet."""
        self._declined: deque[asyncio.Future[None]] = deque()
        """Turns beside the queue, in the order in which they came."""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> RouteRequest | None:
        """The first turn that has not been woken."""
        return self._heap[0][2] if self._heap else None

    def has_earlier(self, route_request: RouteRequest) -> bool:
        """Whether a turn waits that goes before this one."""
        if self._woken and min(woken.priority for woken in self._woken.values()) < route_request.priority:
            return True
        return bool(self._heap) and self._heap[0][0] < route_request.priority

    async def wait(self, route_request: RouteRequest) -> None:
        """Until it is worth a look."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._count = number = self._count + 1
        heapq.heappush(self._heap, (route_request.priority, number, route_request, waiter))
        self._start_timer(loop)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() or (self._heap and self._heap[0][3] is waiter):
                self.wake_next()
            raise
        finally:
            self._woken.pop(number, None)

    async def wait_for_rule(self) -> None:
        """Until another request has ended: the rule named no replica for this one."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._declined.append(waiter)
        self._start_timer(loop)
        await waiter

    def wake_next(self) -> None:
        """Capacity may have become free: wake the first waiter, which asks the router again. So does the one that has
        waited longest for the rule."""
        if self._declined:
            self._wake_declined(1)
        while self._heap:
            _, number, route_request, waiter = heapq.heappop(self._heap)
            if not waiter.done():
                self._woken[number] = route_request
                waiter.set_result(None)
                return

    def close(self) -> None:
        """Wake every turn, and stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_declined(len(self._declined))
        while self._heap:
            self.wake_next()

    def _wake_declined(self, count: int) -> None:
        while self._declined and count:
            waiter = self._declined.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self._wake_declined(len(self._declined))
        self.wake_next()
        if self._heap:
            self._timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._retry)
