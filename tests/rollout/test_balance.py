"""Running requests change replicas: the plan, and what must hold whatever happens during a move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from builders import fake, got, playing, publish, responses, simulate, timed
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.inference.replica import Generation, PauseMode, Request, RequestProgress, Sampling
from cadenza.rollout import balance
from cadenza.rollout.balance import (
    MAX_FILL_AFTER_MOVE,
    MAX_REPLICAS_PER_TICK,
    MIN_GAIN,
    REPLICAS_PER_MOVE,
    Balancer,
    moves_to_balance,
)
from cadenza.rollout.prefix_routing import PrefixRouting
from cadenza.rollout.router import SEQUENCE_WEIGHT, ReplicaEntry, Router
from cadenza.rollout.sampler import NoReplicas
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.faults import FaultInjector, FaultyReplica
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.testing import FakeReplica

CAPACITY = 100_000


def entry(
    index: int, *contexts: int, written: int = 10_000, waiting: bool = False
) -> tuple[ReplicaEntry, list[RequestProgress]]:
    """A entry with requests of so many tokens, and what its replica tells of them."""
    replica = fake(name=f"r{index}", devices=(index,), kv_capacity=CAPACITY)
    found = ReplicaEntry(index, replica, asyncio.get_running_loop().create_future())
    router = Router(PrefixRouting())
    for context in contexts:
        router.add(found, context)
    ids = range(1000 * index, 1000 * index + len(contexts))
    requests = [
        RequestProgress(i, c, written, 0 if waiting else c, written) for i, c in zip(ids, contexts, strict=True)
    ]
    return found, requests


def planned(
    make: Callable[[], list[tuple[ReplicaEntry, list[RequestProgress]]]], prefill_weight: float = 400.0
) -> list[Any]:
    async def main() -> list[Any]:
        moves = moves_to_balance(make(), prefill_weight)
        return [(move.request, move.source.index, move.target.index) for move in moves]

    return simulate(main)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_the_request_nearest_to_half_the_difference_moves_to_the_lightest() -> None:
    assert planned(lambda: [entry(0, 2_000, 15_000, 12_000), entry(1, 5_000), entry(2, 1_000)]) == [(1, 0, 2)]


def test_a_move_that_would_only_swap_the_roles_is_not_made() -> None:
    assert planned(lambda: [entry(0, 30_000), entry(1)]) == []


def test_a_move_that_gains_too_little_is_not_made() -> None:
    assert planned(lambda: [entry(0, 20_000, 500), entry(1, 18_000)]) == []
    assert planned(lambda: [entry(0, 20_000, 4_000), entry(1, 11_000)]) == [(1, 0, 1)]


def test_a_request_whose_prefill_is_not_won_back_does_not_move() -> None:
    assert planned(lambda: [entry(0, 20_000, 20_000, written=399), entry(1)]) == []
    assert planned(lambda: [entry(0, 20_000, 20_000, written=400), entry(1)]) == [(0, 0, 1)]


def test_a_request_that_waits_for_room_moves_for_nothing() -> None:
    assert planned(lambda: [entry(0, 20_000, 20_000, written=0, waiting=True), entry(1)]) == [(0, 0, 1)]


def test_a_replica_takes_no_more_than_it_has_room_for() -> None:
    full = int(MAX_FILL_AFTER_MOVE * CAPACITY) - SEQUENCE_WEIGHT
    assert planned(lambda: [entry(0, *[20_000] * 7), entry(1, full - 20_000 - 2 * SEQUENCE_WEIGHT)]) == [(0, 0, 1)]
    assert planned(lambda: [entry(0, *[20_000] * 7), entry(1, full - 20_000)]) == []


def test_replicas_that_do_not_tell_are_left_alone() -> None:
    silent = entry
    assert planned(lambda: [entry(0, 20_000, 20_000), (silent(1, 5_000)[0], [])]) == []
    assert planned(lambda: [(silent(0, 20_000, 20_000)[0], []), entry(1)]) == []


def test_a_replica_with_half_the_cache_gets_half_the_load() -> None:
    def make() -> list[tuple[ReplicaEntry, list[RequestProgress]]]:
        small = entry(1)
        small[0].capacity //= 2
        return [entry(0, 12_000, 12_000, 12_000), small]

    assert planned(make) == [(0, 0, 1)]


@given(
    loads=st.lists(st.lists(st.integers(1, 30_000), max_size=6), min_size=1, max_size=20),
    weight=st.sampled_from([0.0, 400.0, 20_000.0]),
)
def test_moves_relieve_the_heaviest_and_never_make_a_replica_the_heavier_one(
    loads: list[list[int]], weight: float
) -> None:
    async def main() -> None:
        found = [entry(index, *contexts) for index, contexts in enumerate(loads)]
        moves = moves_to_balance(found, weight)
        assert len(moves) <= max(1, len(loads) // REPLICAS_PER_MOVE)
        touched = [place.index for move in moves for place in (move.source, move.target)]
        assert len(touched) == len(set(touched))
        for move in moves:
            moved = loads[move.source.index][move.request % 1000] + SEQUENCE_WEIGHT
            source, target = (at.inflight_tokens + SEQUENCE_WEIGHT * at.inflight for at in (move.source, move.target))
            assert target + moved <= source - MIN_GAIN * source
            assert target + moved <= MAX_FILL_AFTER_MOVE * CAPACITY

    simulate(main)


def test_a_tick_looks_at_a_bounded_number_of_replicas_and_at_all_of_them_in_turn() -> None:
    class Watched(FakeReplica):
        def requests_in_flight(self) -> list[RequestProgress]:
            looks.append(self.devices[0])
            return []

    looks: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        count = 3 * MAX_REPLICAS_PER_TICK - 20
        found = [ReplicaEntry(i, Watched(devices=(i,)), loop.create_future()) for i in range(count)]
        balancer = Balancer(400.0)
        for tick in range(1, 5):
            balancer.tick(found)
            assert len(looks) == tick * MAX_REPLICAS_PER_TICK
        assert set(looks) == set(range(count))

    simulate(main)


def test_a_fake_tells_how_far_its_requests_have_come() -> None:
    async def main() -> None:
        replica = fake(2.0, tokens=10)
        await replica.pause(0, PauseMode.KEEP)
        requests = [Request(i, (), 20, 100, Sampling(), 0, 0, i, i, 0) for i in range(2)]
        waiting = replica.generate(requests[0])
        assert replica.requests_in_flight() == [(0, 20, 0, 0, 0)]
        await replica.resume()
        await asyncio.sleep(1.0)
        assert replica.requests_in_flight() == [(0, 25, 5, 25, 5)]
        await waiting
        assert replica.requests_in_flight() == []

    simulate(main)


# -- moves under way ---------------------------------------------------------------------------------------------------

COST = CostModel(a=0.01, b=0.0, c=1e-5, p=1e-4, kv_capacity=20_000)
BALANCE = {"balance_seconds": 1.0, "prefill_weight": 10.0, "heartbeat_seconds": 2.0, "control_seconds": 5.0}
LONG, SHORT, BATCH = 1_000, 200, 8


def uneven(count: int = 2, make: Callable[..., SimReplica] = SimReplica, **options: Any) -> list[SimReplica]:
    """Replicas the first of which gets the long answers."""

    def length(request: Request) -> int:
        return LONG if request.session % count == 0 else SHORT

    return [make(f"r{i}", COST, length, devices=(i,), **options) for i in range(count)]


async def played(
    replicas: list[SimReplica],
    disturb: Callable[[RolloutScheduler], Awaitable[None]] | None = None,
    **sampler: Any,
) -> tuple[list[list[int]], float, float]:
    """The answers of one batch, how long it took, and how many moves there were. Whatever else happens, no token of it
    is lost, and none is written by a replica for nothing."""
    async with playing(replicas, batch_size=BATCH, tasks=BATCH, alpha=2, sampler=BALANCE | sampler) as scheduler:
        begun = asyncio.get_running_loop().time()
        await scheduler.resume()
        getting = asyncio.ensure_future(timed(got(scheduler, BATCH)))
        if disturb is not None:
            await disturb(scheduler)
        batch, when = await getting
        moves = scheduler.metrics()["sampler/moves"]
    for replica in replicas:
        replica.check()
    return responses(batch), when - begun, moves


def test_the_tail_of_a_batch_is_spread_and_every_answer_is_what_it_would_have_been() -> None:
    async def main() -> None:
        unmoved, slow, none = await played(uneven(), balance_seconds=0.0)
        replicas = uneven()
        moved, quick, moves = await played(replicas)
        assert (none, moved) == (0, unmoved)
        assert 1 <= moves <= 4
        assert quick < 0.9 * slow
        assert sum(replica.generated for replica in replicas) == sum(map(len, moved))

    simulate(main)


def test_moves_and_what_they_prefill_are_counted() -> None:
    async def main() -> None:
        replicas = uneven()
        async with playing(replicas, batch_size=BATCH, tasks=BATCH, sampler=BALANCE) as scheduler:
            await got(scheduler, BATCH)
            metrics = scheduler.metrics()
            prefilled = [(await replica.stats()).prefilled for replica in replicas]
        prompts = sum(prefilled) - metrics["sampler/moved_tokens"]
        assert metrics["sampler/moves"] > 0
        assert 0 < prompts < 200
        assert all(entry.inflight_tokens == entry.inflight == 0 for entry in scheduler.sampler.entries)

    simulate(main)


def test_zero_seconds_switch_it_off() -> None:
    async def main() -> None:
        assert (await played(uneven(), balance_seconds=0.0))[2] == 0

    simulate(main)


def test_an_engine_that_fails_to_tell_its_requests_keeps_them() -> None:
    class Mute(SimReplica):
        def requests_in_flight(self) -> list[RequestProgress]:
            raise OSError("no such call")

    async def main() -> None:
        replicas = [Mute(f"r{i}", COST, lambda request: LONG, devices=(i,)) for i in range(2)]
        answers, _, moves = await played(list(replicas))
        assert (len(answers), moves) == (BATCH, 0)

    simulate(main)


def test_nothing_moves_while_the_gate_is_closed_or_a_control_operation_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: list[float] = []
    monkeypatch.setattr(Balancer, "tick", lambda self, *about: ticks.append(asyncio.get_running_loop().time()))

    async def main() -> None:
        async with playing(uneven(load_seconds=5.0), alpha=1, sampler={"balance_seconds": 1.0}) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(2.5)
            await scheduler.suspend()
            await asyncio.sleep(3.0)
            await scheduler.resume()
            await asyncio.sleep(1.0)
            await scheduler.sampler.load_weights(1)  # one by one, 5 s each
            await asyncio.sleep(1.0)

    simulate(main)
    assert ticks == [1.0, 2.0, 6.0, 17.0]


async def suspend_and_resume(scheduler: RolloutScheduler, mode: PauseMode) -> None:
    await scheduler.sampler.suspend(mode, holder="test")
    await asyncio.sleep(3.0)
    await scheduler.sampler.resume(holder="test")


def first_move(balancer: Balancer) -> asyncio.Future[None]:
    """Resolves when a request has been called back to be moved."""
    found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tick = balancer.tick

    def told(*about: Any) -> None:
        tick(*about)
        if balancer._targets and not found.done():
            found.set_result(None)

    balancer.tick = told  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_suspension_during_a_move_loses_nothing(mode: PauseMode) -> None:
    async def disturb(scheduler: RolloutScheduler) -> None:
        await first_move(scheduler.sampler.balancer)
        await suspend_and_resume(scheduler, mode)

    async def main() -> None:
        expected = (await played(uneven()))[0]
        assert (await played(uneven(), disturb))[0] == expected

    simulate(main)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.1])
def test_a_replica_that_dies_during_a_move_costs_its_own_tokens_at_most(victim: int, delay: float) -> None:
    async def main() -> None:
        expected = (await played(uneven(3)))[0]
        replicas = uneven(3)

        async def disturb(scheduler: RolloutScheduler) -> None:
            await first_move(scheduler.sampler.balancer)
            await asyncio.sleep(delay)
            replicas[victim].crash()

        assert (await played(replicas, disturb))[0] == expected

    simulate(main)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.1])
def test_a_shrink_during_a_move_loses_nothing(device: int, delay: float) -> None:
    async def disturb(scheduler: RolloutScheduler) -> None:
        await first_move(scheduler.sampler.balancer)
        await asyncio.sleep(delay)
        await scheduler.shrink_sampler([device])

    async def main() -> None:
        expected = (await played(uneven()))[0]
        replicas = uneven()
        assert (await played(replicas, disturb))[0] == expected
        assert not replicas[device].generating

    simulate(main)


def test_an_abort_that_is_lost_or_late_costs_nothing() -> None:
    async def main() -> None:
        expected = (await played(uneven()))[0]
        losing = uneven()
        losing[0].lost_abort()
        answers, _, moves = await played(losing)
        assert answers == expected
        assert moves > 0
        late = uneven()
        late[0].late_abort(1.5)
        assert (await played(late))[0] == expected

    simulate(main)


def test_a_request_that_ends_before_it_can_be_moved_leaves_no_trace() -> None:
    async def main() -> None:
        replicas = uneven()
        replicas[0].late_abort(1e5)
        async with playing(replicas, batch_size=BATCH, tasks=BATCH, sampler=BALANCE) as scheduler:
            await got(scheduler, BATCH)
            assert scheduler.metrics()["sampler/moves"] == 0
            await asyncio.sleep(BALANCE["balance_seconds"])  # a note is good until the next tick
            assert scheduler.sampler.balancer._targets == {}

    simulate(main)


def test_a_rolling_update_between_moves_keeps_the_order_of_versions() -> None:
    async def disturb(scheduler: RolloutScheduler) -> None:
        await first_move(scheduler.sampler.balancer)
        await scheduler.sampler.load_weights(1)
        await asyncio.sleep(3.0)
        await publish(scheduler, 2)
        await scheduler.resume()

    async def main() -> None:
        expected = (await played(uneven()))[0]
        assert (await played(uneven(load_seconds=0.5), disturb))[0] == expected

    simulate(main)


def test_a_balance_that_dies_ends_the_run_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Balancer, *about: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Balancer, "tick", broken)

    async def main() -> None:
        async with playing(uneven(), batch_size=4 * BATCH, sampler=BALANCE) as scheduler:
            with pytest.raises(NoReplicas, match=r"'sampler balance' died: ZeroDivisionError\('a bug'\)"):
                await got(scheduler, 4 * BATCH)

    simulate(main)


Happening = tuple[float, str, int]
HAPPENINGS = ("abort", "drain", "keep", "shrink", "expand", "roll", "crash", "late", "lost", "slow")


@settings(max_examples=60)
@given(
    happenings=st.lists(
        st.tuples(st.sampled_from([0.0, 0.004, 0.3, 1.0, 2.5]), st.sampled_from(HAPPENINGS), st.integers(0, 1)),
        max_size=6,
    ),
    shuffle=st.integers(0, 1000),
)
def test_whatever_happens_between_moves_no_turn_loses_repeats_or_restarts_a_token(
    happenings: list[Happening], shuffle: int
) -> None:
    asked: dict[int, list[tuple[Request, asyncio.Future[Generation]]]] = {}

    def hear(replica: FaultyReplica, request: Request, answer: asyncio.Future[Generation]) -> None:
        asked.setdefault(request.session, []).append((request, answer))

    async def disturb(scheduler: RolloutScheduler) -> None:
        """Replica 2 is well."""
        sampler, version = scheduler.sampler, 0
        await asyncio.wait([first_move(sampler.balancer)], timeout=8.0)
        for delay, what, device in happenings:
            await asyncio.sleep(delay)
            state = sampler.devices[device]
            if what in ("abort", "drain", "keep"):
                await suspend_and_resume(scheduler, PauseMode(what))
            elif what == "slow":
                replicas[device].slow(3.0)
            elif what == "shrink" and state == "active":
                try:
                    await scheduler.shrink_sampler([device])
                except ValueError:
                    assert sampler.devices[device] == "lost"  # it had crashed, and nobody knew yet
            elif what == "expand" and state == "asleep":
                await scheduler.expand_sampler([device])
            elif what == "roll" and version < 2:
                version += 1
                await sampler.load_weights(version)
            elif what == "crash":
                replicas[device].crash()
            elif what == "late":
                replicas[device].late_abort(0.7)
            elif what == "lost":
                replicas[device].lost_abort()

    async def main() -> None:
        nonlocal replicas
        replicas = uneven(3, make=lambda *args, **options: FaultyReplica(FaultInjector(()), hear, *args, **options))
        answers = (await played(replicas, disturb))[0]
        assert sorted(map(len, answers)) == sorted(LONG if i % 3 == 0 else SHORT for i in range(BATCH))

    replicas: list[Any] = []
    simulate(main, shuffle=shuffle)
    for turns in asked.values():
        done = 0
        for request, answer in turns:
            assert request.offset == done
            if not answer.cancelled() and answer.exception() is None:
                done += len(answer.result().tokens)


def test_the_constants_fit_the_cost_models() -> None:
    from cadenza.simulation.virtual_cluster.cost import A100_QWEN25_7B, H100_QWEN3_8B, H100_QWEN25_7B

    for cost in (A100_QWEN25_7B, H100_QWEN3_8B, H100_QWEN25_7B):
        assert pytest.approx(cost.a / (cost.c * cost.kv_capacity), abs=0.05) == balance.STEP_SHARE


# -- replicas that come ------------------------------------------------------------------------------------------------


def spread_out(
    make: Callable[[], list[tuple[ReplicaEntry, list[RequestProgress]]]], prefill_weight: float = 400.0
) -> list[Any]:
    async def main() -> list[Any]:
        moves = balance.moves_to_spread(make(), prefill_weight)
        return [(move.request, move.source.index, move.target.index) for move in moves]

    return simulate(main)


def test_replicas_that_come_get_their_share_at_once() -> None:
    moves = spread_out(lambda: [entry(0, *[5_000] * 6), entry(1, *[5_000] * 6), entry(2), entry(3)])
    assert sorted(moves) == [(0, 0, 2), (1, 0, 3), (2, 0, 2), (1000, 1, 3), (1001, 1, 2), (1002, 1, 3)]


def test_those_that_wait_go_first_and_those_whose_prefill_is_lost_stay() -> None:
    def made() -> list[tuple[ReplicaEntry, list[RequestProgress]]]:
        busy, requests = entry(0, *[5_000] * 6)
        requests[4] = requests[4]._replace(computed=0)
        for young in (0, 1):
            requests[young] = requests[young]._replace(written=100)
        return [(busy, requests), entry(1)]

    assert [request for request, _, _ in spread_out(made)] == [4, 2, 3]


def test_nothing_moves_where_all_have_their_share() -> None:
    assert spread_out(lambda: [entry(0, 5_000, 5_000), entry(1, 5_000, 5_000)]) == []
    assert spread_out(lambda: [entry(0), entry(1)]) == []


def test_a_replica_that_comes_back_takes_over_running_requests() -> None:
    async def main() -> None:
        cost = CostModel(a=0.01, b=0.0, c=1e-7, p=1e-6, kv_capacity=100_000)
        replicas = [SimReplica(f"r{i}", cost, lambda request: 1_000, devices=(i,)) for i in range(2)]
        async with playing(replicas, batch_size=8, slots=8, tasks=8, sampler={"prefill_weight": 1.0}) as scheduler:
            await scheduler.resume()
            await scheduler.shrink_sampler([1])
            await asyncio.sleep(2.0)
            before = (await replicas[0].stats()).generated
            await scheduler.expand_sampler([1])
            batch, _ = await timed(got(scheduler, 8))
            assert [len(response) for response in responses(batch)] == [1_000] * 8
            assert scheduler.metrics()["sampler/moves"] == 4
            assert replicas[1].generated == pytest.approx((8 * 1_000 - before) / 2, rel=0.1)

    simulate(main)
