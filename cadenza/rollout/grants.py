"""Grants for whoever is not in the sampler's process.

Invariant: the sampler decides, also for those far away, and a grant is given back exactly once: by whoever got it, or
by the clerk when that one is gone. What a request says and gets goes straight to the replica; only this goes here:
```
Granter.grant --Ask--> Clerk --sampler.grant--> Granted --> request to the replica, with the epoch of the grant
Granter.release --Release--> Clerk --sampler.release
```
A granter stands where a sampler would (`Grants`), so that the model of an attempt does not see the difference.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from cadenza.cluster.channel import LINGER_SECONDS
from cadenza.cluster.remote_replica import RemoteReplica
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Replica, ReplicaError, ReplicaLost
from cadenza.rollout.router import Need, Seat
from cadenza.rollout.sampler import Sampler, Verdict

MAX_MOVES = 1024
"""Moves that nobody has followed yet and the clerk remembers."""


class Grants(Protocol):
    """What the model of an attempt needs of a sampler."""

    @property
    def epoch(self) -> int: ...

    def next_id(self) -> int: ...

    def namespace(self) -> int: ...

    async def grant(self, need: Need, sticky: Seat | None = None, cached: int = 0, moved_to: Any = None) -> Seat: ...

    def release(
        self, seat: Seat, need: Need, request: int, verdict: Verdict, error: ReplicaError | None, cached: int
    ) -> Any: ...

    def leave(self, seat: Seat, session: int) -> None: ...

    def learn(self, tokens: int) -> None: ...


class Address(NamedTuple):
    """A replica, for those who are to reach it."""

    name: str
    devices: tuple[int, ...]
    kv_capacity: int
    way: WorkerHandle | Replica
    """Its peer; or the replica itself, where it is in the same process."""


def addresses(sampler: Sampler) -> list[Address]:
    """Of all replicas, in the order of their seats."""
    return [
        Address(r.name, r.devices, r.kv_capacity, r.worker_handle if isinstance(r, RemoteReplica) else r)
        for r in sampler.replicas
    ]


def seats_of(addresses: Sequence[Address], client: str) -> list[Seat]:
    """Seats of one's own, to send requests to. Made inside the running loop."""
    loop = asyncio.get_running_loop()
    seats = []
    for index, (name, devices, kv_capacity, way) in enumerate(addresses):
        replica: Replica = (
            RemoteReplica(way, name, devices, kv_capacity, client=client, linger=LINGER_SECONDS)
            if isinstance(way, WorkerHandle)
            else way
        )
        seats.append(Seat(index, replica, loop.create_future()))
    return seats


class Ask(NamedTuple):
    """A grant is wanted."""

    number: int
    """Of the question, among those of its granter."""
    need: Need
    sticky: int
    """Seat, -1 for none."""
    cached: int
    after: int
    """The request that came back interrupted, of which this one is the continuation; -1 for none."""


class Withdraw(NamedTuple):
    """Nobody waits for this grant any more."""

    number: int


class Granted(NamedTuple):
    number: int
    request: int
    seat: int
    epoch: int


class Denied(NamedTuple):
    number: int
    text: str


class Release(NamedTuple):
    request: int
    verdict: Verdict
    error: str = ""
    cached: int = 0


class Leave(NamedTuple):
    seat: int
    session: int


class Learn(NamedTuple):
    tokens: int


