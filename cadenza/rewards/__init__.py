"""Rewards: what an episode was worth, judged after its slot is free."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from cadenza.config import load_callable
from cadenza.errors import RewardError
from cadenza.off_loop import as_async
from cadenza.scalars import as_number

Reward = Callable[[Any], Awaitable[float]]
"""`async reward(trajectory) -> float`."""


def as_reward(spec: str | Callable[..., Any]) -> Reward:
    """The reward that 'module:name' or a function means; a plain function runs off the loop."""
    return as_async(load_callable(spec) if isinstance(spec, str) else spec)


def check_reward(value: Any, domain: str) -> float:
    """A reward as a finite float, or the error that says what is wrong with it."""
    reward = as_number(value)
    if reward is None:
        raise RewardError(f"the reward of domain '{domain}' returned {value!r}; return a number or a bool")
    if not math.isfinite(reward):
        raise RewardError(f"the reward of domain '{domain}' returned {reward}; return a finite number")
    return reward
