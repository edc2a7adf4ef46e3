"""Rewards: what a response was worth, judged after its slot is free. docs/rewards.md says how to write one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from cadenza.config import load_object
from cadenza.off_loop import as_async
from cadenza.rewards.base import ConfiguredReward, finite
from cadenza.rewards.config import RewardConfig
from cadenza.rewards.domain import DomainReward, RewardSpec, make_reward
from cadenza.rewards.registry import REWARDS, RewardName
from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.worker import RewardUnavailable

__all__ = [
    "REWARDS",
    "ConfiguredReward",
    "DomainReward",
    "Reward",
    "RewardConfig",
    "RewardName",
    "RewardSpec",
    "RewardUnavailable",
    "Sample",
    "Scored",
    "as_reward",
    "check_reward",
    "make_reward",
]

Reward = Callable[[Any], Awaitable[float]]
"""`async reward(trajectory) -> float`."""


def as_reward(spec: str | Callable[..., Any]) -> Reward:
    """The reward that 'module:name' or a function means; a plain function runs off the loop."""
    return as_async(load_object(spec) if isinstance(spec, str) else spec)


def check_reward(value: Any, domain: str) -> float:
    """A reward as a finite float, or the error that says what is wrong with it."""
    return finite(value, f"the reward of domain '{domain}'")
