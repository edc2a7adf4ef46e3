"""Who gets the KV caches when they are too small for all: router.py and wait_queue.py."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from builders import EventRecorder, fake, fates, got, playing, sim_replicas, simulate, stepping, timed
from hypothesis import given
from hypothesis import strategies as st

from cadenza.inference.replica import Request
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.prefix_routing import PrefixRouting
from cadenza.rollout.router import HOLD_SECONDS, MAX_FILL, ReplicaEntry, Router, RouteRequest, WaitReason
from cadenza.rollout.sampler import GrantRequest
from cadenza.rollout.wait_queue import RETRY_SECONDS, WaitQueue
from cadenza.simulation.virtual_cluster.cost import CostModel

CAPACITY = 10_000
USABLE = int(MAX_FILL * CAPACITY)
"""Tokens that are given out."""


def entries(count: int = 1) -> tuple[Router, list[ReplicaEntry]]:
    loop = asyncio.get_running_loop()
    found = [ReplicaEntry(n, fake(name=f"r{n}", kv_capacity=CAPACITY), loop.create_future()) for n in range(count)]
    router = Router(PrefixRouting())
    router.mean_answer = 100.0
    router.rebuild(found)
    return router, found


def test_a_session_that_is_away_keeps_its_room() -> None:
    async def main() -> None:
        router, [entry] = entries()
        router.keep_context(entry, session=1, tokens=USABLE // 2, group_number=1, now=0.0)
        assert router.admit(RouteRequest(2, 2, USABLE // 2, group_number=2), None, 0, 1.0) is entry
        assert router.admit(RouteRequest(2, 2, USABLE // 2 + 10, group_number=2), None, 0, 1.0) is WaitReason.CAPACITY
        assert router.admit(RouteRequest(1, 1, USABLE, group_number=1), entry, USABLE // 2, 1.0) is entry  # it grew
        assert router.drop_context(entry, 1)
        assert router.admit(RouteRequest(2, 2, USABLE, group_number=2), None, 0, 1.0) is entry

    simulate(main)


def test_older_groups_take_the_room_of_younger_ones_that_are_away_the_youngest_first() -> None:
    async def main() -> None:
        router, [entry] = entries()
        for age in (5, 7, 6):
            router.keep_context(entry, session=age, tokens=USABLE // 3, group_number=age, now=0.0)
        assert router.admit(RouteRequest(9, 9, 1_000, group_number=9), None, 0, 1.0) is WaitReason.CAPACITY
        assert set(entry.cached_contexts) == {5, 6, 7}
        assert router.admit(RouteRequest(1, 1, 1_000, group_number=1), None, 0, 1.0) is entry
        assert set(entry.cached_contexts) == {5, 6}
        assert not router.drop_context(entry, 7)

    simulate(main)


def test_a_session_that_is_away_for_long_gives_way_to_all() -> None:
    async def main() -> None:
        router, [entry] = entries()
        router.keep_context(entry, session=1, tokens=USABLE, group_number=1, now=0.0)
        assert router.admit(RouteRequest(2, 2, USABLE, group_number=2), None, 0, HOLD_SECONDS) is WaitReason.CAPACITY
        assert router.admit(RouteRequest(2, 2, USABLE, group_number=2), None, 0, HOLD_SECONDS + 1) is entry

    simulate(main)


def test_a_replica_without_work_takes_a_context_of_any_size() -> None:
    async def main() -> None:
        router, [entry] = entries()
        assert router.admit(RouteRequest(1, 1, 5 * CAPACITY, group_number=1), None, 0, 0.0) is entry
        router.add(entry, 10)
        assert router.admit(RouteRequest(1, 1, 5 * CAPACITY, group_number=1), None, 0, 0.0) is WaitReason.CAPACITY

    simulate(main)


def test_another_replica_with_room_is_better_than_waiting() -> None:
    async def main() -> None:
        router, [full, other] = entries(2)
        router.add(full, USABLE)
        router.keep_context(full, session=1, tokens=10, group_number=1, now=0.0)
        assert router.admit(RouteRequest(1, 1, USABLE, group_number=1), full, 10, 0.0) is other

    simulate(main)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, USABLE)), max_size=40))
def test_what_is_kept_adds_up_and_nothing_is_given_out_twice(story: list[tuple[int, int, int]]) -> None:
    async def main() -> None:
        router, found = entries(2)
        where: dict[int, ReplicaEntry] = {}
        for now, (kind, session, context) in enumerate(story):
            if kind == 0 and session not in where:
                entry = router.admit(RouteRequest(session, session, context, session), None, 0, float(now))
                if isinstance(entry, ReplicaEntry):
                    assert entry.inflight_tokens + entry.cached_tokens + context <= USABLE
                    router.add(entry, context)
                    router.keep_context(entry, session, context, session, float(now))
                    router.remove(entry, context)
                    where[session] = entry
            elif kind == 1 and session in where:
                router.drop_context(where.pop(session), session)
            for entry in found:
                assert entry.cached_tokens == sum(held.tokens for held in entry.cached_contexts.values())
                assert entry.pressure == pytest.approx(entry.cached_tokens / CAPACITY, abs=1e-9)

    simulate(main)


# -- the wait queue ----------------------------------------------------------------------------------------------------


def test_the_oldest_is_first_in_line_and_lets_the_next_one_look() -> None:
    async def main() -> None:
        wait_queue, order = WaitQueue(), []

        async def wait(age: int) -> None:
            await wait_queue.wait(RouteRequest(0, 0, 1, age))
            order.append(age)
            wait_queue.wake_next()

        waits = [asyncio.ensure_future(wait(age)) for age in (3, 1, 2)]
        await asyncio.sleep(0)
        assert (
            len(wait_queue),
            wait_queue.has_earlier(RouteRequest(0, 0, 1, 1)),
            wait_queue.has_earlier(RouteRequest(0, 0, 1, 2)),
        ) == (
            3,
            False,
            True,
        )
        waits[1].cancel()
        wait_queue.wake_next()
        await asyncio.gather(*waits, return_exceptions=True)
        assert order == [2, 3]

    simulate(main)


def test_one_who_is_cancelled_at_the_head_of_the_line_does_not_take_the_turn_along() -> None:
    async def main() -> None:
        wait_queue = WaitQueue()
        first, second = (
            asyncio.ensure_future(wait_queue.wait(RouteRequest(0, 0, 1, 1))),
            asyncio.ensure_future(wait_queue.wait(RouteRequest(0, 0, 1, 2))),
        )
        await asyncio.sleep(0)
        wait_queue.wake_next()
        first.cancel()
        await asyncio.wait([first, second], timeout=1.0)
        assert first.cancelled()
        assert second.done()

    simulate(main)


def test_one_who_leaves_the_head_of_the_line_lets_the_next_one_look() -> None:
    async def main() -> None:
        wait_queue = WaitQueue()
        waits = [asyncio.ensure_future(wait_queue.wait(RouteRequest(0, 0, 1, age))) for age in (1, 2, 3, 4)]
        await asyncio.sleep(0)
        waits[2].cancel()
        await asyncio.sleep(0.1)
        assert not waits[0].done()  # one in the middle is nobody's business
        waits[0].cancel()
        waits[1].cancel()
        await asyncio.sleep(0.1)
        assert waits[3].done()
        assert not wait_queue.has_earlier(RouteRequest(0, 0, 1, 5))

    simulate(main)


def test_nobody_waits_behind_one_who_has_left() -> None:
    async def main() -> None:
        sampler = LocalSampler([fake(name="r0", kv_capacity=CAPACITY)])
        await sampler.resume()
        entry = (await sampler.grant(GrantRequest(RouteRequest(1, 1, 5_000, group_number=1)))).entry
        oldest = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(0, 0, USABLE, group_number=0))))
        await asyncio.sleep(0.1)
        behind = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(2, 2, 10, group_number=2))))
        await asyncio.sleep(0.1)
        oldest.cancel()
        await asyncio.sleep(0.1)
        assert behind.result().entry is entry
        assert (await sampler.grant(GrantRequest(RouteRequest(3, 3, 10, group_number=3)))).entry is entry
        assert asyncio.get_running_loop().time() < 1.0
        await sampler.close()

    simulate(main)


def test_the_first_in_line_looks_again_after_a_while() -> None:
    async def main() -> None:
        wait_queue = WaitQueue()
        _, when = await timed(wait_queue.wait(RouteRequest(0, 0, 1, 1)))
        assert when == RETRY_SECONDS

    simulate(main)


def test_a_turn_without_room_waits_for_the_one_that_has_it() -> None:
    async def main() -> None:
        sampler = LocalSampler([fake(name="r0", kv_capacity=CAPACITY)])
        await sampler.resume()
        grant = await sampler.grant(GrantRequest(RouteRequest(1, 1, USABLE, group_number=1)))
        waiting = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(2, 2, 1_000, group_number=2))))
        behind = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(3, 3, 10, group_number=3))))
        await asyncio.sleep(2 * RETRY_SECONDS)
        assert not waiting.done()
        assert not behind.done()  # small as it is, it does not overtake
        sampler.release(grant)
        await asyncio.wait([waiting, behind], timeout=1.0)
        assert waiting.result().entry is behind.result().entry is grant.entry
        await sampler.close()

    simulate(main)


def test_a_replica_that_comes_back_is_seen_at_once() -> None:
    async def main() -> None:
        sampler = LocalSampler(
            [fake(name=f"r{number}", devices=(number,), kv_capacity=CAPACITY) for number in range(2)]
        )
        await sampler.resume()
        await sampler.shrink([1])
        await sampler.grant(GrantRequest(RouteRequest(1, 1, USABLE, group_number=1)))
        waiting = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(2, 2, 1_000, group_number=2))))
        await asyncio.sleep(0.1)
        await sampler.expand([1], skip_load=True)
        await asyncio.wait([waiting], timeout=0.1)
        assert waiting.result().entry is sampler.entries[1]
        await sampler.close()

    simulate(main)


def test_closing_the_sampler_ends_the_wait_queue() -> None:
    async def main() -> None:
        sampler = LocalSampler([fake(name="r0", kv_capacity=CAPACITY)])
        await sampler.resume()
        await sampler.grant(GrantRequest(RouteRequest(1, 1, USABLE, group_number=1)))
        waiting = asyncio.ensure_future(sampler.grant(GrantRequest(RouteRequest(2, 2, 1_000, group_number=2))))
        await asyncio.sleep(0)
        await sampler.close()
        await asyncio.wait([waiting], timeout=1.0)
        assert "closed" in str(waiting.exception())

    simulate(main)


def prefilled(kv_capacity: int) -> tuple[int, dict[str, int]]:
    """Tokens of prefill of 8 sessions of 10 turns, which need 4,000 tokens each, and what became of them."""

    async def step(seed: int, number: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        await asyncio.sleep(1.0)
        return np.zeros(300, np.int32), 0.0, False, False, {}

    async def main() -> tuple[int, dict[str, int]]:
        cost = CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=kv_capacity)
        [replica] = sim_replicas(1, lambda request: 100, cost=cost)
        async with playing(
            [replica], env=stepping(step), group_size=2, batch_size=8, tasks=4, slots=8, max_turns=10
        ) as scheduler:
            await got(scheduler, 8)
            kept = sum(entry.cached_tokens for entry in scheduler.sampler.entries)
            return (await replica.stats()).prefilled, {**fates(scheduler), "kept": kept}

    return simulate(main)


def test_sessions_that_do_not_fit_together_take_turns_and_do_not_throw_each_other_out() -> None:
    enough, all_fates = prefilled(100_000)
    tight, tight_fates = prefilled(14_000)
    assert all_fates == tight_fates == {"trained": 8, "kept": 0}
    assert tight < 2 * enough


def test_requests_alone_are_not_kept() -> None:
    """What ended leaves nothing behind."""

    async def main() -> None:
        async with playing(group_size=2, batch_size=4) as scheduler:
            for _ in range(3):
                await got(scheduler, 4)
        assert all(not entry.cached_contexts and not entry.cached_tokens for entry in scheduler.sampler.entries)

    simulate(main)


# -- extra members that begin late -------------------------------------------------------------------------------------


def race(request: Request) -> int:
    return (100, 1000, 100)[request.session]


def test_an_extra_member_begins_only_when_the_group_is_late() -> None:
    async def main() -> None:
        story = EventRecorder()
        async with playing(
            sim_replicas(1, race), group_size=2, extra_members=1, extra_after=0.5, batch_size=2, tasks=1, events=story
        ) as scheduler:
            _, when = await timed(got(scheduler, 2))
            assert story.times("issue") == [0.0, 0.0, pytest.approx(1.5)]
            assert when == pytest.approx(2.5)
            assert fates(scheduler) == {"trained": 2, "surplus": 1}

    simulate(main)


def test_no_extra_member_begins_in_a_group_that_is_whole_in_time() -> None:
    async def main() -> None:
        async with playing(
            sim_replicas(1, lambda request: 100 + 40 * (request.session % 2)), group_size=2, extra_members=1,
            extra_after=0.5, batch_size=2, tasks=1,
        ) as scheduler:  # fmt: skip
            await got(scheduler, 2)
            await asyncio.sleep(5.0)
            assert fates(scheduler) == {"trained": 2}

    simulate(main)


def test_an_extra_member_takes_the_place_of_one_that_is_given_up() -> None:
    async def step(seed: int, number: int) -> None:
        if number == 0:
            raise RuntimeError("always")

    async def main() -> None:
        async with playing(
            env=stepping(step), group_size=1, extra_members=1, extra_after=0.5, batch_size=1, tasks=1, max_attempts=1
        ) as scheduler:
            await got(scheduler, 1)
            assert fates(scheduler) == {"trained": 1, "failed": 1}

    simulate(main)
