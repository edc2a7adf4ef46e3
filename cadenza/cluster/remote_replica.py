"""An inference replica that is somebody else's process: the protocol here, the engine there.

Invariant: turns share calls. What the loop asked for since the last call travels in one, and an answer brings all turns
that ended meanwhile. One call at a time of each client waits at the other end: one that brings news relieves it.
```
generate, abort --outbox, once per turn of the loop--> exchange() --> engine
futures <------ all answers that are there <---------- waits for one, a newer call, or POLL_SECONDS
```
A call that is lost is a replica that is lost: every future that was handed out fails with `ReplicaLost`. Control calls
have no deadline of their own; the sampler has one for each.

Weights come as a shipment (shipping.py): `prepare` fetches them beside the generation, `load_weights` swaps them in. A
shipment that was not prepared is fetched when it is loaded, if it can be.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from cadenza.cluster.cluster import Cluster
from cadenza.cluster.crew import Tasks
from cadenza.cluster.dispatch import dispatch
from cadenza.cluster.peer import Peer
from cadenza.cluster.shipping import Broadcast, Lines, Stored
from cadenza.cluster.worker import Worker
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import (
    Flight,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
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


class Abort(NamedTuple):
    """A request to end."""

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
        self._desks: dict[str, _Desk] = {}
        self._lines = Lines()
        self._ready: tuple[str, object] | None = None
        """The shipment that waits to be loaded, and what the engine takes for it."""

    @dispatch("rank_zero")
    async def about(self) -> tuple[str, tuple[int, ...], int]:
        """Name, devices, KV capacity."""
        return self._engine.name, self._engine.devices, self._engine.kv_capacity

    @dispatch("rank_zero")
    async def exchange(self, requests: Sequence[Request], aborts: Sequence[Abort], client: str = "") -> list[Answer]:
        """Take requests, and give all answers for this client that are there; if there is none, wait for one."""
        loop = asyncio.get_running_loop()
        desk = self._desks.setdefault(client, _Desk())
        desk.seen = loop.time()
        for request in requests:
            try:
                future = self._engine.generate(request)
            except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; the others go on
                desk.ready.append((request.id, _portable(error)))
                continue
            self._running[request.id] = future
            future.add_done_callback(partial(self._ended, request.id, desk))
        for abort in aborts:
            if abort.id not in self._running:
                continue
            if not abort.is_wanted:
                self._running[abort.id].cancel()  # so that the engine books its tokens as discarded
            self._engine.abort(abort.id, abort.cause)
        desk.relieve()
        if not desk.ready:
            desk.waiter = loop.create_future()
            await asyncio.wait([desk.waiter], timeout=POLL_SECONDS)
            self._desks = {name: d for name, d in self._desks.items() if loop.time() - d.seen < FORGET_SECONDS}
        ready, desk.ready = desk.ready, []
        return ready

    @dispatch("rank_zero")
    async def flights(self) -> Sequence[Flight]:
        return self._engine.flights()

    @dispatch("rank_zero")
    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._engine.pause(epoch, mode)

    @dispatch("rank_zero")
    async def resume(self) -> None:
        await self._engine.resume()

    @dispatch("rank_zero")
    async def prepare(self, shipment: Stored | Broadcast) -> None:
        """Fetch weights and make them ready to be loaded."""
        if isinstance(shipment, Stored):
            weights = await shipment.fetch()
        else:
            weights = await as_async(shipment.receive)(self._lines)
        prepare = getattr(self._engine, "prepare", None)  # an engine without it does all the work when it loads
        self._ready = shipment.id, weights if prepare is None else await prepare(weights)

    @dispatch("rank_zero")
    async def load_weights(self, version: int, weights: object) -> None:
        if not isinstance(weights, Stored | Broadcast):
            await self._engine.load_weights(version, weights)
            return
        if self._ready is None or self._ready[0] != weights.id:
            if isinstance(weights, Broadcast):
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

    def _ended(self, id: int, desk: _Desk, future: asyncio.Future[Generation]) -> None:
        del self._running[id]
        if future.cancelled():
            return
        error = future.exception()
        desk.ready.append((id, future.result() if error is None else _portable(error)))
        desk.relieve()


class _Desk:
    """Where a client waits for its answers."""

    def __init__(self) -> None:
        self.ready: list[Answer] = []
        self.waiter: asyncio.Future[None] | None = None
        self.seen = 0.0

    def relieve(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class RemoteReplica:
    """This end: a `Replica` over a started cluster of one `ReplicaWorker`."""

    def __init__(
        self,
        cluster: Cluster[Any] | Peer,
        name: str,
        devices: tuple[int, ...],
        kv_capacity: int,
        *,
        client: str = "",
        is_shared: bool = False,
        linger: float = 0.0,
    ) -> None:
        """Where several processes ask one replica, each is a `client` with a name; for one that `is_shared`, flights
        are those of all clients. What is asked for within `linger` seconds shares a call."""
        self.name = name
        self.devices = devices
        self.kv_capacity = kv_capacity
        self._cluster: Any = cluster
        self._is_peer = isinstance(cluster, Peer)
        self._client = (client,) if client else ()
        self._is_shared = is_shared
        self._linger = linger
        self._flight: dict[int, asyncio.Future[Generation]] = {}
        self._requests: list[Request] = []
        self._aborts: list[Abort] = []
        self._is_due = False
        """A call is to be made at the end of this turn of the loop."""
        self._calls = 0
        """Under way."""
        self._told: Sequence[Flight] = ()
        self._is_looking = False
        self._tasks = Tasks()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def address(self) -> Peer:
        """Where other processes reach it."""
        return self._cluster if isinstance(self._cluster, Peer) else cast("Peer", self._cluster.peers[0])

    @classmethod
    async def of(cls, cluster: Cluster[Any], *, is_shared: bool = False) -> RemoteReplica:
        """Made when its cluster has started."""
        if cluster.world_size != 1:
            raise ValueError(f"a remote replica is one worker, '{cluster.role}' has {cluster.world_size}")
        return cls(cluster, *await cluster.about(), is_shared=is_shared)

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    # -- the replica protocol --------------------------------------------------------------------------------------

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if self._lost.done():
            future.set_exception(ReplicaLost(self._lost.result()))
        elif request.id in self._flight:
            future.set_exception(ReplicaError(f"{self.name}: request {request.id} is already in flight"))
        else:
            self._flight[request.id] = future
            self._requests.append(request)
            self._wake()
        return future

    def abort(self, request_id: int, cause: str) -> None:
        future = self._flight.get(request_id)
        if future is None:
            self._aborts.append(Abort(request_id, cause, True))  # another client's; who knows it not ignores it
            self._wake()
            return
        if future.done():  # whoever waited is gone
            del self._flight[request_id]
        self._aborts.append(Abort(request_id, cause, not future.done()))
        self._wake()

    def flights(self) -> Sequence[Flight]:
        """What it told last, of those still in flight; and it is asked again, for the next time."""
        if not self._is_looking and (self._flight or self._is_shared) and not self._lost.done():
            self._is_looking = True
            self._tasks.begin(self._look())
        return [flight for flight in self._told if self._is_shared or flight.id in self._flight]

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        await self._ask(self._cluster.pause, epoch, mode)

    async def resume(self) -> None:
        await self._ask(self._cluster.resume)

    async def prepare(self, shipment: Stored | Broadcast) -> None:
        """Have weights fetched, beside the generation."""
        await self._ask(self._cluster.prepare, shipment)

    async def load_weights(self, version: int, weights: object) -> None:
        await self._ask(self._cluster.load_weights, version, weights)

    async def sleep(self) -> None:
        await self._ask(self._cluster.sleep)

    async def wake(self) -> None:
        await self._ask(self._cluster.wake)

    async def stats(self) -> ReplicaStats:
        found: ReplicaStats = await self._ask(self._cluster.stats)
        return found

    def kill(self, cause: str) -> None:
        self._die(f"{self.name} was killed: {cause}")
        self._tasks.begin(self._cluster.shutdown())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            if self._linger:
                loop.call_later(self._linger, self._send)
            else:
                loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        if self._lost.done():
            return
        requests, self._requests = self._requests, []
        aborts, self._aborts = self._aborts, []
        self._calls += 1
        self._tasks.begin(self._exchange(requests, aborts))

    async def _exchange(self, requests: Sequence[Request], aborts: Sequence[Abort]) -> None:
        try:
            exchange = partial(self._cluster.talk, "exchange") if self._is_peer else self._cluster.exchange
            answers: list[Answer] = await exchange(requests, aborts, *self._client)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer must hear of it
            self._die(_told(self.name, error))
            return
        finally:
            self._calls -= 1
        for id, answer in answers:
            future = self._flight.pop(id, None)
            if future is None or future.done():
                continue
            if isinstance(answer, ReplicaError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        if self._flight and not self._calls:
            self._wake()

    async def _look(self) -> None:
        try:
            self._told = await self._cluster.flights()
        except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; it is not balanced then
            logger.debug("replica %s does not tell its requests: %r", self.name, error)
            self._told = ()
        finally:
            self._is_looking = False

    async def _ask(self, call: Callable[..., Awaitable[T]], *args: object) -> T:
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
            self._die(_told(self.name, error))
            raise ReplicaLost(self._lost.result()) from error
        finally:
            answer.cancel()

    def _die(self, text: str) -> None:
        """Fail whatever is in flight, once."""
        if self._lost.done():
            return
        self._lost.set_result(text)
        for future in self._flight.values():
            if not future.done():
                future.set_exception(ReplicaLost(text))
        self._flight.clear()


def _portable(error: BaseException) -> ReplicaError:
    """What `generate` raised, as an error that can be read at the other end."""
    for kind in (ReplicaLost, RequestRefused, StaleEpoch, ReplicaError):
        if isinstance(error, kind):
            return kind(str(error))
    return ReplicaError(f"'generate' raised {type(error).__name__}: {error}")


def _told(name: str, error: Exception) -> str:
    """With where it happened, which the notes say."""
    notes = "; ".join(note for note in getattr(error, "__notes__", ()) if "\n" not in note)
    return f"{name}: {error}" + (f" ({notes})" if notes else "")
