"""What an environment is: reset and step, sync or async.

An async env runs on the loop; a plain one in a thread, one call at a time. An observation is text, chat messages or
tokens, a reward a finite number. `close`, where there is one, is always called.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from cadenza.errors import EnvError
from cadenza.off_loop import THREADS, as_async, is_async

Outcome = tuple[Any, float, bool, bool, dict[str, Any]]
"""observation, reward, terminated, truncated, info: what a step returns."""


class Env(Protocol):
    """The plain form."""

    def reset(self, seed: int) -> Any: ...

    def step(self, action: str) -> Outcome: ...


class AsyncEnv(Protocol):
    """The async form."""

    async def reset(self, seed: int) -> Any: ...

    async def step(self, action: str) -> Outcome: ...


AnyEnv = Env | AsyncEnv


class EnvType:
    """How to make and call the envs of one domain; looked up once, not for every episode."""

    __slots__ = ("_args", "_factory", "_made_on_loop", "_on_loop", "name")

    def __init__(self, name: str, factory: Callable[..., Any], args: dict[str, Any]) -> None:
        self.name = name
        self._factory = factory
        self._args = args
        self._made_on_loop = is_async(getattr(factory, "step", factory))
        self._on_loop: dict[str, bool] = {}

    async def make(self) -> Any:
        """A new env; that of an async class is made on the loop."""
        if self._made_on_loop:
            return self._factory(**self._args)
        loop = asyncio.get_running_loop()
        made: asyncio.Future[Any] = loop.run_in_executor(THREADS, lambda: self._factory(**self._args))
        try:
            env = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_close_late)
            raise
        for method in ("reset", "step"):
            if not callable(getattr(env, method, None)):
                raise EnvError(f"env '{self.name}' is a {type(env).__name__} without a method '{method}'")
        self._made_on_loop = is_async(env.step)
        return env

    def call(self, name: str, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        """The async form of the method `name` of an env."""
        on_loop = self._on_loop.get(name)
        if on_loop is None:
            on_loop = self._on_loop[name] = is_async(method)
        return method if on_loop else as_async(method)

    def check_observation(self, observation: Any, where: str) -> Any:
        if observation is None:
            raise EnvError(f"env '{self.name}' {where} returned no observation; return text, messages or tokens")
        return observation

    def check_outcome(self, outcome: Any) -> Outcome:
        """A step's result, or the error that says what is wrong with it."""
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise EnvError(
                f"env '{self.name}' step returned {_short(outcome)}; "
                "return (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = outcome
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            try:
                reward = float(reward)
            except (TypeError, ValueError):
                raise EnvError(f"env '{self.name}' step returned reward {_short(reward)}; return a number") from None
        if not math.isfinite(reward):
            raise EnvError(f"env '{self.name}' step returned reward {reward}; return a finite number")
        if not (terminated or truncated):
            self.check_observation(observation, "step")
        return observation, float(reward), bool(terminated), bool(truncated), info or {}


def _close_late(made: asyncio.Future[Any]) -> None:
    """Nobody waits any more for an env that was made in a thread: it is closed all the same."""
    if made.cancelled() or made.exception() is not None:
        return
    close = getattr(made.result(), "close", None)
    if close is not None:
        asyncio.ensure_future(as_async(close)())  # noqa: RUF006 - nobody is left to wait for it


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
