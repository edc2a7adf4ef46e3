"""A replica whose requests are served by tasks of the event loop: what such engines have in common.

Invariant: a request that was accepted is in `_in_flight` until its future is resolved, and a task of its own brings
that about, whatever happens to the engine. Every token that came is returned, held by a request in flight, or discarded
under a cause.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cadenza.inference.replica import (
    Finish,
    Generation,
    ReplicaError,
    ReplicaLost,
    Request,
    RequestProgress,
    Span,
    StaleEpoch,
    Tokens,
)
from cadenza.inference.request_context import checked_context
from cadenza.off_loop import resolve_future


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that is not answered yet, with the tokens that have come."""

    request: Request
    context: Tokens
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    engine_id: str | None = None
    """The engine's name for it, as soon as the engine has it."""
    cause: str | None = None
    """Why it was aborted."""
    task: asyncio.Task[None] = field(init=False)

    def generation(self, spans: Sequence[Span], finish: Finish) -> Generation:
        return Generation(np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), tuple(spans), finish)


class TaskReplica(ABC):
    """What of a `Replica` is about requests. One event loop uses it."""

    kv_capacity: int
    max_context: int
    """Tokens of context, those written included."""
    vocab: int | None = None
    """Tokens that there are, if it is known."""

    def __init__(self, name: str, devices: Sequence[int], version: int) -> None:
        self.name = name
        self.devices = tuple(devices)
        self.version = version
        self.fence = 0
        self.discarded: dict[str, int] = {}
        self._in_flight: dict[int, PendingRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered = 0
        self._lost_reason = ""
        self._lost_event = asyncio.Event()

    @abstractmethod
    async def _generate(self, pending: PendingRequest) -> Generation:
        """Have the engine write; the tokens are added to `pending` as they come."""

    @abstractmethod
    def _stop_request(self, pending: PendingRequest) -> None:
        """Have the engine end a request. If its task is cancelled for that, the tokens so far are the answer."""

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        try:
            context = self._validated(request)
        except ReplicaError as error:
            future.set_exception(error)
        else:
            self._in_flight[request.id] = pending = PendingRequest(request, context, future)
            pending.task = self._start_task(self._serve(pending))
            pending.task.add_done_callback(lambda _: self._on_task_done(pending))
        return future

    def abort(self, request_id: int, cause: str) -> None:
        pending = self._in_flight.get(request_id)
        if pending is not None and pending.cause is None:
            pending.cause = cause
            self._stop_request(pending)

    def requests_in_flight(self) -> list[RequestProgress]:
        found = []
        for id, pending in self._in_flight.items():
            request, written = pending.request, len(pending.tokens)
            context = request.context + written
            found.append(RequestProgress(id, context, request.offset + written, context if written else 0, written))
        return found

    def kill(self, cause: str) -> None:
        self._die(cause, f"{self.name} was killed: {cause}")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _validated(self, request: Request) -> Tokens:
        """Its context, unless there is a reason to refuse it."""
        self._check_alive()
        if request.epoch < self.fence:
            raise StaleEpoch(f"{self.name}: epoch {request.epoch} is behind fence {self.fence}")
        last = np.iinfo(np.int32).max if self.vocab is None else self.vocab - 1
        return checked_context(
            request, replica=self.name, in_flight=self._in_flight, max_context=self.max_context, last_token=last
        )

    async def _serve(self, pending: PendingRequest) -> None:
        """The life of a request."""
        answer: Generation | ReplicaError
        try:
            answer = await self._generate(pending)
        except ReplicaLost as error:
            self._die("replica_lost", str(error))
            return
        except ReplicaError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever the engine raised, the caller that waits gets it
            answer = ReplicaError(f"{self.name}: {type(error).__name__}: {error}")
        self._finish_request(pending, answer)

    def _on_task_done(self, pending: PendingRequest) -> None:
        """Its task has ended, cancelled perhaps, and perhaps before its first step."""
        if pending.cause is not None:
            spans = [Span(self.version, len(pending.tokens))] if pending.tokens else []
            self._finish_request(pending, pending.generation(spans, Finish.ABORT))

    def _finish_request(self, pending: PendingRequest, answer: Generation | ReplicaError) -> None:
        """Answer a request, once."""
        if self._in_flight.get(pending.request.id) is not pending:
            return
        del self._in_flight[pending.request.id]
        self._answered += 1
        if isinstance(answer, ReplicaError):
            self._discard("failed", pending)
        elif pending.future.done():
            self._discard(pending.cause or "unclaimed", pending)
        resolve_future(pending.future, answer)

    def _check_alive(self) -> None:
        if self._lost_reason:
            raise ReplicaLost(self._lost_reason)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _discard(self, cause: str, pending: PendingRequest) -> None:
        if pending.tokens:
            self.discarded[cause] = self.discarded.get(cause, 0) + len(pending.tokens)

    def _die(self, cause: str, text: str) -> None:
        """Fail every call in flight, once."""
        if self._lost_reason:
            return
        self._lost_reason = text
        self._lost_event.set()
        for pending in self._in_flight.values():
            self._discard(cause, pending)
            resolve_future(pending.future, ReplicaLost(text))
        self._in_flight.clear()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
