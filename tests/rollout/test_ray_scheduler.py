"""The scheduler on a real Ray: the example program, the same batches as embedded, suspension, deaths, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray_cases import SECONDS, RayTestCluster, actors, until  # noqa: E402

from cadenza import Cluster, DataProto, ResourceManager, RolloutScheduler  # noqa: E402
from cadenza.cluster import dispatch  # noqa: E402
from cadenza.cluster.remote_replica import ReplicaWorker  # noqa: E402
from cadenza.inference.replica import Request  # noqa: E402
from cadenza.rollout import (  # noqa: E402
    DomainConfig,
    EnvManagerConfig,
    InferenceService,
    RolloutConfig,
    env_worker_process,
)
from cadenza.testing import ByteCodec, FakeReplica, LocalCluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def say(request: Request) -> list[int]:
    """Words that depend on the key of the turn, as those of an engine do."""
    draw = np.random.default_rng(request.seed)
    return [int(token) for token in draw.integers(65, 91, int(draw.integers(5, 30)))]


class Scripted(ReplicaWorker):
    """A replica that tells what it does."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.replica = FakeReplica(say, seconds=seconds, name=f"r{self.place.rank}", devices=self.place.devices)
        super().__init__(self.replica)

    @dispatch("broadcast")
    async def look(self) -> tuple[int, int, int, int]:
        """Requests under way, tokens so far, requests that continued one, the process."""
        stats = await self.replica.stats()
        continued = sum(request.offset > 0 for request in self.replica.requests)
        return stats.running, stats.progress, continued, os.getpid()


class Echo:
    """Three turns; the env tells its process."""

    async def reset(self, seed: int) -> str:
        self.seed, self.turn = seed, 0
        return f"task {seed}"

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, int]]:
        self.turn += 1
        return f"{action[:3]} again", float(len(action)), self.turn == 3, False, {"pid": os.getpid()}


def score(sample: Any) -> float:
    return float(sum(len(turn.response) for turn in sample.trajectory.turns))


def processes(trajectories: list[Any]) -> DataProto:
    """A collator: where each trajectory ran, and which try it was."""
    infos = [trajectory.info or {} for trajectory in trajectories]
    return DataProto(
        {"pid": np.array([i["pid"] for i in infos]), "attempt": np.array([t.attempt for t in trajectories])}
    )


def configs(**options: Any) -> tuple[RolloutConfig, EnvManagerConfig]:
    envs = {"slots": 16, "workers": 2, "lease_seconds": 300.0} | {
        name: options.pop(name) for name in list(options) if name in EnvManagerConfig.model_fields
    }
    rollout = RolloutConfig(**{"batch_size": 16, "group_size": 4, "seed": 7} | options)
    return rollout, EnvManagerConfig(domains={"echo": DomainConfig(env=Echo, reward=score)}, **envs)


class Program:
    """A controller: replicas, their sampler, and a scheduler that is an actor."""

    def __init__(self, seconds: float = 0.0, collator: Any = None, **options: Any) -> None:
        self.resources = ResourceManager.on_ray()
        place = self.resources.place({"inference": "0-1"})["inference"]
        self.replicas: Any = Cluster("inference", Scripted, place, seconds=seconds, start_seconds=SECONDS)
        asyncio.run(self.replicas.start())
        self.service = asyncio.run(InferenceService.start(self.replicas.worker_handles, ByteCodec()))
        scheduler = ray.remote(RolloutScheduler)
        self.scheduler = scheduler.remote(*configs(**options), self.resources, self.service, "train", collator)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        ray.get(self.scheduler.shutdown.remote(), timeout=SECONDS)
        ray.kill(self.scheduler)
        asyncio.run(self.service.shutdown())
        asyncio.run(self.replicas.shutdown())
        asyncio.run(self.resources.shutdown())

    def get_batch(self, step: int, size: int = 16) -> DataProto:
        data = DataProto(meta_info={"global_step": step})
        batch: DataProto = ray.get(self.scheduler.get_batch.remote(data, size), timeout=SECONDS)
        return batch

    def publish(self, version: int) -> None:
        asyncio.run(self.service.sampler.load_weights(version))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = ray.get(self.scheduler.metrics.remote(), timeout=SECONDS)
        return found

    def look(self) -> list[tuple[int, int, int, int]]:
        found: list[tuple[int, int, int, int]] = asyncio.run(self.replicas.look())
        return found


def test_the_example_program_runs_as_written() -> None:
    program = Path(__file__).parents[2] / "examples" / "ray_scheduler.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["0", "1", "2"]
    assert "['r1'] sleeps" in done.stdout
    assert "['r1'] is back" in done.stdout
    assert "g7: task guess/7" in done.stdout


def test_the_batches_are_those_of_the_embedded_scheduler(nodes: RayTestCluster) -> None:
    async def embedded() -> list[DataProto]:
        cluster = LocalCluster([FakeReplica(say)])
        rollout, envs = configs(workers=0)
        scheduler = RolloutScheduler(rollout, envs, cluster.resources, cluster)
        found = []
        for step in range(3):
            batch = await scheduler.get_batch(DataProto(meta_info={"global_step": step}), 16)
            assert batch is not None
            found.append(batch)
            await cluster.sampler.load_weights(step + 1)
        await scheduler.shutdown()
        await cluster.sampler.close()
        return found

    with Program() as program:
        for step, one in enumerate(asyncio.run(embedded())):
            other = program.get_batch(step)
            program.publish(step + 1)
            for name in ("input_ids", "response_mask", "infer_logprobs", "versions", "step_scores", "turn_ids"):
                a, b = one.batch.ragged(name), other.batch.ragged(name)
                for row in range(len(a)):
                    np.testing.assert_array_equal(np.asarray(a[row]), np.asarray(b[row]))
            for name in ("scores", "episode_scores", "seed", "traj_group_id", "finish_reason"):
                np.testing.assert_array_equal(one.batch.numpy(name), other.batch.numpy(name))
            for name in ("task_id", "traj_key"):
                assert one.non_tensor_batch[name].tolist() == other.non_tensor_batch[name].tolist()
            assert other.meta_info["version"] == step


