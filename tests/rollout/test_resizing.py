"""Shrink and expand accept what is already so, and all devices may be shrunk: generation waits for the next expand."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from builders import client, fake, get, got, now, playing, pool, publish, simulate, site, timed

from cadenza.rollout.failures import Stalled

# -- what is already so ------------------------------------------------------------------------------------------------


def test_a_shrink_of_a_device_that_is_asleep_changes_nothing_and_says_so() -> None:
    async def main() -> None:
        async with playing(pool(3)) as scheduler:
            await scheduler.shrink_sampler([2])
            epoch = scheduler.sampler.epoch
            again = await scheduler.shrink_sampler([2])
            assert (again["replicas"], again["unchanged"], again["moved"]) == ([], [2], 0)
            assert scheduler.sampler.epoch == epoch
            both = await scheduler.shrink_sampler([1, 2])
            assert (both["replicas"], both["unchanged"]) == (["r1"], [2])
            assert scheduler.sampler.devices == {0: "active", 1: "asleep", 2: "asleep"}

    simulate(main)


def test_an_expand_of_a_device_that_is_active_changes_nothing_and_says_so() -> None:
    async def main() -> None:
        async with playing(pool(3)) as scheduler:
            first = await scheduler.expand_sampler([0])
            assert (first["replicas"], first["unchanged"]) == ([], [0])
            await scheduler.shrink_sampler([1, 2])
            both = await scheduler.expand_sampler([0, 2])
            assert (both["replicas"], both["unchanged"]) == (["r2"], [0])
            assert scheduler.sampler.devices == {0: "active", 1: "asleep", 2: "active"}

    simulate(main)


def test_an_expand_of_what_is_active_does_not_open_a_gate_that_is_held() -> None:
    async def main() -> None:
        async with playing(pool(2)) as scheduler:
            await scheduler.suspend()
            await scheduler.expand_sampler([0, 1])
            assert scheduler.sampler.is_held
            assert not scheduler.sampler.is_open

    simulate(main)


def test_a_lost_replica_is_still_refused() -> None:
    async def main() -> None:
        replicas = pool(2)
        async with playing(replicas, sampler={"heartbeat_seconds": 1.0, "max_strikes": 1}) as scheduler:
            replicas[1].kill("power")
            await got(scheduler, 4)
            assert scheduler.sampler.devices == {0: "active", 1: "lost"}
            with pytest.raises(ValueError, match=r"shrink: devices \{1: 'lost'\} cannot change; the sampler has"):
                await scheduler.shrink_sampler([1])
            with pytest.raises(ValueError, match=r"expand: devices \{1: 'lost'\} cannot change; the sampler has"):
                await scheduler.expand_sampler([0, 1])

    simulate(main)


# -- no device is left -------------------------------------------------------------------------------------------------


def test_all_devices_may_be_shrunk_and_turns_go_on_from_their_tokens_after_the_expand() -> None:
    async def main() -> None:
        replicas = [fake(2.0, name=f"r{number}", devices=(number,)) for number in range(2)]
        async with playing(replicas, tasks=4) as scheduler:
            await scheduler.resume()
            await asyncio.sleep(1.0)
            report = await scheduler.shrink_sampler([0, 1])
            assert (report["moved"], report["devices"]) == (4, {0: "asleep", 1: "asleep"})
            waiting = asyncio.ensure_future(timed(got(scheduler, 4)))
            await asyncio.sleep(10.0)
            assert not waiting.done()
            await scheduler.expand_sampler([1])
            batch, when = await waiting
            assert (len(batch), when) == (4, pytest.approx(12.0))
            assert scheduler.metrics()["fate/failed"] == 0

    simulate(main)


def test_a_sampler_without_devices_is_no_stall_and_get_batch_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with playing(pool(2), stall_seconds=100) as scheduler:
            await scheduler.shrink_sampler([0, 1])
            with caplog.at_level(logging.WARNING):
                waiting = asyncio.ensure_future(timed(got(scheduler, 4)))
                await asyncio.sleep(1_000.0)
            assert not waiting.done()
            told = [record.getMessage() for record in caplog.records if "get_batch waits" in record.getMessage()]
            assert told == [
                "get_batch waits for an expand: all devices of the sampler were shrunk ({0: 'asleep', 1: 'asleep'})"
            ]
            await scheduler.expand_sampler([0, 1])
            assert len((await waiting)[0]) == 4

    simulate(main)


@pytest.mark.parametrize("where", ["here", "far"])
@pytest.mark.parametrize("order", ["shrink", "suspend, shrink, resume"])
def test_a_get_batch_that_waits_already_says_that_all_devices_were_shrunk(
    where: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            if where == "here":
                scheduler = await stack.enter_async_context(playing(pool(2, 100.0)))
            else:
                scheduler = (await stack.enter_async_context(site(pool(2, 100.0)))).scheduler(batch_size=4)
            waiting = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(10.0)
            with caplog.at_level(logging.WARNING):
                for call in order.split(", "):
                    await (scheduler.shrink_sampler([0, 1]) if call == "shrink" else getattr(scheduler, call)())
                await asyncio.sleep(1.0)
            told = [record.getMessage() for record in caplog.records]
            assert told == [
                "get_batch waits for an expand: all devices of the sampler were shrunk ({0: 'asleep', 1: 'asleep'})"
            ]
            await scheduler.expand_sampler([0, 1])
            assert len(await waiting) == 4

    simulate(main)


def test_after_the_expand_the_stall_counts_from_there() -> None:
    async def main() -> None:
        async with playing([fake(1e9)], stall_seconds=100, sampler={"heartbeat_seconds": 1e7}) as scheduler:
            await scheduler.shrink_sampler([0])
            waiting = asyncio.ensure_future(get(scheduler, 4))
            await asyncio.sleep(250.0)
            await scheduler.expand_sampler([0])
            with pytest.raises(Stalled):
                await waiting
            assert now() == pytest.approx(350.0)

    simulate(main)


def test_a_stall_because_the_last_active_replica_was_lost_names_the_devices_to_expand() -> None:
    async def main() -> None:
        replicas = pool(2)
        async with playing(replicas, stall_seconds=100) as scheduler:
            await scheduler.shrink_sampler([1])
            replicas[0].kill("power")
            with pytest.raises(
                Stalled, match=r"no device of the sampler is active: \{0: 'lost', 1: 'asleep'\}; expand"
            ):
                await get(scheduler, 4)

    simulate(main)


def test_weights_published_without_a_device_are_loaded_by_the_expand() -> None:
    async def main() -> None:
        replicas = pool(2)
        async with playing(replicas, alpha=1) as scheduler:
            await scheduler.shrink_sampler([0, 1])
            await scheduler.suspend()
            await scheduler.sampler.load_weights(1)
            await scheduler.resume()
            assert scheduler.sampler.version == 1
            assert [replica.version for replica in replicas] == [0, 0]
            waiting = asyncio.ensure_future(got(scheduler, 4))
            await scheduler.expand_sampler([0, 1])
            assert [replica.version for replica in replicas] == [1, 1]
            assert (await waiting).meta_info["version"] == 1

    simulate(main)


def test_a_suspension_over_the_shrink_of_all_devices_keeps_the_gate_closed() -> None:
    async def main() -> None:
        async with playing(pool(2)) as scheduler:
            await scheduler.resume()
            await scheduler.suspend()
            await scheduler.shrink_sampler([0, 1])
            await scheduler.expand_sampler([0])
            assert not scheduler.sampler.is_open
            await scheduler.resume()
            assert scheduler.sampler.is_open

    simulate(main)


def test_schedulers_of_a_sampler_elsewhere_wait_for_the_expand_too() -> None:
    async def main() -> None:
        async with site() as here:
            scheduler = here.scheduler(stall_seconds=100)
            await scheduler.resume()
            await scheduler.shrink_sampler([0, 1])
            waiting = asyncio.ensure_future(got(scheduler, 4))
            await asyncio.sleep(500.0)
            assert not waiting.done()
            assert client(scheduler).waits_for == "expand"
            assert (await scheduler.expand_sampler([0, 1]))["unchanged"] == []
            assert len(await waiting) == 4
            assert client(scheduler).waits_for == ""

    simulate(main)


def test_a_program_may_shrink_everything_for_every_train_step() -> None:
    async def main() -> None:
        async with playing(pool(2), alpha=1) as scheduler:
            for step in range(5):
                assert len(await got(scheduler, 4, step)) == 4
                await scheduler.shrink_sampler([0, 1])
                await asyncio.sleep(20.0)  # the train step
                await publish(scheduler, step + 1)
                await scheduler.expand_sampler([0, 1])
            assert scheduler.metrics()["fate/failed"] == 0

    simulate(main)


def test_an_expand_that_is_refused_in_part_opens_the_gate_for_the_rest() -> None:
    async def main() -> None:
        async with playing(pool(2)) as scheduler:
            await got(scheduler, 4)
            await scheduler.shrink_sampler([1])
            await publish(scheduler, 1)
            await scheduler.resume()
            await scheduler.shrink_sampler([0])
            with pytest.raises(ValueError, match=r"skip_load: \{'r1': 0\} do not have version 1"):
                await scheduler.expand_sampler([0, 1], skip_load=True)
            assert scheduler.sampler.devices == {0: "active", 1: "asleep"}
            assert scheduler.sampler.is_open
            await got(scheduler, 4)

    simulate(main)
