"""GrantSource for whoever is not in the sampler's process.

Invariant: the sampler decides, also for those far away, and a grant is given back exactly once: by whoever got it, or
by the clerk when that one is gone. What a request says and gets goes straight to the replica; only this goes here:
```
GrantClient.grant --GrantRequest--> GrantServer --sampler.grant--> Granted --> request to the replica, with the epoch of the grant
GrantClient.release --ReleaseGrant--> GrantServer --sampler.release
```
A granter stands where a sampler would (`GrantSource`), so that the model of an attempt does not see the difference.
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
from cadenza.rollout.router import RouteRequest, ReplicaEntry
from cadenza.rollout.sampler import Sampler, RequestOutcome

MAX_MOVES = 1024
"""Moves that nobody has followed yet and the clerk remembers."""


class GrantSource(Protocol):
    """What the model of an attempt needs of a sampler."""

    @property
    def epoch(self) -> int: ...

    def next_id(self) -> int: ...

    def namespace(self) -> int: ...

    async def grant(self, route_request: RouteRequest, sticky: ReplicaEntry | None = None, cached: int = 0, moved_to: Any = None) -> ReplicaEntry: ...

    def release(
        self, entry: ReplicaEntry, route_request: RouteRequest, request: int, verdict: RequestOutcome, error: ReplicaError | None, cached: int
    ) -> Any: ...

    def leave(self, entry: ReplicaEntry, session: int) -> None: ...

    def learn(self, tokens: int) -> None: ...


class ReplicaAddress(NamedTuple):
    """A replica, for those who are to reach it."""

    name: str
    devices: tuple[int, ...]
    kv_capacity: int
    way: WorkerHandle | Replica
    """Its peer; or the replica itself, where it is in the same process."""


def addresses(sampler: Sampler) -> list[ReplicaAddress]:
    """Of all replicas, in the order of their entries."""
    return [
        ReplicaAddress(r.name, r.devices, r.kv_capacity, r.worker_handle if isinstance(r, RemoteReplica) else r)
        for r in sampler.replicas
    ]


def make_replica_entries(addresses: Sequence[ReplicaAddress], client: str) -> list[ReplicaEntry]:
    """Seats of one's own, to send requests to. Made inside the running loop."""
    loop = asyncio.get_running_loop()
    entries = []
    for index, (name, devices, kv_capacity, way) in enumerate(addresses):
        replica: Replica = (
            RemoteReplica(way, name, devices, kv_capacity, client=client, linger=LINGER_SECONDS)
            if isinstance(way, WorkerHandle)
            else way
        )
        entries.append(ReplicaEntry(index, replica, loop.create_future()))
    return entries


class GrantRequest(NamedTuple):
    """A grant is wanted."""

    number: int
    """Of the question, among those of its granter."""
    route_request: RouteRequest
    sticky: int
    """ReplicaEntry, -1 for none."""
    cached: int
    after: int
    """The request that came back interrupted, of which this one is the continuation; -1 for none."""


class CancelGrantRequest(NamedTuple):
    """Nobody waits for this grant any more."""

    number: int


class Granted(NamedTuple):
    number: int
    request: int
    entry: int
    epoch: int


class GrantDenied(NamedTuple):
    number: int
    text: str


class ReleaseGrant(NamedTuple):
    request: int
    verdict: RequestOutcome
    error: str = ""
    cached: int = 0


class EndSession(NamedTuple):
    entry: int
    session: int


class ReportAnswerLength(NamedTuple):
    tokens: int


