"""Workers that would be in processes of their own, with calls that are late and overtake each other, under random
deaths, suspensions and moves: every batch comes, and in the end nobody holds anything. One schedule for each seed;
CADENZA_CHAOS_SEEDS says how many (`make fuzz` runs more of them)."""

from __future__ import annotations

import asyncio
import os
import uuid
from random import Random
from typing import Any

import pytest
from builders import RemoteSamplerSetup, client, column, fake, get, got, simulate, site, stepping

from cadenza import RolloutScheduler
from cadenza.cluster import worker_handle
from cadenza.rollout import fleet, sampler_client
from cadenza.rollout.sampler_client import SamplerClient
from cadenza.rollout.sampler_process import FORGET_SECONDS
from cadenza.testing import FakeReplica

SEEDS = int(os.environ.get("CADENZA_CHAOS_SEEDS", "40"))
STEPS = 5
MAX_KILLS = 12


class Chaos:
    """One schedule and its randomness."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.workers = random.choice([0, 1, 3])
        kv = random.choice([1 << 30, 120, 300])
        self.replicas = [self._replica(device, kv) for device in range(3)]
        self.kills = 0
        self.has_lost_replica = False
        self.has_lost_scheduler = False

    async def main(self) -> None:
        async with site(self.replicas) as here:
            train = self._train(here)
            validation = here.scheduler(
                mode="val", batch_size=8, group_size=2, slots=4, workers=self.random.choice([0, 1])
            )
            validating = asyncio.ensure_future(get(validation, 8))
            await train.resume()
            trouble = asyncio.ensure_future(self._trouble(here, train, validation))
            try:
                await self._steps(here, train, trouble)
            finally:
                for task in (trouble, validating):
                    task.cancel()
                await asyncio.wait([trouble, validating])
            if not trouble.cancelled():
                trouble.result()
            await train.resume()
            await train.shutdown()
            await validation.shutdown()
            await asyncio.sleep(2 * FORGET_SECONDS)
            self._nothing_is_held(here)

    async def _steps(self, here: RemoteSamplerSetup, train: RolloutScheduler, trouble: asyncio.Future[None]) -> None:
        sampler = here.service.sampler
        seen: set[tuple[int, int]] = set()
        for version in range(STEPS):
            overtaken = [asyncio.ensure_future(train.suspend())] if self.random.random() < 0.3 else []
            await asyncio.sleep(0)
            getting = asyncio.ensure_future(got(train, 8, version))
            if self.random.random() < 0.5:  # soon enough to meet the call that opens the gate
                await asyncio.sleep(self.random.choice([0, 0.01, 0.5]))
                await self._suspended(train)
            keys = set(column(await getting, "traj_key"))
            await asyncio.gather(*overtaken)
            assert len(keys) >= 8
            assert not keys & seen
            seen |= keys
            suspends = self.random.random() < 0.5
            if suspends:
                await train.suspend()
            await sampler.load_weights(version + 1)
            if suspends:
                await train.resume()
            if trouble.done():
                trouble.result()

    async def _trouble(self, here: RemoteSamplerSetup, train: RolloutScheduler, validation: RolloutScheduler) -> None:
        random = self.random
        while True:
            await asyncio.sleep(random.choice([0.05, 1.0, 7.0]))
            kind = random.random()
            if kind < 0.3:
                workers = train._slots._workers if self.workers else []  # type: ignore[attr-defined]
                if workers and self.kills < MAX_KILLS:
                    self.kills += 1
                    random.choice(workers).handle.kill()
            elif kind < 0.5:
                await self._suspended(here.service.sampler)
            elif kind < 0.73 and not self.has_lost_replica:
                self.has_lost_replica = True
                random.choice(self.replicas).kill("power")
            elif kind < 0.8 and not self.has_lost_scheduler:
                self.has_lost_scheduler = True
                await validation.suspend()
                channel = client(validation)._channel
                assert channel is not None
                channel.close()
            elif kind < 0.95:
                device = random.choice([0, 1])
                try:
                    await train.shrink_sampler([device])
                    await asyncio.sleep(random.choice([0, 1, 3]))
                    await train.expand_sampler([device])
                except ValueError:
                    pass  # it is lost

    async def _suspended(self, who: RolloutScheduler | SamplerClient) -> None:
        """For a while."""
        await who.suspend()
        self._nobody_generates()
        await asyncio.sleep(self.random.choice([0, 1, 5]))
        self._nobody_generates()
        await who.resume()

    # -- the parts -------------------------------------------------------------------------------------------------

    def _replica(self, device: int, kv_capacity: int) -> FakeReplica:
        random = self.random
        return fake(
            lambda request: random.choice([0.1, 1.0, 10.0]),
            tokens=random.choice([3, 10]), name=f"r{device}", devices=(device,), kv_capacity=kv_capacity,
        )  # fmt: skip

    def _train(self, here: RemoteSamplerSetup) -> RolloutScheduler:
        random = self.random

        async def step(task: int, number: int) -> Any:
            await asyncio.sleep(random.choice([0, 0.1, 3.0, 20.0]))
            if random.random() < 0.05:
                raise RuntimeError("the env broke")
            return ("go on", 0.5, False, False, {}) if random.random() < 0.5 else None

        async def reward(trajectory: Any) -> float:
            await asyncio.sleep(random.choice([0, 2.0]))
            return 1.0

        options: dict[str, Any] = {
            "alpha": random.choice([0.0, 1.0, 2.0]),
            "staleness": random.choice(["wait", "drop"]),
            "extra_members": random.choice([0, 1]),
        }
        if random.random() < 0.3:
            options["group_filter"] = lambda group: random.random() < 0.8
        return here.scheduler(
            env=stepping(step), reward=reward, batch_size=8, group_size=2, slots=10, workers=self.workers,
            error_budget=10**6, max_turns=6, close_seconds=5.0, **options,
        )  # fmt: skip

    # -- what must hold --------------------------------------------------------------------------------------------

    def _nobody_generates(self) -> None:
        assert [replica.name for replica in self.replicas if replica._running] == []

    def _nothing_is_held(self, here: RemoteSamplerSetup) -> None:
        for entry in here.sampler.entries:
            assert (entry.inflight, entry.inflight_tokens, entry.cached_tokens, entry.cached_contexts) == (
                0,
                0,
                0,
                {},
            ), entry.replica.name
        for known in here.process._worker_host._worker._clients.values():
            assert (known.grant_server._granted, known.grant_server._pending, known.grant_server._idle_sessions) == (
                {},
                {},
                {},
            )
        assert [replica.name for replica in self.replicas if replica._running or replica._waiting] == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_batch_comes_and_nothing_is_held_in_the_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = Chaos(seed)
    random = chaos.random

    class Winding(worker_handle.LocalWorkerHandle):
        async def call(self, method: str, *args: Any) -> Any:
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.02, 0.3]))
            answer = await super().call(method, *args)
            await asyncio.sleep(random.choice([0, 0, 0.001, 0.02]))
            return answer

    monkeypatch.setattr(worker_handle, "LocalWorkerHandle", Winding)
    monkeypatch.setattr(fleet, "MAX_LOSSES", 10 * MAX_KILLS)
    monkeypatch.setattr(sampler_client.uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128)))
    simulate(chaos.main)
