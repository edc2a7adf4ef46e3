"""A replica in another process: requests share calls, and every future ends. The cluster here is embedded, which the
two ends cannot tell from Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from builders import simulate

from cadenza import Cluster, ResourceManager
from cadenza.cluster import WorkerLost, dispatch
from cadenza.cluster.remote_replica import SILENT_SECONDS, Answer, RemoteReplica, ReplicaWorker
from cadenza.cluster.worker_handle import LocalWorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    ReplicaStats,
    Request,
    RequestRefused,
    Sampling,
    Span,
)


class Desk:
    """A replica that answers when it is told to."""

    name, devices, kv_capacity = "desk", (0,), 100

    def __init__(self) -> None:
        self.flight: dict[int, asyncio.Future[Generation]] = {}
        self.said: list[Any] = []

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        self.flight[request.id] = future = asyncio.get_running_loop().create_future()
        if request.max_tokens == 13:
            future.set_exception(RequestRefused("too long"))
        return future

    def abort(self, request_id: int, cause: str) -> None:
        self.said.append((request_id, cause, self.flight[request_id].cancelled()))
        self.answer(request_id, Finish.ABORT)

    def answer(self, id: int, finish: Finish = Finish.STOP) -> None:
        tokens = np.array([id], np.int32)
        if not self.flight[id].done():
            self.flight[id].set_result(Generation(tokens, np.zeros(1, np.float32), (Span(0, 1),), finish))

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self.said.append((epoch, mode))

    async def resume(self) -> None:
        raise RuntimeError("asleep")

    async def load_weights(self, version: int, weights: object) -> None:
        self.said.append((version, weights))

    async def sleep(self) -> None:
        await asyncio.sleep(1000)

    async def wake(self) -> None: ...

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(3, 0, 0, 0, False, 0, 100, 0, 0)

    def kill(self, cause: str) -> None: ...


class DeskWorker(ReplicaWorker):
    """Counts its calls, and dies when it is told to."""

    def __init__(self, desk: Replica, calls: list[int]) -> None:
        super().__init__(desk)
        self.calls = calls

    @dispatch("rank_zero")
    async def exchange(self, client: str, number: int, messages: Sequence[Any]) -> tuple[int, list[Answer]]:
        self.calls.append(len(messages))
        if any(isinstance(message, Request) and message.max_tokens == 666 for message in messages):
            raise WorkerLost("the worker's process is gone")
        return await super().exchange(client, number, messages)


def request(id: int, max_tokens: int = 1) -> Request:
    return Request(id, (np.ones(2, np.int32),), 2, max_tokens, Sampling(), 0, 0, 0, 0, 0)


def run(work: Callable[[RemoteReplica, Desk, list[int]], Awaitable[None]]) -> None:
    async def main() -> None:
        desk, calls = Desk(), list[int]()
        placement = ResourceManager(1).place({"inference": "0"})["inference"]
        async with Cluster("inference", DeskWorker, placement, desk=desk, calls=calls) as cluster:
            await work(await RemoteReplica.of_single_worker(cluster), desk, calls)

    simulate(main)


async def came(desk: Desk, count: int) -> None:
    while len(desk.flight) < count:  # noqa: ASYNC110 - it comes within some turns of the loop
        await asyncio.sleep(0)


def test_turns_of_one_moment_share_a_call_both_ways() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        futures = [replica.generate(request(id)) for id in range(50)]
        await came(desk, 50)
        assert calls == [50]
        for id in range(40):
            desk.answer(id)
        answers = await asyncio.gather(*futures[:40])
        assert [int(answer.tokens[0]) for answer in answers] == list(range(40))
        assert not any(future.done() for future in futures[40:])
        for id in range(40, 50):
            desk.answer(id)
        await asyncio.gather(*futures[40:])
        assert calls == [50, 0]

    run(work)


def test_a_turn_does_not_wait_for_one_that_was_there_before() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        slow = replica.generate(request(1))
        await came(desk, 1)
        quick = replica.generate(request(2))
        await came(desk, 2)
        desk.answer(2)
        assert (await quick).finish is Finish.STOP
        assert not slow.done()
        desk.answer(1)
        assert (await slow).tokens.tolist() == [1]

    run(work)


def test_an_abort_gives_the_tokens_to_whoever_waits_and_else_lets_the_engine_book_them() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        waited, dropped = replica.generate(request(1)), replica.generate(request(2))
        await came(desk, 2)
        dropped.cancel()
        replica.abort(1, "stop")
        replica.abort(2, "lease")
        replica.abort(99, "unknown")
        assert (await waited).finish is Finish.ABORT
        assert desk.said == [(1, "stop", False), (2, "lease", True)]

    run(work)


def test_a_refusal_is_the_error_of_its_request_alone() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        good, bad, double = (replica.generate(request(id, n)) for id, n in ((1, 1), (2, 13), (1, 1)))
        with pytest.raises(RequestRefused, match="too long"):
            await bad
        with pytest.raises(ReplicaError, match="already in flight"):
            await double
        desk.answer(1)
        assert (await good).tokens.tolist() == [1]

    run(work)


def test_control_calls_reach_the_engine_and_its_errors_come_back() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        assert (replica.name, replica.devices, replica.kv_capacity) == ("desk", (0,), 100)
        await replica.pause(4, PauseMode.ABORT)
        await replica.load_weights(5, {"w": 1})
        await replica.wake()
        assert desk.said == [(4, PauseMode.ABORT), (5, {"w": 1})]
        assert (await replica.stats()).version == 3
        with pytest.raises(RuntimeError, match="asleep"):
            await replica.resume()

    run(work)


def test_a_lost_process_fails_everything_in_flight_and_says_where() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        first = replica.generate(request(1))
        await came(desk, 1)
        second = replica.generate(request(2, 666))
        for future in (first, second):
            with pytest.raises(ReplicaLost, match=r"process is gone.*inference rank 0 on node-0, device 0"):
                await future
        with pytest.raises(ReplicaLost):
            await replica.stats()
        with pytest.raises(ReplicaLost):
            await replica.generate(request(3))

    run(work)


def test_kill_fails_requests_and_control_calls_at_once() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        future = replica.generate(request(1))
        sleeping = asyncio.ensure_future(replica.sleep())
        await came(desk, 1)
        replica.kill("no progress")
        for waiting in (future, sleeping):
            with pytest.raises(ReplicaLost, match="desk was killed: no progress"):
                await waiting

    run(work)


class Own(ReplicaError):
    """An engine's own error, which cannot be made from its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} {code}")


