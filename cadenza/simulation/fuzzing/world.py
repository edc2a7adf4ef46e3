"""The envs, rewards and filters of one random schedule, and the truth about them.

Invariant: the world records every call of its envs and rewards and every answer, and takes nothing from the scheduler.
Each observation begins with the number of its env, so the monitor finds the truth for every row of a batch.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from cadenza.envs.protocol import Outcome
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import Tokens
from cadenza.rewards import Sample
from cadenza.rollout.records import Trajectory
from cadenza.simulation.fuzzing.keyed_random import hash64, latency
from cadenza.simulation.fuzzing.scenario import DomainSpec, Scenario
from cadenza.simulation.virtual_cluster.faults import CLOSE, FOREVER, Fault, FaultInjector


class SimulatedFault(RuntimeError):
    """The error that a simulated env or reward raises on purpose."""


class EnvRecord:
    """The calls of one simulated env, and its answers."""

    __slots__ = ("attempt", "broken", "calls", "closed", "observations", "rewards", "scheduler")

    def __init__(self, scheduler: str, attempt: str) -> None:
        self.scheduler = scheduler
        self.attempt = attempt
        """Key of the attempt that made the env."""
        self.calls = 0
        self.closed = 0
        self.broken = ""
        """Kind of the fault that ended the episode; empty when none did."""
        self.observations: list[Tokens] = []
        self.rewards: list[float] = []


class SimWorld:
    """The envs and rewards of one schedule, and a record of everything that happened to them."""

    def __init__(self, scenario: Scenario, injector: FaultInjector) -> None:
        self.scenario = scenario
        self.injector = injector
        self.episodes: list[EnvRecord] = []
        self.scores: dict[tuple[str, int], float] = {}
        """Score that the reward function returned, by scheduler and trajectory."""
        self.faults_hit: dict[tuple[str, str], str] = {}
        """Kind of the fault that hit an attempt in its env or reward, by scheduler and attempt."""
        self.outages_hit: Counter[str] = Counter()
        """Reward calls that met an outage, by scheduler."""
        self.verdicts: dict[int, bool] = {}
        """Answer of the filter, by group."""
        self.on_verdict: Callable[[int, bool, float], None] = lambda group, keep, delay: None
        """Called with the group, the verdict and the seconds until the scheduler can know it."""
        self._reward_calls: dict[tuple[str, str], list[int]] = {}

    def new_env(self, scheduler: str) -> int:
        """Register a new env of the running attempt; returns its number."""
        self.episodes.append(EnvRecord(scheduler, _begin_attempt()))
        return len(self.episodes) - 1

    def record_fault(self, scheduler: str, fault: Fault) -> None:
        self.faults_hit[scheduler, _current_attempt()] = fault.kind

    # -- rewards -------------------------------------------------------------------------------------------------------

    def reward(self, domain: DomainSpec, scheduler: str) -> Callable[..., Any] | None:
        """Return the reward function of a domain, or None when it has none."""
        if domain.reward == "none":
            return None
        function = _RewardFunction(self, domain, scheduler)
        return function.asynchronous if domain.reward == "async" else function

    def next_reward_call(self, scheduler: str) -> tuple[int, Fault | None]:
        """Count a reward call for the running attempt; returns the number of the attempt among those that were judged,
        and the fault of this call."""
        calls = self._reward_calls.setdefault((scheduler, _current_attempt()), [len(self._reward_calls), 0])
        number, call = calls
        calls[1] += 1
        fault = self.injector.reward_fault(number, call)
        if fault is not None:
            self.record_fault(scheduler, fault)
        return number, fault

    def meets_outage(self, scheduler: str, domain: DomainSpec) -> bool:
        """Return whether the rewards of the domain are out of service now, and record it for the running attempt."""
        if domain.outage is None or not domain.outage[0] <= asyncio.get_running_loop().time() < domain.outage[1]:
            return False
        self.faults_hit[scheduler, _current_attempt()] = "reward_outage"
        self.outages_hit[scheduler] += 1
        return True

    def score(self, scheduler: str, trajectory: Trajectory) -> float:
        value = (hash64(trajectory.seed, 5) % 65 - 32) / 16
        self.scores[scheduler, trajectory.id] = value
        return value

    # -- the filter ----------------------------------------------------------------------------------------------------

    def group_filter(self) -> Callable[..., Any] | None:
        kind, seconds = self.scenario.filter, self.scenario.filter_seconds
        if kind == "none":
            return None

        async def on_loop(group: list[Trajectory]) -> bool:
            if kind == "slow":
                await asyncio.sleep(latency(seconds, 0.25, self.scenario.seed, group[0].group, 3))
            return self.filter_verdict(group, 0.0)

        return on_loop if kind in ("instant", "slow") else _OffLoopFilter(self)

    def filter_verdict(self, group: list[Trajectory], delay: float) -> bool:
        chance = (hash64(self.scenario.seed, group[0].task.seed, len(group[0].task.id), 4) % 1000) / 1000
        keep = chance >= self.scenario.filter_rate
        self.verdicts[group[0].group] = keep
        self.on_verdict(group[0].group, keep, delay)
        return keep


class _OffLoopFilter:
    """A plain function as filter: the virtual loop runs it as off-loop work and charges `seconds()`."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.calls = 0
        self._cost = 0.0

    def seconds(self) -> float:
        """Draw the cost of the next call."""
        scenario = self.world.scenario
        self.calls += 1
        self._cost = latency(scenario.filter_seconds, 0.25, scenario.seed, self.calls, 3)
        return self._cost

    def __call__(self, group: list[Trajectory]) -> bool:
        return self.world.filter_verdict(group, self._cost)


