"""`cadenza bench ray`: CPU time of rollouts on Ray per trajectory and per turn, and the time of a batch.

The replicas and envs only answer, so the time is that of Cadenza and of Ray. It is the CPU time, user and system, of
this process and all of its descendants: the controller, the scheduler, the sampler, the env workers, the replicas, and
Ray's own processes (raylet, GCS, agents). Nothing is subtracted. Start-up and the first batches do not count; the CPU
time of the start is a figure of its own.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.benchmarks.control_plane import NAMED, BenchReplica
from cadenza.benchmarks.paced import own_ray
from cadenza.cluster import Cluster, ResourceManager
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.data import DataProto
from cadenza.inference.replica import Finish, Generation, Request, Span, Tokens
from cadenza.rollout import DomainConfig, EnvManagerConfig, InferenceService, RolloutConfig
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.testing import ByteCodec

WORKERS, ENVS, BATCH, GROUP, REPLICAS = 4, 256, 512, 8, 2
PROMPT = 64
TARGETS = {
    "cpu_ms_per_trajectory": 2.0,
    "cpu_ms_per_trajectory_4096": 2.5,
    "get_batch_512x4096_ms": 150.0,
}
"""Upper limits of the figures."""
TURNS_TARGET = 400.0
"""Lower limit of `turns_per_cpu_second`."""


class InstantReplica(BenchReplica):
    """A replica that answers at once."""

    def __init__(self, number: int, devices: tuple[int, ...], tokens: int) -> None:
        super().__init__(number, tokens, hold=0)
        self.devices = devices
        self._answer_tokens = np.arange(tokens, dtype=np.int32)
        self._logprobs = np.full(tokens, -1.0, np.float32)

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        spans = (Span(self._version, self._tokens),)
        future.set_result(Generation(self._answer_tokens.copy(), self._logprobs.copy(), spans, Finish.STOP))
        return future


class InstantWorker(ReplicaWorker):
    """A worker with an `InstantReplica`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(InstantReplica(self.place.rank, self.place.devices, tokens))


class FixedTurnsEnv:
    """An env with a fixed number of turns, each with a prompt of its own."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    async def reset(self, seed: int) -> Tokens:
        return np.arange(PROMPT, dtype=np.int32)

    async def step(self, action: str) -> tuple[Tokens, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return np.arange(PROMPT, dtype=np.int32), 1.0, self._left == 0, False, {}


class RaySchedulerBench:
    """A controller with its scheduler on Ray."""

    def __init__(self, ray: Any, tokens: int, turns: int) -> None:
        self._ray = ray
        self._version = 0
        self._resources = ResourceManager.on_ray()
        place = self._resources.place({"inference": f"0-{REPLICAS - 1}"})["inference"]
        self._replicas = Cluster("inference", InstantWorker, place, tokens=tokens)
        asyncio.run(self._replicas.start())
        self._service = asyncio.run(InferenceService.start(self._replicas.worker_handles, ByteCodec()))
        config = RolloutConfig(batch_size=BATCH, group_size=GROUP, alpha=1.0, history=0)
        domain = DomainConfig(env=FixedTurnsEnv, env_args={"turns": turns})
        envs = EnvManagerConfig(domains={"bench": domain}, slots=ENVS, workers=WORKERS)
        actor = ray.remote(RolloutScheduler)
        self.scheduler = actor.remote(config, envs, self._resources, self._service, "train")

    def get_batch(self) -> DataProto:
        data = DataProto(meta_info={"global_step": self._version})
        batch: DataProto = self._ray.get(self.scheduler.get_batch.remote(data, BATCH))
        return batch

    def publish(self) -> None:
        self._version += 1
        asyncio.run(self._service.sampler.load_weights(self._version))

    def cpu_seconds(self, batches: int) -> float:
        """Return the CPU time of the process tree for `batches` batches and updates, after two that do not count."""
        for _ in range(2):
            self.get_batch()
            self.publish()
        before = tree_cpu_seconds()
        for _ in range(batches):
            self.get_batch()
            self.publish()
        return tree_cpu_seconds() - before

    def ready(self) -> None:
        """Wait until the next batch is complete."""
        for _ in range(1200):
            metrics = self._ray.get(self.scheduler.metrics.remote())
            if metrics["attempts/live"] >= BATCH and not metrics["slots/busy"]:
                return
            time.sleep(0.05)
        raise TimeoutError("no batch was ready within a minute")

    def close(self) -> None:
        self._ray.get(self.scheduler.shutdown.remote())
        self._ray.kill(self.scheduler)
        asyncio.run(self._service.shutdown())
        asyncio.run(self._replicas.shutdown())
        asyncio.run(self._resources.shutdown())


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, including dead ones that their parent waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
    tree, size = {os.getpid()}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {pid for pid, parent in parents.items() if parent in tree}
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")


def get_batch_ms(bench: RaySchedulerBench, repeats: int = 5) -> float:
    """Return the median wall time from the call until every named column of a ready batch is a tensor."""
    times = []
    for _ in range(repeats):
        bench.ready()
        start = time.perf_counter()
        batch = bench.get_batch()
        tensors = [batch.batch[name] for name in NAMED]
        times.append(time.perf_counter() - start)
        assert len(tensors[0]) == BATCH
        del tensors, batch
        bench.publish()
    return statistics.median(times) * 1e3


@contextmanager
def benches(ray: Any) -> Iterator[Callable[[int, int], RaySchedulerBench]]:
    """Yield a function that makes a bench, and closes the one before."""
    made: list[RaySchedulerBench] = []

    def make(tokens: int, turns: int) -> RaySchedulerBench:
        while made:
            made.pop().close()
        made.append(RaySchedulerBench(ray, tokens, turns))
        return made[-1]

    try:
        yield make
    finally:
        while made:
            made.pop().close()


def measure(batches: int = 12) -> dict[str, float]:
    """Measure all figures in one Ray of this process."""
    with own_ray(REPLICAS) as ray:
        figures: dict[str, float] = {"startup_cpu_seconds": tree_cpu_seconds()}
        with benches(ray) as make:
            figures["cpu_ms_per_trajectory"] = make(64, 1).cpu_seconds(batches) / (batches * BATCH) * 1e3
            figures["turns_per_cpu_second"] = batches * BATCH * 8 / make(64, 8).cpu_seconds(batches)
            long = make(4096, 1)
            figures["cpu_ms_per_trajectory_4096"] = long.cpu_seconds(batches) / (batches * BATCH) * 1e3
            figures["get_batch_512x4096_ms"] = get_batch_ms(long)
    return figures


def ray(json: bool = False) -> int:
    """Print the figures; returns 1 when one of them misses its target."""
    figures = measure()
    targets = {name: f"<= {value:,.1f}" for name, value in TARGETS.items()}
    targets["turns_per_cpu_second"] = f">= {TURNS_TARGET:,.0f}"
    if json:
        print(jsonlib.dumps({name: round(value, 3) for name, value in figures.items()}))
    else:
        from rich.console import Console
        from rich.table import Table

        title = f"rollouts on Ray, {WORKERS} env workers, {ENVS} envs, batches of {BATCH}, {REPLICAS} replicas"
        table = Table("figure", "measured", "target", title=title)
        for name, value in figures.items():
            table.add_row(name, f"{value:,.2f}", targets.get(name, ""))
        Console().print(table)
    missed = any(figures[name] > target for name, target in TARGETS.items())
    return int(missed or figures["turns_per_cpu_second"] < TURNS_TARGET)


if __name__ == "__main__":
    raise SystemExit(ray())
