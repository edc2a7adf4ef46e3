"""Examples to begin with: rows of a dataset, or what a well-formed answer looks like, or how an expert plays.

Without rows, the env is played without a model, in a thread with a loop of its own. Each turn gives a pair of tokens,
the context as the model would see it and the answer as it should write it.

Invariant: no wait without a deadline. The run's own loop watches the thread, so that a call of an env that never ends
is found whether it awaits or blocks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from cadenza.data import DataProto
from cadenza.datasets import DataConfig
from cadenza.envs import find_factory
from cadenza.envs.protocol import EnvType
from cadenza.errors import DeadlinePassed, EnvError
from cadenza.inference.codec import TemplateError, TextCodec
from cadenza.off_loop import as_async, ignore_result
from cadenza.run.cold_start_config import ColdStartConfig
from cadenza.run.config import ConfigError
from cadenza.run.example_rows import SUPERVISED, open_rows
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.training import examples
from cadenza.training.supervised import Pair

READ_ROWS = 1000
"""Rows that are read at once."""
REQUIRED_ENV_ATTRIBUTES = {
    "format": ("actions", "a property with all well-formed answers"),
    "demonstrations": ("solution", "a method"),
}


async def cold_start_examples(config: RolloutRunConfig, settings: ColdStartConfig, codec: TextCodec) -> DataProto:
    """The examples of the cold start: all rows of its data, or episodes from all domains alternately."""
    if settings.data is not None:
        found: DataProto = await as_async(_examples_of_rows)(settings.data, config.seed, codec)
        return found
    return examples(await EpisodePlayer(config, settings, codec).play())


def _examples_of_rows(data: DataConfig, seed: int, codec: TextCodec) -> DataProto:
    rows = open_rows("cold_start.data", data.model_copy(update={"epochs": 1}), SUPERVISED, codec, seed=seed)
    try:
        return DataProto.concat(list(rows.batches(READ_ROWS)), on_meta_conflict="drop")
    finally:
        rows.close()


class EpisodePlayer:
    """Plays episodes without a model, one after the other."""

    def __init__(self, config: RolloutRunConfig, settings: ColdStartConfig, codec: TextCodec) -> None:
        self._envs, self._settings, self._codec = config.env_manager, settings, codec
        self._rng = random.Random(config.seed)
        self._answered = 0
        """Calls of envs that have ended."""
        self._call = ""
        """The one under way, in words."""

    async def play(self) -> list[Pair]:
        """The pairs of all turns. Raises `DeadlinePassed` where an env does not answer within `envs.lease_seconds`; its
        thread is left behind."""
        playing = asyncio.ensure_future(as_async(lambda: asyncio.run(self._play_all()))())
        playing.add_done_callback(ignore_result)
        seconds = self._envs.lease_seconds
        while not playing.done():
            answered = self._answered
            await asyncio.wait([playing], timeout=seconds)
            if not playing.done() and self._answered == answered:
                raise DeadlinePassed(f"{self._call} did not answer within envs.lease_seconds {seconds:g}")
        pairs: list[Pair] = playing.result()
        return pairs

    async def _play_all(self) -> list[Pair]:
        domains = [
            EnvType(name, find_factory(domain.env), dict(domain.env_args))
            for name, domain in self._envs.domains.items()
            if domain.env is not None
        ]
        pairs: list[Pair] = []
        for number in range(self._settings.episodes):
            pairs += await self._play(domains[number % len(domains)], self._settings.first_seed + number)
        return pairs

    async def _play(self, type: EnvType, seed: int) -> list[Pair]:
        async def ask(name: str, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
            self._call = f"env '{type.name}' was asked to {name} in the cold start, with seed {seed}, and"
            answer = await call(*args)
            self._answered += 1
            return answer

        try:
            env = await ask("open", type.make)
            try:
                type.check(env)
                return await self._episode(type, env, seed, ask)
            finally:
                if hasattr(env, "close"):
                    await ask("close", type.call("close", env.close))
        except (ConfigError, TemplateError):
            raise
        except Exception as error:  # the user's own code
            raise EnvError(f"env '{type.name}' failed in the cold start, with seed {seed}: {error!r}") from error

    async def _episode(self, type: EnvType, env: Any, seed: int, ask: Callable[..., Awaitable[Any]]) -> list[Pair]:
        envs, codec, source = self._envs, self._codec, self._settings.source or "format"
        attribute, what = REQUIRED_ENV_ATTRIBUTES[source]
        if not hasattr(env, attribute):
            raise ConfigError(
                f"cold_start.source '{source}' needs envs with '{attribute}' ({what}); '{type.name}' has none"
            )
        observation = type.check_observation(await ask("reset", type.call("reset", env.reset), seed), "reset")
        answers = None
        if source == "demonstrations":
            answers = await ask("give its solution", as_async(lambda: iter(env.solution())))
        fresh = envs.rollout == "step"
        context = np.empty(0, np.int32)
        pairs: list[Pair] = []
        for _ in range(envs.max_turns):
            first = fresh or not len(context)
            prompt = codec.encode(observation, first=first, last=None if first else int(context[-1]))
            context = prompt if first else np.concatenate((context, prompt))
            if answers is None:
                answer = self._rng.choice(env.actions)
            else:
                answer = await ask("give its solution", as_async(next), answers, None)
            if answer is None:
                break
            try:
                response = codec.encode_answer(answer, max_tokens=envs.sampling.max_tokens)
            except ValueError as error:
                raise ConfigError(f"cold_start: {error}; raise envs.sampling.max_tokens") from error
            pairs.append((context, response))
            context = np.concatenate((context, response))
            outcome = type.check_outcome(await ask("step", type.call("step", env.step), answer))
            observation, _, terminated, truncated, _ = outcome
            if terminated or truncated or len(context) >= envs.max_context:
                break
        return pairs
