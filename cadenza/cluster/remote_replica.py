"""An inference replica in another process: `RemoteReplica` is this end, `ReplicaWorker` the end with the engine.

Requests, aborts and answers are messages of one channel for each client (channel.py): ordered, each once, and the
requests of one moment share a call.
```
RemoteReplica.generate, abort --> Channel --> ReplicaWorker.exchange --> Mailbox --> engine
futures <-- Channel <----------- all requests that ended <------------- Mailbox <-- engine
```
Invariant: every future that `generate` returns ends. When the channel is lost, or the replica is killed, all of them
fail with `ReplicaLost`. A client that is silent for SILENT_SECONDS is lost for the replica: its requests are aborted,
its answers dropped, and its later calls refused (channel.py).

Control calls (pause, load_weights, ...) are calls of their own beside the channel. The sampler has a deadline for each.

Weights come as a transfer (weight_transfer.py): `prepare` fetches them beside the generation, `load_weights` swaps them
in. A transfer that was not prepared is fetched when it is loaded, if it can be.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from cadenza.cluster.channel import Channel, Mailbox
from cadenza.cluster.cluster import Cluster
from cadenza.cluster.dispatch import dispatch
from cadenza.cluster.weight_transfer import BroadcastGroups, StoredWeights, WeightBroadcast
from cadenza.cluster.worker import Worker
from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import (
    ContextTooLong,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestProgress,
    RequestRefused,
    StaleEpoch,
)
from cadenza.off_loop import COMPUTE_POOL, as_async, done_before, resolve_future, with_deadline

SILENT_SECONDS = 600.0
"""After this time without a sign of life either end gives the other up. An engine may hold its process for minutes
while it loads weights."""
CONTROL_SECONDS = 3600.0
"""The longest that a control call may take."""

logger = logging.getLogger("cadenza")


class AbortRequest(NamedTuple):
    """Asks the engine to end a request."""

    id: int
    cause: str
    wants_tokens: bool
    """Whether the client still waits for its tokens."""


Answer = tuple[int, "Generation | ReplicaError"]
"""The id of a request and what became of it. A plain tuple: it is pickled for every turn."""


class ReplicaWorker(Worker):
    """The end with the local replica: a worker that serves several clients, each through a mailbox of its own."""

    def __init__(self, replica: Replica) -> None:
        self._local_replica = replica
        self._running: dict[int, tuple[asyncio.Future[Generation], Mailbox]] = {}
        """By request id: the engine's future, and the mailbox of the client that gets the answer."""
        self._mailboxes: dict[str, Mailbox] = {}
        """By client, until it falls silent."""
        self._broadcast_groups = BroadcastGroups()
        self._prepared_weights: tuple[str, object] | None = None
        """The transfer that waits to be loaded, and what the engine takes for it."""

    @dispatch("rank_zero")
    async def describe(self) -> tuple[str, tuple[int, ...], int]:
        """Name, devices, KV capacity."""
        return self._local_replica.name, self._local_replica.devices, self._local_replica.kv_capacity

    @dispatch("rank_zero")
    async def exchange(self, client: str, number: int, messages: Sequence[Any]) -> tuple[int, list[Answer]]:
        """Take requests and aborts of a client, and return its answers; see channel.py."""
        if client not in self._mailboxes:
            self._mailboxes[client] = Mailbox(
                partial(self._on_message, client),
                partial(self._on_client_lost, client),
                max_silence_seconds=SILENT_SECONDS,
            )
        return await self._mailboxes[client].exchange(number, messages)

    @dispatch("rank_zero")
    async def requests_in_flight(self) -> Sequence[RequestProgress]:
        return self._local_replica.requests_in_flight()

    @dispatch("rank_zero")
    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._local_replica.pause(epoch, mode)

    @dispatch("rank_zero")
    async def resume(self) -> None:
        await self._local_replica.resume()

    @dispatch("rank_zero")
    async def prepare(self, transfer: StoredWeights | WeightBroadcast) -> None:
        """Fetch weights and make them ready to be loaded."""
        if isinstance(transfer, StoredWeights):
            weights = await transfer.fetch()
        else:
            weights = await as_async(transfer.receive, COMPUTE_POOL)(self._broadcast_groups)
        prepare = getattr(self._local_replica, "prepare", None)  # an engine without it does all the work when it loads
        self._prepared_weights = transfer.id, weights if prepare is None else await prepare(weights)

    @dispatch("rank_zero")
    async def load_weights(self, version: int, weights: object) -> None:
        if not isinstance(weights, StoredWeights | WeightBroadcast):
            await self._local_replica.load_weights(version, weights)
            return
        if self._prepared_weights is None or self._prepared_weights[0] != weights.id:
            if isinstance(weights, WeightBroadcast):
                raise ReplicaError(
                    f"{self._local_replica.name} did not take part in the broadcast of version {version}"
                )
            await self.prepare(weights)
            assert self._prepared_weights is not None
        await self._local_replica.load_weights(version, self._prepared_weights[1])
        self._prepared_weights = None

    @dispatch("rank_zero")
    async def sleep(self) -> None:
        await self._local_replica.sleep()

    @dispatch("rank_zero")
    async def wake(self) -> None:
        await self._local_replica.wake()

    @dispatch("rank_zero")
    async def stats(self) -> ReplicaStats:
        return await self._local_replica.stats()

    def _on_message(self, client: str, message: Request | AbortRequest) -> None:
        if isinstance(message, AbortRequest):
            self._abort(message)
            return
        mailbox = self._mailboxes[client]
        try:
            future = self._local_replica.generate(message)
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; it costs this request alone
            mailbox.send((message.id, _portable(error)))
            return
        self._running[message.id] = future, mailbox
        future.add_done_callback(partial(self._on_request_ended, message.id))

    def _abort(self, abort: AbortRequest) -> None:
        """The request may be that of another client: a sampler aborts what its schedulers asked for."""
        if abort.id not in self._running:
            return
        if not abort.wants_tokens:
            self._running[abort.id][0].cancel()  # so that the engine counts its tokens as discarded
        self._local_replica.abort(abort.id, abort.cause)

    def _on_request_ended(self, id: int, future: asyncio.Future[Generation]) -> None:
        _, mailbox = self._running.pop(id)
        if not future.cancelled():
            error = future.exception()
            mailbox.send((id, future.result() if error is None else _portable(error)))

    def _on_client_lost(self, client: str) -> None:
        mailbox = self._mailboxes.pop(client)
        ids = [id for id, (_, other) in self._running.items() if other is mailbox]
        if ids:
            logger.warning(
                "%s gives up its silent client '%s' and %d requests", self._local_replica.name, client, len(ids)
            )
        for id in ids:
            self._abort(AbortRequest(id, "client_lost", wants_tokens=False))