class Granter:
    """This end."""

    def __init__(self, seats: Sequence[Seat], namespace: int, say: Callable[[Any], None]) -> None:
        self.seats = seats
        self.epoch = 0
        self._namespace = namespace
        self._say = say
        self._request = -1
        self._waiting: dict[int, asyncio.Future[Granted]] = {}
        self._numbers = itertools.count()
        self._end = ""
        """Why nobody answers any more."""

    def next_id(self) -> int:
        """Of the request that was granted last; like `epoch` it is read before anybody else runs."""
        return self._request

    def namespace(self) -> int:
        return self._namespace

    async def grant(self, need: Need, sticky: Seat | None = None, cached: int = 0, moved_to: Any = None) -> Seat:
        if self._end:
            raise InfrastructureError(self._end)
        number = next(self._numbers)
        after = -1 if moved_to is None else moved_to
        seat_number = -1 if sticky is None else sticky.index
        self._say(Ask(number, need, seat_number, cached, after))
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            granted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._say(Release(future.result().request, Verdict.UNSENT))
            else:
                self._say(Withdraw(number))
            raise
        finally:
            self._waiting.pop(number, None)
        self.epoch, self._request = granted.epoch, granted.request
        seat: Seat = self.seats[granted.seat]
        return seat

    def release(
        self, seat: Seat, need: Need, request: int, verdict: Verdict, error: ReplicaError | None, cached: int
    ) -> int:
        """The request itself stands for where its turn should go on: the clerk knows."""
        self._say(Release(request, verdict, str(error) if error is not None else "", cached))
        return request

    def leave(self, seat: Seat, session: int) -> None:
        self._say(Leave(seat.index, session))

    def learn(self, tokens: int) -> None:
        self._say(Learn(tokens))

    def hear(self, message: Granted | Denied) -> None:
        future = self._waiting.pop(message.number, None)
        if isinstance(message, Denied):
            if future is not None and not future.done():
                future.set_exception(InfrastructureError(message.text))
        elif future is None or future.done():
            self._say(Release(message.request, Verdict.UNSENT))  # it was withdrawn meanwhile
        else:
            future.set_result(message)

    def lost(self, text: str) -> None:
        """Nobody answers any more."""
        self._end = text
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(text))


class Clerk:
    """The sampler's end, for one granter."""

    def __init__(self, sampler: Any, say: Callable[[Any], None]) -> None:
        """`sampler` is a `Sampler`, or a client of one."""
        self._sampler = sampler
        self._say = say
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, tuple[Seat, Need]] = {}
        """Granted and not released."""
        self._kept: dict[int, Seat] = {}
        """Sessions that are away, and where."""
        self._moves: dict[int, Any] = {}

    def hear(self, message: Any) -> bool:
        """Whether it was one for the clerk."""
        if isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, Release):
            self._release(message)
        elif isinstance(message, Leave):
            self._kept.pop(message.session, None)
            self._sampler.leave(self._sampler.seats[message.seat], message.session)
        elif isinstance(message, Learn):
            self._sampler.learn(message.tokens)
        elif isinstance(message, Withdraw):
            if (task := self._asking.pop(message.number, None)) is not None:
                task.cancel()
        else:
            return False
        return True

    def close(self, cause: str) -> None:
        """The granter is gone: nobody asks any more, and what runs for it is ended."""
        for task in self._asking.values():
            task.cancel()
        self._asking.clear()
        held, self._held = self._held, {}
        for request, (seat, need) in held.items():
            seat.replica.abort(request, cause)
            self._sampler.release(seat, need, request, Verdict.UNSENT)
        kept, self._kept = self._kept, {}
        for session, seat in kept.items():
            self._sampler.leave(seat, session)

    def _ask(self, ask: Ask) -> None:
        sticky = None if ask.sticky < 0 else self._sampler.seats[ask.sticky]
        about = (ask.need, sticky, ask.cached, self._moves.pop(ask.after, None))
        try:
            seat = self._sampler.grant_now(*about)
        except InfrastructureError as error:
            self._say(Denied(ask.number, str(error)))
            return
        if seat is not None:
            self._give(ask, seat)
        else:
            task = asyncio.get_running_loop().create_task(self._wait(ask, about), name="sampler clerk")
            self._asking[ask.number] = task

    async def _wait(self, ask: Ask, about: tuple[Any, ...]) -> None:
        try:
            seat = await self._sampler.grant(*about)
        except InfrastructureError as error:
            self._say(Denied(ask.number, str(error)))
        else:
            self._give(ask, seat)
        finally:
            self._asking.pop(ask.number, None)

    def _give(self, ask: Ask, seat: Seat) -> None:
        request = self._sampler.next_id()
        self._held[request] = (seat, ask.need)
        self._say(Granted(ask.number, request, seat.index, self._sampler.epoch))

    def _release(self, message: Release) -> None:
        held = self._held.pop(message.request, None)
        if held is None:
            return
        seat, need = held
        error: ReplicaError | None = None
        if message.verdict is Verdict.LOST:
            error = ReplicaLost(message.error)
        elif message.verdict is Verdict.FAILED:
            error = ReplicaError(message.error)
        if message.cached:
            self._kept[need.session] = seat
        moved_to = self._sampler.release(seat, need, message.request, message.verdict, error, message.cached)
        if moved_to is not None:
            self._moves[message.request] = moved_to
            if len(self._moves) > MAX_MOVES:
                del self._moves[next(iter(self._moves))]
