"""Grants for whoever is not in the sampler's process.

Invariant: the sampler decides, also for those far away, and a grant is given back exactly once: by whoever got it, or
by the grant server when that one is gone. A request and its answer go straight between client and replica; only this
goes here:
```
GrantClient.grant --GrantRequest--> GrantServer --sampler.grant--> Granted --> request to the replica, with its epoch
GrantClient.release --ReleaseGrant--> GrantServer --sampler.release
```
A grant client stands where a sampler would (`GrantSource`), so that the model of an attempt does not see the
difference.
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
from cadenza.rollout.router import ReplicaEntry, RouteRequest
from cadenza.rollout.sampler import RequestOutcome, Sampler

MAX_MOVE_TARGETS = 1024
"""Moves that nobody has followed yet and the grant server remembers."""


class GrantSource(Protocol):
    """What the model of an attempt needs of a sampler."""

    @property
    def epoch(self) -> int: ...

    def next_id(self) -> int: ...

    def namespace(self) -> int: ...

    async def grant(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None = None, cached: int = 0, moved_to: Any = None
    ) -> ReplicaEntry: ...

    def release(
        self,
        entry: ReplicaEntry,
        route_request: RouteRequest,
        request: int,
        outcome: RequestOutcome,
        error: ReplicaError | None,
        cached: int,
    ) -> Any: ...

    def end_session(self, entry: ReplicaEntry, session: int) -> None: ...

    def observe_answer_length(self, tokens: int) -> None: ...


class ReplicaAddress(NamedTuple):
    """A replica, for those who are to reach it."""

    name: str
    devices: tuple[int, ...]
    kv_capacity: int
    endpoint: WorkerHandle | Replica
    """Its peer; or the replica itself, where it is in the same process."""


def replica_addresses(sampler: Sampler) -> list[ReplicaAddress]:
    """Of all replicas, in the order of their entries."""
    return [
        ReplicaAddress(r.name, r.devices, r.kv_capacity, r.worker_handle if isinstance(r, RemoteReplica) else r)
        for r in sampler.replicas
    ]


def make_replica_entries(replica_addresses: Sequence[ReplicaAddress], client: str) -> list[ReplicaEntry]:
    """Replica entries for another process, to send requests to. Called inside the running loop."""
    loop = asyncio.get_running_loop()
    entries = []
    for index, (name, devices, kv_capacity, endpoint) in enumerate(replica_addresses):
        replica: Replica = (
            RemoteReplica(endpoint, name, devices, kv_capacity, client=client, linger=LINGER_SECONDS)
            if isinstance(endpoint, WorkerHandle)
            else endpoint
        )
        entries.append(ReplicaEntry(index, replica, loop.create_future()))
    return entries


class GrantRequest(NamedTuple):
    """A grant client asks its grant server for a grant."""

    number: int
    """Of the grant request, among those of its grant client."""
    route_request: RouteRequest
    sticky: int
    """Index of the replica entry, -1 for none."""
    cached: int
    continues: int
    """The request that came back interrupted, of which this one is the continuation; -1 for none."""


class CancelGrantRequest(NamedTuple):
    """Nobody waits for this grant any more."""

    number: int


class Granted(NamedTuple):
    """The answer to a `GrantRequest`: this replica, this gate epoch, and the id for the request."""

    number: int
    request: int
    entry: int
    epoch: int


class GrantDenied(NamedTuple):
    """The answer to a `GrantRequest` when the sampler raised."""

    number: int
    text: str


class ReleaseGrant(NamedTuple):
    """A request is over, and its grant is given back."""

    request: int
    outcome: RequestOutcome
    error: str = ""
    cached: int = 0


class EndSession(NamedTuple):
    """A session is over: its replica need not keep the context."""

    entry: int
    session: int


class ReportAnswerLength(NamedTuple):
    """An answer had so many tokens: the router averages them."""

    tokens: int


class GrantClient:
    """Gets grants from a sampler in another process, through the `GrantServer` there."""

    def __init__(self, entries: Sequence[ReplicaEntry], namespace: int, send: Callable[[Any], None]) -> None:
        self.entries = entries
        self.epoch = 0
        self._namespace = namespace
        self._send = send
        self._request = -1
        self._waiting: dict[int, asyncio.Future[Granted]] = {}
        self._numbers = itertools.count()
        self._closed_because = ""
        """Why nobody answers any more."""

    def next_id(self) -> int:
        """Of the request that was granted last; like `epoch` it is read before anybody else runs."""
        return self._request

    def namespace(self) -> int:
        return self._namespace

    async def grant(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None = None, cached: int = 0, moved_to: Any = None
    ) -> ReplicaEntry:
        if self._closed_because:
            raise InfrastructureError(self._closed_because)
        number = next(self._numbers)
        continues = -1 if moved_to is None else moved_to
        entry_index = -1 if sticky is None else sticky.index
        self._send(GrantRequest(number, route_request, entry_index, cached, continues))
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            granted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._send(ReleaseGrant(future.result().request, RequestOutcome.UNSENT))
            else:
                self._send(CancelGrantRequest(number))
            raise
        finally:
            self._waiting.pop(number, None)
        self.epoch, self._request = granted.epoch, granted.request
        entry: ReplicaEntry = self.entries[granted.entry]
        return entry

    def release(
        self,
        entry: ReplicaEntry,
        route_request: RouteRequest,
        request: int,
        outcome: RequestOutcome,
        error: ReplicaError | None,
        cached: int,
    ) -> int:
        """The request itself stands for where its turn should go on: the grant server knows where."""
        self._send(ReleaseGrant(request, outcome, str(error) if error is not None else "", cached))
        return request

    def end_session(self, entry: ReplicaEntry, session: int) -> None:
        self._send(EndSession(entry.index, session))

    def observe_answer_length(self, tokens: int) -> None:
        self._send(ReportAnswerLength(tokens))

    def receive(self, message: Granted | GrantDenied) -> None:
        future = self._waiting.pop(message.number, None)
        if isinstance(message, GrantDenied):
            if future is not None and not future.done():
                future.set_exception(InfrastructureError(message.text))
        elif future is None or future.done():
            self._send(ReleaseGrant(message.request, RequestOutcome.UNSENT))  # it was withdrawn meanwhile
        else:
            future.set_result(message)

    def close(self, text: str) -> None:
        """Nobody answers any more."""
        self._closed_because = text
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(text))


class GrantServer:
    """Beside the sampler: answers the grant requests of one `GrantClient`, and gives back what it holds when it is
    gone."""

    def __init__(self, sampler: Any, send: Callable[[Any], None]) -> None:
        """`sampler` is a `Sampler`, or a client of one."""
        self._sampler = sampler
        self._send = send
        self._pending: dict[int, asyncio.Task[None]] = {}
        self._granted: dict[int, tuple[ReplicaEntry, RouteRequest]] = {}
        """Granted and not released."""
        self._idle_sessions: dict[int, ReplicaEntry] = {}
        """Sessions that are away, and where."""
        self._move_targets: dict[int, Any] = {}

    def receive(self, message: Any) -> bool:
        """Whether it was one for the grant server."""
        if isinstance(message, GrantRequest):
            self._on_request(message)
        elif isinstance(message, ReleaseGrant):
            self._on_release(message)
        elif isinstance(message, EndSession):
            self._idle_sessions.pop(message.session, None)
            self._sampler.end_session(self._sampler.entries[message.entry], message.session)
        elif isinstance(message, ReportAnswerLength):
            self._sampler.observe_answer_length(message.tokens)
        elif isinstance(message, CancelGrantRequest):
            if (task := self._pending.pop(message.number, None)) is not None:
                task.cancel()
        else:
            return False
        return True

    def close(self, cause: str) -> None:
        """The grant client is gone: nobody asks any more, and what runs for it is ended."""
        for task in self._pending.values():
            task.cancel()
        self._pending.clear()
        granted, self._granted = self._granted, {}
        for request, (entry, route_request) in granted.items():
            entry.replica.abort(request, cause)
            self._sampler.release(entry, route_request, request, RequestOutcome.UNSENT)
        idle_sessions, self._idle_sessions = self._idle_sessions, {}
        for session, entry in idle_sessions.items():
            self._sampler.end_session(entry, session)

    def _on_request(self, grant_request: GrantRequest) -> None:
        sticky = None if grant_request.sticky < 0 else self._sampler.entries[grant_request.sticky]
        arguments = (
            grant_request.route_request,
            sticky,
            grant_request.cached,
            self._move_targets.pop(grant_request.continues, None),
        )
        try:
            entry = self._sampler.grant_now(*arguments)
        except InfrastructureError as error:
            self._send(GrantDenied(grant_request.number, str(error)))
            return
        if entry is not None:
            self._send_grant(grant_request, entry)
        else:
            task = asyncio.get_running_loop().create_task(
                self._wait_and_grant(grant_request, arguments), name="grant server"
            )
            self._pending[grant_request.number] = task

    async def _wait_and_grant(self, grant_request: GrantRequest, arguments: tuple[Any, ...]) -> None:
        try:
            entry = await self._sampler.grant(*arguments)
        except InfrastructureError as error:
            self._send(GrantDenied(grant_request.number, str(error)))
        else:
            self._send_grant(grant_request, entry)
        finally:
            self._pending.pop(grant_request.number, None)

    def _send_grant(self, grant_request: GrantRequest, entry: ReplicaEntry) -> None:
        request = self._sampler.next_id()
        self._granted[request] = (entry, grant_request.route_request)
        self._send(Granted(grant_request.number, request, entry.index, self._sampler.epoch))

    def _on_release(self, message: ReleaseGrant) -> None:
        granted = self._granted.pop(message.request, None)
        if granted is None:
            return
        entry, route_request = granted
        error: ReplicaError | None = None
        if message.outcome is RequestOutcome.LOST:
            error = ReplicaLost(message.error)
        elif message.outcome is RequestOutcome.FAILED:
            error = ReplicaError(message.error)
        if message.cached:
            self._idle_sessions[route_request.session] = entry
        moved_to = self._sampler.release(entry, route_request, message.request, message.outcome, error, message.cached)
        if moved_to is not None:
            self._move_targets[message.request] = moved_to
            if len(self._move_targets) > MAX_MOVE_TARGETS:
                del self._move_targets[next(iter(self._move_targets))]
