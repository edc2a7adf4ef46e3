"""Rewards: what a response was worth, judged after its slot is free. docs/rewards.md says how to write one."""

from __future__ import annotations

from cadenza.rewards.base import ConfiguredReward, LastingFault
from cadenza.rewards.config import RewardConfig
from cadenza.rewards.domain import DomainReward, RewardSpec, make_reward
from cadenza.rewards.host import AskPolicy, RewardHost
from cadenza.rewards.registry import REWARDS, RewardName
from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.worker import LateReward, RewardUnavailable

__all__ = [
    "REWARDS",
    "AskPolicy",
    "ConfiguredReward",
    "DomainReward",
    "LastingFault",
    "LateReward",
    "RewardConfig",
    "RewardHost",
    "RewardName",
    "RewardSpec",
    "RewardUnavailable",
    "Sample",
    "Scored",
    "make_reward",
]
