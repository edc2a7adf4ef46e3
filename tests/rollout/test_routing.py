"""The routing choice is open: `sampler.routing` names a rule, also one that is defined outside the package."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from builders import fake, get, got, playing, pool, simulate, timed

from cadenza import RolloutScheduler
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.router import ReplicaEntry, ReplicaState, Router, RouteRequest
from cadenza.rollout.sampler import NoReplicas, SamplerConfig
from cadenza.rollout.wait_queue import RETRY_SECONDS


class RoundRobin:
    """Takes the active replicas in turn, whatever they hold."""

    def __init__(self, config: SamplerConfig) -> None:
        self._count = itertools.count()

    def choose(
        self, route_request: RouteRequest, sticky: ReplicaEntry | None, cached: int, router: Router
    ) -> ReplicaEntry | None:
        return router.active[next(self._count) % len(router.active)] if router.active else None


class Broken(RoundRobin):
    def choose(self, *args: Any) -> ReplicaEntry | None:
        raise ZeroDivisionError("a bug")


class Stubborn(RoundRobin):
    """Remembers the first replica for ever."""

    first: ReplicaEntry | None = None

    def choose(self, *args: Any) -> ReplicaEntry | None:
        self.first = self.first or super().choose(*args)
        return self.first


class Picky(RoundRobin):
    """Lets the requests of the first group wait while another one runs."""

    def choose(self, route_request: RouteRequest, *args: Any) -> ReplicaEntry | None:
        entry = super().choose(route_request, *args)
        return None if entry is not None and route_request.group_number == 0 and entry.inflight else entry


class Undecided(RoundRobin):
    """Says None to every request the first time."""

    def __init__(self, config: SamplerConfig) -> None:
        super().__init__(config)
        self.asked: list[int] = []

    def choose(self, route_request: RouteRequest, *args: Any) -> ReplicaEntry | None:
        self.asked.append(route_request.session)
        return super().choose(route_request, *args) if self.asked.count(route_request.session) > 1 else None


async def take_batches(scheduler: RolloutScheduler, count: int) -> None:
    for step in range(count):
        await get(scheduler, 4, step)


def here(name: str) -> dict[str, str]:
    return {"routing": f"{__name__}:{name}"}


def test_a_rule_from_outside_the_package_chooses_the_replicas_of_a_scheduler() -> None:
    async def main() -> None:
        asked: list[str] = []
        replicas = [
            fake(lambda request, name=f"r{number}": asked.append(name) or 1.0, name=f"r{number}", devices=(number,))
            for number in range(3)
        ]
        async with playing(replicas, sampler=here("RoundRobin"), batch_size=12, slots=12, tasks=12) as scheduler:
            assert len(await got(scheduler, 12)) == 12
            assert asked == ["r0", "r1", "r2"] * 4

    simulate(main)


def test_a_rule_sees_only_the_replicas_that_are_active() -> None:
    async def main() -> None:
        async with playing(pool(3), sampler=here("RoundRobin")) as scheduler:
            await scheduler.shrink_sampler([1])
            assert [entry.index for entry in scheduler.sampler.router.active] == [0, 2]
            await got(scheduler, 4)

    simulate(main)


def test_a_request_that_the_rule_lets_wait_holds_up_no_other() -> None:
    async def main() -> None:
        replica = fake(lambda request: 1.0 + request.session)
        async with playing([replica], sampler=here("Picky"), batch_size=8, slots=8, alpha=0) as scheduler:
            await scheduler.sampler.refresh()
            (entry,) = scheduler.sampler.entries
            scheduler.sampler.router.add(entry, 1)  # a request that runs for long
            waiting = asyncio.ensure_future(timed(got(scheduler, 8)))
            await asyncio.sleep(8.5)
            assert sorted(request.session for request in replica.requests) == list(range(1, 8))
            scheduler.sampler.router.remove(entry, 1)
            assert len((await waiting)[0]) == 8

    simulate(main)


def test_a_request_that_the_rule_lets_wait_is_asked_for_again_though_nothing_happens() -> None:
    async def main() -> None:
        async with playing(pool(1), sampler=here("Undecided"), batch_size=4, slots=4) as scheduler:
            _, when = await timed(got(scheduler, 4))
            assert when == pytest.approx(RETRY_SECONDS + 1.0)

    simulate(main)


def test_a_rule_that_raises_ends_the_run_and_is_named() -> None:
    async def main() -> None:
        async with playing(pool(2), sampler=here("Broken")) as scheduler:
            with pytest.raises(NoReplicas, match=r"routing 'test_routing:Broken' failed: ZeroDivisionError\('a bug'\)"):
                await get(scheduler, 4)

    simulate(main)


def test_a_rule_that_chooses_a_replica_which_sleeps_is_told_so() -> None:
    async def main() -> None:
        async with playing(pool(2), sampler=here("Stubborn"), alpha=1) as scheduler:
            await got(scheduler, 4)
            await scheduler.shrink_sampler([0])
            assert scheduler.sampler.entries[0].state is ReplicaState.ASLEEP
            with pytest.raises(NoReplicas, match=r"chose replica r0, which is asleep; .* one of router\.active"):
                await take_batches(scheduler, 10)

    simulate(main)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ("prefx", "routing 'prefx' is not known; take one of prefix, or write 'module:name'"),
        ("nowhere:Rule", "'nowhere:Rule' cannot be loaded"),
        ("builtins:str", "which has no method 'choose'; see RoutingRule"),
    ],
)
def test_a_rule_that_cannot_be_had_is_refused_at_once(routing: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSampler(pool(1), SamplerConfig(routing=routing))
