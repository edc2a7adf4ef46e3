"""Long answers that are written in slices: model.py, line.py, router.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import column, fates, got, now, playing, responses, simulate, timed
from hypothesis import given
from hypothesis import strategies as st

from cadenza.inference.replica import Request, Sampling
from cadenza.rollout.config import SLICE_TOKENS, RolloutConfig
from cadenza.rollout.line import Line
from cadenza.rollout.router import FULL, Need, Router, Seat
from cadenza.simulation.cost import CostModel
from cadenza.simulation.replica import SimReplica
from cadenza.testing import FakeReplica

LONG, SHORT, SLICE = 1_000, 100, 100


class Watched(SimReplica):
    """Keeps what it is asked for."""

    def __init__(self, lengths: list[int], kv_capacity: int, number: int = 0, c: float = 0.0) -> None:
        cost = CostModel(a=0.01, b=0.0, c=c, p=0.0, kv_capacity=kv_capacity)
        super().__init__(f"r{number}", cost, lambda request: lengths[request.session], devices=(number,))
        self.asked: list[Request] = []

    def generate(self, request: Request) -> asyncio.Future[Any]:
        self.asked.append(request)
        return super().generate(request)


async def played(
    lengths: list[int], *, kv_capacity: int = 100_000, replicas: int = 1, c: float = 0.0, **options: Any
) -> tuple[list[list[int]], float, list[Watched]]:
    """The answers of one batch, how long it took, and who wrote them."""
    pool = [Watched(lengths, kv_capacity, number, c) for number in range(replicas)]
    size = len(lengths)
    begun = now()
    async with playing(list(pool), batch_size=size, tasks=size, slots=size, **options) as scheduler:
        batch, when = await timed(got(scheduler, size))
        assert fates(scheduler) == {"trained": size}
        assert all(not seat.load and not seat.held and not seat.kept for seat in scheduler.sampler._seats)
    for replica in pool:
        replica.check()
        assert not replica.discarded
    order = [column(batch, "task_id").index(task) for task in sorted(column(batch, "task_id"))]
    return [responses(batch)[row] for row in order], when - begun, pool


@pytest.mark.parametrize(("alpha", "given_tokens", "expected"), [
    (0.0, None, SLICE_TOKENS), (0.5, None, 0), (1.0, None, 0), (0.0, 0, 0), (0.0, 7, 7), (2.0, 7, 7),
])  # fmt: skip
def test_only_a_synchronous_run_takes_turns_unless_it_is_told(
    alpha: float, given_tokens: int | None, expected: int
) -> None:
    assert RolloutConfig(batch_size=1, alpha=alpha, slice_tokens=given_tokens).tokens_per_slice == expected


def test_a_batch_that_does_not_fit_is_over_sooner() -> None:
    """One answer in ten is long, and nobody knows which. A full KV cache makes a decode step four times as long."""
    lengths = [LONG if number % 10 == 9 else SHORT for number in range(100)]

    async def main() -> None:
        whole, slow, _ = await played(lengths, kv_capacity=6 * LONG, c=0.03 / (6 * LONG), slice_tokens=0)
        sliced, quick, _ = await played(lengths, kv_capacity=6 * LONG, c=0.03 / (6 * LONG), slice_tokens=SLICE)
        assert sliced == whole
        assert quick < 0.96 * slow

    simulate(main)


def test_whoever_has_room_writes_on_where_it_is_and_prefills_nothing() -> None:
    async def main() -> None:
        _, whole, _ = await played([LONG] * 4, replicas=2, slice_tokens=0)
        _, sliced, replicas = await played([LONG] * 4, replicas=2, slice_tokens=SLICE)
        assert sliced == whole == LONG * 0.01
        for replica in replicas:
            sessions = {request.session for request in replica.asked}
            assert [request.offset for request in replica.asked if request.session == min(sessions)] == [
                *range(0, LONG, SLICE)
            ]
            assert (await replica.stats()).prefilled < 20 * len(replica.asked)

    simulate(main)


def test_those_who_have_not_begun_go_before_those_who_have_written_a_slice() -> None:
    """One has the replica; the others come later and are short."""

    async def main() -> None:
        _, _, [replica] = await played([LONG] + [SHORT // 2] * 3, kv_capacity=500, slice_tokens=SLICE)
        assert [request.session for request in replica.asked][:5] == [0, 1, 2, 3, 0]

    simulate(main)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 30), st.integers(200, 600), st.integers(0, 2)
)
def test_every_answer_is_what_it_would_have_been(
    lengths: list[int], slice_tokens: int, kv_capacity: int, workers: int
) -> None:
    async def main() -> None:
        workers_used = min(workers, len(lengths))
        whole, _, _ = await played(lengths, kv_capacity=kv_capacity, replicas=2, slice_tokens=0)
        sliced, _, replicas = await played(
            lengths, kv_capacity=kv_capacity, replicas=2, slice_tokens=slice_tokens, workers=workers_used
        )
        assert sliced == whole
        assert [len(answer) for answer in sliced] == lengths
        asked = [request for replica in replicas for request in replica.asked]
        assert all(request.max_tokens <= slice_tokens for request in asked)
        assert len(asked) == sum(-(-length // slice_tokens) for length in lengths)

    simulate(main)


@pytest.mark.parametrize("limit", [7, 14, 15, 16])
def test_the_limit_of_an_answer_is_that_of_all_its_slices(limit: int) -> None:
    async def main() -> None:
        async with playing(
            [FakeReplica(lambda request: [65] * 100)], batch_size=1, slice_tokens=7, sampling=Sampling(max_tokens=limit)
        ) as scheduler:
            batch = await got(scheduler, 1)
        assert [len(answer) for answer in responses(batch)] == [limit]

    simulate(main)


def test_the_line_counts_slices_before_age() -> None:
    async def main() -> None:
        line = Line()
        needs = [Need(0, 0, 1, age=1, slices=1), Need(1, 1, 1, age=3), Need(2, 2, 1, age=2)]
        waits = [asyncio.ensure_future(line.wait(need.place)) for need in needs]
        await asyncio.sleep(0)
        for expected in (2, 1, 0):
            line.move()
            await asyncio.wait([waits[expected]], timeout=0.1)
            assert waits[expected].done()

    simulate(main)


def test_room_is_kept_for_what_slices_are_going_to_write() -> None:
    async def main() -> None:
        capacity = 10_000
        router = Router()
        replica = FakeReplica(lambda request: [65], kv_capacity=capacity)
        seat = Seat(0, replica, asyncio.get_running_loop().create_future())
        router.rebuild([seat])
        router.answer = 2_000.0
        counts = {}
        for slice_tokens in (0, 1_000, 50_000):
            while router.admit(need := Need(0, 0, 500, slice_tokens=slice_tokens), None, 0, 0.0) is seat:
                router.add(seat, need.context)
            counts[slice_tokens] = seat.inflight
            while seat.inflight:
                router.remove(seat, 500)
        assert counts == {0: FULL * capacity // 500, 1_000: capacity // 1_000, 50_000: capacity // 1_500}

    simulate(main)
