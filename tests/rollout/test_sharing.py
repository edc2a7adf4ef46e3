"""Devices that generate and train alternately: the lending rule by its numbers, and the devices that change hands."""

from __future__ import annotations

import asyncio

import pytest
from builders import got, now, playing, publish, responses, sim_replicas, simulate

from cadenza.rollout.sharing import DECAY, TRY_EVERY, DecayingRate, LendingRule, SharedDevices


def lending_rule(*, lend: float, take: float, alone: float, together: float, tokens: float = 100.0) -> LendingRule:
    """What was measured: seconds, tokens per second, tokens per missing group."""
    found = LendingRule()
    found.lend_seconds.add(lend)
    found.take_seconds.add(take)
    found.rates[False].add(alone * 10, 10.0)
    found.rates[True].add(together * 10, 10.0)
    found.group_tokens.add(tokens * 8, 8)
    return found


# -- the lending rule --------------------------------------------------------------------------------------------------


def test_a_rate_follows_the_last_measurements() -> None:
    rate = DecayingRate()
    assert rate.value is None
    for _ in range(50):
        rate.add(100.0, 10.0)
    assert rate.value == pytest.approx(10.0)
    for _ in range(50):
        rate.add(100.0, 5.0)
    assert rate.value == pytest.approx(20.0, rel=1e-3)


def test_a_measurement_counts_by_its_weight() -> None:
    rate = DecayingRate()
    rate.add(100.0, 10.0)
    rate.add(1000.0, 10.0, 0.1)
    assert rate.value == pytest.approx((100 * DECAY**0.1 + 100) / (10 * DECAY**0.1 + 1))


def test_lending_pays_when_the_faster_wait_and_both_changes_take_less_than_the_slow_wait() -> None:
    # 8 groups are 800 tokens: 80 s alone; lent 5 s with 50 tokens of the others, then 750 at 20/s = 37.5 s, then 3 s
    found = lending_rule(lend=5.0, take=3.0, alone=10.0, together=20.0)
    assert found.expected_wait(8, lent=False) == pytest.approx(80.0)
    assert found.expected_wait(8, lent=True) == pytest.approx(5.0 + 37.5 + 3.0)
    assert found.should_lend(8)
    assert found.refusals == 0


def test_lending_does_not_pay_for_a_short_wait() -> None:
    # one group is 100 tokens: 10 s alone; lent 5 + 50 / 20 + 3 = 10.5 s
    found = lending_rule(lend=5.0, take=3.0, alone=10.0, together=20.0)
    assert found.expected_wait(1, lent=True) == pytest.approx(10.5)
    assert not found.should_lend(1)
    assert found.should_lend(2)
    assert found.refusals == 1


def test_lending_does_not_pay_where_more_devices_write_no_faster() -> None:
    assert not lending_rule(lend=1.0, take=1.0, alone=10.0, together=10.0).should_lend(8)


def test_a_switch_that_costs_more_than_it_gains_is_refused() -> None:
    assert lending_rule(lend=20.0, take=19.0, alone=10.0, together=20.0).should_lend(8)
    assert not lending_rule(lend=40.0, take=39.0, alone=10.0, together=20.0).should_lend(8)


def test_a_batch_that_is_ready_needs_no_devices() -> None:
    found = lending_rule(lend=0.0, take=0.0, alone=1.0, together=100.0)
    assert not found.should_lend(0)
    assert found.refusals == 1


def test_both_ways_are_tried_before_they_are_compared() -> None:
    found = LendingRule()
    assert found.should_lend(8)
    found.rates[True].add(100.0, 10.0)
    assert not found.should_lend(8)
    found.rates[False].add(10.0, 10.0)
    found.group_tokens.add(100.0, 8)
    assert found.should_lend(8)


@pytest.mark.parametrize("together", [20.0, 10.0])
def test_the_other_way_is_tried_once_in_a_while(together: float) -> None:
    found = lending_rule(lend=1.0, take=1.0, alone=10.0, together=together)
    usual = together > 10.0
    chosen = [found.should_lend(8) for _ in range(3 * (TRY_EVERY + 1))]
    assert chosen == ([usual] * TRY_EVERY + [not usual]) * 3


# -- the devices -------------------------------------------------------------------------------------------------------


def test_devices_change_hands_and_no_token_is_written_twice() -> None:
    async def main() -> None:
        told: list[str] = []

        async def offload() -> None:
            told.append(f"offload {replicas[1].version} {await asleep()}")

        async def reload() -> None:
            told.append(f"reload {await asleep()}")
            await asyncio.sleep(3.0)

        async def asleep() -> bool:
            return scheduler.sampler.devices[1] == "asleep"

        replicas = sim_replicas(2, 400, wake_seconds=2.0)
        async with playing(replicas, batch_size=4, alpha=1, slots=4, tasks=20) as scheduler:
            shared = SharedDevices(scheduler, [1], 4, offload=offload, reload=reload)
            assert await shared.lend()
            shared.lending_rule.rates[False].add(1.0, 10.0)  # so slow that lending pays
            first = await got(scheduler, 4)
            await shared.take_back()
            assert not shared.is_lent
            assert scheduler.sampler.devices == {0: "active", 1: "asleep"}
            assert shared.lending_rule.take_seconds.value == pytest.approx(3.0, abs=0.02)
            await shared.take_back()  # once is enough
            await publish(scheduler, 1)
            assert await shared.lend()
            assert replicas[1].version == 1
            assert shared.lending_rule.lend_seconds.value == pytest.approx(2.0, abs=0.02)
            second = await got(scheduler, 4, 1)
            await shared.take_back()
            assert told == ["offload 0 False", "reload True", "offload 0 True", "reload True"]
            assert [len(response) for batch in (first, second) for response in responses(batch)] == [400] * 8
            await shared.lend()
        written = sum(replica.generated for replica in replicas)
        assert written == sum(replica.returned + sum(replica.discarded.values()) for replica in replicas)
        assert written == sum(scheduler.ledger.tokens.values())

    simulate(main)


