"""The env, as a rollout sees it: checked, recorded, and under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from cadenza.envs.protocol import EnvType
from cadenza.errors import EnvError
from cadenza.rollout.failures import logger
from cadenza.rollout.ledger import Attempt
from cadenza.rollout.model import RolloutContext
from cadenza.rollout.records import Trajectory

ENDLESS_TURNS = 1000
"""Turns of one episode after which the log says that it may never end."""


class EnvHandle:
    """One env for one attempt."""

    __slots__ = ("_attempt", "_env", "_shared", "_type", "call", "done", "reward", "trajectory")

    def __init__(
        self, env: Any, type: EnvType, attempt: Attempt, trajectory: Trajectory, shared: RolloutContext
    ) -> None:
        self._env = env
        self._type = type
        self._attempt = attempt
        self._shared = shared
        self.call: asyncio.Future[Any] | None = None
        """The last call in a thread, which may run on after its attempt has ended."""
        self.trajectory = trajectory
        self.done = False
        self.reward = 0.0
        """Of the last step."""

    @property
    def info(self) -> dict[str, Any]:
        """What the last step said besides."""
        return self.trajectory.info or {}

    async def reset(self, seed: int) -> Any:
        """Begin the episode; returns the first observation. An env whose `reset` has a parameter `row` gets the row of
        the task with it."""
        reset = self._env.reset
        if self._type.takes_row is None:
            self._type.look_at(reset)
        if self._type.takes_row:
            reset = partial(reset, row=self.trajectory.task.data)
        observation = await self._call("reset", reset, seed)
        return self._type.check_observation(observation, "reset")

    async def step(self, action: str) -> Any:
        """Act; returns the next observation. The reward is booked on the turn before it, of whichever branch."""
        if self.done:
            raise EnvError(f"env '{self._type.name}' was stepped after the episode was done; look at `env.done`")
        if not self.trajectory.turns:
            raise EnvError(
                f"env '{self._type.name}' was stepped before the first turn of the model: no turn gets the reward"
            )
        turn = self.trajectory.turns[self._attempt.last_turn]  # another branch may record one meanwhile
        outcome = self._type.check_outcome(await self._call("step", self._env.step, action))
        observation, self.reward, terminated, truncated, info = outcome
        trajectory = self.trajectory
        turn.reward += self.reward
        if info:
            trajectory.info = info
        if len(trajectory.turns) >= self._shared.max_turns and not terminated:
            truncated = True
        if len(trajectory.turns) == ENDLESS_TURNS and not terminated:
            self._tell_of_endless()
        trajectory.terminated, trajectory.truncated = terminated, truncated
        self.done = terminated or truncated
        if self.done and isinstance(observation, str):
            trajectory.final = observation
        return observation

    def _tell_of_endless(self) -> None:
        """Say once for a domain that its episodes may never end."""
        if not self._type.has_told_of_endless:
            self._type.has_told_of_endless = True
            logger.warning(
                "%s of task '%s' has had %d turns, and the step of env '%s' has not returned terminated: it may never "
                "end; max_turns is %d, lower it to end such episodes earlier",
                self._attempt.key, self.trajectory.task.id, ENDLESS_TURNS, self._type.name, self._shared.max_turns,
            )  # fmt: skip

    async def _call(self, stage: str, method: Callable[..., Any], *args: Any) -> Any:
        if self.trajectory.ended >= 0:
            raise EnvError(f"env '{self._type.name}': {stage} was called after the rollout had returned")
        self._attempt.stage = stage
        call = self._type.call(stage, method)(*args)
        if isinstance(call, asyncio.Future):
            self.call = call
            call = asyncio.shield(call)
        result = await call
        self._shared.leases.renew(self._attempt)
        self._attempt.stage = "rollout"
        return result
