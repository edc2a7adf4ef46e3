"""The contract of the simulated replica, against the closed form and against a step-by-step reference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    Request,
    Sampling,
    Span,
    StaleEpoch,
)
from cadenza.simulation.virtual_cluster.clock import Deadlock, VirtualLoop, run
from cadenza.simulation.virtual_cluster.cost import H100_QWEN3_8B, CostModel
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.simulation.virtual_cluster.tokens import seeded_tokens

T = TypeVar("T")
SAMPLING = Sampling()
COST = CostModel(a=0.0101, b=0.00013, c=0.0000017, p=0.00031, kv_capacity=100_000)
VOCAB = 1000


def ask(id: int = 1, prompt: int = 10, **fields: Any) -> Request:
    """A request with a prompt that nobody shares."""
    values: dict[str, Any] = {
        "chunks": (), "context": prompt, "max_tokens": 10_000, "sampling": SAMPLING, "seed": 7 * id + 3, "offset": 0,
        "session": id, "group": id, "epoch": 0,
    }  # fmt: skip
    return Request(id=id, **(values | fields))


def chunks(*lengths: int) -> dict[str, Any]:
    return {"chunks": tuple(np.zeros(n, np.int32) for n in lengths), "context": sum(lengths)}


def make(length: int | Callable[[Request], int] = 50, cost: CostModel = COST, **options: Any) -> SimReplica:
    return SimReplica("r0", cost, length if callable(length) else lambda _: length, vocab=VOCAB, **options)


def alone(prompt: int, steps: int, cost: CostModel = COST) -> float:
    """Seconds that a request needs alone."""
    return cost.p * prompt + cost.decode(steps, 1, prompt)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(awaitable: Awaitable[T]) -> tuple[T, float]:
    return await awaitable, now()


def simulate(main: Callable[[], Coroutine[Any, Any, T]], **options: Any) -> T:
    return run(main, max_time=1e6, **options)


def assert_continues(request: Request, *parts: Generation) -> None:
    """The parts, in order, are the turn without a gap, a repetition or a restart."""
    total = sum(len(part.tokens) for part in parts)
    tokens, logprobs = seeded_tokens(request.seed, 0, total, VOCAB)
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), tokens)
    np.testing.assert_array_equal(np.concatenate([part.logprobs for part in parts]), logprobs)
    for part in parts:
        assert sum(span.length for span in part.spans) == len(part.tokens)


# -- the cost model --------------------------------------------------------------------------------------------------


def test_it_is_a_replica() -> None:
    async def main() -> None:
        replica: Replica = make()
        assert (replica.name, replica.devices, replica.kv_capacity) == ("r0", (0,), COST.kv_capacity)

    simulate(main)


@given(
    seconds=st.floats(0, 1e4),
    running=st.integers(1, 256),
    context=st.integers(0, 10**6),
    c=st.sampled_from([0.0, 1e-8, 1e-5]),
)
def test_steps_within_is_the_inverse_of_decode(seconds: float, running: int, context: int, c: float) -> None:
    cost = CostModel(a=0.01, b=1e-5, c=c, p=0.0, kv_capacity=10**6)
    steps = cost.steps_within(seconds, running, context)
    assert cost.decode(steps, running, context) <= seconds < cost.decode(steps + 1, running, context)


def test_a_cost_model_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="a must be > 0"):
        CostModel(a=0.0, b=0.0, c=0.0, p=0.0, kv_capacity=10)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 5000)), min_size=1, max_size=40))
def test_a_set_that_arrives_together_takes_exactly_the_bound(shapes: list[tuple[int, int]]) -> None:
    cost = H100_QWEN3_8B
    work = sum(cost.b * n + cost.c * (n * p + n * (n - 1) / 2) + cost.p * p for p, n in shapes)
    bound = cost.a * max(n for _, n in shapes) + work

    async def main() -> float:
        replica = make(lambda request: shapes[request.id][1], cost)
        await asyncio.gather(*[replica.generate(ask(i, prompt)) for i, (prompt, _) in enumerate(shapes)])
        replica.check()
        return now()

    if sum(p + n for p, n in shapes) <= cost.kv_capacity:
        assert simulate(main) == pytest.approx(bound, rel=1e-9)


@dataclass
class Row:
    """A request of the reference."""

    arrive: float
    prompt: int
    length: int
    abort: float | None
    written: int = 0
    where: str = "outside"
    done: float = 0.0


@dataclass
class Reference:
    """The same engine, one decode step at a time."""

    cost: CostModel
    rows: list[Row]
    time: float = 0.0
    running: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    preempted: int = 0

    def run(self) -> None:
        events = self.events()
        while events or self.running:
            if events and (not self.running or events[0][0] <= self.time):  # idle, or prefill is going on
                when, kind, row = events.pop(0)
                self.take(kind, row, when, when)
                self.time = self.time if self.running else when
                self.admit()
                continue
            self.time += self.cost.decode(1, len(self.running), self.kv())
            for row in self.running:
                row.written += 1
            for row in [row for row in self.running if row.written == row.length]:
                self.leave(row, "stop", self.time)
            while events and events[0][0] < self.time:  # in the middle of the step
                when, kind, row = events.pop(0)
                self.take(kind, row, when, self.time)
            while self.kv() + len(self.running) > self.cost.kv_capacity:
                self.waiting.insert(0, self.running.pop())
                self.preempted += 1
            self.admit()

    def events(self) -> list[tuple[float, str, Row]]:
        events = [(row.arrive, "arrive", row) for row in self.rows]
        events += [(row.abort, "abort", row) for row in self.rows if row.abort is not None]
        return sorted(events, key=lambda event: event[0])

    def kv(self) -> int:
        return sum(row.prompt + row.written for row in self.running)

    def take(self, kind: str, row: Row, when: float, boundary: float) -> None:
        if kind == "arrive":
            self.waiting.append(row)
        elif any(row is other for other in (*self.running, *self.waiting)):
            self.leave(row, "abort", boundary if any(row is other for other in self.running) else when)

    def leave(self, row: Row, where: str, when: float) -> None:
        self.running = [other for other in self.running if other is not row]
        self.waiting = [other for other in self.waiting if other is not row]
        row.where, row.done = where, when

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.cost.max_running:
            context = self.waiting[0].prompt + self.waiting[0].written
            if self.kv() + context + len(self.running) + 1 > self.cost.kv_capacity:
                return
            self.running.append(self.waiting.pop(0))
            self.time += self.cost.p * context


ROWS = st.lists(
    st.tuples(
        st.integers(0, 4000),  # arrival, in units that never meet the end of a step
        st.integers(1, 120),
        st.integers(1, 150),
        st.none() | st.integers(0, 1500),
    ),
    min_size=1,
    max_size=25,
)
UNIT = 0.00071828


@given(rows=ROWS, max_running=st.sampled_from([1, 3, 256]), capacity=st.sampled_from([300, 700, 100_000]))
@settings(max_examples=200, deadline=None)
def test_it_finishes_everything_when_a_step_by_step_engine_does(
    rows: list[tuple[int, int, int, int | None]], max_running: int, capacity: int
) -> None:
    cost = CostModel(COST.a, COST.b, COST.c, COST.p, capacity, max_running)
    slow = Reference(
        cost,
        [
            Row(arrive * UNIT, prompt, length, None if after is None else (arrive + after) * UNIT)
            for arrive, prompt, length, after in rows
        ],
    )
    slow.run()

    async def main() -> tuple[list[tuple[Generation, float]], int]:
        preempted: list[object] = []
        replica = make(
            lambda request: rows[request.id][2],
            cost,
            on_event=lambda _, kind, request: preempted.append(request) if kind == "preempt" else None,
        )
        replies: dict[int, asyncio.Task[tuple[Generation, float]]] = {}
        for when, kind, row in slow.events():
            await asyncio.sleep(when - now())
            index = next(i for i, other in enumerate(slow.rows) if other is row)
            if kind == "abort":
                replica.abort(index, "test")
            else:
                replies[index] = asyncio.ensure_future(timed(replica.generate(ask(index, row.prompt))))
            replica.check()
        results = [await replies[index] for index in range(len(rows))]
        replica.check()
        assert replica.generated == sum(len(generation.tokens) for generation, _ in results)
        return results, len(preempted)

    results, preempted = simulate(main)
    assert preempted == slow.preempted
    for index, (row, (generation, when)) in enumerate(zip(slow.rows, results, strict=True)):
        assert (generation.finish, len(generation.tokens)) == (row.where, row.written)
        assert when == pytest.approx(row.done, rel=1e-6)
        assert_continues(ask(index), generation)


# -- one request -----------------------------------------------------------------------------------------------------


def test_a_response_stops_at_its_length_and_is_cut_at_max_tokens() -> None:
    async def main() -> None:
        replica = make(50)
        assert (await replica.generate(ask(1))).finish is Finish.STOP
        cut = await replica.generate(ask(2, max_tokens=20))
        assert (cut.finish, len(cut.tokens)) == (Finish.LENGTH, 20)

    simulate(main)


def test_a_response_that_alone_fills_the_cache_is_cut() -> None:
    async def main() -> None:
        replica = make(500, CostModel(1.0, 0, 0, 0, kv_capacity=100))
        generation = await replica.generate(ask(prompt=40))
        assert (generation.finish, len(generation.tokens)) == (Finish.LENGTH, 60)
        with pytest.raises(ReplicaError, match="100 tokens of context"):
            await replica.generate(ask(prompt=100))

    simulate(main)


def test_a_continued_turn_that_is_already_long_enough_gets_one_token() -> None:
    async def main() -> None:
        assert len((await make(50).generate(ask(offset=60))).tokens) == 1

    simulate(main)


def test_an_id_in_flight_cannot_be_used_twice() -> None:
    async def main() -> None:
        replica = make()
        first = replica.generate(ask())
        with pytest.raises(ReplicaError, match="already in flight"):
            await replica.generate(ask())
        assert len((await first).tokens) == 50

    simulate(main)


@given(seed=st.integers(0, 2**63), cuts=st.lists(st.integers(0, 70_000), max_size=4))
def test_tokens_depend_on_the_seed_and_the_position_only(seed: int, cuts: list[int]) -> None:
    whole, logprobs = seeded_tokens(seed, 0, 70_000, VOCAB)
    places = [0, *sorted(cuts), 70_000]
    parts = [seeded_tokens(seed, a, b - a, VOCAB) for a, b in pairwise(places)]
    np.testing.assert_array_equal(np.concatenate([tokens for tokens, _ in parts]), whole)
    np.testing.assert_array_equal(np.concatenate([values for _, values in parts]), logprobs)
    assert whole.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert whole.min() >= 0 > logprobs.max()
    assert whole.max() < VOCAB
    assert not np.array_equal(whole[:100], whole[1:101])


def test_a_response_may_be_longer_than_the_table_of_tokens() -> None:
    whole, _ = seeded_tokens(11, 0, 1_200_000, VOCAB)
    np.testing.assert_array_equal(seeded_tokens(11, 1_150_000, 50, VOCAB)[0], whole[1_150_000:1_150_050])


def test_a_continuation_gives_the_tokens_of_an_uninterrupted_turn() -> None:
    async def main() -> None:
        replica, elsewhere = make(200), make(200)
        request = ask()
        future = replica.generate(request)
        await asyncio.sleep(1.0)
        replica.abort(1, "moved")
        first = await future
        written = len(first.tokens)
        assert first.finish is Finish.ABORT
        assert 0 < written < 200
        rest = await elsewhere.generate(ask(context=10 + written, offset=written))
        assert (rest.finish, len(rest.tokens)) == (Finish.STOP, 200 - written)
        assert_continues(request, first, rest)
        replica.check()
        assert replica.discarded == {}

    simulate(main)


def test_an_abort_takes_effect_at_the_end_of_the_step_with_its_token() -> None:
    async def main() -> None:
        replica = make(200)
        future = replica.generate(ask())
        await asyncio.sleep(alone(10, 5) + 0.3 * COST.a)
        replica.abort(1, "test")
        generation, when = await timed(future)
        assert len(generation.tokens) == 6
        assert when == pytest.approx(alone(10, 6))

    simulate(main)


def test_tokens_of_a_cancelled_client_are_discarded_under_the_cause_of_the_abort() -> None:
    async def main() -> None:
        replica = make(200)
        future = replica.generate(ask())
        await asyncio.sleep(alone(10, 5) + 0.3 * COST.a)
        future.cancel()
        replica.abort(1, "client_gone")
        await asyncio.sleep(1.0)
        assert replica.discarded == {"client_gone": 6} == (await replica.stats()).discarded
        replica.check()

    simulate(main)


def test_tokens_that_nobody_waits_for_are_unclaimed() -> None:
    async def main() -> None:
        replica = make(50)
        replica.generate(ask()).cancel()
        await asyncio.sleep(10.0)
        assert replica.discarded == {"unclaimed": 50}
        replica.abort(1, "unknown ids are ignored")
        replica.check()

    simulate(main)


# -- the KV cache ----------------------------------------------------------------------------------------------------


def test_preemption_recomputes_and_loses_no_token() -> None:
    async def main() -> None:
        replica = make(60, CostModel(1.0, 0, 0, 0.01, kv_capacity=150))
        first, second = replica.generate(ask(1, 40)), replica.generate(ask(2, 40))
        assert [len((await first).tokens), len((await second).tokens)] == [60, 60]
        assert_continues(ask(1), await first)
        assert_continues(ask(2), await second)
        # Both grow to 75; the second goes back, and is prefilled again when the first is done.
        assert now() == pytest.approx(0.01 * (40 + 40) + 60 + 0.01 * 75 + 25)
        assert (await replica.stats()).prefilled == 40 + 40 + 75
        replica.check()

    simulate(main)


def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    async def main() -> None:
        order: list[int] = []

        def done(id: int, _: asyncio.Future[Generation]) -> None:
            order.append(id)

        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=100))
        for id, prompt in ((1, 60), (2, 60), (3, 5)):
            replica.generate(ask(id, prompt)).add_done_callback(partial(done, id))
        await asyncio.sleep(5.0)
        stats = await replica.stats()
        assert (stats.running, stats.waiting, stats.kv_tokens) == (1, 2, 65)
        await asyncio.sleep(100.0)
        assert order == [1, 2, 3]

    simulate(main)


def test_the_next_in_line_joins_when_the_blocked_head_is_aborted() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=100))
        for id, prompt in ((1, 60), (2, 60), (3, 5)):
            replica.generate(ask(id, prompt))
        replica.abort(2, "test")
        await asyncio.sleep(1.5)
        assert (await replica.stats()).running == 2

    simulate(main)


def test_a_later_turn_pays_only_for_its_new_tokens() -> None:
    async def main() -> None:
        replica = make(50)
        await replica.generate(ask(1, session=9, **chunks(100)))
        await replica.generate(ask(2, session=9, **chunks(100, 50, 30)))
        assert (await replica.stats()).prefilled == 100 + 30

    simulate(main)


def test_members_of_a_group_pay_for_its_prompt_once() -> None:
    async def main() -> None:
        replica = make(50)
        await asyncio.gather(*[replica.generate(ask(i, group=4, **chunks(100))) for i in range(3)])
        await replica.generate(ask(9, group=4, **chunks(100, 20)))
        # The last token of a prompt is computed for everybody: the first answer token comes from it.
        assert (await replica.stats()).prefilled == 100 + 1 + 1 + 20
        replica.check()

    simulate(main)


def test_an_idle_context_gives_way_to_running_ones_oldest_first() -> None:
    async def main() -> None:
        replica = make(50, CostModel(1.0, 0, 0, 0, kv_capacity=400))
        await replica.generate(ask(1, 100))
        await replica.generate(ask(2, 100))
        await replica.generate(ask(3, 100))  # three times 150: the first gives way
        before = (await replica.stats()).prefilled
        await replica.generate(ask(4, 151, session=2))
        assert (await replica.stats()).prefilled - before == 1
        before = (await replica.stats()).prefilled
        await replica.generate(ask(5, 101, session=1))
        assert (await replica.stats()).prefilled - before == 101
        replica.check()

    simulate(main)


@pytest.mark.parametrize(("keep_kv", "prefilled"), [(True, 1), (False, 151)])
def test_new_weights_drop_the_cache_unless_it_is_kept(keep_kv: bool, prefilled: int) -> None:
    async def main() -> None:
        replica = make(50, keep_kv=keep_kv)
        await replica.generate(ask(1, 100, session=1))
        await replica.load_weights(1, None)
        await replica.generate(ask(2, 151, session=1))
        assert (await replica.stats()).prefilled == 100 + prefilled

    simulate(main)


def test_a_context_computed_with_old_weights_is_not_kept_for_new_ones() -> None:
    async def main() -> None:
        replica = make(50, keep_kv=False)
        replica.generate(ask(1, 100))
        await asyncio.sleep(alone(100, 10))
        await replica.pause(1, PauseMode.KEEP)
        await replica.load_weights(1, None)
        await replica.pause(2, PauseMode.ABORT)
        await replica.resume()
        await replica.generate(ask(2, 105, session=1, epoch=2))
        assert (await replica.stats()).prefilled == 100 + 105

    simulate(main)


def test_who_joins_first_pushes_out_what_who_joins_next_could_have_used() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=300))
        await replica.generate(ask(1, 50))
        await replica.generate(ask(2, 90))
        await replica.pause(1, PauseMode.DRAIN)
        before = (await replica.stats()).prefilled
        first, second = replica.generate(ask(3, 150, epoch=1)), replica.generate(ask(4, 61, session=1, epoch=1))
        await replica.resume()
        await asyncio.gather(first, second)
        # 60 and 100 tokens idle, and there is room for 149 when the first has joined: the older context goes.
        assert (await replica.stats()).prefilled - before == 150 + 61

    simulate(main)


def test_a_prefill_cut_short_leaves_only_its_computed_part_in_the_cache() -> None:
    async def main() -> None:
        replica = make(50, CostModel(1.0, 0, 0, 0.5, kv_capacity=1000))
        future = replica.generate(ask(1, 100))
        await asyncio.sleep(20.0)
        await replica.pause(1, PauseMode.ABORT)
        assert (now(), len((await future).tokens)) == (20.0, 0)
        assert (await replica.stats()).prefilled == 40
        await replica.resume()
        await replica.generate(ask(2, 100, session=1, epoch=1))
        assert (await replica.stats()).prefilled == 100

    simulate(main)


# -- pause, fence, weights -------------------------------------------------------------------------------------------


def test_a_pause_that_aborts_returns_partial_tokens_of_running_and_waiting_requests() -> None:
    async def main() -> None:
        replica = make(200, CostModel(1.0, 0, 0, 0, kv_capacity=1000, max_running=1))
        running, waiting = replica.generate(ask(1)), replica.generate(ask(2))
        await asyncio.sleep(3.5)
        assert replica.generating
        await replica.pause(1, PauseMode.ABORT)
        assert now() == 4.0
        assert not replica.generating
        assert (running.result().finish, len(running.result().tokens)) == (Finish.ABORT, 4)
        assert (waiting.result().finish, len(waiting.result().tokens), waiting.result().spans) == (Finish.ABORT, 0, ())
        replica.check()

    simulate(main)


def test_a_pause_that_drains_waits_for_who_is_there_and_not_for_who_comes() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=1000, max_running=2))
        futures = [replica.generate(ask(id)) for id in (1, 2, 3)]
        asyncio.get_running_loop().call_later(3.0, lambda: futures.append(replica.generate(ask(4, epoch=1))))
        await replica.pause(1, PauseMode.DRAIN)
        assert now() == 20.0
        assert [future.done() for future in futures] == [True, True, True, False]
        assert replica.generated == 30
        await replica.resume()
        assert (await timed(futures[3]))[1] == 30.0

    simulate(main)


def test_an_older_pause_does_not_lower_the_fence() -> None:
    async def main() -> None:
        replica = make()
        await replica.pause(5, PauseMode.ABORT)
        await replica.pause(3, PauseMode.ABORT)
        with pytest.raises(StaleEpoch):
            await replica.generate(ask(epoch=4))

    simulate(main)


def test_a_pause_that_keeps_goes_on_where_it_stopped() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0.1, kv_capacity=1000))
        first = replica.generate(ask(1, 10))
        await asyncio.sleep(0.4)  # in the middle of the prefill: nothing to wait for
        await replica.pause(1, PauseMode.KEEP)
        assert now() == 0.4
        await asyncio.sleep(100.0)
        await replica.resume()
        generation, when = await timed(first)
        assert when == pytest.approx(100 + 1.0 + 10.0)
        assert len(generation.tokens) == 10

    simulate(main)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_the_fence_refuses_a_request_that_arrives_after_the_pause(mode: PauseMode) -> None:
    async def main() -> None:
        replica = make(arrival_delay=0.5)
        future = replica.generate(ask())
        await asyncio.sleep(0.1)
        await replica.pause(1, mode)
        await replica.resume()
        with pytest.raises(StaleEpoch, match="epoch 0 is behind fence 1"):
            await future
        assert (now(), replica.generated) == (0.5, 0)

    simulate(main)


def test_a_request_of_the_new_epoch_waits_for_the_resume() -> None:
    async def main() -> None:
        replica = make(10)
        await replica.pause(3, PauseMode.ABORT)
        future = replica.generate(ask(epoch=3))
        await asyncio.sleep(10.0)
        stats = await replica.stats()
        assert (stats.paused, stats.waiting, stats.generated) == (True, 1, 0)
        await replica.resume()
        assert (await timed(future))[1] == pytest.approx(10.0 + alone(10, 10))

    simulate(main)


def test_on_the_wall_clock_it_goes_on_after_a_pause() -> None:
    """Time passes between any two looks at the clock."""

    async def main() -> None:
        replica = make(cost=CostModel(a=1e-3, b=0.0, c=0.0, p=0.0, kv_capacity=1000))
        answer = replica.generate(ask())
        await asyncio.sleep(0.01)
        await replica.pause(1, PauseMode.KEEP)
        await replica.resume()
        assert len((await asyncio.wait_for(answer, 30.0)).tokens) == 50

    asyncio.run(main())


def test_keeping_through_new_weights_makes_two_spans() -> None:
    async def main() -> None:
        replica = make(100, load_seconds=2.0, version=4)
        future = replica.generate(ask())
        await asyncio.sleep(alone(10, 30) - 0.001)
        await replica.pause(1, PauseMode.KEEP)
        await replica.load_weights(5, None)
        await replica.resume()
        generation, when = await timed(future)
        assert generation.spans == (Span(4, 30), Span(5, 70))
        assert when == pytest.approx(2.0 + alone(10, 100))
        assert_continues(ask(), generation)

    simulate(main)


def test_loading_without_a_pause_stands_still_and_goes_on() -> None:
    async def main() -> None:
        replica = make(100, load_seconds=2.0)
        future = replica.generate(ask())
        await asyncio.sleep(alone(10, 30) - 0.001)
        load = asyncio.ensure_future(replica.load_weights(1, None))
        await asyncio.sleep(1.0)
        assert (replica.generating, replica.generated) == (False, 30)
        await load
        generation, when = await timed(future)
        assert generation.spans == (Span(0, 30), Span(1, 70))
        assert when == pytest.approx(2.0 + alone(10, 100))

    simulate(main)


def test_without_the_cache_frozen_requests_are_prefilled_again() -> None:
    async def main() -> None:
        replica = make(100, keep_kv=False)
        future = replica.generate(ask())
        await asyncio.sleep(alone(10, 30) - 0.001)
        await replica.pause(1, PauseMode.KEEP)
        await replica.load_weights(1, None)
        await replica.resume()
        assert (await timed(future))[1] == pytest.approx(alone(10, 100) + COST.p * 40)
        assert (await replica.stats()).prefilled == 10 + 40

    simulate(main)


def test_spans_survive_preemption() -> None:
    async def main() -> None:
        replica = make(60, CostModel(1.0, 0, 0, 0, kv_capacity=150))
        first, second = replica.generate(ask(1, 40)), replica.generate(ask(2, 40))
        await asyncio.sleep(9.5)
        await replica.load_weights(1, None)
        await first
        await replica.load_weights(2, None)
        assert (await second).spans == (Span(0, 10), Span(1, 25), Span(2, 25))

    simulate(main)


def test_a_pause_that_a_resume_overtakes_fails() -> None:
    async def main() -> None:
        replica = make(1000)
        replica.generate(ask())
        draining = asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN))
        await asyncio.sleep(1.0)
        replica.generate(ask(2, epoch=1))
        await asyncio.sleep(1.0)
        assert (await replica.stats()).waiting == 1
        await replica.resume()
        with pytest.raises(ReplicaError, match="resumed before"):
            await draining
        await asyncio.sleep(1.0)
        assert (await replica.stats()).running == 2

    simulate(main)


def test_a_drain_can_be_cut_short_by_an_abort() -> None:
    async def main() -> None:
        replica = make(1000)
        future = replica.generate(ask())
        draining = asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN))
        await asyncio.sleep(1.0)
        await replica.pause(2, PauseMode.ABORT)
        await draining
        assert future.result().finish is Finish.ABORT

    simulate(main)


def test_it_sleeps_only_when_paused_and_empty() -> None:
    async def main() -> None:
        replica = make(50)
        with pytest.raises(RuntimeError, match="paused and empty"):
            await replica.sleep()
        await replica.generate(ask(1, 100))
        frozen = replica.generate(ask(2))
        await replica.pause(1, PauseMode.KEEP)
        with pytest.raises(RuntimeError, match="1 running"):
            await replica.sleep()
        await replica.pause(1, PauseMode.ABORT)
        await frozen
        await replica.sleep()
        with pytest.raises(ReplicaError, match="asleep"):
            await replica.generate(ask(3, epoch=1))
        with pytest.raises(RuntimeError, match="wake it"):
            await replica.resume()
        await replica.wake()
        before = await replica.stats()
        assert not before.paused
        await replica.generate(ask(4, 151, session=1, epoch=1))  # the cache is gone
        assert (await replica.stats()).prefilled - before.prefilled == 151

    simulate(main)


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "cause"), [("kill", "preempted"), ("crash", "replica_lost")])
def test_death_fails_every_call_in_flight_and_every_later_one(end: str, cause: str) -> None:
    async def main() -> None:
        replica = make(1000, arrival_delay=lambda request: 5.0 if request.id == 3 else 0.0, load_seconds=100.0)
        calls: list[Awaitable[object]] = [replica.generate(ask(id)) for id in (1, 2, 3)]
        await asyncio.sleep(alone(20, 5))
        written = (await replica.stats()).generated
        calls.append(asyncio.ensure_future(replica.pause(1, PauseMode.DRAIN)))
        calls.append(asyncio.ensure_future(replica.load_weights(1, None)))
        await asyncio.sleep(0)
        replica.kill(cause) if end == "kill" else replica.crash()
        calls += [replica.generate(ask(4)), replica.pause(2, PauseMode.ABORT), replica.resume(), replica.stats()]
        calls += [replica.load_weights(1, None), replica.sleep(), replica.wake()]
        for call in calls:
            with pytest.raises(ReplicaLost):
                await call
        replica.abort(1, "ignored")
        assert replica.discarded == {cause: written}
        assert not replica.generating
        replica.check()

    simulate(main)


def test_it_tells_how_far_its_requests_have_come() -> None:
    async def main() -> None:
        replica = make(100, CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=1000, max_running=1), arrival_delay=0.2)
        asked = [replica.generate(ask(1, 20, offset=5))]
        await asyncio.sleep(0.1)
        assert replica.requests_in_flight() == []  # on its way
        asked.append(replica.generate(ask(2, 30)))
        await asyncio.sleep(0.505)
        assert replica.requests_in_flight() == [(1, 60, 45, 60, 40), (2, 30, 0, 0, 0)]
        replica.hang()
        await asyncio.sleep(5.0)
        assert replica.requests_in_flight()[0] == (1, 60, 45, 60, 40)
        replica.crash()
        assert replica.requests_in_flight() == []
        await asyncio.gather(*asked, return_exceptions=True)

    simulate(main)


def test_a_hung_replica_stands_still_and_only_stats_answers() -> None:
    async def main() -> None:
        replica = make(100)
        first = replica.generate(ask(1))
        await asyncio.sleep(alone(10, 30) + 0.001)
        replica.hang()
        before = await replica.stats()
        assert before.generated == 30
        late = replica.generate(ask(2))
        pausing = asyncio.ensure_future(replica.pause(1, PauseMode.KEEP))
        await asyncio.sleep(50.0)
        assert await replica.stats() == before
        assert not any([first.done(), late.done(), pausing.done(), replica.generating])
        pausing.cancel()
        replica.unhang()
        assert (await replica.stats()).generated == 30
        replica.abort(2, "test")
        assert len((await late).tokens) == 0
        assert (await timed(first))[1] == pytest.approx(50.0 + alone(10, 100))

    simulate(main)


def test_what_is_asked_of_a_hung_replica_takes_effect_when_it_goes_on() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=1000), load_seconds=1.0)
        future = replica.generate(ask(1))
        await asyncio.sleep(2.5)
        load = asyncio.ensure_future(replica.load_weights(1, None))
        await asyncio.sleep(1.0)  # frozen after three steps
        replica.hang()
        replica.slow(2.0)
        load.cancel()
        await asyncio.sleep(10.0)
        assert replica.generated == 3
        replica.unhang()
        generation, when = await timed(future)
        assert (generation.spans, when) == ((Span(0, 10),), 13.5 + 7 * 2.0)

    simulate(main)


def test_a_hung_replica_can_be_killed() -> None:
    async def main() -> None:
        replica = make(100)
        future = replica.generate(ask(1))
        await asyncio.sleep(alone(10, 30) + 0.001)
        replica.hang()
        pausing = asyncio.ensure_future(replica.pause(1, PauseMode.ABORT))
        await asyncio.sleep(10.0)
        replica.kill("hung")
        for call in (future, pausing):
            with pytest.raises(ReplicaLost):
                await call
        assert replica.discarded == {"hung": 30}

    simulate(main)


def test_a_slow_replica_costs_its_factor_from_the_next_step_on() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0.1, kv_capacity=1000))
        future = replica.generate(ask(1, 10))
        asyncio.get_running_loop().call_later(0.5, replica.slow, 2.0)  # half of the prefill is left
        asyncio.get_running_loop().call_later(5.0, replica.slow, 1.0)  # in the second step
        assert (await timed(future))[1] == pytest.approx(0.5 + 2 * 0.5 + 2 * 2.0 + 8 * 1.0)

    simulate(main)


def test_a_prefill_that_a_pause_interrupts_is_slow_too() -> None:
    async def main() -> None:
        replica = make(10, CostModel(1.0, 0, 0, 0.1, kv_capacity=1000))
        future = replica.generate(ask(1, 10))
        await asyncio.sleep(0.5)
        await replica.pause(1, PauseMode.KEEP)
        replica.slow(2.0)
        await replica.resume()
        assert (await timed(future))[1] == pytest.approx(0.5 + 2 * 0.5 + 10 * 2.0)

    simulate(main)


def test_a_flaky_replica_fails_as_often_as_told() -> None:
    async def main() -> None:
        replica = make(10)
        replica.flaky(1)
        with pytest.raises(ReplicaError, match="could not take request 1"):
            await replica.generate(ask(1))
        assert len((await replica.generate(ask(1))).tokens) == 10

    simulate(main)


def test_a_failed_load_leaves_the_version() -> None:
    async def main() -> None:
        replica = make(10)
        replica.fail_load(1)
        with pytest.raises(ReplicaError, match="could not load version 3"):
            await replica.load_weights(3, None)
        assert replica.version == 0
        await replica.load_weights(3, None)
        assert (await replica.stats()).version == 3

    simulate(main)


def test_a_late_abort_lets_tokens_be_written_meanwhile_but_the_fence_stands() -> None:
    async def main() -> None:
        replica = make(100, CostModel(1.0, 0, 0, 0, kv_capacity=1000))
        first, second = replica.generate(ask(1)), replica.generate(ask(2))
        replica.late_abort(5.0)
        replica.abort(1, "test")
        pausing = asyncio.ensure_future(replica.pause(1, PauseMode.ABORT))
        await asyncio.sleep(0)
        with pytest.raises(StaleEpoch):
            await replica.generate(ask(3))
        await pausing
        assert now() == 5.0
        assert [len((await first).tokens), len((await second).tokens)] == [5, 5]

    simulate(main)


def test_a_lost_abort_never_takes_effect_nor_answers() -> None:
    async def main() -> None:
        replica = make(100)
        future = replica.generate(ask(1))
        replica.lost_abort()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await replica.pause(1, PauseMode.ABORT)
        replica.lost_abort()
        replica.abort(1, "test")
        assert (await future).finish is Finish.STOP

    simulate(main)


def test_progress_grows_during_a_long_prefill() -> None:
    async def main() -> None:
        replica = make(10, CostModel(0.01, 0, 0, 1.0, kv_capacity=10_000))
        replica.generate(ask(1, 1000))
        seen = []
        for _ in range(5):
            await asyncio.sleep(100.0)
            seen.append((await replica.stats()).progress)
        assert seen == [100, 200, 300, 400, 500]

    simulate(main)


def test_monitors_hear_what_happens_and_when() -> None:
    async def main() -> None:
        heard: list[tuple[float, str, int]] = []

        def listen(when: float, kind: str, request: object) -> None:
            assert isinstance(request, Request)
            heard.append((when, kind, request.id))

        replica = make(10, CostModel(1.0, 0, 0, 0, kv_capacity=1000), on_event=listen)
        replica.generate(ask(1))
        second = replica.generate(ask(2, max_tokens=100))
        await asyncio.sleep(3.5)
        replica.abort(2, "test")
        await second
        await asyncio.sleep(100.0)
        assert heard[:4] == [(0.0, "start", 1), (0.0, "join", 1), (0.0, "start", 2), (0.0, "join", 2)]
        assert heard[4:] == [(4.0, "abort", 2), (10.0, "finish", 1)]
        assert replica.last_generation_time == 10.0

    simulate(main)


def test_a_loop_that_is_late_skips_no_boundary() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        replica = make(3, CostModel(1.0, 0, 0, 0, kv_capacity=1000))
        first = replica.generate(ask(1))
        loop._now = 5.5  # the timer for the end of the first should have fired at 3
        second = replica.generate(ask(2))
        assert [len((await first).tokens), len((await second).tokens)] == [3, 3]
        replica.check()

    simulate(main)


def test_it_runs_on_a_real_loop_too() -> None:
    async def main() -> list[int]:
        replica = make(lambda request: request.id, CostModel(1e-4, 0, 0, 0, kv_capacity=1000))
        replies = await asyncio.gather(*[replica.generate(ask(id)) for id in (5, 20, 60)])
        replica.check()
        return [len(reply.tokens) for reply in replies]

    assert asyncio.run(main()) == [5, 20, 60]


def test_a_hang_without_deadline_shows_as_a_deadlock() -> None:
    async def main() -> None:
        replica = make(10)
        replica.hang()
        await replica.generate(ask())

    with pytest.raises(Deadlock):
        simulate(main)


# -- conservation under random operations ------------------------------------------------------------------------------

WORDS = "generate generate generate generate abort cancel cancel+abort resume resume load sleep wake kill stats"
FAULTS = "hang unhang slow flaky late punctual lost fail_load pause_abort pause_drain pause_keep"
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(f"{WORDS} {FAULTS}".split()),
        st.integers(0, 11),
        st.sampled_from([0.0, 0.0, 0.001, 0.013, 0.2, 3.0]),
    ),
    min_size=5,
    max_size=60,
)


class Chaos:
    """Plays random operations on a replica, and remembers what it owes us."""

    def __init__(self, capacity: int, max_running: int, keep_kv: bool, delay: float) -> None:
        cost = CostModel(COST.a, COST.b, COST.c, COST.p, capacity, max_running)
        self.replica = make(
            lambda request: 1 + request.seed % 60, cost, load_seconds=0.1, keep_kv=keep_kv, arrival_delay=delay
        )
        self.futures: dict[int, asyncio.Future[Generation]] = {}
        self.requests: dict[int, Request] = {}
        self.calls: list[asyncio.Task[None]] = []
        self.epoch = 0
        self.openings = 0  # calls that may set the engine going again
        self.opening_now = 0
        self.dead = False

    async def pause(self, mode: PauseMode) -> None:
        self.epoch += 1
        if mode is PauseMode.DRAIN:
            await self.opening(self.replica.pause(self.epoch, mode))
        else:
            before = self.openings
            await self.replica.pause(self.epoch, mode)
            assert self.openings > before or self.opening_now or not self.replica.generating

    async def opening(self, call: Coroutine[Any, Any, None]) -> None:
        self.openings += 1
        self.opening_now += 1
        try:
            await call
        finally:
            self.opening_now -= 1

    def kill(self) -> None:
        self.dead = True
        self.replica.kill("chaos")

    def do(self, operation: str, which: int) -> None:
        replica = self.replica
        if operation == "generate":
            id = len(self.requests)
            self.requests[id] = ask(
                id, group=which % 3, session=which, epoch=max(0, self.epoch - which // 10), **chunks(5, which)
            )
            self.futures[id] = replica.generate(self.requests[id])
        elif operation.startswith(("cancel", "abort")) and self.futures:
            id = len(self.futures) - 1 - which % len(self.futures)
            if operation.startswith("cancel"):
                self.futures[id].cancel()
            if operation.endswith("abort"):
                replica.abort(id, "chaos")
        calls: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "pause_abort": lambda: self.pause(PauseMode.ABORT),
            "pause_drain": lambda: self.pause(PauseMode.DRAIN),
            "pause_keep": lambda: self.pause(PauseMode.KEEP),
            "resume": lambda: self.opening(replica.resume()),
            "load": lambda: replica.load_weights(replica.version + 1, None),
            "sleep": replica.sleep,
            "wake": lambda: self.opening(replica.wake()),
        }
        faults: dict[str, Callable[[], None]] = {
            "hang": replica.hang,
            "unhang": replica.unhang,
            "slow": lambda: replica.slow((0.5, 1.0, 3.0)[which % 3]),
            "flaky": lambda: replica.flaky(1),
            "late": lambda: replica.late_abort(0.05),
            "punctual": lambda: replica.late_abort(0.0),
            "lost": replica.lost_abort,
            "fail_load": lambda: replica.fail_load(1),
            "kill": lambda: self.kill() if which == 0 else None,
        }
        if operation in calls:
            self.calls.append(asyncio.ensure_future(calls[operation]()))
        elif operation in faults:
            faults[operation]()


@given(
    operations=OPERATIONS,
    capacity=st.sampled_from([80, 200, 100_000]),
    max_running=st.sampled_from([2, 256]),
    keep_kv=st.booleans(),
    delay=st.sampled_from([0.0, 0.02]),
    shuffle=st.none() | st.integers(0, 100),
)
@settings(max_examples=300, deadline=None)
def test_every_token_is_returned_discarded_or_held_whatever_happens(
    operations: list[tuple[str, int, float]],
    capacity: int,
    max_running: int,
    keep_kv: bool,
    delay: float,
    shuffle: int | None,
) -> None:
    async def main() -> None:
        chaos = Chaos(capacity, max_running, keep_kv, delay)
        replica = chaos.replica
        progress = 0
        for operation, which, wait in operations:
            chaos.do(operation, which)
            replica.check()
            await asyncio.sleep(wait)
            replica.check()
            if operation == "stats" and not chaos.dead:
                before, progress = progress, (await replica.stats()).progress
                assert progress >= before
        replica.unhang()
        await asyncio.sleep(1000.0)
        replica.check()
        replica.kill("end")
        replica.check()
        outcomes = await asyncio.gather(*chaos.futures.values(), return_exceptions=True)
        for answer in await asyncio.gather(*chaos.calls, return_exceptions=True):
            assert answer is None or isinstance(answer, ReplicaError | RuntimeError), answer
        generations = {id: outcome for id, outcome in enumerate(outcomes) if isinstance(outcome, Generation)}
        for id, generation in generations.items():
            assert_continues(chaos.requests[id], generation)
        assert replica.returned == sum(len(generation.tokens) for generation in generations.values())
        assert replica.generated == replica.returned + sum(replica.discarded.values())
        for outcome in outcomes:
            assert isinstance(outcome, Generation | ReplicaError | asyncio.CancelledError)

    simulate(main, shuffle=shuffle)
