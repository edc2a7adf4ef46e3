"""Long answers that give way to those that wait: balance.py, wait_queue.py, router.py, model.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from builders import OneStepEnv, column, fake, fates, got, now, playing, publish, responses, rows, simulate, timed
from hypothesis import given
from hypothesis import strategies as st

from cadenza.inference.replica import Request, RequestProgress
from cadenza.rollout.balance import Balancer, requests_to_preempt
from cadenza.rollout.config import SLICE_TOKENS, RolloutConfig
from cadenza.rollout.prefix_routing import PrefixRouting
from cadenza.rollout.router import MAX_FILL, ReplicaEntry, Router, RouteRequest
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.wait_queue import WaitQueue
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.rollouts import validation_configs
from cadenza.simulation.comparison.experiment import Trial
from cadenza.simulation.comparison.strategy import StrategySettings
from cadenza.simulation.comparison.workloads import find_workload
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.testing import FakeReplica

LONG, SLICE, PROMPT = 1_000, 100, 500


class Spacious(OneStepEnv):
    """A long question."""

    async def reset(self, seed: int) -> str:
        return "x" * PROMPT


class Twice(Spacious):
    """Two of them."""

    turn = 0

    async def step(self, action: str) -> tuple[Any, ...]:
        self.turn += 1
        await asyncio.sleep(0.1)
        return "y" * 50, 1.0, self.turn == 2, False, {}


class Watched(SimReplica):
    """Keeps what it is asked for."""

    def __init__(self, lengths: list[int], kv_capacity: int, number: int = 0) -> None:
        cost = CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=kv_capacity)
        super().__init__(f"r{number}", cost, lambda request: lengths[request.session], devices=(number,))
        self.asked: list[Request] = []

    def generate(self, request: Request) -> asyncio.Future[Any]:
        self.asked.append(request)
        return super().generate(request)


async def played(
    lengths: list[int],
    disturb: Callable[[RolloutScheduler], Any] | None = None,
    *,
    kv_capacity: int = 100_000,
    replicas: int = 1,
    **options: Any,
) -> tuple[dict[str, list[Any]], float, list[Watched]]:
    """The answers of one batch by task, how long it took, and who wrote them."""
    pool = [Watched(lengths, kv_capacity, number) for number in range(replicas)]
    size, begun = len(lengths), now()
    options = {"slots": size, "tasks": size, "sampler": {"balance_seconds": 0.05}} | options
    async with playing(list(pool), batch_size=size, **options) as scheduler:
        getting = asyncio.ensure_future(timed(got(scheduler, size)))
        if disturb is not None:
            await disturb(scheduler)
        batch, when = await getting
        assert fates(scheduler) == {"trained": size}
        assert not scheduler.sampler._wait_queue
        for entry in scheduler.sampler.entries:
            assert (entry.inflight_tokens, entry.inflight, entry.cached_contexts, entry.cached_tokens) == (0, 0, {}, 0)
    for replica in pool:
        replica.check()
        assert not replica.discarded
    answers = zip(column(batch, "task_id"), responses(batch), map(list, rows(batch, "infer_logprobs")), strict=True)
    return {task: [tokens, logprobs] for task, tokens, logprobs in answers}, when - begun, pool


# -- where it applies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "given_tokens", "expected"), [
    (0.0, None, SLICE_TOKENS), (0.5, None, 0), (1.0, None, 0), (0.0, 0, 0), (0.0, 7, 7), (2.0, 7, 7),
])  # fmt: skip
def test_only_a_synchronous_run_takes_turns_unless_it_is_told(
    alpha: float, given_tokens: int | None, expected: int
) -> None:
    assert RolloutConfig(batch_size=1, alpha=alpha, slice_tokens=given_tokens).tokens_per_slice == expected


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, SLICE_TOKENS), (1.0, 0)])
def test_validation_takes_turns_where_training_does(alpha: float, expected: int) -> None:
    """Else its long answers would wait behind all of training's."""
    config = AgenticConfig.model_validate(
        {
            "steps": 1,
            "envs": {"domains": {"guess": {"env": "guess"}}, "slots": 4},
            "rollout": {"batch_size": 4, "group_size": 2, "alpha": alpha},
            "validation": {"episodes": 4, "every": 1},
        }
    )
    assert validation_configs(config)[0].tokens_per_slice == expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(SLICE, 0), (SLICE + 1, SLICE)])
def test_answers_that_cannot_be_so_long_do_not_take_turns(max_tokens: int, expected: int) -> None:
    async def main() -> None:
        async with playing(slice_tokens=SLICE, sampling={"max_tokens": max_tokens}) as scheduler:
            assert next(iter(scheduler._slots._domains.values())).shared.slice_tokens == expected  # type: ignore[attr-defined]

    simulate(main)


def test_a_domain_with_longer_answers_takes_turns_too() -> None:
    async def main() -> None:
        domains = {"long": {"env": OneStepEnv, "sampling": {"max_tokens": SLICE + 1}}, "short": {"env": OneStepEnv}}
        async with playing(slice_tokens=SLICE, sampling={"max_tokens": 1}, domains=domains) as scheduler:
            found = scheduler._slots._domains  # type: ignore[attr-defined]
            assert found["long"].shared.slice_tokens == SLICE

    simulate(main)