class _RewardFunction:
    """A reward function, plain (`__call__`) and async."""

    def __init__(self, world: SimWorld, domain: DomainSpec, scheduler: str) -> None:
        self.world = world
        self.domain = domain
        self.scheduler = scheduler
        self._fault: Fault | None = None
        self._is_down = False

    def seconds(self) -> float:
        """Draw the cost of the next call, and look up the fault that it meets."""
        number, self._fault = self.world.next_reward_call(self.scheduler)
        self._is_down = self.world.meets_outage(self.scheduler, self.domain)
        if self._fault is not None and self._fault.kind == "reward_hang":
            return FOREVER
        return latency(self.domain.reward_seconds, self.domain.grid, self.world.scenario.seed, number, 2)

    async def asynchronous(self, sample: Sample) -> float:
        seconds = self.seconds()
        fault, is_down = self._fault, self._is_down
        if seconds:
            await asyncio.sleep(seconds)
        return self._score(sample, fault, is_down)

    def __call__(self, sample: Sample) -> float:
        return self._score(sample, self._fault, self._is_down)

    def _score(self, sample: Sample, fault: Fault | None, is_down: bool) -> float:
        if is_down:
            raise InfrastructureError("the reward was told to be out of service")
        if fault is not None and fault.kind == "reward_exception":
            raise SimulatedFault("the reward was told to raise")
        return self.world.score(self.scheduler, sample.trajectory)


class SimEnv:
    """An async env whose latencies, rewards and length follow from the scenario."""

    def __init__(self, world: SimWorld, domain: DomainSpec, scheduler: str) -> None:
        self.world = world
        self.domain = domain
        self.number = world.new_env(scheduler)
        self.episode = world.episodes[self.number]
        self._task = 0

    async def reset(self, seed: int) -> Tokens:
        await self._wait(self.episode.calls)
        return self._begin(seed)

    async def step(self, action: str) -> Outcome:
        await self._wait(self.episode.calls)
        return self._take_step(action)

    async def close(self) -> None:
        self.episode.closed += 1
        await self._wait(CLOSE)

    async def _wait(self, call: int) -> None:
        fault = self.world.injector.env_fault(self.number, call)
        if seconds := self._seconds(call, fault):
            await asyncio.sleep(seconds)
        self._raise_fault(fault)

    def _seconds(self, call: int, fault: Fault | None) -> float:
        domain = self.domain
        if fault is not None and fault.kind == "env_hang":
            self._record_fault(fault)
            return FOREVER
        if call == CLOSE:
            return domain.close_seconds
        slower = fault.amount if fault is not None and fault.kind == "env_slow" else 0.0
        return slower + latency(domain.seconds, domain.grid, self.world.scenario.seed, self.number, call, 1)

    def _raise_fault(self, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "env_exception":
            self._record_fault(fault)
            raise SimulatedFault("the env was told to raise")

    def _record_fault(self, fault: Fault) -> None:
        if fault.after != CLOSE:  # the episode is over by then
            self.episode.broken = fault.kind
            self.world.record_fault(self.episode.scheduler, fault)

    def _begin(self, seed: int) -> Tokens:
        self._task = seed
        return self._observe()

    def _take_step(self, action: str) -> Outcome:
        scenario = self.world.scenario
        turn = len(self.episode.rewards) + 1
        reward = (hash64(self._task, turn, len(action)) % 33 - 16) / 16
        self.episode.rewards.append(reward)
        done = turn >= 1 + hash64(scenario.seed, self.number, 6) % self.domain.turns
        return self._observe(), reward, done, False, {}

    def _observe(self) -> Tokens:
        self.episode.calls += 1
        size = 2 + (self.number * 7 + self.episode.calls * 3 + self._task) % 6
        observation = np.array((self.number, *(self._task,) * size), np.int32)
        self.episode.observations.append(observation)
        return observation


class SyncSimEnv(SimEnv):
    """The same env with plain methods: the virtual loop runs them as off-loop work and charges `seconds(method)`."""

    def reset(self, seed: int) -> Tokens:  # type: ignore[override]
        self._raise_fault(self._fault)
        return self._begin(seed)

    def step(self, action: str) -> Outcome:  # type: ignore[override]
        self._raise_fault(self._fault)
        return self._take_step(action)

    def close(self) -> None:  # type: ignore[override]
        self.episode.closed += 1

    _fault: Fault | None = None

    def seconds(self, method: str) -> float:
        """Draw the cost of the next call, and look up the fault that it meets."""
        call = CLOSE if method == "close" else self.episode.calls
        self._fault = self.world.injector.env_fault(self.number, call)
        return self._seconds(call, self._fault)


def executor_cost(function: Callable[..., Any]) -> float:
    """Return what off-loop work costs, in virtual seconds."""
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, SyncSimEnv):
        return owner.seconds(function.__name__)
    if isinstance(owner, (_RewardFunction, _OffLoopFilter)):
        return owner.seconds()
    return 0.0


class SimTrainer:
    """A trainer that sleeps for `seconds` per batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trained = 0

    async def train(self, batch: Any) -> None:
        self.trained += 1
        await asyncio.sleep(self.seconds)


_running: ContextVar[str] = ContextVar("attempt", default="")
"""Key of the attempt whose code runs; tasks that it starts inherit the key."""


def _current_attempt() -> str:
    return _running.get()


def _begin_attempt() -> str:
    """Read the attempt from the name of the running task: env workers name the task of an attempt by its key."""
    task = asyncio.current_task()
    _running.set("" if task is None else task.get_name())
    return _running.get()
