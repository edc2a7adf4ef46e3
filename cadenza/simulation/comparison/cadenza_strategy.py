"""The strategy `cadenza`: the production scheduler, sampler and router over simulated replicas and envs.

The control plane is neither modelled nor replaced. Simulated are its inputs: replicas, an env and a reward whose times
come from the trace, a collator that keeps no tokens, and a training program that sleeps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from cadenza.data import DataProto
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import PauseMode, Replica, Request, Sampling, Tokens
from cadenza.rewards import Sample
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate, Task, Trajectory
from cadenza.rollout.sampler import SamplerConfig
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.rollout.sharing import SharedDevices
from cadenza.simulation.comparison.episodes import TraceLike
from cadenza.simulation.comparison.figures import BatchRow, UsageTotals
from cadenza.simulation.comparison.strategy import ScheduleStrategy, observation_of, tokens_discarded, tokens_generated
from cadenza.simulation.comparison.workloads import NEVER, TraceEpisode
from cadenza.simulation.virtual_cluster.replica import SimReplica
from cadenza.simulation.virtual_cluster.tokens import LengthCodec
from cadenza.testing import LocalCluster

MEMBER_BITS = 12
NO_DEADLINE = 1e7
"""Seconds of every deadline of the scheduler: deadlines are no subject of the comparison."""
HEARTBEAT = 300.0
"""Seconds between two health checks of a quiet replica; no replica is lost here."""


class CadenzaStrategy(ScheduleStrategy):
    """Runs the production scheduler over simulated replicas."""

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        workload, settings = self.workload, self.settings
        self._lengths: dict[int, int] = {}
        self._rows: list[BatchRow] = []
        cluster = LocalCluster(
            await self._make_replicas(),
            LengthCodec(),
            SamplerConfig(
                balance_seconds=settings.balance_seconds,
                prefill_weight=workload.cost.p / workload.cost.c if workload.cost.c else 0.0,
                heartbeat_seconds=HEARTBEAT,
                load_seconds=NO_DEADLINE,
            ),
        )
        most = (workload.groups * (1 + math.ceil(self.alpha)) + settings.extra_groups) * (
            workload.group_size + settings.extra_members
        )
        self.scheduler = RolloutScheduler(
            RolloutConfig(
                batch_size=workload.batch,
                group_size=workload.group_size,
                alpha=self.alpha,
                slice_tokens=None if settings.slice_tokens < 0 else settings.slice_tokens,
                extra_members=settings.extra_members,
                extra_after=settings.extra_after,
                extra_groups=settings.extra_groups,
                suspend_mode=PauseMode.KEEP,
                stall_seconds=NO_DEADLINE,
                max_attempts=100,
            ),
            EnvManagerConfig(
                domains={
                    "trace": DomainConfig(
                        env=TraceEnv,
                        env_args={"trace": self.trace},
                        reward=self._reward if workload.rewards is not None or workload.recorded else None,
                    )
                },
                slots=min(settings.concurrency * self.generating_gpus, most) or most,
                rollout=self._rollout,
                sampling=Sampling(max_tokens=1 << 20),
                lease_seconds=NO_DEADLINE,
                reward_seconds=NO_DEADLINE,
                close_seconds=NO_DEADLINE,
            ),
            cluster.resources,
            cluster,
            collator=self._collate,
        )
        self.shared: SharedDevices | None = None
        if settings.shared:
            last = range(self.generating_gpus - settings.shared, self.generating_gpus)
            self.shared = SharedDevices(self.scheduler, last, workload.groups, reload=self._switch_devices)
            await self.shared.lend()

    def chunks(self) -> list[int]:
        groups, chunks = self.workload.groups, min(self.settings.parts, self.workload.groups)
        return [groups * (chunk + 1) // chunks - groups * chunk // chunks for chunk in range(chunks)]

    async def batch(self, groups: int) -> list[BatchRow]:
        data = DataProto(meta_info={"global_step": self.version})
        batch = await self.scheduler.get_batch(data, groups * self.workload.group_size)
        assert batch is not None, "the tasks never run out"
        if self.shared is not None:
            await self.shared.take_back()
        return self._rows

    async def publish(self, version: int) -> None:
        await self.scheduler.suspend()
        await self.scheduler.sampler.load_weights(version)
        await self.scheduler.resume()
        if self.shared is not None:
            await self.shared.lend()

    async def close(self) -> None:
        await self.scheduler.shutdown()
        await self.scheduler.sampler.close()

    def totals(self) -> UsageTotals:
        queue, ledger = self.scheduler.queue, self.scheduler.ledger
        wasted = Counter(ledger.lost_tokens) + tokens_discarded(self.replicas)
        given_up = sum(count for fate, count in ledger.groups_closed.items() if fate is not Fate.TRAINED)
        return UsageTotals(tokens_generated(self.replicas), wasted, queue.consumed + given_up)

    async def _switch_devices(self) -> None:
        await asyncio.sleep(self.workload.switch_seconds)

    # -- inputs of the scheduler ---------------------------------------------------------------------------------------

    async def _make_replicas(self) -> Sequence[Replica]:
        workload = self.workload
        self.replicas = [
            SimReplica(
                f"r{number}",
                workload.cost,
                self._length,
                devices=(number,),
                load_seconds=workload.sync_seconds,
                wake_seconds=workload.switch_seconds,
                on_event=self.recorder.replica_listener(number) if self.recorder is not None else None,
            )
            for number in range(self.generating_gpus)
        ]
        return self.replicas

    async def _rollout(self, task: Task, env: EnvHandle, model: Model) -> None:
        """Play the default rollout, and record the length of each answer where the replicas look it up."""
        trajectory = model.trajectory
        episode = self.trace.episode(task.seed, trajectory.member)
        observation = await env.reset(reset_seed(task, trajectory))
        try:
            for length in episode.lengths:
                self._lengths[trajectory.id] = length
                await model.generate(observation, fresh=episode.fresh)
                observation = await env.step("")
        finally:
            self._lengths.pop(trajectory.id, None)

    def _length(self, request: Request) -> int:
        return self._lengths[request.session]

    async def _reward(self, sample: Sample) -> float:
        trajectory: Trajectory = sample.trajectory
        await asyncio.sleep(self.trace.episode(trajectory.task.seed, trajectory.member).reward)
        return 0.0

    def _collate(self, trajectories: list[Trajectory]) -> DataProto:
        rows: list[BatchRow] = []
        for trajectory in trajectories:
            versions = trajectory.versions
            assert versions is not None
            group = trajectory.task.seed
            rows.append(BatchRow(group, self.trace.episode(group, trajectory.member), versions[0]))
        self._rows = rows
        return DataProto()


def reset_seed(task: Task, trajectory: Trajectory) -> int:
    """Return the seed for `TraceEnv.reset`: group, member and whether it is the first attempt, in one number."""
    first_try = trajectory.attempt == 0
    return (task.seed << MEMBER_BITS | trajectory.member) << 1 | first_try


class TraceEnv:
    """An env that plays an episode of the trace; `reset_seed` says which one, and whether it may fail."""

    def __init__(self, trace: TraceLike) -> None:
        self._trace = trace
        self._episode = TraceEpisode((), ())
        self._turn = 0
        self._fails_at = NEVER

    async def reset(self, seed: int) -> Tokens:
        group, member = divmod(seed >> 1, 1 << MEMBER_BITS)
        self._episode = episode = self._trace.episode(group, member)
        self._fails_at = episode.fails_at if seed & 1 else NEVER
        if episode.reset:
            await asyncio.sleep(episode.reset)
        return observation_of(episode.observations[0])

    async def step(self, action: str) -> tuple[Tokens, float, bool, bool, dict[str, object]]:
        episode, turn = self._episode, self._turn
        self._turn += 1
        if seconds := episode.steps[turn]:
            await asyncio.sleep(seconds)
        if turn == self._fails_at:
            raise InfrastructureError("env failed")
        done = self._turn == len(episode.lengths)
        return observation_of(0 if done else episode.observations[self._turn]), 0.0, done, False, {}
