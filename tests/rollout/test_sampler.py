"""The contract of the sampler and its router, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from builders import (
    EventRecorder,
    OneStepEnv,
    chain,
    cluster_of,
    column,
    fake,
    fates,
    get,
    got,
    now,
    playing,
    pool,
    publish,
    responses,
    rows,
    sim_replicas,
    simulate,
    timed,
)

from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Finish, Generation, PauseMode, ReplicaLost, Request, RequestRefused, Sampling
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.prefix_routing import MAX_HOMES, PrefixRouting
from cadenza.rollout.router import SEQUENCE_WEIGHT, ReplicaEntry, Router, RouteRequest
from cadenza.rollout.sampler import GrantRequest, NoReplicas, SamplerConfig
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.testing import FakeReplica

SAMPLING = Sampling()


async def ask(sampler: LocalSampler, *, group: int = 0, context: int = 10, limit: int = 10_000) -> Generation:
    """A client: one request, whatever comes back."""
    route_request = RouteRequest(group, group, context)
    grant = await sampler.grant(GrantRequest(route_request))
    entry, id = grant.entry, grant.request_id
    request = Request(id, (np.zeros(context, np.int32),), context, limit, SAMPLING, id, 0, id, group, grant.epoch)
    try:
        return await entry.replica.generate(request)
    finally:
        sampler.release(grant)


def pick(router: Router, sticky: ReplicaEntry | None, group: int, *, context: int, cached: int) -> ReplicaEntry | None:
    return router.choose(RouteRequest(group, group, context), sticky, cached)


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(work)


def versions_of(batch: Any) -> list[list[int]]:
    """The versions of the response tokens, row by row."""
    return [row[row >= 0].tolist() for row in rows(batch, "versions")]


# -- suspend modes -----------------------------------------------------------------------------------------------------


def test_abort_returns_the_partial_tokens_at_once() -> None:
    async def main() -> None:
        sampler = LocalSampler(sim_replicas(1, 100))
        await sampler.resume()
        asking = start(ask(sampler))
        await asyncio.sleep(0.5)
        await sampler.suspend(PauseMode.ABORT)
        assert now() == pytest.approx(0.5, abs=0.011)
        part = await asking
        assert (part.finish, len(part.tokens)) == (Finish.ABORT, pytest.approx(50, abs=1))

    simulate(main)


def test_drain_lets_every_request_finish_and_grants_no_other() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        sampler = LocalSampler(replicas)
        await sampler.resume()
        asking = [start(ask(sampler, group=group)) for group in range(4)]
        await asyncio.sleep(0.5)
        suspending = start(sampler.suspend(PauseMode.DRAIN))
        await asyncio.sleep(0.1)
        late = start(ask(sampler, group=9))
        await suspending
        assert now() == pytest.approx(1.0)
        assert [(await one).finish for one in asking] == [Finish.STOP] * 4
        await asyncio.sleep(5.0)
        assert not late.done()
        await sampler.resume()
        assert len((await late).tokens) == 100

    simulate(main)


def test_drain_is_bounded_by_the_health_check_when_a_replica_hangs() -> None:
    async def main() -> None:
        hung, alive = sim_replicas(2, 100)
        sampler = LocalSampler([hung, alive], SamplerConfig(heartbeat_seconds=1.0, max_strikes=3))
        await sampler.resume()
        asking = [start(ask(sampler, group=group)) for group in range(2)]
        await asyncio.sleep(0.5)
        hung.hang()
        await sampler.suspend(PauseMode.DRAIN)
        assert now() <= 5.0
        assert sampler.devices == {0: "lost", 1: "active"}
        await asyncio.gather(*asking, return_exceptions=True)

    simulate(main)


def test_keep_freezes_every_request_in_place_and_resume_goes_on() -> None:
    async def main() -> None:
        [replica] = sim_replicas(1, 100)
        sampler = LocalSampler([replica])
        await sampler.resume()
        asking = start(ask(sampler))
        await asyncio.sleep(0.5)
        await sampler.suspend(PauseMode.KEEP)
        frozen, written = now(), replica.generated
        await asyncio.sleep(10.0)
        assert (replica.generated, asking.done()) == (written, False)
        await sampler.resume()
        part, when = await timed(asyncio.wait_for(asking, 100.0))
        assert (part.finish, len(part.tokens)) == (Finish.STOP, 100)
        assert when == pytest.approx(frozen + 10.0 + 0.5, abs=0.011)

    simulate(main)


def test_keep_and_new_weights_give_two_version_spans_inside_one_turn() -> None:
    async def main() -> None:
        [replica] = sim_replicas(1, 100)
        async with playing([replica], suspend_mode="keep", alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            await publish(scheduler, 1)
            batch = await got(scheduler, 4)
            assert versions_of(batch) == [[0] * 50 + [1] * 50] * 4
            assert replica.discarded == {}

    simulate(main)


def test_suspend_is_bounded_when_a_replica_does_not_answer() -> None:
    async def main() -> None:
        hung, alive = sim_replicas(2, 100)
        async with playing([hung, alive], alpha=1, sampler={"control_seconds": 7.0}) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            hung.hang()
            await scheduler.suspend()
            assert now() == pytest.approx(7.5, abs=0.02)
            assert "did not answer 'pause' within 7.0 s" in scheduler.sampler.lost["r0"]
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_in_every_mode_no_token_is_written_twice_or_lost(mode: PauseMode) -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        async with playing(replicas, env=chain(3), suspend_mode=mode, alpha=4, tasks=8) as scheduler:
            await scheduler.resume()
            for version in (1, 2, 3):
                await asyncio.sleep(0.4)
                await publish(scheduler, version)
                await scheduler.resume()
            batch = await got(scheduler, -1)
            assert [len(response) for response in responses(batch)] == [300] * 8
            assert sum(replica.generated for replica in replicas) == 8 * 300
            assert all(replica.discarded == {} for replica in replicas)

    simulate(main)


def test_a_gate_that_one_scheduler_holds_is_not_opened_by_another() -> None:
    async def main() -> None:
        cluster = cluster_of(fake())
        async with (
            playing(cluster=cluster, alpha=1) as trainer,
            playing(cluster=cluster, mode="val", tasks=4) as validator,
        ):
            await trainer.suspend()
            validating = start(got(validator, -1))
            await asyncio.sleep(5.0)
            assert not validating.done()
            await trainer.resume()
            assert (len(await validating), now()) == (4, 6.0)

    simulate(main)


def test_a_scheduler_that_is_shut_down_lets_go_of_the_gate() -> None:
    async def main() -> None:
        cluster = cluster_of(fake())
        async with playing(cluster=cluster, mode="val", tasks=4) as validator:
            async with playing(cluster=cluster, alpha=1) as trainer:
                await trainer.suspend()
            assert len(await asyncio.wait_for(got(validator, -1), 10.0)) == 4

    simulate(main)


def test_closing_the_sampler_wakes_whoever_waits_at_the_gate() -> None:
    async def main() -> None:
        sampler = LocalSampler([fake()])
        await sampler.suspend()
        asking = start(ask(sampler))
        await asyncio.sleep(1.0)
        await sampler.close()
        with pytest.raises(InfrastructureError, match="the sampler is closed"):
            await asking

    simulate(main)


# -- a caller that gives up --------------------------------------------------------------------------------------------


def test_a_suspend_whose_caller_gives_up_leaves_no_replica_paused() -> None:
    async def main() -> None:
        late, quick = sim_replicas(2, 100)
        async with playing([late, quick], batch_size=8, tasks=8, stall_seconds=100) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.3)
            late.late_abort(5.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scheduler.suspend(), 1.0)
            await asyncio.sleep(10.0)
            batch, when = await timed(got(scheduler, 8))
            assert (len(batch), when < 20.0) == (8, True)

    simulate(main)


def test_a_shrink_whose_caller_gives_up_leaves_no_replica_half_gone() -> None:
    async def main() -> None:
        late, quick = sim_replicas(2, 100)
        async with playing([late, quick], alpha=1) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.3)
            late.late_abort(5.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scheduler.shrink_sampler([0]), 1.0)
            await asyncio.sleep(100.0)
            assert scheduler.sampler.devices[0] in ("active", "asleep", "lost")
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_a_rolling_update_whose_caller_gives_up_leaves_no_replica_paused() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100, load_seconds=5.0)
        async with playing(replicas, batch_size=8, tasks=8, alpha=1, stall_seconds=100) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.3)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scheduler.sampler.load_weights(1), 1.0)
            batch, when = await timed(got(scheduler, 8))
            assert (len(batch), when < 30.0) == (8, True)

    simulate(main)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_behind_a_closed_gate_all_replicas_load_at_once() -> None:
    async def main() -> None:
        sampler = LocalSampler(sim_replicas(4, 100, load_seconds=3.0))
        await publish(sampler, 1)
        assert now() == pytest.approx(3.0)
        assert sampler.version == 1

    simulate(main)


def test_with_the_gate_open_replicas_are_updated_one_by_one_and_the_others_go_on() -> None:
    async def main() -> None:
        first, second = replicas = sim_replicas(2, 1000, load_seconds=3.0)
        async with playing(replicas, batch_size=2, alpha=1, tasks=2, sampling={"max_tokens": 2000}) as scheduler:
            published: list[float] = []
            await scheduler.resume()
            scheduler.sampler.on_version.append(lambda version: published.append(now()))
            await asyncio.sleep(1.0)
            loading = start(scheduler.sampler.load_weights(1))
            await asyncio.sleep(1.5)  # the first one loads
            assert (first.generating, second.generating, scheduler.sampler.version) == (False, True, 0)
            await asyncio.sleep(3.0)  # the second one loads
            assert (first.generating, second.generating, scheduler.sampler.version) == (True, False, 0)
            await loading
            assert published == [pytest.approx(7.0, abs=0.03)]
            batch, when = await timed(got(scheduler, 2))
            assert when == pytest.approx(13.0, abs=0.03)  # ten seconds of writing, three of standing still
            for versions in versions_of(batch):
                assert sorted(versions) == versions
                assert set(versions) == {0, 1}
            assert sum(replica.generated for replica in replicas) == 2000

    simulate(main)


def test_a_load_that_fails_once_is_tried_again() -> None:
    async def main() -> None:
        flaky, well = sim_replicas(2, 100)
        async with playing([flaky, well], alpha=1) as scheduler:
            flaky.fail_load(1)
            await publish(scheduler, 1)
            assert scheduler.sampler.devices == {0: "active", 1: "active"}
            assert (flaky.version, well.version, scheduler.sampler.version) == (1, 1, 1)

    simulate(main)


@pytest.mark.parametrize("gate", ["closed", "open"])
def test_a_load_that_fails_twice_costs_the_replica_and_the_others_go_on(gate: str) -> None:
    async def main() -> None:
        broken, well = sim_replicas(2, 100)
        async with playing([broken, well], alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            broken.fail_load(2)
            if gate == "closed":
                await scheduler.suspend()
            await scheduler.sampler.load_weights(1)
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "could not load version 1" in scheduler.sampler.lost["r0"]
            batch = await got(scheduler, 4)
            assert batch.meta_info["version"] == 1
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


def test_a_load_that_never_ends_costs_the_replica_and_the_cause_names_its_deadline() -> None:
    async def main() -> None:
        slow, well = sim_replicas(2, 100)
        slow.load_seconds = 10_000.0
        sampler = LocalSampler([slow, well], SamplerConfig(load_seconds=50.0))
        await publish(sampler, 1)
        assert now() == pytest.approx(50.0, abs=1.1)
        assert sampler.devices == {0: "lost", 1: "active"}
        assert "50" in sampler.lost["r0"]
        assert "None" not in sampler.lost["r0"]

    simulate(main)


def test_when_no_replica_takes_the_weights_the_error_names_each_with_its_cause() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        for replica in replicas:
            replica.fail_load(2)
        sampler = LocalSampler(replicas)
        await sampler.suspend()
        with pytest.raises(NoReplicas, match=r"no replica took version 1: r0: .*; r1: "):
            await sampler.load_weights(1)

    simulate(main)


def test_when_the_last_replica_dies_whoever_waits_for_a_batch_is_told() -> None:
    async def main() -> None:
        [replica] = sim_replicas(1, 100)
        async with playing([replica]) as scheduler:
            waiting = start(get(scheduler, 4))
            await asyncio.sleep(0.5)
            replica.crash()
            with pytest.raises(NoReplicas, match="no replica is left to generate; the last one, r0, was lost"):
                await waiting
            assert now() == 0.5

    simulate(main)


# -- routing -----------------------------------------------------------------------------------------------------------


def replicas_of(replicas: list[FakeReplica], key: str) -> dict[int, set[str]]:
    """By session or group: the replicas that served it."""
    found: dict[int, set[str]] = {}
    for replica in replicas:
        for request in replica.requests:
            found.setdefault(getattr(request, key), set()).add(replica.name)
    return found


def test_the_turns_of_a_session_stay_on_its_replica() -> None:
    async def main() -> None:
        replicas = pool(4, lambda request: 1.0 + request.session % 3)
        async with playing(replicas, env=chain(6), batch_size=16, slots=16) as scheduler:
            scheduler.sampler.router.mean_answer = 10.0
            await got(scheduler, 16)
        assert all(len(names) == 1 for names in replicas_of(replicas, "session").values())
        assert all(len(replica.requests) == 4 * 6 for replica in replicas)

    simulate(main)


def test_the_members_of_a_group_share_a_home() -> None:
    class Long(OneStepEnv):
        async def reset(self, seed: int) -> str:
            return "x" * 1000

    async def main() -> None:
        replicas = pool(4)
        async with playing(replicas, env=Long, group_size=4, batch_size=16, slots=16) as scheduler:
            scheduler.sampler.router.mean_answer = 10.0
            await got(scheduler, 16)
        assert all(len(names) == 1 for names in replicas_of(replicas, "group").values())
        assert [len(replica.requests) for replica in replicas] == [4] * 4

    simulate(main)


def test_a_group_with_a_short_prompt_spreads_when_its_home_is_loaded() -> None:
    async def main() -> None:
        replicas = pool(4)
        async with playing(replicas, group_size=64, batch_size=64, slots=64) as scheduler:
            await got(scheduler, 64)
        assert [len(replica.requests) for replica in replicas] == pytest.approx([16] * 4, abs=4)

    simulate(main)


def entries(*loads: int, capacity: int = 100_000, answer: float = 50.0) -> tuple[Router, list[ReplicaEntry]]:
    """A router over entries that carry so many tokens, when answers have so many."""
    loop = asyncio.get_running_loop()
    found = [ReplicaEntry(i, fake(name=f"r{i}", kv_capacity=capacity), loop.create_future()) for i in range(len(loads))]
    router = Router(PrefixRouting())
    router.mean_answer = answer
    router.rebuild(found)
    for entry, load in zip(found, loads, strict=True):
        if load:
            router.add(entry, load - SEQUENCE_WEIGHT)
    return router, found


def test_a_request_stays_where_its_prefix_is_while_the_load_there_is_worth_it() -> None:
    async def main() -> None:
        router, (home, idle) = entries(3_000, 0)
        assert pick(router, home, 0, context=1_100, cached=1_000) is home
        assert router.escapes == 0
        assert pick(router, None, 0, context=1_100, cached=0) is idle

    simulate(main)


def test_a_request_leaves_its_prefix_when_the_load_there_costs_more_than_computing_it_again() -> None:
    async def main() -> None:
        router, (home, idle) = entries(50_000, 0)
        assert pick(router, home, 0, context=1_100, cached=1_000) is idle
        assert router.escapes == 1

    simulate(main)


def test_a_request_leaves_its_prefix_the_sooner_the_longer_answers_are() -> None:
    async def main() -> None:
        router, (home, idle) = entries(3_000, 0)
        for _ in range(2_000):
            router.observe_answer_length(10_000)
        assert router.mean_answer == pytest.approx(10_000, rel=0.01)
        assert pick(router, home, 0, context=1_100, cached=1_000) is idle

    simulate(main)


def test_a_request_stays_with_its_prefix_the_longer_the_more_requests_its_prefill_would_hold_up() -> None:
    async def main() -> None:
        router, (home, other) = entries(30_000, 0)
        for _ in range(20):
            router.add(other, 0)
        assert pick(router, home, 0, context=1_100, cached=1_000) is home
        router, (home, other) = entries(30_000, 0)
        router.add(other, 20 * SEQUENCE_WEIGHT)
        assert pick(router, home, 0, context=1_100, cached=1_000) is other

    simulate(main)


def test_a_request_leaves_its_prefix_when_the_kv_cache_there_has_no_room() -> None:
    async def main() -> None:
        router, (home, idle) = entries(9_500, 0, capacity=10_000)
        assert pick(router, home, 0, context=3_000, cached=2_900) is idle
        router, (home, _) = entries(6_500, 0, capacity=10_000)
        assert pick(router, home, 0, context=3_000, cached=2_900) is home

    simulate(main)


def test_when_no_kv_cache_has_room_a_request_stays_with_its_prefix() -> None:
    async def main() -> None:
        router, (home, _) = entries(9_500, 9_400, capacity=10_000)
        assert pick(router, home, 0, context=3_000, cached=2_900) is home

    simulate(main)


def test_pressure_and_not_the_number_of_requests_decides() -> None:
    async def main() -> None:
        small, large = fake(name="small", kv_capacity=10_000), fake(name="large", devices=(1,), kv_capacity=30_000)
        async with playing([small, large], batch_size=40, slots=40) as scheduler:
            await got(scheduler, 40)
        assert len(large.requests) == pytest.approx(3 * len(small.requests), abs=4)

    simulate(main)


def test_a_preemption_under_kv_pressure_loses_no_token() -> None:
    async def main() -> None:
        cost = CostModel(a=0.01, b=0.0, c=0.0, p=0.0, kv_capacity=500)
        replicas = sim_replicas(2, 100, cost=cost)
        async with playing(replicas, batch_size=32, slots=32) as scheduler:
            batch = await got(scheduler, 32)
            assert [len(response) for response in responses(batch)] == [100] * 32
        for replica in replicas:
            replica.check()

    simulate(main)


def test_what_the_router_keeps_does_not_grow_with_the_sessions_in_flight() -> None:
    async def main() -> None:
        router, found = entries(0, 0, 0, 0)
        flight = []
        for session in range(20_000):
            entry = pick(router, None, session, context=10, cached=0)
            assert entry is not None
            router.add(entry, 10)
            flight.append(entry)
            assert len(router._heap) <= 8 * len(found) + 65
        for entry in flight:
            router.remove(entry, 10)
            assert len(router._heap) <= 8 * len(found) + 65
        assert [entry.inflight_tokens for entry in found] == [0] * 4

    simulate(main)


def test_the_homes_of_old_groups_are_forgotten() -> None:
    async def main() -> None:
        router, _ = entries(0, 0)
        for group in range(MAX_HOMES + 100):
            pick(router, None, group, context=10, cached=0)
        assert len(router.rule._homes) == MAX_HOMES

    simulate(main)


# -- shrink and expand -------------------------------------------------------------------------------------------------


def test_a_shrink_moves_requests_with_their_tokens() -> None:
    async def main() -> None:
        leaving, staying = replicas = sim_replicas(2, 100)
        async with playing(replicas, batch_size=8, tasks=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            report = await scheduler.shrink_sampler([0])
            assert report["moved"] == 4
            batch, when = await timed(got(scheduler, 8))
            assert when == pytest.approx(1.0, abs=0.02)
            assert [len(response) for response in responses(batch)] == [100] * 8
            assert (leaving.generated, staying.generated) == (pytest.approx(200, abs=4), pytest.approx(600, abs=4))
            assert leaving.generated + staying.generated == 800

    simulate(main)


def test_shrink_and_expand_report_what_they_did() -> None:
    async def main() -> None:
        replicas = sim_replicas(3, 100, wake_seconds=2.0, load_seconds=3.0)
        async with playing(replicas, alpha=1) as scheduler:
            shrunk = await scheduler.shrink_sampler([1, 2])
            assert shrunk == {
                "replicas": ["r1", "r2"],
                "unchanged": [],
                "lost": [],
                "devices": {0: "active", 1: "asleep", 2: "asleep"},
                "seconds": 0.0,
                "moved": 0,
                "moved_tokens": 0,
            }
            await publish(scheduler, 1)
            expanded = await scheduler.expand_sampler([2])
            assert expanded == {
                "replicas": ["r2"],
                "unchanged": [],
                "lost": [],
                "devices": {0: "active", 1: "asleep", 2: "active"},
                "seconds": pytest.approx(2.0 + 3.0),
            }
            assert replicas[2].version == 1

    simulate(main)


def test_skip_load_trusts_a_replica_that_has_the_weights() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100, wake_seconds=2.0, load_seconds=3.0)
        async with playing(replicas) as scheduler:
            await publish(scheduler, 1)
            await scheduler.shrink_sampler([1])
            report = await scheduler.expand_sampler([1], skip_load=True)
            assert report["seconds"] == pytest.approx(2.0)
            assert scheduler.sampler.devices == {0: "active", 1: "active"}

    simulate(main)


def test_a_replica_that_comes_back_takes_new_requests() -> None:
    async def main() -> None:
        replicas = pool(2)
        async with playing(replicas, batch_size=8) as scheduler:
            await scheduler.shrink_sampler([1])
            await got(scheduler, 8)
            assert [len(replica.requests) for replica in replicas] == [8, 0]
            await scheduler.expand_sampler([1])
            await got(scheduler, 8)
            assert [len(replica.requests) for replica in replicas] == [12, 4]

    simulate(main)


def test_a_replica_that_comes_back_behind_a_closed_gate_waits_for_resume() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        async with playing(replicas, batch_size=8, alpha=1, tasks=8) as scheduler:
            await scheduler.resume()
            await scheduler.shrink_sampler([1])
            await asyncio.sleep(0.5)
            await scheduler.suspend()
            await scheduler.expand_sampler([1])
            await asyncio.sleep(5.0)
            assert not any(replica.generating for replica in replicas)
            assert len(await got(scheduler, 8)) == 8

    simulate(main)


def test_a_replica_that_does_not_wake_is_given_up_and_the_report_says_so() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        async with playing(replicas, sampler={"control_seconds": 10.0}) as scheduler:
            await scheduler.shrink_sampler([1])
            replicas[1].wake_seconds = 10_000.0
            report = await scheduler.expand_sampler([1])
            assert (report["replicas"], report["lost"]) == ([], ["r1"])
            assert report["devices"] == {0: "active", 1: "lost"}
            assert "None" not in scheduler.sampler.lost["r1"]
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_a_shrink_does_not_open_a_closed_gate() -> None:
    async def main() -> None:
        async with playing(sim_replicas(2, 100)) as scheduler:
            await scheduler.suspend()
            await scheduler.shrink_sampler([1])
            assert scheduler.sampler.is_held
            await scheduler.expand_sampler([1])
            assert scheduler.sampler.is_held

    simulate(main)


# -- health ------------------------------------------------------------------------------------------------------------


def test_a_replica_that_hangs_is_given_up_after_so_many_looks() -> None:
    async def main() -> None:
        hung, alive = sim_replicas(2, 1000)
        sampler = LocalSampler([hung, alive], SamplerConfig(heartbeat_seconds=2.0, max_strikes=3))
        lost: list[float] = []
        sampler.on_lost.append(lambda name, cause: lost.append(now()))
        await sampler.resume()
        asking = [start(ask(sampler, group=group)) for group in range(2)]
        await asyncio.sleep(1.0)
        hung.hang()
        await asyncio.gather(*asking, return_exceptions=True)
        assert lost == [pytest.approx(2.0 + 3 * 2.0)]  # the look at 2 s sees the progress of the first second
        assert "no progress in 3 looks, 2.0 s apart" in sampler.lost["r0"]

    simulate(main)


def test_a_replica_that_swallows_requests_is_given_up_though_it_says_that_it_is_idle() -> None:
    async def main() -> None:
        hung, alive = sim_replicas(2, 100)
        patience = {"heartbeat_seconds": 2.0, "max_strikes": 3}
        async with playing([hung, alive], batch_size=8, stall_seconds=100, sampler=patience) as scheduler:
            hung.hang()
            batch, when = await timed(got(scheduler, 8))
            assert (len(batch), when) == (8, pytest.approx(3 * 2.0 + 1.0, abs=2.1))
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}

    simulate(main)


def test_a_replica_that_does_not_even_answer_is_given_up_after_so_many_looks() -> None:
    class Mute(FakeReplica):
        async def stats(self) -> Any:
            await asyncio.sleep(1e5)

    async def main() -> None:
        replicas = [Mute(seconds=1e5, name="mute"), fake(name="well", devices=(1,))]
        sampler = LocalSampler(replicas, SamplerConfig(heartbeat_seconds=2.0, max_strikes=3))
        await sampler.resume()
        asking = start(ask(sampler))
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), Exception)
        assert now() == pytest.approx(12.0)  # three looks, each two seconds after the last and two seconds long
        assert sampler.devices == {0: "lost", 1: "active"}

    simulate(main)


def test_a_slow_replica_that_moves_is_not_given_up() -> None:
    async def main() -> None:
        slow, quick = sim_replicas(2, 100)
        patience = {"heartbeat_seconds": 5.0, "max_strikes": 2}
        async with playing([slow, quick], batch_size=8, sampler=patience) as scheduler:
            slow.slow(50.0)
            assert len(await got(scheduler, 8)) == 8
            assert now() == pytest.approx(50.0, abs=0.1)
            assert scheduler.sampler.devices == {0: "active", 1: "active"}

    simulate(main)


def test_an_idle_replica_is_not_given_up() -> None:
    async def main() -> None:
        sampler = LocalSampler(sim_replicas(2, 100), SamplerConfig(heartbeat_seconds=1.0))
        await sampler.resume()
        await asyncio.sleep(100.0)
        assert sampler.devices == {0: "active", 1: "active"}

    simulate(main)


def test_a_paused_replica_is_not_given_up() -> None:
    async def main() -> None:
        patience = {"heartbeat_seconds": 1.0}
        async with playing(sim_replicas(2, 100), suspend_mode="keep", alpha=1, sampler=patience) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            await scheduler.suspend()
            await asyncio.sleep(100.0)
            assert scheduler.sampler.devices == {0: "active", 1: "active"}

    simulate(main)


def test_a_flaky_replica_survives_occasional_failures() -> None:
    async def main() -> None:
        flaky, well = sim_replicas(2, 10)
        async with playing([flaky, well], batch_size=4, sampler={"max_strikes": 3}) as scheduler:
            for step in range(10):
                flaky.flaky(2)
                assert len(await got(scheduler, 4, step)) == 4
                await publish(scheduler, step + 1)
            assert scheduler.sampler.devices == {0: "active", 1: "active"}
            assert fates(scheduler) == {"trained": 40}

    simulate(main)


def test_a_replica_that_fails_request_after_request_is_given_up() -> None:
    async def main() -> None:
        broken, well = sim_replicas(2, 10)
        async with playing([broken, well], batch_size=8, sampler={"max_strikes": 3}) as scheduler:
            broken.flaky(1000)
            assert len(await got(scheduler, 8)) == 8
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "3 requests failed in a row" in scheduler.sampler.lost["r0"]
            assert fates(scheduler) == {"trained": 8}

    simulate(main)


class Odd(FakeReplica):
    """A replica one of whose calls raises what no protocol foresees."""

    def __init__(self, call: str, **options: Any) -> None:
        super().__init__(lambda request: "x" * 1000, name="odd", **options)
        self.call = call

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        self.fail("generate")
        return super().generate(request)

    async def load_weights(self, version: int, weights: object) -> None:
        self.fail("load_weights")
        await super().load_weights(version, weights)

    async def stats(self) -> Any:
        self.fail("stats")
        return await super().stats()

    def fail(self, call: str) -> None:
        if call == self.call:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("call", ["generate", "load_weights", "stats"])
def test_a_replica_that_raises_whatever_it_likes_costs_itself_and_nothing_else(call: str) -> None:
    async def main() -> None:
        odd, well = Odd(call, seconds=100.0), fake(devices=(1,))
        patience = {"heartbeat_seconds": 1.0}
        async with playing([odd, well], batch_size=8, alpha=1, tasks=8, sampler=patience) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            await publish(scheduler, 1)
            assert len(await got(scheduler, 8)) == 8
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "CUDA error" in scheduler.sampler.lost["odd"]
            assert fates(scheduler) == {"trained": 8}
            assert scheduler.metrics()["errors/user_code"] == 0

    simulate(main)


def test_a_failure_of_infrastructure_under_a_turn_is_not_seen_by_the_rollout() -> None:
    async def main() -> None:
        first, second, third = sim_replicas(3, 100)
        async with playing([first, second, third], env=chain(3), batch_size=6, tasks=6) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(0.5)
            first.crash()
            await asyncio.sleep(1.0)
            second.crash()
            batch = await got(scheduler, 6)
            assert fates(scheduler) == {"trained": 6}
            assert [len(response) for response in responses(batch)] == [300] * 6
            assert column(batch, "attempt") == [0] * 6

    simulate(main)


def test_the_sampler_tells_what_happens_to_it() -> None:
    async def main() -> None:
        story = EventRecorder()
        async with playing(sim_replicas(2, 100), alpha=1) as scheduler:
            scheduler.sampler.events = story
            await publish(scheduler, 1)
            await scheduler.resume()
            await scheduler.shrink_sampler([1])
            await scheduler.expand_sampler([1])
        kinds = [event.kind for event in story.events]
        assert kinds == ["suspend", "suspended", "publish", "resume", "shrink", "expand"]

    simulate(main)


class Quitter(FakeReplica):
    """A replica one of whose calls ends in a cancellation that nobody asked for."""

    def __init__(self, call: str, seconds: float) -> None:
        super().__init__(lambda request: "x" * 1000, seconds=seconds, name="quitter")
        self.call = call

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        self.fail("generate")
        future = super().generate(request)
        if self.call == "the future of generate":
            asyncio.get_running_loop().call_later(0.5, future.cancel)
        return future

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        self.fail("pause")
        await super().pause(epoch, mode)

    async def load_weights(self, version: int, weights: object) -> None:
        self.fail("load_weights")
        await super().load_weights(version, weights)

    def fail(self, call: str) -> None:
        if call == self.call:
            raise asyncio.CancelledError


def test_suspend_does_not_return_while_a_replica_generates_whose_pause_was_cancelled() -> None:
    async def main() -> None:
        quitter, well = Quitter("pause", 100.0), fake(100.0, devices=(1,))
        async with playing([quitter, well], alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            await scheduler.suspend()
            written = (await quitter.stats()).generated
            await asyncio.sleep(20.0)
            assert (await quitter.stats()).generated == written
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "quitter" in scheduler.sampler.lost
            assert len(await got(scheduler, 4)) == 4
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


@pytest.mark.parametrize("gate", ["closed", "open"])
def test_a_version_is_not_published_on_a_replica_whose_load_was_cancelled(gate: str) -> None:
    async def main() -> None:
        quitter, well = Quitter("load_weights", 100.0), fake(100.0, devices=(1,))
        async with playing([quitter, well], alpha=1, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            if gate == "closed":
                await scheduler.suspend()
            await scheduler.sampler.load_weights(1)
            assert (well.version, scheduler.sampler.version) == (1, 1)
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert len(await got(scheduler, 4)) == 4
            assert fates(scheduler) == {"trained": 4}

    simulate(main)


@pytest.mark.parametrize("call", ["generate", "the future of generate"])
def test_a_request_that_a_replica_cancels_by_itself_is_retried_elsewhere(call: str) -> None:
    async def main() -> None:
        quitter, well = Quitter(call, 1.0), fake(devices=(1,))
        async with playing([quitter, well], batch_size=8, tasks=8) as scheduler:
            assert len(await got(scheduler, 8)) == 8
            assert fates(scheduler) == {"trained": 8}
            assert scheduler.metrics()["errors/user_code"] == 0
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "requests failed in a row" in scheduler.sampler.lost["quitter"]

    simulate(main)


def test_a_generation_whose_logprobs_do_not_match_its_tokens_is_retried_elsewhere() -> None:
    class Malformed(FakeReplica):
        def generate(self, request: Request) -> asyncio.Future[Generation]:
            future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            future.set_result(Generation(np.zeros(3, np.int32), np.zeros(2, np.float32), (), Finish.STOP))
            return future

    async def main() -> None:
        replicas = [Malformed(name="malformed"), fake(name="well", devices=(1,))]
        async with playing(replicas, batch_size=8, tasks=8) as scheduler:
            batch = await got(scheduler, 8)
            assert [len(response) for response in responses(batch)] == [10] * 8
            assert fates(scheduler) == {"trained": 8}
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            assert "logprobs" in scheduler.sampler.lost["malformed"]

    simulate(main)


def test_a_replica_that_answers_nothing_while_it_loads_is_not_given_up_by_the_health_check() -> None:
    class OneCallAtATime(FakeReplica):
        def __init__(self, **options: Any) -> None:
            super().__init__(lambda request: "x" * 100, seconds=300.0, **options)
            self.turn = asyncio.Lock()

        async def load_weights(self, version: int, weights: object) -> None:
            async with self.turn:
                await asyncio.sleep(60.0)
                await super().load_weights(version, weights)

        async def stats(self) -> Any:
            async with self.turn:
                return await super().stats()

    async def main() -> None:
        replicas = [OneCallAtATime(name=f"r{i}", devices=(i,)) for i in range(2)]
        patience = {"heartbeat_seconds": 5.0, "max_strikes": 2}
        async with playing(replicas, alpha=1, tasks=8, batch_size=8, sampler=patience) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(5.0)
            await scheduler.sampler.load_weights(1)
            assert scheduler.sampler.lost == {}
            assert [replica.version for replica in replicas] == [1, 1]
            assert len(await got(scheduler, 8)) == 8
            assert scheduler.sampler.lost == {}

    simulate(main)


class LateAnswers(FakeReplica):
    """So many looks at it in a row get no answer in time."""

    def __init__(self, looks: int) -> None:
        super().__init__(lambda request: "x" * 1000, seconds=60.0, name="late")
        self.looks = looks

    async def stats(self) -> Any:
        self.looks -= 1
        if self.looks >= 0:
            await asyncio.sleep(1e5)
        return await super().stats()


def test_a_replica_that_is_late_for_a_look_or_two_is_not_given_up() -> None:
    async def main() -> None:
        sampler = LocalSampler([LateAnswers(2)], SamplerConfig(heartbeat_seconds=2.0, max_strikes=3))
        await sampler.resume()
        answer, when = await timed(ask(sampler))
        assert (len(answer.tokens), when) == (1000, 60.0)
        assert sampler.lost == {}

    simulate(main)


def test_a_replica_that_is_late_for_look_after_look_is_given_up() -> None:
    async def main() -> None:
        replicas = [LateAnswers(3), fake(name="well", devices=(1,))]
        sampler = LocalSampler(replicas, SamplerConfig(heartbeat_seconds=2.0, max_strikes=3))
        lost: list[float] = []
        sampler.on_lost.append(lambda name, cause: lost.append(now()))
        await sampler.resume()
        asking = start(ask(sampler))
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), Exception)
        assert sampler.devices == {0: "lost", 1: "active"}
        assert 2.0 + 2 * 2.0 < lost[0] <= 3 * (2.0 + 2.0)

    simulate(main)


def test_requests_that_are_refused_speak_against_no_replica() -> None:
    class Narrow(FakeReplica):
        def generate(self, request: Request) -> asyncio.Future[Generation]:
            if request.context <= 100:
                return super().generate(request)
            future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
            future.set_exception(RequestRefused("too long"))
            return future

    class Long(OneStepEnv):
        async def reset(self, seed: int) -> str:
            await asyncio.sleep(5.0)
            return "x" * (200 if seed < 40 else 10)

    async def main() -> None:
        patience = {"heartbeat_seconds": 10.0, "max_strikes": 3}
        async with playing(
            [Narrow()], env=Long, slots=1, batch_size=1, max_attempts=1, sampler=patience
        ) as scheduler:  # fmt: skip
            batch, when = await timed(got(scheduler, 1))
            assert (column(batch, "task_id"), when) == (["toy/40"], 41 * 5.0)
            assert scheduler.sampler.devices == {0: "active"}

    simulate(main)


@pytest.mark.parametrize("moment", ["a request", "resume"])
def test_when_one_replica_is_lost_and_the_other_asleep_a_batch_waits_for_expand(moment: str) -> None:
    class Dying(FakeReplica):
        async def resume(self) -> None:
            raise ReplicaLost("power cut")

    async def main() -> None:
        dying = Dying(name="dying", seconds=1.0) if moment == "resume" else fake(name="dying")
        async with playing([dying, fake(name="well", devices=(1,))], alpha=1) as scheduler:
            await got(scheduler, 4)
            if moment == "resume":
                await scheduler.suspend()
            await scheduler.shrink_sampler([1])
            if moment == "a request":
                dying.kill("power cut")
            waiting = start(got(scheduler, 8, 1))
            await asyncio.sleep(5.0)
            assert scheduler.sampler.devices == {0: "lost", 1: "asleep"}
            assert not waiting.done()
            await scheduler.expand_sampler([1])
            assert len(await asyncio.wait_for(waiting, 10.0)) == 8

    simulate(main)
