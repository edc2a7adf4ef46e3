"""Simulated envs, rewards, filters and a trainer, and the truth about them.

Invariant: the world knows everything that its envs and rewards were asked and what they answered, and learns it from
nobody else. Each observation begins with the number of its env, so a row of a batch leads back to the truth.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from cadenza.inference.replica import Tokens
from cadenza.rollout.records import Trajectory
from cadenza.simulation.fuzzing.scenario import DomainSpec, Scenario, hash64, latency
from cadenza.simulation.virtual_cluster.faults import CLOSE, FOREVER, Fault, FaultInjector

Outcome = tuple[Any, float, bool, bool, dict[str, Any]]


class SimulatedFault(RuntimeError):
    """What a simulated env or reward raises when it is told to."""


class EnvRecord:
    """What one simulated env was asked and answered."""

    __slots__ = ("attempt", "broken", "calls", "closed", "observations", "rewards", "scheduler")

    def __init__(self, scheduler: str, attempt: str) -> None:
        self.scheduler = scheduler
        self.attempt = attempt
        """The key of the attempt that made it."""
        self.calls = 0
        self.closed = 0
        self.broken = ""
        """The fault that ended it."""
        self.observations: list[Tokens] = []
        self.rewards: list[float] = []


class SimWorld:
    """The envs and rewards of one schedule, and all that happened to them."""

    def __init__(self, scenario: Scenario, injector: FaultInjector) -> None:
        self.scenario = scenario
        self.injector = injector
        self.episodes: list[EnvRecord] = []
        self.scores: dict[tuple[str, int], float] = {}
        """What the reward said, by scheduler and trajectory."""
        self.faults_hit: dict[tuple[str, str], str] = {}
        """The fault that met an attempt in its env or reward, by scheduler and attempt."""
        self.verdicts: dict[int, bool] = {}
        """What the filter said, by group."""
        self.on_verdict: Callable[[int, bool, float], None] = lambda group, keep, delay: None
        """Told of each verdict and of the seconds until it is known."""
        self._reward_calls: dict[tuple[str, str], list[int]] = {}

    def new_env(self, scheduler: str) -> int:
        """An env is made; returns its number."""
        self.episodes.append(EnvRecord(scheduler, _begin_attempt()))
        return len(self.episodes) - 1

    def record_fault(self, scheduler: str, fault: Fault) -> None:
        self.faults_hit[scheduler, _current_attempt()] = fault.kind

    # -- rewards -------------------------------------------------------------------------------------------------------

    def reward(self, domain: DomainSpec, scheduler: str) -> Callable[..., Any] | None:
        """The reward function of a domain."""
        if domain.reward == "none":
            return None
        function = _RewardFunction(self, domain, scheduler)
        return function.asynchronous if domain.reward == "async" else function

    def next_reward_call(self, scheduler: str) -> tuple[int, Fault | None]:
        """Another call for an attempt: its number among the judged, and what goes wrong."""
        calls = self._reward_calls.setdefault((scheduler, _current_attempt()), [len(self._reward_calls), 0])
        number, call = calls
        calls[1] += 1
        fault = self.injector.reward_fault(number, call)
        if fault is not None:
            self.record_fault(scheduler, fault)
        return number, fault

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
    """A plain filter: the loop runs it off the loop, at its cost."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.calls = 0
        self._cost = 0.0

    def seconds(self) -> float:
        """What the next call costs."""
        scenario = self.world.scenario
        self.calls += 1
        self._cost = latency(scenario.filter_seconds, 0.25, scenario.seed, self.calls, 3)
        return self._cost

    def __call__(self, group: list[Trajectory]) -> bool:
        return self.world.filter_verdict(group, self._cost)


class _RewardFunction:
    """A reward function, in both forms."""

    def __init__(self, world: SimWorld, domain: DomainSpec, scheduler: str) -> None:
        self.world = world
        self.domain = domain
        self.scheduler = scheduler
        self._fault: Fault | None = None

    def seconds(self) -> float:
        """What the next call costs; it meets its fault, if it has one."""
        number, self._fault = self.world.next_reward_call(self.scheduler)
        if self._fault is not None and self._fault.kind == "reward_hang":
            return FOREVER
        return latency(self.domain.reward_seconds, self.domain.grid, self.world.scenario.seed, number, 2)

    async def asynchronous(self, trajectory: Trajectory) -> float:
        seconds = self.seconds()
        fault = self._fault
        if seconds:
            await asyncio.sleep(seconds)
        return self._score(trajectory, fault)

    def __call__(self, trajectory: Trajectory) -> float:
        return self._score(trajectory, self._fault)

    def _score(self, trajectory: Trajectory, fault: Fault | None) -> float:
        if fault is not None and fault.kind == "reward_exception":
            raise SimulatedFault("the reward was told to raise")
        return self.world.score(self.scheduler, trajectory)


class SimEnv:
    """An env whose latencies, rewards and length follow from the scenario; async."""

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
    """The same env as plain code: the loop runs it off the loop, at the cost that it states beforehand."""

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
        """What the next call costs; it meets its fault, if it has one."""
        call = CLOSE if method == "close" else self.episode.calls
        self._fault = self.world.injector.env_fault(self.number, call)
        return self._seconds(call, self._fault)


def executor_cost(function: Callable[..., Any]) -> float:
    """What a piece of work off the loop costs in virtual seconds."""
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, SyncSimEnv):
        return owner.seconds(function.__name__)
    if isinstance(owner, (_RewardFunction, _OffLoopFilter)):
        return owner.seconds()
    return 0.0


class LengthCodec:
    """A codec for observations that are tokens already; a response decodes to as many letters as it has tokens."""

    def encode(self, observation: object, *, first: bool, last: int | None = None) -> Tokens:
        raise TypeError(f"simulated envs observe tokens, got {observation!r}")

    def decode(self, tokens: Tokens) -> str:
        return "x" * len(tokens)


class SimTrainer:
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.trained = 0

    async def train(self, batch: Any) -> None:
        self.trained += 1
        await asyncio.sleep(self.seconds)


_running: ContextVar[str] = ContextVar("attempt", default="")
"""The attempt whose code runs; what it starts inherits it."""


def _current_attempt() -> str:
    return _running.get()


def _begin_attempt() -> str:
    """An attempt makes its env in a task that is called like it."""
    task = asyncio.current_task()
    _running.set("" if task is None else task.get_name())
    return _running.get()