class RemoteReplica:
    """The end of a client: a `Replica` whose engine is a `ReplicaWorker` in another process."""

    def __init__(
        self,
        worker_handle: WorkerHandle,
        name: str,
        devices: tuple[int, ...],
        kv_capacity: int,
        *,
        client: str = "controller",
        linger: float = 0.0,
    ) -> None:
        """`client` names this process in the log of the replica. What is asked for within `linger` seconds shares a
        call; with 0, what one iteration of the event loop asks for."""
        self.name = name
        self.devices = devices
        self.kv_capacity = kv_capacity
        self.worker_handle = worker_handle
        """Where other processes reach the engine."""
        self._client = f"{client}-{uuid.uuid4().hex[:12]}"
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._channel = Channel(
            self._exchange,
            self._on_answer,
            self._on_channel_lost,
            grace_seconds=SILENT_SECONDS,
            linger=linger,
            is_expecting=lambda: bool(self._futures),
        )
        self._reported_requests: Sequence[RequestProgress] = ()
        self._is_refreshing = False
        self._tasks = BackgroundTasks()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, worker_handle: WorkerHandle, *, client: str = "controller") -> RemoteReplica:
        """The replica of a running `ReplicaWorker`, which is asked what it is."""
        return cls(worker_handle, *await worker_handle.describe(), client=client)

    @classmethod
    async def of_single_worker(cls, cluster: Cluster[Any]) -> RemoteReplica:
        """The replica of a started cluster, which has one worker."""
        if cluster.world_size != 1:
            raise ValueError(f"a remote replica is one worker, '{cluster.role}' has {cluster.world_size}")
        return await cls.connect(cluster.worker_handles[0])

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    # -- the replica protocol --------------------------------------------------------------------------------------

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if self._lost.done():
            future.set_exception(ReplicaLost(self._lost.result()))
        elif request.id in self._futures:
            future.set_exception(ReplicaError(f"{self.name}: request {request.id} is already in flight"))
        else:
            self._futures[request.id] = future
            self._channel.send(request)
        return future

    def abort(self, request_id: int, cause: str) -> None:
        """The request may be that of another client; an id that the engine does not know is ignored there."""
        future = self._futures.get(request_id)
        wants_tokens = future is None or not future.done()
        if not wants_tokens:  # the caller of `generate` has cancelled it
            del self._futures[request_id]
        self._channel.send(AbortRequest(request_id, cause, wants_tokens))

    def requests_in_flight(self) -> Sequence[RequestProgress]:
        """What the engine reported last, of the requests of all clients. Each call starts a report for the next one."""
        if not self._is_refreshing and not self._lost.done():
            self._is_refreshing = True
            self._tasks.begin(self._refresh_requests())
        return self._reported_requests

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._control("pause", epoch, mode)

    async def resume(self) -> None:
        await self._control("resume")

    async def prepare(self, transfer: StoredWeights | WeightBroadcast) -> None:
        """Make the engine fetch weights, beside the generation."""
        await self._control("prepare", transfer)

    async def load_weights(self, version: int, weights: object) -> None:
        await self._control("load_weights", version, weights)

    async def sleep(self) -> None:
        await self._control("sleep")

    async def wake(self) -> None:
        await self._control("wake")

    async def stats(self) -> ReplicaStats:
        found: ReplicaStats = await self._control("stats")
        return found

    def kill(self, cause: str) -> None:
        self._fail(f"{self.name} was killed: {cause}")
        self._tasks.begin(self.worker_handle.shutdown())

    def mark_lost(self, cause: str) -> None:
        """Give the replica up in this process: another one has found that it is lost."""
        self._fail(f"{self.name} is lost: {cause}")

    def close(self) -> None:
        """Send no more requests from this process; the replica lives on for others."""
        self._fail(f"{self.name} is closed in this process")

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _exchange(self, number: int, messages: list[Any]) -> tuple[int, Sequence[Any]]:
        answer: tuple[int, Sequence[Any]] = await self.worker_handle.call_small(
            "exchange", self._client, number, messages
        )
        return answer

    def _on_answer(self, message: Answer) -> None:
        id, answer = message
        future = self._futures.pop(id, None)
        if future is not None:
            resolve_future(future, answer)

    async def _refresh_requests(self) -> None:
        try:
            self._reported_requests = await self.worker_handle.requests_in_flight()
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; it is not balanced then
            logger.debug("replica %s does not report its requests: %r", self.name, error)
            self._reported_requests = ()
        finally:
            self._is_refreshing = False

    async def _control(self, method: str, *args: object) -> Any:
        """What a method of the worker returns. The call ends with the replica at the latest."""
        if self._lost.done():
            raise ReplicaLost(self._lost.result())
        call = self.worker_handle.call(method, *args)
        answer = asyncio.ensure_future(with_deadline(CONTROL_SECONDS, call, "control seconds"))
        if not await done_before(self._lost, answer):
            raise ReplicaLost(self._lost.result())
        try:
            return answer.result()
        except InfrastructureError as error:
            self._on_channel_lost(error)
            raise ReplicaLost(self._lost.result()) from error

    def _on_channel_lost(self, error: Exception) -> None:
        self._fail(f"{self.name}: {error} ({self.worker_handle.role})")

    def _fail(self, text: str) -> None:
        """Fail everything that is in flight, once."""
        if self._lost.done():
            return
        self._lost.set_result(text)
        self._channel.close()
        for future in self._futures.values():
            resolve_future(future, ReplicaLost(text))
        self._futures.clear()


def _portable(error: BaseException) -> ReplicaError:
    """What `generate` raised, as an error that can be read at the other end."""
    for kind in (ReplicaLost, ContextTooLong, RequestRefused, StaleEpoch, ReplicaError):
        if isinstance(error, kind):
            return kind(str(error))
    return ReplicaError(f"'generate' raised {type(error).__name__}: {error}")