def test_suspend_returns_with_no_token_being_generated_and_resume_goes_on(nodes: RayTestCluster) -> None:
    with Program(seconds=3.0, alpha=1.0) as program:
        ray.get(program.scheduler.resume.remote(), timeout=SECONDS)
        until(lambda: min(sum(look[n] for look in program.look()) for n in (0, 1)) >= 8)  # requests and tokens
        ray.get(program.scheduler.suspend.remote(), timeout=SECONDS)
        before = program.look()
        time.sleep(1.0)
        after = program.look()
        assert [(running, progress) for running, progress, *_ in after] == [(0, look[1]) for look in before]
        program.publish(1)
        batch = program.get_batch(0)
        assert len(batch) == 16
        assert sum(continued for _, _, continued, _ in program.look()) > 0
        versions = [set(np.asarray(row).tolist()) for row in batch.batch.ragged("versions")]
        assert {0, 1} <= set.union(*versions)  # some answers were begun by one version and ended by the other
        assert program.metrics()["fate/failed"] == 0


def test_the_death_of_an_env_worker_costs_its_own_attempts(nodes: RayTestCluster) -> None:
    with Program(seconds=1.0, collator=processes, alpha=1.0) as program:
        pids = program.get_batch(0).batch.numpy("pid")
        program.publish(1)
        until(lambda: program.metrics()["slots/busy"] == 16)
        os.kill(int(pids[0]), signal.SIGKILL)
        later = []
        for step in range(1, 5):
            batch = program.get_batch(step)
            later.append(batch)
            program.publish(step + 1)
        metrics = program.metrics()
        assert 0 < metrics["fate/failed"] <= 8
        assert metrics["errors/user_code"] == 0
        assert metrics["fate/trained"] == 5 * 16
        assert sum(int(batch.batch.numpy("attempt").sum()) for batch in later) == metrics["fate/failed"]
        alive = {int(pid) for pid in later[-1].batch.numpy("pid")}
        assert len(alive) == 2  # another has taken its place
        assert int(pids[0]) not in alive


def test_the_death_of_a_replica_costs_no_attempt(nodes: RayTestCluster) -> None:
    with Program(seconds=1.0) as program:
        ray.get(program.scheduler.resume.remote(), timeout=SECONDS)
        found = until(lambda: [look for look in program.look() if look[0]])
        os.kill(found[0][3], signal.SIGKILL)
        batch = program.get_batch(0)
        assert len(batch) == 16
        metrics = program.metrics()
        assert metrics["sampler/replicas_lost"] == 1
        assert metrics["fate/failed"] == 0


def test_train_and_validation_schedulers_share_the_gate(nodes: RayTestCluster) -> None:
    with Program(seconds=0.5) as program:
        rollout, envs = configs(batch_size=4)
        validation = ray.remote(RolloutScheduler).remote(rollout, envs, program.resources, program.service, "val")
        ray.get(program.scheduler.suspend.remote(), timeout=SECONDS)
        waiting = validation.get_batch.remote(DataProto(meta_info={"global_step": 0}), 4)
        until(lambda: ray.get(validation.metrics.remote(), timeout=SECONDS)["slots/busy"] > 0)
        _, late = ray.wait([waiting], timeout=2.5)  # three turns of 0.5 s
        assert late
        assert sum(running for running, *_ in program.look()) == 0
        ray.get(program.scheduler.resume.remote(), timeout=SECONDS)
        assert len(ray.get(waiting, timeout=SECONDS)) == 4
        ray.get(validation.shutdown.remote(), timeout=SECONDS)
        ray.kill(validation)


def test_shutdown_leaves_no_actor(nodes: RayTestCluster) -> None:
    until(lambda: not actors())
    with Program() as program:
        program.get_batch(0)
        assert len(actors()) == 2 + 1 + 1 + 2  # replicas, sampler, scheduler, env workers
        ray.get(program.scheduler.shutdown.remote(), timeout=SECONDS)
        until(lambda: len(actors()) == 2 + 1 + 1)
    until(lambda: not actors())


def test_replicas_in_the_controller_are_out_of_reach_for_env_workers(nodes: RayTestCluster) -> None:
    async def main() -> None:
        cluster = LocalCluster([FakeReplica(say)])
        scheduler = RolloutScheduler(*configs(), ResourceManager.on_ray(), cluster)
        with pytest.raises(ValueError, match="env workers on Ray cannot reach the replicas fake"):
            await scheduler.resume()

    asyncio.run(main())


def test_info_may_hold_what_only_ray_can_send() -> None:
    class Local:
        pass

    assert "ray" in sys.modules
    env_worker_process._check_sendable({"note": Local()})
    with pytest.raises(TypeError, match="lock"):
        env_worker_process._check_sendable({"lock": threading.Lock()})
