"""A cluster in the controller's own process: how data travels, what comes back, what is refused."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from builders import simulate
from hypothesis import given
from hypothesis import strategies as st

from cadenza import Cluster, DataProto, ResourceManager, Worker
from cadenza.cluster import Place, WorkerError, dispatch
from cadenza.cluster.dispatch import DispatchCall, DispatchMode, DispatchSpec
from cadenza.cluster.worker_group import WorkerLaunch
from cadenza.data import IS_PADDING, Ragged
from cadenza.errors import DeadlinePassed, OtherRanksLost


class Adder(Worker):
    """Knows its rank from the start, and what it was called with."""

    def __init__(self, base: int = 0) -> None:
        self.base = base + self.place.rank
        self.closed = False
        self.gate = threading.Event()

    @dispatch("broadcast")
    def add(self, value: int, *, times: int = 1) -> int:
        return self.base + value * times

    @dispatch("split")
    def double(self, batch: DataProto) -> DataProto:
        batch = batch.select()
        batch.batch["twice"] = batch.batch.numpy("x") * 2
        return batch

    @dispatch("split")
    def bare(self, batch: DataProto) -> DataProto:
        return DataProto({"y": batch.batch.numpy("x")})

    @dispatch("split", gather=sum)
    def total(self, batch: DataProto) -> float:
        return float(batch.batch.numpy("x")[~batch.batch.numpy(IS_PADDING)].sum())

    @dispatch("split")
    def ranks(self, batch: DataProto, info: DataProto, scale: int = 1) -> tuple[int, int, Any]:
        return self.place.rank, len(batch) * scale, info.meta_info

    @dispatch("split")
    def shorten(self, batch: DataProto) -> DataProto:
        return batch[:1]

    @dispatch("split")
    def reverse(self, batch: DataProto) -> DataProto:
        return batch.reorder(np.arange(len(batch))[::-1])

    @dispatch("broadcast")
    def rename(self, batch: DataProto) -> str:
        batch.batch["x"] = batch.batch.numpy("x") + 1
        batch.meta_info["by"] = self.place.rank
        return repr(batch.batch.numpy("x")[0])

    @dispatch("broadcast")
    async def where(self) -> int:
        return self.place.rank

    @dispatch("rank_zero")
    def thread(self) -> str:
        return threading.current_thread().name

    @dispatch("broadcast")
    def fail(self, rank: int, error: BaseException) -> None:
        if self.place.rank == rank:
            raise error

    @dispatch("broadcast")
    async def hang(self, rank: int) -> None:
        if self.place.rank == rank:
            await asyncio.sleep(1e9)

    @dispatch("rank_zero")
    def wait(self) -> bool:
        return self.gate.wait(20)

    @dispatch("rank_zero")
    async def open_gate(self) -> None:
        self.gate.set()

    def secret(self) -> int:
        return self.base

    def close(self) -> None:
        self.closed = True
        CLOSED.append(self.place.rank)


CLOSED: list[int] = []


def cluster(ranks: int = 3, tensor_parallel: int = 1, **options: Any) -> Cluster[Adder]:
    plan = ResourceManager(ranks).place({"adder": {"devices": range(ranks), "tensor_parallel": tensor_parallel}})
    return Cluster("adder", Adder, plan["adder"], **options)


def run(work: Callable[[Any], Awaitable[Any]], ranks: int = 3, tensor_parallel: int = 1, **options: Any) -> Any:
    """What the work says about a cluster that runs meanwhile."""

    async def main() -> Any:
        async with cluster(ranks, tensor_parallel, **options) as adder:
            return await work(adder)

    return asyncio.run(main())


def rows(count: int) -> DataProto:
    ids = Ragged.from_rows([np.arange(n % 3 + 1) for n in range(count)], dtype=np.int32)
    return DataProto(
        {"x": np.arange(count, dtype=np.float32), "ids": ids}, {"name": [f"row {n}" for n in range(count)]}
    )


# -- how data travels


def test_broadcast_asks_every_rank_the_same() -> None:
    assert run(lambda adder: adder.add(5, times=2), base=100) == [110, 111, 112]


def test_a_method_that_overrides_a_marked_one_travels_like_it() -> None:
    class Tenfold(Adder):
        def add(self, value: int, *, times: int = 10) -> int:
            return super().add(value, times=times)

        @dispatch("rank_zero")
        async def where(self) -> int:
            return 7

    async def main() -> None:
        plan = ResourceManager(2).place({"adder": "0-1"})
        async with Cluster("adder", Tenfold, plan["adder"]) as adder:
            assert await adder.add(1) == [10, 11]
            assert await adder.where() == 7

    asyncio.run(main())


def test_rank_zero_answers_alone_and_off_the_loop() -> None:
    assert run(lambda adder: adder.thread()) == "cadenza-off-loop"


def test_a_call_that_cannot_be_dispatched_says_that_it_reached_no_worker() -> None:
    with pytest.raises(TypeError, match="needs a DataProto with rows") as caught:
        run(lambda adder: adder.total(7))
    assert "in adder.total, before it reached a worker" in caught.value.__notes__


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 100])
def test_rows_come_back_as_they_were_sent_however_they_divide(count: int) -> None:
    batch = rows(count)
    answer = run(lambda adder: adder.double(batch))
    assert IS_PADDING not in answer.columns
    assert np.array_equal(answer.batch.numpy("twice"), batch.batch.numpy("x") * 2)
    del answer.batch["twice"]
    assert answer == batch


@pytest.mark.parametrize("count", [1, 7, 9])
def test_an_answer_without_the_mark_loses_its_padding_too(count: int) -> None:
    assert run(lambda adder: adder.bare(rows(count))).batch.numpy("y").tolist() == list(range(count))


def test_the_ranks_of_a_replica_get_the_same_rows_and_one_answers() -> None:
    info = DataProto(meta_info={"step": 3})
    answers = run(lambda adder: adder.ranks(rows(7), info, scale=10), ranks=4, tensor_parallel=2)
    assert answers == [(0, 40, {"step": 3}), (2, 40, {"step": 3})]


def test_a_padded_row_has_no_weight() -> None:
    assert run(lambda adder: adder.total(rows(7))) == 21.0


@given(count=st.integers(1, 60), chunks=st.integers(1, 9), tensor=st.integers(1, 3))
def test_every_row_is_sent_once_unmarked_and_chunks_are_equal(count: int, chunks: int, tensor: int) -> None:
    places = (
        ResourceManager(chunks * tensor)
        .place({"a": {"devices": range(chunks * tensor), "tensor_parallel": tensor}})["a"]
        .places
    )
    dispatched = DispatchCall(DispatchSpec(DispatchMode.SPLIT, None), places, (rows(count),), {})
    firsts = [call for call, place in zip(dispatched.calls, places, strict=True) if place.tensor_rank == 0]
    sent = [call.args[0] for call in firsts]
    marks = [chunk.batch.numpy(IS_PADDING) for chunk in sent]
    real = [chunk.batch.numpy("x")[~mark].tolist() for chunk, mark in zip(sent, marks, strict=True)]
    assert [x for chunk in real for x in chunk] == list(range(count))
    assert len({len(chunk) for chunk in sent}) == 1
    assert all(mark.sum() <= 1 for mark in marks)
    assert count < chunks or all(chunk for chunk in real)
    assert [call.wants_answer for call in dispatched.calls] == [place.tensor_rank == 0 for place in places]
    for call, place in zip(dispatched.calls, places, strict=True):
        assert call.args[0] is sent[place.data_rank]
    assert dispatched.gather({call.rank: call.args[0] for call in firsts}) == rows(count)


def test_what_all_ranks_get_is_one_object() -> None:
    places = ResourceManager(4).place({"a": "0-3"})["a"].places
    batch = rows(8)
    assert all(
        call.args[0] is batch
        for call in DispatchCall(DispatchSpec(DispatchMode.BROADCAST, None), places, (batch,), {}).calls
    )


def test_what_a_worker_does_to_its_batch_is_not_seen_elsewhere() -> None:
    batch = rows(2)
    assert len(set(run(lambda adder: adder.rename(batch)))) == 1
    assert batch == rows(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda adder: adder.shorten(rows(6)), ValueError, "answered a chunk of 2 rows with 1"),
        (lambda adder: adder.reverse(rows(7)), ValueError, "replica 1 changed the order of its rows"),
        (lambda adder: adder.total(rows(0)), ValueError, "no rows to split"),
        (lambda adder: adder.total(DataProto()), TypeError, "needs a DataProto with rows"),
        (lambda adder: adder.total(3), TypeError, "needs a DataProto with rows"),
        (lambda adder: adder.ranks(rows(6), rows(5)), ValueError, r"have \[5, 6\] rows"),
        (lambda adder: adder.total(rows(6).pad_to_multiple(4)[0]), ValueError, "'is_padding' already"),
    ],
)
def test_a_batch_that_cannot_be_split_or_put_together_is_refused(
    call: Callable[[Any], Awaitable[Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(call)


# -- what is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doubel", "Adder, the worker class of 'adder', has no method 'doubel'; did you mean 'double'?"),
        ("zzz", "has no method 'zzz'; there are add, bare, double"),
        ("secret", r"Adder.secret is not for the controller: mark it with @dispatch\(...\); marked are add, bare"),
    ],
)
def test_a_method_that_is_not_there_or_not_marked_is_named_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(cluster(), name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda adder: adder.add(), r"adder\.add\(value: int, \*, times: int = 1\).*: missing a required argument"),
        (lambda adder: adder.add(1, tmies=2), "unexpected keyword argument 'tmies'; did you mean 'times'"),
    ],
)
def test_wrong_arguments_are_refused_before_they_are_sent(call: Callable[[Any], Awaitable[Any]], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(call)


def test_workers_that_cannot_be_made_are_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match=r"cluster 'adder' cannot make its workers: Adder\(base: int = 0\).*'bsae'"):
        cluster(bsae=1)


def test_a_class_that_is_no_worker_is_refused() -> None:
    class Nothing(Worker):
        pass

    class Clash(Worker):
        @dispatch("broadcast")
        def start(self) -> None: ...

    place = ResourceManager(1).place({"a": "0"})["a"]
    with pytest.raises(TypeError, match=r"derives from cadenza\.Worker, got <class 'int'>"):
        Cluster("a", int, place)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"Nothing has no method that is marked with @dispatch"):
        Cluster("a", Nothing, place)
    with pytest.raises(TypeError, match=r"Clash.start: a cluster has a 'start' of its own"):
        Cluster("a", Clash, place)
    with pytest.raises(ValueError, match="cluster 'b' is given the devices of the role 'a'"):
        Cluster("b", Adder, place)
    with pytest.raises(ValueError, match="backend must be one of embedded, ray, got 'rya'"):
        Cluster("a", Adder, place, backend="rya")
    with pytest.raises(ValueError, match="call_seconds must be above 0, got 0"):
        Cluster("a", Adder, place, call_seconds=0)


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [("scatter", {}, "must be one of broadcast, split"), ("rank_zero", {"gather": sum}, "gather does nothing")],
)
def test_a_mark_that_means_nothing_is_refused(mode: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch(mode, **options)


# -- life


def test_a_cluster_is_started_once_and_closes_its_workers() -> None:
    async def main() -> None:
        adder = cluster()
        with pytest.raises(RuntimeError, match=r"adder\.add: the cluster is not started"):
            await adder.add(1)
        await adder.start()
        with pytest.raises(RuntimeError, match="was started before"):
            await adder.start()
        CLOSED.clear()
        await adder.shutdown()
        await adder.shutdown()
        assert sorted(CLOSED) == [0, 1, 2]
        with pytest.raises(RuntimeError, match="the cluster was shut down"):
            await adder.add(1)

    asyncio.run(main())


def test_a_shutdown_that_fails_does_not_hide_why_it_came() -> None:
    class Stuck(Worker):
        @dispatch("broadcast")
        def work(self) -> None: ...

        def close(self) -> None:
            raise OSError("cannot let go")

    async def main(*, fails: bool) -> None:
        plan = ResourceManager(1).place({"stuck": "0"})
        async with Cluster("stuck", Stuck, plan["stuck"]):
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(main(fails=True))
    assert caught.value.__notes__ == ["the shutdown of 'stuck' failed too: OSError: cannot let go"]
    with pytest.raises(OSError, match="cannot let go"):
        asyncio.run(main(fails=False))


def test_plain_methods_of_a_worker_take_turns_and_async_ones_do_not() -> None:
    async def main(adder: Any) -> None:
        waiting = asyncio.ensure_future(adder.wait())
        behind = asyncio.ensure_future(adder.thread())
        await adder.open_gate()
        assert await waiting is True
        await behind

    run(main)


def test_a_call_that_is_given_up_keeps_its_worker_busy() -> None:
    async def main(adder: Any) -> None:
        with pytest.raises(DeadlinePassed, match=r"adder\.wait: no answer within 0.05 s from adder rank 0 on node-0"):
            await adder.wait()
        with pytest.raises(DeadlinePassed):
            await adder.thread()
        await adder.open_gate()

    run(main, call_seconds=0.05)


# -- failures


@pytest.mark.parametrize("error", [KeyError("x"), InterruptedError("y"), StopIteration(1)])
def test_the_worker_s_own_exception_comes_back_with_its_place(error: Exception) -> None:
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind) as caught:
        run(lambda adder: adder.fail(1, error))
    assert "in adder.fail, adder rank 1 on node-0, device 1" in caught.value.__notes__


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("z")])
def test_a_worker_that_exits_fails_its_call_and_not_the_controller(error: BaseException) -> None:
    with pytest.raises(WorkerError, match="was raised"):
        run(lambda adder: adder.fail(1, error))


def test_the_first_failure_ends_a_call_while_others_hang() -> None:
    class Pair(Worker):
        @dispatch("broadcast")
        async def work(self) -> None:
            if self.place.rank == 0:
                await asyncio.sleep(1e6)
            raise ZeroDivisionError

    async def main() -> None:
        plan = ResourceManager(3).place({"pair": "0-2"})
        async with Cluster("pair", Pair, plan["pair"]) as pair:
            with pytest.raises(ZeroDivisionError) as caught:
                await pair.work()
        assert caught.value.__notes__ == [
            "in pair.work, pair rank 1 on node-0, device 1",
            "pair rank 2 on node-0, device 2 failed too: ZeroDivisionError: ",
        ]

    simulate(main)


@pytest.mark.parametrize(("seconds", "named"), [(9.0, 2), (1e6, 0)])
def test_the_rank_that_failed_is_named_rather_than_those_that_lost_it(seconds: float, named: int) -> None:
    class Trio(Worker):
        @dispatch("broadcast")
        async def work(self) -> None:
            await asyncio.sleep(seconds if self.place.rank == 2 else self.place.rank)
            raise ZeroDivisionError if self.place.rank == 2 else OtherRanksLost("where is everybody?")

    async def main() -> None:
        plan = ResourceManager(3).place({"trio": "0-2"})
        async with Cluster("trio", Trio, plan["trio"]) as trio:
            with pytest.raises((ZeroDivisionError, OtherRanksLost)) as caught:
                await trio.work()
        assert caught.value.__notes__[0] == f"in trio.work, trio rank {named} on node-0, device {named}"

    simulate(main)


def test_a_rank_that_hangs_is_named_when_the_time_is_up() -> None:
    async def main() -> None:
        async with cluster(call_seconds=60) as adder:
            with pytest.raises(DeadlinePassed, match=r"within 60 s from adder rank 2 on node-0, device 2$"):
                await adder.hang(2)

    simulate(main)


def test_a_worker_that_cannot_start_ends_the_start_and_closes_the_others() -> None:
    class Picky(Worker):
        def __init__(self) -> None:
            if self.place.rank == 1:
                raise MemoryError("no room")

        @dispatch("broadcast")
        def work(self) -> None: ...

        def close(self) -> None:
            CLOSED.append(self.place.rank)

    async def main() -> None:
        CLOSED.clear()
        plan = ResourceManager(2).place({"picky": "0-1"})
        picky = Cluster("picky", Picky, plan["picky"])
        with pytest.raises(MemoryError, match="no room") as caught:
            await picky.start()
        assert "in start, picky rank 1 on node-0, device 1" in caught.value.__notes__
        assert CLOSED == [0]

    asyncio.run(main())


def test_what_carries_the_workers_is_looked_at_while_nothing_comes() -> None:
    class Lost(Exception):
        pass

    class BareWorkerGroup:
        """Workers that never answer, on ground that gives way."""

        def __init__(self, launch: WorkerLaunch) -> None:
            self.places: tuple[Place, ...] = launch.places

        async def open(self) -> None: ...

        async def submit(self, method: str, calls: Any) -> list[asyncio.Future[Any]]:
            return [asyncio.get_running_loop().create_future() for _ in calls]

        async def check_alive(self) -> None:
            if asyncio.get_running_loop().time() > 12:
                raise Lost

        async def close(self) -> None: ...

    async def main() -> None:
        async with cluster(backend=BareWorkerGroup) as adder:
            with pytest.raises(Lost):
                await adder.add(1)
            assert asyncio.get_running_loop().time() == pytest.approx(15)

    simulate(main)


def test_an_embedded_cluster_imports_no_ray() -> None:
    program = (
        "import asyncio, sys, cadenza\n"
        "from cadenza.cluster import dispatch\n"
        "class W(cadenza.Worker):\n"
        "    @dispatch('broadcast')\n"
        "    def f(self): return self.place.rank\n"
        "async def main():\n"
        "    async with cadenza.Cluster('w', W, cadenza.ResourceManager(2).place({'w': '0-1'})['w']) as w:\n"
        "        assert await w.f() == [0, 1]\n"
        "asyncio.run(main())\n"
        "assert not {'ray', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ray_that_is_not_installed_is_named_with_the_command() -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from cadenza import ResourceManager\n"
        "try: ResourceManager.on_ray()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "pip install 'cadenza[ray]'" in done.stdout