# -- who goes first ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("waiting", [1, 2, 5])
def test_those_who_have_not_begun_go_before_one_who_has_had_a_slice(waiting: int, workers: int) -> None:
    """There is room for one."""

    async def main() -> None:
        options = {"kv_capacity": 900, "env": Spacious, "workers": workers}
        _, _, [whole] = await played([3 * SLICE] + [20] * waiting, slice_tokens=0, **options)
        _, _, [replica] = await played([3 * SLICE] + [20] * waiting, slice_tokens=SLICE, **options)
        others = list(range(1, 1 + waiting))
        assert [request.session for request in whole.asked] == [0, *others]
        assert [request.session for request in replica.asked] == [0, *others, 0]
        assert SLICE <= replica.asked[-1].offset < SLICE + 10

    simulate(main)


def test_two_long_answers_take_turns() -> None:
    async def main() -> None:
        _, _, [replica] = await played([350, 350], kv_capacity=900, env=Spacious, slice_tokens=SLICE)
        turns = [(request.session, request.offset // SLICE) for request in replica.asked]
        assert turns == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]

    simulate(main)


def test_where_nobody_waits_nothing_changes() -> None:
    async def main() -> None:
        whole, seconds, _ = await played([LONG] * 4, replicas=2, slice_tokens=0)
        same, sliced, replicas = await played([LONG] * 4, replicas=2, slice_tokens=SLICE)
        assert (same, sliced) == (whole, seconds)
        assert sum(len(replica.asked) for replica in replicas) == 4

    simulate(main)


def test_a_batch_that_does_not_fit_is_over_sooner() -> None:
    whole, sliced = (
        Trial(find_workload("W3x8"), "cadenza", 0.0, 0, StrategySettings(slice_tokens=tokens), 2, 1).run()
        for tokens in (0, -1)
    )
    assert sliced.wait_seconds < 0.98 * whole.wait_seconds


# -- nothing is lost ---------------------------------------------------------------------------------------------------


async def suspended(scheduler: RolloutScheduler) -> None:
    await asyncio.sleep(0.7)
    await scheduler.suspend()
    await asyncio.sleep(0.5)
    await scheduler.resume()


async def published(scheduler: RolloutScheduler) -> None:
    await asyncio.sleep(0.7)
    await publish(scheduler, 1)
    await scheduler.resume()


async def shrunk(scheduler: RolloutScheduler) -> None:
    await asyncio.sleep(0.7)
    await scheduler.shrink_sampler([0])
    await asyncio.sleep(1.0)
    await scheduler.expand_sampler([0])


@given(
    lengths=st.lists(st.integers(1, 150), min_size=2, max_size=8),
    slice_tokens=st.integers(1, 60),
    kv_capacity=st.integers(850, 2_000),
    workers=st.integers(0, 2),
    env=st.sampled_from([Spacious, Twice]),
    disturb=st.sampled_from([None, suspended, shrunk]),
)
def test_every_answer_is_what_it_would_have_been(
    lengths: list[int], slice_tokens: int, kv_capacity: int, workers: int, env: type, disturb: Any
) -> None:
    async def main() -> None:
        options = {"kv_capacity": kv_capacity, "replicas": 2, "env": env}
        whole, _, _ = await played(lengths, slice_tokens=0, **options)
        sliced, _, replicas = await played(lengths, disturb, slice_tokens=slice_tokens, workers=workers, **options)
        assert sliced == whole
        assert sum(replica.generated for replica in replicas) == sum(len(tokens) for tokens, _ in sliced.values())

    simulate(main)


def test_an_answer_that_waits_for_its_next_slice_is_written_by_whoever_is_there_then() -> None:
    async def main() -> None:
        options = {"kv_capacity": 900, "env": Spacious, "alpha": 1}
        whole, _, _ = await played([300, 300], slice_tokens=0, **options)
        sliced, _, _ = await played([300, 300], published, slice_tokens=SLICE, **options)
        assert sliced == whole

    simulate(main)


def test_one_who_is_stopped_between_two_slices_leaves_nothing_behind() -> None:
    async def main() -> None:
        [replica] = [Watched([250, 250], 900)]
        async with playing(
            [replica], batch_size=2, tasks=2, env=Spacious, slice_tokens=SLICE, sampler={"balance_seconds": 0.05}
        ) as scheduler:
            getting = asyncio.ensure_future(got(scheduler, 2))
            await asyncio.sleep(SLICE * 0.01 + 0.1)
            assert (scheduler.metrics()["sampler/gave_way"], len(scheduler.sampler._wait_queue)) == (1, 1)
            getting.cancel()
        [entry] = scheduler.sampler.entries
        assert (entry.inflight_tokens, entry.cached_contexts, entry.cached_tokens) == (0, {}, 0)

    simulate(main)


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_line_counts_slices_before_age() -> None:
    async def main() -> None:
        wait_queue = WaitQueue()
        route_requests = [
            RouteRequest(0, 0, 1, group_number=1, slices=1),
            RouteRequest(1, 1, 1, group_number=3),
            RouteRequest(2, 2, 1, group_number=2),
        ]
        waits = [asyncio.ensure_future(wait_queue.wait(route_request)) for route_request in route_requests]
        await asyncio.sleep(0)
        assert wait_queue.first is route_requests[2]
        for expected in (2, 1, 0):
            wait_queue.wake_next()
            await asyncio.wait([waits[expected]], timeout=0.1)
            assert waits[expected].done()

    simulate(main)


def test_one_who_is_called_and_has_not_looked_yet_is_still_before_the_others() -> None:
    async def main() -> None:
        wait_queue = WaitQueue()
        wait = asyncio.ensure_future(wait_queue.wait(RouteRequest(0, 0, 1, group_number=1)))
        await asyncio.sleep(0)
        wait_queue.wake_next()
        assert wait_queue.has_earlier(RouteRequest(1, 1, 1, group_number=2))
        await wait
        assert not wait_queue.has_earlier(RouteRequest(1, 1, 1, group_number=2))

    simulate(main)


def test_who_gives_way() -> None:
    async def main() -> None:
        entry = ReplicaEntry(0, fake(), asyncio.get_running_loop().create_future())
        first = RouteRequest(0, 0, 10, slices=1, slice_tokens=100)
        requests = [
            RequestProgress(1, 500, 99, 500, 99),  # has not had its slice
            RequestProgress(2, 500, 250, 500, 100),
            RequestProgress(3, 500, 250, 500, 99),  # has had others before, but not here
            RequestProgress(4, 500, 450, 500, 450),
            RequestProgress(5, 500, 120, 500, 120),
        ]
        assert requests_to_preempt([(entry, requests)], first) == [(entry, 4), (entry, 2), (entry, 5)]
        assert requests_to_preempt([(entry, requests)], first._replace(slices=2)) == [(entry, 4), (entry, 2)]
        assert requests_to_preempt([(entry, requests)], first._replace(slices=5)) == []

    simulate(main)


@pytest.mark.parametrize(("first", "waiting", "expected"), [
    (None, 0, []),
    (RouteRequest(0, 0, 10, slice_tokens=100), 1, [4]),
    (RouteRequest(0, 0, 10, slice_tokens=100), 9, [4, 2]),
    (RouteRequest(0, 0, 10), 9, []),
])  # fmt: skip
def test_no_more_give_way_than_wait(first: RouteRequest | None, waiting: int, expected: list[int]) -> None:
    aborted: list[int] = []

    class Telling(FakeReplica):
        def requests_in_flight(self) -> list[RequestProgress]:
            return [RequestProgress(4, 500, 450, 500, 450), RequestProgress(2, 500, 250, 500, 100)]

        def abort(self, request_id: int, cause: str) -> None:
            aborted.append(request_id)

    async def main() -> None:
        entry = ReplicaEntry(0, Telling(lambda request: [65]), asyncio.get_running_loop().create_future())
        balancer = Balancer(1.0)
        balancer.tick([entry], first, waiting)
        assert (aborted, balancer.gave_way) == (expected, len(expected))

    simulate(main)


def test_room_is_kept_for_what_slices_are_going_to_write() -> None:
    async def main() -> None:
        capacity = 10_000
        router = Router(PrefixRouting())
        entry = ReplicaEntry(0, fake(kv_capacity=capacity), asyncio.get_running_loop().create_future())
        router.rebuild([entry])
        router.mean_answer = 2_000.0
        counts = {}
        for slice_tokens in (0, 1_000, 50_000):
            while (
                router.admit(route_request := RouteRequest(0, 0, 500, slice_tokens=slice_tokens), None, 0, 0.0) is entry
            ):
                router.add(entry, route_request.context)
            counts[slice_tokens] = entry.inflight
            while entry.inflight:
                router.remove(entry, 500)
        assert counts == {0: MAX_FILL * capacity // 500, 1_000: capacity // 1_000, 50_000: capacity // 1_500}

    simulate(main)


def test_an_answer_goes_on_where_its_context_is_and_else_where_there_is_least_to_do() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        home, idle = (ReplicaEntry(n, fake(name=f"r{n}", kv_capacity=10_000), loop.create_future()) for n in range(2))
        router = Router(PrefixRouting(0.0))
        router.rebuild([home, idle])
        route_request = RouteRequest(1, 1, 1_000, slices=1, slice_tokens=100)
        assert router.admit(RouteRequest(0, 1, 10), None, 0, 0.0) is home  # the group's prompt is there
        router.add(home, 4_000)
        assert router.admit(route_request, home, 1_000, 0.0) is idle
        router.keep_context(home, session=1, tokens=1_000, group_number=0, now=0.0)
        assert router.admit(route_request, home, 1_000, 0.0) is home
        assert router.admit(route_request._replace(slices=0), home, 1_000, 0.0) is idle

    simulate(main)
