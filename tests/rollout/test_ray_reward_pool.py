"""Rewards in processes of their own on a real Ray: where they run, what a death costs, what is left at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray_cases import SECONDS, actors, until  # noqa: E402

from cadenza import DataProto, ResourceManager, RolloutScheduler  # noqa: E402
from cadenza.rewards import Sample, Scored  # noqa: E402
from cadenza.rollout import EnvManagerConfig, RolloutConfig  # noqa: E402
from cadenza.testing import FakeReplica, LocalCluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("nodes")]


class OneStep:
    async def reset(self, seed: int) -> str:
        return f"task {seed}"

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, int]]:
        return "", 1.0, True, False, {}


class Waiting:
    """Leaves a file that is named after its process, and answers once there is a file `go`."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def __call__(self, sample: Sample) -> Scored:
        (self.directory / f"{os.getpid()}.pid").touch()
        until((self.directory / "go").exists)
        return Scored(1.0, parts={"pid": float(os.getpid())})


class Keyless:
    async def open(self) -> None:
        raise RuntimeError("set JUDGE_KEY")

    async def __call__(self, sample: Sample) -> float:
        return 1.0


def processes(trajectories: list[Any]) -> DataProto:
    """A collator: which process scored each trajectory."""
    return DataProto({"pid": np.array([int(t.info["rewards"]["Waiting/pid"]) for t in trajectories])})


@asynccontextmanager
async def playing(reward: Any) -> AsyncIterator[RolloutScheduler]:
    """A scheduler in this process, whose rewards are computed in two others."""
    envs = EnvManagerConfig(domains={"toy": {"env": OneStep, "reward": reward}}, slots=8, reward_workers=2)
    cluster = LocalCluster([FakeReplica(lambda request: [65] * 4)])
    resources = ResourceManager.on_ray()
    scheduler = RolloutScheduler(RolloutConfig(batch_size=8), envs, resources, cluster, collator=processes)
    try:
        async with asyncio.timeout(2 * SECONDS):
            yield scheduler
    finally:
        await scheduler.shutdown()
        await cluster.sampler.close()
        await resources.shutdown()


@pytest.mark.parametrize("deaths", [1, 2])
def test_the_death_of_reward_processes_costs_no_sample(tmp_path: Path, deaths: int) -> None:
    def pids() -> set[int]:
        return {int(path.stem) for path in tmp_path.glob("*.pid")}

    async def main() -> None:
        async with playing({"name": Waiting, "directory": str(tmp_path)}) as scheduler:
            waiting = asyncio.ensure_future(scheduler.get_batch(batch_size=8))
            await asyncio.to_thread(until, lambda: len(pids()) == 2)
            killed = sorted(pids())[:deaths]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            (tmp_path / "go").touch()
            batch = await waiting
            assert batch is not None
            assert len(batch) == 8
            assert scheduler.metrics()["fate/failed"] == 0
            assert not set(batch.batch.numpy("pid").tolist()) & {os.getpid(), *killed}

    asyncio.run(main())
    until(lambda: not actors())


def test_a_reward_that_cannot_open_refuses_the_run_and_leaves_no_process() -> None:
    async def main() -> None:
        async with playing(Keyless) as scheduler:
            with pytest.raises(RuntimeError, match="set JUDGE_KEY"):
                await scheduler.get_batch(batch_size=8)
            assert scheduler.metrics()["fate/failed"] == 0

    asyncio.run(main())
    until(lambda: not actors())
