"""An inference replica that is somebody else's process: the protocol here, the engine there.

Invariant: turns share calls. What the loop asked for since the last call travels in one, and an answer brings all turns
that ended meanwhile. One call at a time of each client waits at the other end: one that brings news relieves it.
```
generate, abort --outbox, once per loop iteration--> exchange() --> engine
futures <------ all answers that are there <---------- waits for one, a newer call, or POLL_SECONDS
```
A call that is lost is a replica that is lost: every future that was handed out fails with `ReplicaLost`. Control calls
have no deadline of their own; the sampler has one for each.

Weights come as a transfer (weight_transfer.py): `prepare` fetches them beside the generation, `load_weights` swaps them
in. A transfer that was not prepared is fetched when it is loaded, if it can be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from cadenza.cluster.cluster import Cluster
from cadenza.cluster.dispatch import dispatch
from cadenza.cluster.weight_transfer import BroadcastGroups, StoredWeights, WeightBroadcast
from cadenza.cluster.worker import Worker
from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import (
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
from cadenza.off_loop import as_async

POLL_SECONDS = 30.0
"""After which a call comes back empty: no wait is endless."""
FORGET_SECONDS = 600.0
"""After which the answers for a client that does not call any more are dropped."""

logger = logging.getLogger("cadenza")
T = TypeVar("T")


class AbortRequest(NamedTuple):
    """Asks the engine to end a request."""

    id: int
    cause: str
    is_wanted: bool
    """Whether somebody still waits for its tokens."""


Answer = tuple[int, "Generation | ReplicaError"]


class ReplicaWorker(Worker):
    """The other end: a replica that is called through a cluster."""

    def __init__(self, replica: Replica) -> None:
        self._engine = replica
        self._running: dict[int, asyncio.Future[Generation]] = {}
        self._pending_answers: dict[str, _PendingAnswers] = {}
        self._broadcast_groups = BroadcastGroups()
        self._ready: tuple[str, object] | None = None
        """The transfer that waits to be loaded, and what the engine takes for it."""

    @dispatch("rank_zero")
    async def describe(self) -> tuple[str, tuple[int, ...], int]:
        """Name, devices, KV capacity."""
        return self._engine.name, self._engine.devices, self._engine.kv_capacity

    @dispatch("rank_zero")
    async def exchange(
        self, requests: Sequence[Request], aborts: Sequence[AbortRequest], client: str = ""
    ) -> list[Answer]:
        """Take requests, and give all answers for this client that are there; if there is none, wait for one."""
        loop = asyncio.get_running_loop()
        pending = self._pending_answers.setdefault(client, _PendingAnswers())
        pending.last_seen = loop.time()
        for request in requests:
            try:
                future = self._engine.generate(request)
            except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; the others go on
                pending.ready.append((request.id, _portable(error)))
                continue
            self._running[request.id] = future
            future.add_done_callback(partial(self._ended, request.id, pending))
        for abort in aborts:
            if abort.id not in self._running:
                continue
            if not abort.is_wanted:
                self._running[abort.id].cancel()  # so that the engine books its tokens as discarded
            self._engine.abort(abort.id, abort.cause)
        pending.release_waiter()
        if not pending.ready:
            pending.waiter = loop.create_future()
            await asyncio.wait([pending.waiter], timeout=POLL_SECONDS)
            self._pending_answers = {
                name: other
                for name, other in self._pending_answers.items()
                if loop.time() - other.last_seen < FORGET_SECONDS
            }
        ready, pending.ready = pending.ready, []
        return ready

    @dispatch("rank_zero")
    async def requests_in_flight(self) -> Sequence[RequestProgress]:
        return self._engine.requests_in_flight()

    @dispatch("rank_zero")
    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._engine.pause(epoch, mode)

    @dispatch("rank_zero")
    async def resume(self) -> None:
        await self._engine.resume()

    @dispatch("rank_zero")
    async def prepare(self, transfer: StoredWeights | WeightBroadcast) -> None:
        """Fetch weights and make them ready to be loaded."""
        if isinstance(transfer, StoredWeights):
            weights = await transfer.fetch()
        else:
            weights = await as_async(transfer.receive)(self._broadcast_groups)
        prepare = getattr(self._engine, "prepare", None)  # an engine without it does all the work when it loads
        self._ready = transfer.id, weights if prepare is None else await prepare(weights)

    @dispatch("rank_zero")
    async def load_weights(self, version: int, weights: object) -> None:
        if not isinstance(weights, StoredWeights | WeightBroadcast):
            await self._engine.load_weights(version, weights)
            return
        if self._ready is None or self._ready[0] != weights.id:
            if isinstance(weights, WeightBroadcast):
                raise ReplicaError(f"{self._engine.name} has no part in the broadcast of version {version}")
            await self.prepare(weights)
            assert self._ready is not None
        await self._engine.load_weights(version, self._ready[1])
        self._ready = None

    @dispatch("rank_zero")
    async def sleep(self) -> None:
        await self._engine.sleep()

    @dispatch("rank_zero")
    async def wake(self) -> None:
        await self._engine.wake()

    @dispatch("rank_zero")
    async def stats(self) -> ReplicaStats:
        return await self._engine.stats()

    def _ended(self, id: int, pending: _PendingAnswers, future: asyncio.Future[Generation]) -> None:
        del self._running[id]
        if future.cancelled():
            return
        error = future.exception()
        pending.ready.append((id, future.result() if error is None else _portable(error)))
        pending.release_waiter()


class _PendingAnswers:
    """The answers that are ready for one client, and its call that waits for them."""

    def __init__(self) -> None:
        self.ready: list[Answer] = []
        self.waiter: asyncio.Future[None] | None = None
        self.last_seen = 0.0

    def release_waiter(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class RemoteReplica:
    """This end: a `Replica` over a started cluster of one `ReplicaWorker`."""

    def __init__(
        self,
        cluster: Cluster[Any] | WorkerHandle,
        name: str,
        devices: tuple[int, ...],
        kv_capacity: int,
        *,
        client: str = "",
        is_shared: bool = False,
        linger: float = 0.0,
    ) -> None:
        """Where several processes ask one replica, each is a `client` with a name; for one that `is_shared`, the
        requests in flight are those of all clients. What is asked for within `linger` seconds shares a call."""
        self.name = name
        self.devices = devices
        self.kv_capacity = kv_capacity
        self._cluster: Any = cluster
        self._is_handle = isinstance(cluster, WorkerHandle)
        self._client = (client,) if client else ()
        self._is_shared = is_shared
        self._linger = linger
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._requests: list[Request] = []
        self._aborts: list[AbortRequest] = []
        self._is_send_scheduled = False
        """A call is to be made at the end of this iteration of the event loop."""
        self._calls = 0
        """Under way."""
        self._reported_requests: Sequence[RequestProgress] = ()
        self._is_refreshing = False
        self._tasks = BackgroundTasks()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def worker_handle(self) -> WorkerHandle:
        """Where other processes reach it."""
        return (
            self._cluster
            if isinstance(self._cluster, WorkerHandle)
            else cast("WorkerHandle", self._cluster.worker_handles[0])
        )

    @classmethod
    async def of(cls, cluster: Cluster[Any], *, is_shared: bool = False) -> RemoteReplica:
        """Made when its cluster has started."""
        if cluster.world_size != 1:
            raise ValueError(f"a remote replica is one worker, '{cluster.role}' has {cluster.world_size}")
        return cls(cluster, *await cluster.describe(), is_shared=is_shared)

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
            self._requests.append(request)
            self._schedule_send()
        return future

    def abort(self, request_id: int, cause: str) -> None:
        future = self._futures.get(request_id)
        if future is None:
            self._aborts.append(AbortRequest(request_id, cause, True))  # another client's; who knows it not ignores it
            self._schedule_send()
            return
        if future.done():  # whoever waited is gone
            del self._futures[request_id]
        self._aborts.append(AbortRequest(request_id, cause, not future.done()))
        self._schedule_send()

    def requests_in_flight(self) -> Sequence[RequestProgress]:
        """What it told last, of those still in flight; and it is asked again, for the next time."""
        if not self._is_refreshing and (self._futures or self._is_shared) and not self._lost.done():
            self._is_refreshing = True
            self._tasks.begin(self._refresh_flights())
        return [progress for progress in self._reported_requests if self._is_shared or progress.id in self._futures]

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._control(self._cluster.pause, epoch, mode)

    async def resume(self) -> None:
        await self._control(self._cluster.resume)

    async def prepare(self, transfer: StoredWeights | WeightBroadcast) -> None:
        """Have weights fetched, beside the generation."""
        await self._control(self._cluster.prepare, transfer)

    async def load_weights(self, version: int, weights: object) -> None:
        await self._control(self._cluster.load_weights, version, weights)

    async def sleep(self) -> None:
        await self._control(self._cluster.sleep)

    async def wake(self) -> None:
        await self._control(self._cluster.wake)

    async def stats(self) -> ReplicaStats:
        found: ReplicaStats = await self._control(self._cluster.stats)
        return found

    def kill(self, cause: str) -> None:
        self._fail(f"{self.name} was killed: {cause}")
        self._tasks.begin(self._cluster.shutdown())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _schedule_send(self) -> None:
        if not self._is_send_scheduled:
            self._is_send_scheduled = True
            loop = asyncio.get_running_loop()
            if self._linger:
                loop.call_later(self._linger, self._send)
            else:
                loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_send_scheduled = False
        if self._lost.done():
            return
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        self._calls += 1
        self._tasks.begin(self._exchange(requests, aborts))

    async def _exchange(self, requests: Sequence[Request], aborts: Sequence[AbortRequest]) -> None:
        try:
            exchange = partial(self._cluster.call_small, "exchange") if self._is_handle else self._cluster.exchange
            answers: list[Answer] = await exchange(requests, aborts, *self._client)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            self._fail(_error_text(self.name, error))
            return
        finally:
            self._calls -= 1
        for id, answer in answers:
            future = self._futures.pop(id, None)
            if future is None or future.done():
                continue
            if isinstance(answer, ReplicaError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        if self._futures and not self._calls:
            self._schedule_send()

    async def _refresh_flights(self) -> None:
        try:
            self._reported_requests = await self._cluster.requests_in_flight()
        except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; it is not balanced then
            logger.debug("replica %s does not tell its requests: %r", self.name, error)
            self._reported_requests = ()
        finally:
            self._is_refreshing = False

    async def _control(self, call: Callable[..., Awaitable[T]], *args: object) -> T:
        """A control call, but not beyond the end of the replica."""
        if self._lost.done():
            raise ReplicaLost(self._lost.result())
        answer = asyncio.ensure_future(call(*args))
        either: list[asyncio.Future[Any]] = [answer, self._lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ReplicaLost(self._lost.result())
            return answer.result()
        except InfrastructureError as error:
            self._fail(_error_text(self.name, error))
            raise ReplicaLost(self._lost.result()) from error
        finally:
            answer.cancel()

    def _fail(self, text: str) -> None:
        """Fail whatever is in flight, once."""
        if self._lost.done():
            return
        self._lost.set_result(text)
        for future in self._futures.values():
            if not future.done():
                future.set_exception(ReplicaLost(text))
        self._futures.clear()


def _portable(error: BaseException) -> ReplicaError:
    """What `generate` raised, as an error that can be read at the other end."""
    for kind in (ReplicaLost, RequestRefused, StaleEpoch, ReplicaError):
        if isinstance(error, kind):
            return kind(str(error))
    return ReplicaError(f"'generate' raised {type(error).__name__}: {error}")


def _error_text(name: str, error: Exception) -> str:
    """With where it happened, which the notes say."""
    notes = "; ".join(note for note in getattr(error, "__notes__", ()) if "\n" not in note)
    return f"{name}: {error}" + (f" ({notes})" if notes else "")
