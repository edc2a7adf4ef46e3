"""The rollout scheduler as a Ray actor: `python examples/ray_scheduler.py`.

Two replicas, a sampler, a scheduler and two env workers, each in a process of its own. The replica here always gives
the same answer; `ReplicaWorker` takes any engine. The controller is this program.
"""

import asyncio

import ray

import cadenza
from cadenza import Cluster, DataProto, ResourceManager, RolloutScheduler
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.rollout import DomainConfig, EnvManagerConfig, InferenceService, RolloutConfig
from cadenza.testing import ByteCodec, FakeReplica


@cadenza.env("guess")
class Guess:
    def reset(self, seed: int) -> str:
        self.secret = seed % 10
        return "guess a digit"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, bool]]:
        right = action == str(self.secret)
        return "", float(right), True, False, {"success": right}


class Seven(ReplicaWorker):
    """A replica that answers seven."""

    def __init__(self) -> None:
        super().__init__(FakeReplica(lambda request: "7", name=f"r{self.place.rank}", devices=self.place.devices))


ray.init(address="local", num_cpus=2, include_dashboard=False)
resource_manager = ResourceManager.on_ray()
replicas = Cluster("inference", Seven, resource_manager.place({"inference": "0-1"})["inference"])
asyncio.run(replicas.start())
infer_cluster = asyncio.run(InferenceService.start(replicas.worker_handles, ByteCodec()))

scheduler = ray.remote(RolloutScheduler).remote(
    RolloutConfig(batch_size=32, group_size=8, alpha=1.0),
    EnvManagerConfig(domains={"guess": DomainConfig(env="guess")}, slots=16, workers=2),
    resource_manager,
    infer_cluster,
    "train",
)
for step in range(3):
    ray.get(scheduler.suspend.remote())
    asyncio.run(infer_cluster.sampler.load_weights(step + 1))
    ray.get(scheduler.resume.remote())
    batch = ray.get(scheduler.get_batch.remote(DataProto(meta_info={"global_step": step}), 32))
    print(step, batch.batch["scores"].mean().item(), batch.meta_info["metrics"]["staleness/max"])
print(ray.get(scheduler.shrink_sampler.remote([1]))["replicas"], "sleeps")
print(ray.get(scheduler.expand_sampler.remote([1]))["replicas"], "is back")
print(ray.get(scheduler.why.remote("guess/7")))
ray.get(scheduler.shutdown.remote())
ray.shutdown()