def test_an_engine_that_raises_costs_the_request_and_not_the_replica() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        generate = desk.generate

        def picky(request: Request) -> asyncio.Future[Generation]:
            if request.id == 2:
                raise KeyError("no such adapter")
            future = generate(request)
            if request.id == 3:
                future.set_exception(Own(7, "out of blocks"))
            return future

        desk.generate = picky  # type: ignore[method-assign]
        good, bad, own = (replica.generate(request(id)) for id in (1, 2, 3))
        with pytest.raises(ReplicaError, match=r"'generate' raised KeyError: 'no such adapter'") as raised:
            await bad
        assert not isinstance(raised.value, ReplicaLost)
        with pytest.raises(ReplicaError, match="out of blocks 7") as raised:
            await own
        assert type(pickle.loads(pickle.dumps(raised.value))) is ReplicaError
        desk.answer(1)
        assert (await good).tokens.tolist() == [1]
        assert not replica.is_lost

    run(work)


def test_an_abort_is_never_sent_before_its_request() -> None:
    """Calls of Ray may overtake each other."""

    class Overtaking(LocalWorkerHandle):
        calls = 0

        async def call(self, method: str, *args: Any) -> Any:
            if method == "exchange":
                self.calls += 1
                await asyncio.sleep(1.0 if self.calls == 1 else 0.0)
            return await super().call(method, *args)

    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        replica.worker_handle.__class__ = Overtaking
        aborted = replica.generate(request(1))
        await asyncio.sleep(0.1)
        replica.abort(1, "stop")
        assert (await aborted).finish is Finish.ABORT
        assert desk.said == [(1, "stop", False)]

    run(work)


def test_clients_of_one_replica_get_their_own_answers_and_may_abort_those_of_others() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        other = await RemoteReplica.connect(replica.worker_handle, client="other")
        mine, theirs = replica.generate(request(1)), other.generate(request(2))
        await came(desk, 2)
        replica.abort(2, "moved")
        desk.answer(1)
        assert (await mine).tokens.tolist() == [1]
        assert (await theirs).finish is Finish.ABORT

    run(work)


def test_a_client_that_is_gone_leaves_nothing_behind_and_is_refused_when_it_comes_back() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        gone = await RemoteReplica.connect(replica.worker_handle, client="gone")
        worker = replica.worker_handle._worker_host._worker  # type: ignore[attr-defined]
        lost, kept = gone.generate(request(1)), replica.generate(request(2))
        await came(desk, 2)
        call = gone._exchange
        gone._channel.close()
        await asyncio.sleep(SILENT_SECONDS + 1.0)
        assert desk.said == [(1, "client_lost", True)]
        assert not lost.done()
        assert list(worker._mailboxes) == [replica._client]
        with pytest.raises(InfrastructureError, match="gave its caller up"):
            await call(1, [])
        assert list(worker._mailboxes) == [replica._client]
        desk.answer(2)
        assert (await kept).tokens.tolist() == [2]

    run(work)


def test_a_client_that_asks_for_nothing_stays_known() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        for id in (1, 2):
            future = replica.generate(request(id))
            await came(desk, id)
            desk.answer(id)
            assert (await future).tokens.tolist() == [id]
            before = len(calls)
            await asyncio.sleep(3 * SILENT_SECONDS)
            assert len(calls) - before < 200  # it polls once in a while

    run(work)


def test_a_replica_that_is_silent_is_lost() -> None:
    class Silent(LocalWorkerHandle):
        async def call(self, method: str, *args: Any) -> Any:
            await asyncio.sleep(1e9)

    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        replica.worker_handle.__class__ = Silent
        with pytest.raises(ReplicaLost, match="desk: no answer within 610 s"):
            await replica.generate(request(1))

    run(work)


def test_a_replica_that_another_process_found_lost_is_lost_here() -> None:
    async def work(replica: RemoteReplica, desk: Desk, calls: list[int]) -> None:
        future = replica.generate(request(1))
        replica.mark_lost("no progress")
        with pytest.raises(ReplicaLost, match="desk is lost: no progress"):
            await future
        assert replica.is_lost

    run(work)
