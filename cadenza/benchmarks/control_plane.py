"""`cadenza bench control-plane`: CPU time and memory of the control plane per trajectory, token and route.

The replicas and envs only answer, so the time is the scheduler's own: admission, env calls, routing, recording, groups,
the ledger, the cut and the collation. It is CPU time, because other programs run too; each figure is the best of some
repeats, and memory is measured in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json as jsonlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cadenza.data import DataProto
from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    ReplicaStats,
    Request,
    RequestProgress,
    Span,
    Tokens,
)
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.prefix_routing import PrefixRouting
from cadenza.rollout.router import ReplicaEntry, Router, RouteRequest
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.testing import LocalCluster

GROUP = 8
REPLICAS = 4
NAMED = (
    "input_ids", "attention_mask", "position_ids", "response_mask", "prompt_mask", "scores", "traj_group_id",
    "traj_id", "env_ids", "step_scores", "episode_scores", "infer_logprobs", "versions",
)  # fmt: skip
TARGETS = {
    "us_per_trajectory_1k": 150.0,
    "us_per_trajectory_100k": 220.0,
    "us_per_route": 5.0,
    "bytes_per_trajectory": 4096.0,
    "bytes_per_token": 10.0,
}
"""Upper limits of the figures; that of `get_batch_512x4096_ms` is 2x `copy_512x4096_ms` + 5."""


class BenchReplica:
    """A replica that answers without work, oldest request first, and keeps about `hold` requests in flight."""

    def __init__(self, device: int, tokens: int, hold: int) -> None:
        self.name = f"bench{device}"
        self.devices: tuple[int, ...] = (device,)
        self.kv_capacity = 1 << 40
        self.in_flight: deque[asyncio.Future[Generation]] = deque()
        self.held = 0
        """Requests of second turns, which are never answered."""
        self._hold = hold
        self._tokens = tokens
        self._version = 0
        self._armed = False

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if len(request.chunks) > 1:
            self.held += 1
        else:
            self.in_flight.append(future)
            self._arm()
        return future

    def _arm(self) -> None:
        if not self._armed and self._hold >= 0:
            self._armed = True
            asyncio.get_running_loop().call_later(0.001, self._answer)

    def _answer(self) -> None:
        """Answer the requests above `hold`, and at least 64."""
        version, count = self._version, self._tokens
        for _ in range(min(len(self.in_flight), max(len(self.in_flight) - self._hold, 64))):
            future = self.in_flight.popleft()
            if not future.done():
                tokens, logprobs = np.arange(count, dtype=np.int32), np.full(count, -1.0, np.float32)
                future.set_result(Generation(tokens, logprobs, (Span(version, count),), Finish.STOP))
        self._armed = False
        if self.in_flight:
            self._arm()

    def abort(self, request_id: int, cause: str) -> None:
        return

    def requests_in_flight(self) -> list[RequestProgress]:
        return []

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        return

    async def resume(self) -> None:
        return

    async def load_weights(self, version: int, weights: object) -> None:
        self._version = version

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(
            version=self._version,
            running=len(self.in_flight),
            waiting=0,
            progress=time.monotonic_ns(),
            paused=False,
            kv_tokens=0,
            kv_capacity=0,
            generated=0,
            prefilled=0,
        )

    def kill(self, cause: str) -> None:
        return


class OneTurnEnv:
    """An env of one turn with a prompt of its own."""

    __slots__ = ("_prompt",)

    def __init__(self, prompt: int = 64) -> None:
        self._prompt = prompt

    async def reset(self, seed: int) -> Tokens:
        return np.arange(self._prompt, dtype=np.int32)

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return None, 1.0, True, False, {}


class TwoTurnEnv(OneTurnEnv):
    """An env of two turns; its trajectories wait in the second turn with the tokens of the first."""

    __slots__ = ("_turns",)

    async def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._turns = getattr(self, "_turns", 0) + 1
        return np.zeros(1, np.int32), 1.0, self._turns == 2, False, {}


class SchedulerBench:
    """A scheduler over replicas that answer at once or never."""

    def __init__(
        self,
        in_flight: int,
        batch: int,
        *,
        alpha: float,
        hold: int,
        prompt: int = 64,
        tokens: int = 64,
        env: type = OneTurnEnv,
    ) -> None:
        self.replicas = [BenchReplica(device, tokens, hold) for device in range(REPLICAS)]
        self.cluster = LocalCluster(self.replicas)
        self.batch = batch
        self.version = 0
        config = RolloutConfig(batch_size=batch, group_size=GROUP, alpha=alpha, history=0)
        domain = DomainConfig(env=env, env_args={"prompt": prompt})
        envs = EnvManagerConfig(domains={"bench": domain}, slots=in_flight)
        self.scheduler = RolloutScheduler(config, envs, self.cluster.resources, self.cluster)

    async def step(self) -> DataProto:
        """Take one batch and publish one version."""
        batch = await self.scheduler.get_batch(DataProto(meta_info={"global_step": self.version}), self.batch)
        self.version += 1
        await self.cluster.sampler.load_weights(self.version)
        assert batch is not None
        return batch

    async def close(self) -> None:
        await self.scheduler.shutdown()
        self.scheduler.ledger.check()
        await self.cluster.sampler.close()


def us_per_trajectory(in_flight: int, batches: int, batch: int = 1024) -> float:
    """Return the CPU time of a one-turn trajectory of 64 + 64 tokens, from admission to the batch."""

    async def main() -> float:
        bench = SchedulerBench(in_flight, batch, alpha=in_flight // batch + 1, hold=in_flight // REPLICAS * 3 // 4)
        for _ in range(2 + in_flight // batch):  # until every counted trajectory started with all slots busy
            await bench.step()
        start = time.process_time()
        for _ in range(batches):
            await bench.step()
        seconds = time.process_time() - start
        await bench.close()
        return seconds / (batches * batch) * 1e6

    return asyncio.run(main())


def us_per_route(sessions: int, calls: int = 100_000) -> float:
    """Return the CPU time of a routing decision and its release, with `sessions` in flight on 64 replicas."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        entries = [ReplicaEntry(i, BenchReplica(i, 1, 0), loop.create_future()) for i in range(64)]
        router = Router(PrefixRouting())
        router.rebuild(entries)
        held: deque[ReplicaEntry] = deque()
        requests = [RouteRequest(number, number // GROUP, 512) for number in range(sessions + calls)]

        def route(number: int, sticky: ReplicaEntry | None) -> ReplicaEntry:
            entry = router.choose(requests[number], sticky, 512)
            assert entry is not None
            router.add(entry, 512)
            return entry

        for number in range(sessions):
            held.append(route(number, None))
        start = time.process_time()
        for number in range(calls):
            entry = held.popleft()
            router.remove(entry, 512)
            held.append(route(sessions + number, entry if number % 2 else None))
        return (time.process_time() - start) / calls * 1e6

    return asyncio.run(main())


def get_batch_ms(rows: int = 512, tokens: int = 4096) -> tuple[float, float]:
    """Return the CPU time until every named column of a ready batch is a tensor, and to fill as many bytes."""

    async def main() -> tuple[float, float]:
        bench = SchedulerBench(rows, rows, alpha=1.0, hold=0, prompt=tokens // 2, tokens=tokens // 2)
        best = copied = float("inf")
        for _ in range(20):  # the least of both counts: the rest is noise of the machine
            await bench.step()
            await _until(lambda: bench.scheduler.ledger.live >= rows and not bench.scheduler.metrics()["slots/busy"])
            gc.collect()
            start = time.process_time()
            batch = await bench.scheduler.get_batch(DataProto(meta_info={"global_step": 0}), rows)
            assert batch is not None
            tensors = [batch.batch[name] for name in NAMED]
            best = min(best, time.process_time() - start)
            bench.version += 1
            await bench.cluster.sampler.load_weights(bench.version)
            sizes = [
                (tuple(tensor.shape), batch.batch.numpy(name).dtype)
                for name, tensor in zip(NAMED, tensors, strict=True)
            ]
            del tensors, batch
            gc.collect()
            start = time.process_time()
            filled = [np.full(shape, 1, dtype) for shape, dtype in sizes]
            copied = min(copied, time.process_time() - start)
            del filled
        await bench.close()
        return best * 1e3, copied * 1e3

    return asyncio.run(main())


def resident_bytes(tokens: int, env: type, in_flight: int) -> float:
    """Return the resident memory of a trajectory that waits for an answer: to its first prompt of one token or, with
    `TwoTurnEnv`, to its second prompt after a response of `tokens` tokens."""

    async def main() -> float:
        first = env is OneTurnEnv
        bench = SchedulerBench(
            in_flight, in_flight, alpha=0.0, hold=-1 if first else 0, prompt=1, tokens=tokens, env=env
        )
        gc.collect()
        before = _resident()
        await bench.scheduler.resume()
        await _until(lambda: sum(len(r.in_flight) if first else r.held for r in bench.replicas) >= in_flight)
        gc.collect()
        used = _resident() - before
        await bench.close()
        return used / in_flight

    return asyncio.run(main())


async def _until(ready: Callable[[], bool], seconds: float = 120.0) -> None:
    """Poll every millisecond: the condition has no event to wait for."""
    async with asyncio.timeout(seconds):
        while not ready():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _alone(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh process, so that no measurement affects another."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def measure() -> dict[str, float]:
    """Measure all figures."""
    large, small = (_alone(resident_bytes, tokens, TwoTurnEnv, 20_000) for tokens in (4160, 64))
    get_batch, copy = _alone(get_batch_ms)
    return {
        "us_per_trajectory_1k": min(_alone(us_per_trajectory, 1024, 20) for _ in range(3)),
        "us_per_trajectory_100k": min(_alone(us_per_trajectory, 100_000, 120) for _ in range(2)),
        "us_per_route": _alone(us_per_route, 100_000),
        "get_batch_512x4096_ms": get_batch,
        "copy_512x4096_ms": copy,
        "bytes_per_trajectory": _alone(resident_bytes, 1, OneTurnEnv, 100_000),
        "bytes_per_token": (large - small) / 4096,
    }


def control_plane(json: bool = False) -> int:
    """Print the figures; returns 1 when one of them misses its target."""
    figures = measure()
    targets = TARGETS | {"get_batch_512x4096_ms": 2 * figures["copy_512x4096_ms"] + 5}
    if json:
        print(jsonlib.dumps({name: round(value, 3) for name, value in figures.items()}))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("figure", "measured", "target", title="control plane, one process, groups of 8")
        for name, value in figures.items():
            target = targets.get(name)
            table.add_row(name, f"{value:,.2f}", "" if target is None else f"<= {target:,.1f}")
        Console().print(table)
    return int(any(figures[name] > target for name, target in targets.items()))


if __name__ == "__main__":
    raise SystemExit(control_plane())
