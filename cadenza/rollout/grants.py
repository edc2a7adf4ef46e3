"""Grants for env workers and schedulers in other processes than the sampler's.

Invariant: the sampler decides, also for clients in other processes, and a grant is given back exactly once: by its
client, or by the grant server when that one is gone. A request and its answer go straight between client and replica;
only this goes here:
```
GrantClient.grant --AskForGrant--> GrantServer --sampler.grant--> Granted --> request to the replica, with its epoch
GrantClient.release --ReleaseGrant--> GrantServer --sampler.release
```
A grant client stands where a sampler would (`GrantSource`), so that the model of an attempt does not see the
difference.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cadenza.cluster.channel import LINGER_SECONDS
from cadenza.cluster.remote_replica import RemoteReplica
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Replica, ReplicaError, ReplicaLost
from cadenza.rollout.failures import logger
from cadenza.rollout.router import ReplicaEntry, RouteRequest
from cadenza.rollout.sampler import Grant, GrantRequest, ReplicaAddress, RequestOutcome, Sampler


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


class AskForGrant(NamedTuple):
    """A grant client asks its grant server for a grant: a `GrantRequest` between processes."""

    number: int
    """Of the grant request, among those of its grant client."""
    route_request: RouteRequest
    sticky: int
    """Index of the replica entry, -1 for none."""
    cached: int
    interrupted: int | None


class CancelGrantRequest(NamedTuple):
    """The client does not wait for this grant any more."""

    number: int


class Granted(NamedTuple):
    """The answer to a `AskForGrant`: this replica, this gate epoch, and the id for the request."""

    number: int
    request: int
    entry: int
    epoch: int


class GrantDenied(NamedTuple):
    """The answer to a `AskForGrant` when the sampler raised."""

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
        self._namespace = namespace
        self._send = send
        self._waiting: dict[int, asyncio.Future[Granted]] = {}
        self._numbers = itertools.count()
        self._closed_because = ""
        """Why the grant server does not answer any more; empty while it does."""

    def allocate_ids(self) -> int:
        """Returns the range of the scheduler whose env worker this is: all of its env workers share it."""
        return self._namespace

    async def grant(self, grant_request: GrantRequest) -> Grant:
        if self._closed_because:
            raise InfrastructureError(self._closed_because)
        route_request, sticky, cached, interrupted = grant_request
        number = next(self._numbers)
        entry_index = -1 if sticky is None else sticky.index
        self._send(AskForGrant(number, route_request, entry_index, cached, interrupted))
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
        return Grant(self.entries[granted.entry], granted.request, granted.epoch, route_request)

    def release(
        self,
        grant: Grant,
        outcome: RequestOutcome = RequestOutcome.UNSENT,
        error: ReplicaError | None = None,
        cached: int = 0,
    ) -> None:
        self._send(ReleaseGrant(grant.request_id, outcome, str(error) if error is not None else "", cached))

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
        """The grant server is gone: fail every grant that waits, and every later one; talk to the replicas no more."""
        self._closed_because = text
        for entry in self.entries:
            if isinstance(entry.replica, RemoteReplica):
                entry.replica.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(InfrastructureError(text))


class GrantServer:
    """Beside the sampler: answers the grant requests of one `GrantClient`, and gives back what it holds when it is
    gone."""

    def __init__(self, sampler: Sampler, send: Callable[[Any], None]) -> None:
        self._sampler = sampler
        self._send = send
        self._pending: dict[int, asyncio.Task[None]] = {}
        self._granted: dict[int, Grant] = {}
        """Granted and not released, by request id."""
        self._idle_sessions: dict[int, ReplicaEntry] = {}
        """Sessions that are away, and where."""

    def receive(self, message: Any) -> bool:
        """Whether it was one for the grant server."""
        if isinstance(message, AskForGrant):
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
        """The grant client is gone: cancel its grant requests, abort its requests and give back its grants."""
        for task in self._pending.values():
            task.cancel()
        self._pending.clear()
        granted, self._granted = self._granted, {}
        for grant in granted.values():
            grant.entry.replica.abort(grant.request_id, cause)
            self._sampler.release(grant)
        idle_sessions, self._idle_sessions = self._idle_sessions, {}
        for session, entry in idle_sessions.items():
            self._sampler.end_session(entry, session)

    def grants_for(self, entry: ReplicaEntry) -> int:
        """Grants for this replica that the grant client holds."""
        return sum(grant.entry is entry for grant in self._granted.values())

    def _on_request(self, message: AskForGrant) -> None:
        number, route_request, index, cached, interrupted = message
        sticky = None if index < 0 else self._sampler.entries[index]
        grant_request = GrantRequest(route_request, sticky, cached, interrupted)
        try:
            grant = self._sampler.grant_now(grant_request)
        except InfrastructureError as error:
            self._send(GrantDenied(number, str(error)))
            return
        if grant is not None:
            self._send_grant(number, grant)
        else:
            self._pending[number] = asyncio.get_running_loop().create_task(
                self._wait_and_grant(number, grant_request), name="grant server"
            )

    async def _wait_and_grant(self, number: int, grant_request: GrantRequest) -> None:
        try:
            grant = await self._sampler.grant(grant_request)
        except InfrastructureError as error:
            self._send(GrantDenied(number, str(error)))
        except Exception as error:  # noqa: BLE001 - a bug; untold, the client would wait for ever
            logger.exception("the sampler raised while a grant waited")
            self._send(GrantDenied(number, f"the sampler raised {error!r}"))
        else:
            self._send_grant(number, grant)
        finally:
            self._pending.pop(number, None)

    def _send_grant(self, number: int, grant: Grant) -> None:
        self._granted[grant.request_id] = grant
        self._send(Granted(number, grant.request_id, grant.entry.index, grant.epoch))

    def _on_release(self, message: ReleaseGrant) -> None:
        grant = self._granted.pop(message.request, None)
        if grant is None:
            return
        error: ReplicaError | None = None
        if message.outcome is RequestOutcome.LOST:
            error = ReplicaLost(message.error)
        elif message.outcome is RequestOutcome.FAILED:
            error = ReplicaError(message.error)
        if message.cached:
            self._idle_sessions[grant.route_request.session] = grant.entry
        self._sampler.release(grant, message.outcome, error, message.cached)