def test_requests_move_with_their_tokens_and_are_counted() -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 400)
        async with playing(replicas, batch_size=4, alpha=1, slots=8, tasks=8) as scheduler:
            shared = SharedDevices(scheduler, [1], 4)
            assert await shared.lend()
            await scheduler.resume()
            await asyncio.sleep(1.0)
            await shared.take_back()
            assert shared.moved == 4
            assert shared.moved_tokens == 4 * len("task 0")
            batch = await got(scheduler, 4)
            assert now() == pytest.approx(4.0, abs=0.05)  # as if nothing had happened
            assert [len(response) for response in responses(batch)] == [400] * 4

    simulate(main)


def test_a_refusal_leaves_the_devices_with_the_actor() -> None:
    async def main() -> None:
        async with playing(sim_replicas(2, 100), batch_size=4, alpha=1, slots=8) as scheduler:
            shared = SharedDevices(scheduler, [1], 4)
            assert await shared.lend()
            await got(scheduler, 4)
            await shared.take_back()
            await publish(scheduler, 1)
            await asyncio.sleep(10.0)
            assert scheduler.queue.ready_groups >= 4
            assert not await shared.lend()
            assert (shared.is_lent, shared.lending_rule.refusals) == (False, 1)
            assert scheduler.sampler.devices == {0: "active", 1: "asleep"}

    simulate(main)


def test_the_last_replica_that_lives_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 100)
        async with playing(replicas, batch_size=4, slots=8) as scheduler:
            shared = SharedDevices(scheduler, [1], 4)
            assert await shared.lend()
            await got(scheduler, 4)
            replicas[0].crash()
            await publish(scheduler, 1)
            await got(scheduler, 4, 1)
            await shared.take_back()
            assert not shared.is_lent
            assert scheduler.sampler.devices[1] == "active"
        assert "replicas on devices [1] go on beside the actor: no other is alive" in caplog.text

    simulate(main)


@pytest.mark.parametrize("dies", [0.5, 4.0], ids=["in the wait for a batch", "while the actor has its devices"])
def test_when_the_last_other_replica_dies_those_that_were_taken_wake(
    dies: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        replicas = sim_replicas(2, 300)
        async with playing(replicas, batch_size=4, alpha=1, slots=4) as scheduler:
            shared = SharedDevices(scheduler, [1], 4)
            assert await shared.lend()
            shared.lending_rule.rates[False].add(1000.0, 1.0)  # so fast that lending does not pay
            await got(scheduler, 4)
            await shared.take_back()
            if dies > 1.0:
                replicas[0].crash()
                await asyncio.sleep(dies)
            await publish(scheduler, 1)
            assert not await shared.lend()
            asyncio.get_running_loop().call_later(dies, replicas[0].crash)
            batch = await got(scheduler, 4, 1)
            assert [len(response) for response in responses(batch)] == [300] * 4
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
            await shared.take_back()
            assert scheduler.sampler.devices == {0: "lost", 1: "active"}
        assert "replicas on devices [1] generate beside the actor: no other is alive" in caplog.text

    simulate(main)


def test_a_shared_replica_that_died_stays_out() -> None:
    async def main() -> None:
        replicas = sim_replicas(3, 100)
        async with playing(replicas, batch_size=4, slots=8) as scheduler:
            shared = SharedDevices(scheduler, [1, 2], 4)
            assert await shared.lend()
            shared.lending_rule.rates[False].add(1.0, 10.0)  # so slow that lending pays
            await got(scheduler, 4)
            replicas[1].crash()
            await publish(scheduler, 1)
            await got(scheduler, 4, 1)
            await shared.take_back()
            assert scheduler.sampler.devices == {0: "active", 1: "lost", 2: "asleep"}
            await publish(scheduler, 2)
            assert await shared.lend()
            assert scheduler.sampler.devices == {0: "active", 1: "lost", 2: "active"}

    simulate(main)


def test_a_run_that_begins_with_its_batch_ready_takes_the_replicas_off_the_devices_all_the_same() -> None:
    async def main() -> None:
        async def reload() -> None:
            raise AssertionError("the actor's states never left")

        async with playing(sim_replicas(2, 100), batch_size=4, alpha=1, slots=8) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(10.0)
            shared = SharedDevices(scheduler, [1], 4, reload=reload)
            assert not await shared.lend()
            await shared.take_back()
            assert scheduler.sampler.devices == {0: "active", 1: "asleep"}

    simulate(main)


def test_a_lend_that_fails_half_way_is_taken_back_whole() -> None:
    async def main() -> None:
        states = ["loaded"]

        async def offload() -> None:
            states.append("offloaded")

        async def reload() -> None:
            states.append("loaded")

        async with playing(sim_replicas(2, 100), batch_size=4, slots=8) as scheduler:
            shared = SharedDevices(scheduler, [1], 4, offload=offload, reload=reload)
            shared.lending_rule.rates[False].add(1.0, 10.0)  # so slow that lending pays
            await shared.lend()
            await got(scheduler, 4)
            await shared.take_back()
            scheduler.expand_sampler = broken  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="broken"):
                await shared.lend()
            assert states[-1] == "offloaded"
            await shared.take_back()
            assert states[-1] == "loaded"

    async def broken(*args: object) -> dict[str, object]:
        raise RuntimeError("broken")

    simulate(main)
