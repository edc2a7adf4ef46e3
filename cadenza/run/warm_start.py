"""Examples to begin with: what a well-formed answer looks like, or how an expert plays.

The env is played without a model. Each turn gives a pair of tokens, the context as the model would see it and the
answer as it should write it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from cadenza.envs import find_factory
from cadenza.envs.protocol import EnvType
from cadenza.errors import EnvError
from cadenza.inference.codec import TemplateError, TextCodec
from cadenza.run.rollout_config import RolloutRunConfig, WarmStartConfig
from cadenza.run.config import ConfigError
from cadenza.training.supervised import Pair

REQUIRED_ENV_ATTRIBUTES = {
    "format": ("actions", "a property with all well-formed answers"),
    "demonstrations": ("solution", "a method"),
}


def warm_start_pairs(config: RolloutRunConfig, settings: WarmStartConfig, codec: TextCodec) -> list[Pair]:
    """The examples, from all domains alternately."""
    return asyncio.run(_pairs(config, settings, codec))


async def _pairs(config: RolloutRunConfig, settings: WarmStartConfig, codec: TextCodec) -> list[Pair]:
    rng = random.Random(config.seed)
    pairs: list[Pair] = []
    domains = [
        EnvType(name, find_factory(domain.env), dict(domain.env_args)) for name, domain in config.env_manager.domains.items()
    ]
    for number in range(settings.episodes):
        type = domains[number % len(domains)]
        seed = settings.first_seed + number
        try:
            env = await type.make()
            try:
                pairs += await _episode(config, settings, codec, type, env, seed, rng)
            finally:
                if hasattr(env, "close"):
                    await type.call("close", env.close)()
        except (ConfigError, TemplateError):
            raise
        except Exception as error:  # the user's own code
            raise EnvError(f"env '{type.name}' failed in the warm start, with seed {seed}: {error!r}") from error
    return pairs


async def _episode(
    config: RolloutRunConfig,
    settings: WarmStartConfig,
    codec: TextCodec,
    type: EnvType,
    env: Any,
    seed: int,
    rng: random.Random,
) -> list[Pair]:
    attribute, what = REQUIRED_ENV_ATTRIBUTES[settings.source]
    if not hasattr(env, attribute):
        raise ConfigError(
            f"warm_start.source '{settings.source}' needs envs with '{attribute}' ({what}); '{type.name}' has none"
        )
    observation = await type.call("reset", env.reset)(seed)
    answers = iter(env.solution()) if settings.source == "demonstrations" else None
    fresh = config.env_manager.rollout == "step"
    context = np.empty(0, np.int32)
    pairs: list[Pair] = []
    for _ in range(config.env_manager.max_turns):
        first = fresh or not len(context)
        prompt = codec.encode(observation, first=first, last=None if first else int(context[-1]))
        context = prompt if first else np.concatenate((context, prompt))
        answer = rng.choice(env.actions) if answers is None else next(answers, None)
        if answer is None:
            break
        try:
            response = codec.encode_answer(answer, max_tokens=config.env_manager.sampling.max_tokens)
        except ValueError as error:
            raise ConfigError(f"warm_start: {error}; raise envs.sampling.max_tokens") from error
        pairs.append((context, response))
        context = np.concatenate((context, response))
        observation, _, terminated, truncated, _ = await type.call("step", env.step)(answer)
        if terminated or truncated or len(context) >= config.env_manager.max_context:
            break
    return pairs
