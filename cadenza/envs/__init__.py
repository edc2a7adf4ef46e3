"""Environments: the protocol and the registry."""

from __future__ import annotations

from cadenza.envs.protocol import AnyEnv, AsyncEnv, Env, EnvType, Outcome
from cadenza.envs.registry import env, find_factory, registered

__all__ = ["AnyEnv", "AsyncEnv", "Env", "EnvType", "Outcome", "env", "find_factory", "registered"]