class GrantClient:
    """This end."""

    def __init__(self, entries: Sequence[ReplicaEntry], namespace: int, say: Callable[[Any], None]) -> None:
        self.entries = entries
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

    async def grant(self, route_request: RouteRequest, sticky: ReplicaEntry | None = None, cached: int = 0, moved_to: Any = None) -> ReplicaEntry:
        if self._end:
            raise InfrastructureError(self._end)
        number = next(self._numbers)
        after = -1 if moved_to is None else moved_to
        entry_index = -1 if sticky is None else sticky.index
        self._say(GrantRequest(number, route_request, entry_index, cached, after))
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            granted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._say(ReleaseGrant(future.result().request, RequestOutcome.UNSENT))
            else:
                self._say(CancelGrantRequest(number))
            raise
        finally:
            self._waiting.pop(number, None)
        self.epoch, self._request = granted.epoch, granted.request
        entry: ReplicaEntry = self.entries[granted.entry]
        return entry

    def release(
        self, entry: ReplicaEntry, route_request: RouteRequest, request: int, verdict: RequestOutcome, error: ReplicaError | None, cached: int
    ) -> int:
        """The request itself stands for where its turn should go on: the clerk knows."""
        self._say(ReleaseGrant(request, verdict, str(error) if error is not None else "", cached))
        return request

    def leave(self, entry: ReplicaEntry, session: int) -> None:
        self._say(EndSession(entry.index, session))

    def learn(self, tokens: int) -> None:
        self._say(ReportAnswerLength(tokens))

    def hear(self, message: Granted | GrantDenied) -> None:
        future = self._waiting.pop(message.number, None)
        if isinstance(message, GrantDenied):
            if future is not None and not future.done():
                future.set_exception(InfrastructureError(message.text))
        elif future is None or future.done():
            self._say(ReleaseGrant(message.request, RequestOutcome.UNSENT))  # it was withdrawn meanwhile
        else:
            future.set_result(message)

    def lost(self, text: str) -> None:
        """Nobody answers any more."""
        self._end = text
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(text))


class GrantServer:
    """The sampler's end, for one granter."""

    def __init__(self, sampler: Any, say: Callable[[Any], None]) -> None:
        """`sampler` is a `Sampler`, or a client of one."""
        self._sampler = sampler
        self._say = say
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._held: dict[int, tuple[ReplicaEntry, RouteRequest]] = {}
        """Granted and not released."""
        self._kept: dict[int, ReplicaEntry] = {}
        """Sessions that are away, and where."""
        self._moves: dict[int, Any] = {}

    def hear(self, message: Any) -> bool:
        """Whether it was one for the clerk."""
        if isinstance(message, GrantRequest):
            self._ask(message)
        elif isinstance(message, ReleaseGrant):
            self._release(message)
        elif isinstance(message, EndSession):
            self._kept.pop(message.session, None)
            self._sampler.leave(self._sampler.entries[message.entry], message.session)
        elif isinstance(message, ReportAnswerLength):
            self._sampler.learn(message.tokens)
        elif isinstance(message, CancelGrantRequest):
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
        for request, (entry, route_request) in held.items():
            entry.replica.abort(request, cause)
            self._sampler.release(entry, route_request, request, RequestOutcome.UNSENT)
        kept, self._kept = self._kept, {}
        for session, entry in kept.items():
            self._sampler.leave(entry, session)

    def _ask(self, ask: GrantRequest) -> None:
        sticky = None if ask.sticky < 0 else self._sampler.entries[ask.sticky]
        about = (ask.route_request, sticky, ask.cached, self._moves.pop(ask.after, None))
        try:
            entry = self._sampler.grant_now(*about)
        except InfrastructureError as error:
            self._say(GrantDenied(ask.number, str(error)))
            return
        if entry is not None:
            self._give(ask, entry)
        else:
            task = asyncio.get_running_loop().create_task(self._wait(ask, about), name="sampler clerk")
            self._asking[ask.number] = task

    async def _wait(self, ask: GrantRequest, about: tuple[Any, ...]) -> None:
        try:
            entry = await self._sampler.grant(*about)
        except InfrastructureError as error:
            self._say(GrantDenied(ask.number, str(error)))
        else:
            self._give(ask, entry)
        finally:
            self._asking.pop(ask.number, None)

    def _give(self, ask: GrantRequest, entry: ReplicaEntry) -> None:
        request = self._sampler.next_id()
        self._held[request] = (entry, ask.route_request)
        self._say(Granted(ask.number, request, entry.index, self._sampler.epoch))

    def _release(self, message: ReleaseGrant) -> None:
        held = self._held.pop(message.request, None)
        if held is None:
            return
        entry, route_request = held
        error: ReplicaError | None = None
        if message.verdict is RequestOutcome.LOST:
            error = ReplicaLost(message.error)
        elif message.verdict is RequestOutcome.FAILED:
            error = ReplicaError(message.error)
        if message.cached:
            self._kept[route_request.session] = entry
        moved_to = self._sampler.release(entry, route_request, message.request, message.verdict, error, message.cached)
        if moved_to is not None:
            self._moves[message.request] = moved_to
            if len(self._moves) > MAX_MOVES:
                del self._moves[next(iter(self._moves))]
