"""The heart: the life of every single sample, from task to fate."""

from __future__ import annotations

from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.sampler_client import InferenceService

__all__ = ["DomainConfig", "EnvManagerConfig", "InferenceService", "RolloutConfig"]
