"""The sampler as a worker of its own, rehearsed in one process under virtual time: the contract is that of a sampler in
the scheduler's process, and what is lost on the way costs what docs/ray.md says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import FOREVER, client, column, fake, get, got, publish, simulate, site

from cadenza import Cluster, ResourceManager
from cadenza.cluster.remote_replica import SILENT_SECONDS, ReplicaWorker
from cadenza.cluster.worker_handle import LocalWorkerHandle
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Generation, ReplicaLost, Request
from cadenza.rollout.failures import SchedulerClosed
from cadenza.rollout.router import RouteRequest
from cadenza.rollout.sampler import GrantRequest, NoReplicas
from cadenza.rollout.sampler_client import InferenceService
from cadenza.rollout.sampler_process import FORGET_SECONDS
from cadenza.testing import ByteCodec, FakeReplica


class Silent(LocalWorkerHandle):
    """Of a worker that does not answer."""

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(FOREVER)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_and_every_grant_is_given_back(workers: int) -> None:
    async def main() -> None:
        async with site() as here:
            scheduler = here.scheduler(batch_size=8, group_size=4, slots=6, workers=workers, alpha=1.0)
            for step in range(3):
                batch = await got(scheduler, 8, step)
                assert batch.meta_info["version"] == step
                await publish(scheduler, step + 1)
            await scheduler.shutdown()
            await asyncio.sleep(1.0)
            assert [(entry.inflight, entry.inflight_tokens, entry.cached_tokens) for entry in here.sampler.entries] == [
                (0, 0, 0)
            ] * 2

    simulate(main)


@pytest.mark.parametrize("call", ["get_batch", "resume"])
@pytest.mark.parametrize("after", [0.0, 0.1])
def test_a_suspension_is_not_undone_by_a_call_that_came_before(call: str, after: float) -> None:
    """Calls to an async actor may overtake each other."""

    class Winding(LocalWorkerHandle):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "resume":
                await asyncio.sleep(0.5)
            return await super().call(method, *args)

    async def main() -> None:
        replica = fake(10.0)
        async with site([replica]) as here:
            here.process.__class__ = Winding
            scheduler = here.scheduler(batch_size=4, alpha=1.0)
            calling: Any = get(scheduler, 4) if call == "get_batch" else scheduler.resume()
            waiting = asyncio.ensure_future(calling)
            await asyncio.sleep(after)
            await scheduler.suspend()
            await asyncio.sleep(5.0)
            assert not replica._running
            await scheduler.resume()
            await waiting
            assert await get(scheduler, 4) is not None

    simulate(main)


@pytest.mark.parametrize("call", ["get_batch", "resume"])
@pytest.mark.parametrize("late", ["state", "suspend", "resume"])
def test_a_call_that_came_after_a_suspension_opens_the_gate(call: str, late: str) -> None:
    class Winding(LocalWorkerHandle):
        async def call(self, method: str, *args: Any) -> Any:
            if method == late:
                await asyncio.sleep(0.02)
            return await super().call(method, *args)

    async def main() -> None:
        async with site([fake(1.0)]) as here:
            scheduler = here.scheduler(batch_size=4, alpha=1.0)
            await got(scheduler, 4)
            here.process.__class__ = Winding
            suspending = asyncio.ensure_future(scheduler.suspend())
            await asyncio.sleep(0)
            await (get(scheduler, 4) if call == "get_batch" else scheduler.resume())
            await suspending
            await asyncio.sleep(1.0)
            assert here.sampler.is_open
            assert here.sampler.holders == []

    simulate(main)


@pytest.mark.parametrize("call", ["suspend", "resume", "get_batch", "shrink", "shutdown"])
def test_nobody_waits_for_ever_for_a_sampler_that_is_silent(call: str) -> None:
    async def main() -> None:
        async with site() as here:
            scheduler = here.scheduler(batch_size=4, alpha=1.0)
            await got(scheduler, 4)
            await scheduler.suspend()
            here.process.__class__ = Silent
            calls: dict[str, Any] = {
                "suspend": scheduler.suspend,
                "resume": scheduler.resume,
                "get_batch": lambda: get(scheduler, 4),
                "shrink": lambda: scheduler.shrink_sampler([0]),
                "shutdown": scheduler.shutdown,
            }
            async with asyncio.timeout(600.0):
                if call == "shutdown":
                    await calls[call]()
                else:
                    with pytest.raises(NoReplicas, match="the sampler is gone: no answer"):
                        await calls[call]()
            here.process.__class__ = LocalWorkerHandle

    simulate(main)


def test_the_death_of_the_sampler_is_told_to_whoever_waits_and_whoever_comes_later() -> None:
    async def main() -> None:
        async with site([fake(10.0)]) as here:
            scheduler = here.scheduler(batch_size=4)
            waiting = asyncio.ensure_future(get(scheduler, 4))
            await asyncio.sleep(1.0)
            here.process.kill()
            for batch in (waiting, get(scheduler, 4)):
                with pytest.raises(NoReplicas, match="sampler"):
                    await batch

    simulate(main)


def test_a_scheduler_that_holds_the_gate_of_a_dead_sampler_can_be_shut_down() -> None:
    async def main() -> None:
        async with site([fake(10.0)]) as here:
            scheduler = here.scheduler(batch_size=4, workers=2)
            await scheduler.resume()
            await scheduler.suspend()
            here.process.kill()
            await asyncio.sleep(1.0)

    simulate(main)


def test_who_asks_after_the_end_is_not_left_waiting() -> None:
    async def main() -> None:
        async with site() as here:
            sampler = here.service.sampler
            await sampler.refresh()
            await sampler.resume()
            here.process.kill()
            await asyncio.sleep(1.0)
            with pytest.raises(InfrastructureError, match="the sampler is gone"):
                await sampler.grant(GrantRequest(RouteRequest(0, 0, 10)))

    simulate(main)


def test_an_error_that_ends_a_grant_that_waits_is_told_to_the_client() -> None:
    async def main() -> None:
        async with site() as here:
            sampler = here.service.sampler
            await sampler.refresh()

            async def broken(*args: Any) -> Any:
                raise RuntimeError("a bug")

            here.sampler.grant = broken  # type: ignore[method-assign]
            with pytest.raises(InfrastructureError, match=r"the sampler raised RuntimeError\('a bug'\)"):
                await asyncio.wait_for(sampler.grant(GrantRequest(RouteRequest(0, 0, 10))), 60.0)

    simulate(main)


@pytest.mark.parametrize("has_started", [True, False])
def test_a_scheduler_that_is_gone_does_not_keep_the_gate_closed(has_started: bool) -> None:
    async def main() -> None:
        async with site([fake(1.0)]) as here:
            gone, other = here.scheduler(batch_size=4), here.scheduler(batch_size=4)
            if has_started:
                await gone.resume()
            await gone.suspend()
            waiting = asyncio.ensure_future(get(other, 4))
            await asyncio.sleep(1.0)
            assert client(other).is_held
            client(gone)._channel.close()  # type: ignore[union-attr]
            batch = await asyncio.wait_for(waiting, 2 * FORGET_SECONDS)
            assert batch is not None
            assert column(batch, "attempt") == [0] * 4
            assert not client(other).is_held  # or nobody would notice a stall
            assert client(other).is_open

    simulate(main)


def test_a_scheduler_that_is_gone_before_it_said_anything_does_not_keep_the_gate_closed() -> None:
    class Winding(LocalWorkerHandle):
        async def call(self, method: str, *args: Any) -> Any:
            if method == "exchange":
                await asyncio.sleep(0.5)
            return await super().call(method, *args)

    async def main() -> None:
        async with site([fake(1.0)]) as here:
            here.process.__class__ = Winding
            gone, other = here.scheduler(batch_size=4), here.scheduler(batch_size=4)
            await gone.suspend()
            client(gone)._channel.close()  # type: ignore[union-attr]
            assert await asyncio.wait_for(get(other, 4), 2 * FORGET_SECONDS) is not None

    simulate(main)


def test_a_scheduler_that_is_gone_with_its_grants_costs_no_replica() -> None:
    async def main() -> None:
        replica = fake(1.0)
        async with site([replica]) as here:
            gone = here.scheduler(batch_size=4)
            getting = asyncio.ensure_future(get(gone, 4))
            await asyncio.sleep(0.5)
            assert here.sampler.entries[0].inflight
            client(gone)._channel.close()  # type: ignore[union-attr]
            await asyncio.sleep(2 * FORGET_SECONDS)
            assert here.sampler.lost == {}
            assert here.sampler.entries[0].inflight == 0
            getting.cancel()
            assert await get(here.scheduler(batch_size=4), 4) is not None

    simulate(main)


@pytest.mark.parametrize("seconds", [2.0, 10.0])
def test_a_replica_that_swallows_the_requests_of_a_scheduler_that_lives_is_given_up(seconds: float) -> None:
    class Swallowing(FakeReplica):
        def generate(self, request: Request) -> asyncio.Future[Generation]:
            swallowed.append(asyncio.get_running_loop().create_future())
            return swallowed[-1]

        def kill(self, cause: str) -> None:
            for future in swallowed:
                future.set_exception(ReplicaLost(cause))

    swallowed: list[asyncio.Future[Generation]] = []

    async def main() -> None:
        replicas = [Swallowing(name="bad"), fake(1.0, name="good", devices=(1,))]
        async with site(replicas, heartbeat_seconds=seconds) as here:
            batch = await asyncio.wait_for(get(here.scheduler(batch_size=4, slots=4), 4), 100.0)
            assert batch is not None
            assert list(here.sampler.lost) == ["bad"]

    simulate(main)


def test_a_controller_that_only_calls_keeps_the_gate_closed_until_it_resumes() -> None:
    async def main() -> None:
        async with site([fake(1.0)]) as here:
            scheduler = here.scheduler(batch_size=4)
            controller = InferenceService(here.process, ByteCodec()).sampler
            await controller.suspend()
            assert controller._channel is None  # nothing that would have to live on with the loop of this call
            waiting = asyncio.ensure_future(get(scheduler, 4))
            await asyncio.sleep(3 * FORGET_SECONDS)
            assert not waiting.done()
            await controller.resume()
            assert await waiting is not None

    simulate(main)


def test_a_shutdown_that_meets_a_start_leaves_nothing_running() -> None:
    async def main() -> None:
        async with site() as here:
            scheduler = here.scheduler(batch_size=4, workers=2)
            starting = asyncio.ensure_future(scheduler.resume())
            await asyncio.sleep(0)
            await scheduler.shutdown()
            with pytest.raises(SchedulerClosed):
                await starting
            assert scheduler._run_task is None

    simulate(main)


class FakeReplicaWorker(ReplicaWorker):
    """A replica in a process of its own."""

    def __init__(self) -> None:
        super().__init__(FakeReplica(lambda request: "ok", name=f"r{self.place.rank}", devices=self.place.devices))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_and_the_env_workers_reach_replicas_by_their_handles(workers: int) -> None:
    async def main() -> None:
        placement = ResourceManager(2).place({"inference": "0-1"})["inference"]
        async with (
            Cluster("inference", FakeReplicaWorker, placement) as cluster,
            site(cluster.worker_handles) as here,  # type: ignore[arg-type]
        ):
            scheduler = here.scheduler(batch_size=4, workers=workers)
            for step in range(2):
                assert column(await got(scheduler, 4, step), "attempt") == [0] * 4
                await publish(scheduler, step + 1)

    simulate(main)


def test_a_client_that_was_closed_calls_neither_the_sampler_nor_the_replicas() -> None:
    async def main() -> None:
        placement = ResourceManager(2).place({"inference": "0-1"})["inference"]
        async with (
            Cluster("inference", FakeReplicaWorker, placement) as cluster,
            site(cluster.worker_handles) as here,  # type: ignore[arg-type]
        ):
            scheduler = here.scheduler(batch_size=4)
            await got(scheduler, 4)
            workers: list[Any] = [handle._worker_host._worker for handle in cluster.worker_handles]  # type: ignore[attr-defined]
            name = client(scheduler).name
            assert all(name in mailbox for worker in workers for mailbox in worker._mailboxes)
            sampler_process = here.process._worker_host._worker
            await scheduler.shutdown()
            await client(scheduler).close()
            await asyncio.sleep(SILENT_SECONDS + 1.0)
            assert not any(name in mailbox for worker in workers for mailbox in worker._mailboxes)
            assert sampler_process._clients == {}

    simulate(main)


@pytest.mark.parametrize("handle", [Silent, LocalWorkerHandle])
def test_the_service_of_a_sampler_that_does_not_answer_can_be_shut_down(handle: type[LocalWorkerHandle]) -> None:
    async def main() -> None:
        async with site() as here:
            await here.service.sampler.refresh()
            if handle is LocalWorkerHandle:
                here.process.kill()
            here.process.__class__ = handle
            async with asyncio.timeout(60.0):
                await here.service.shutdown()

    simulate(main)
