"""What an environment is: reset and step, sync or async.

An async env runs on the loop; a plain one in a thread, one call at a time. An observation is text, chat messages or
tokens; a reward is a finite number. If the env has a method `close`, it is always called.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import numpy as np

from cadenza.errors import EnvError
from cadenza.off_loop import as_async, is_async
from cadenza.scalars import as_number

Outcome = tuple[Any, float, bool, bool, dict[str, Any]]
"""The result of a step: observation, reward, terminated, truncated, info."""
OBSERVATION = (str, list, tuple)
"""Text or chat messages; tokens are a flat array of integers."""


class Env(Protocol):
    """An env with plain methods, which run in a thread."""

    def reset(self, seed: int) -> Any: ...

    def step(self, action: str) -> Outcome: ...


class AsyncEnv(Protocol):
    """An env with async methods, which run on the loop."""

    async def reset(self, seed: int) -> Any: ...

    async def step(self, action: str) -> Outcome: ...


AnyEnv = Env | AsyncEnv


class EnvType:
    """Makes and calls the envs of one domain; it looks up once, not for every episode, which methods are async."""

    __slots__ = ("_args", "_factory", "_made_on_loop", "_on_loop", "has_told_of_endless", "name", "takes_row")

    def __init__(self, name: str, factory: Callable[..., Any], args: dict[str, Any]) -> None:
        self.name = name
        self._factory = factory
        self._args = args
        step = getattr(factory, "step", None)
        self._made_on_loop = is_async(factory) if step is None else is_async(step)
        self._on_loop: dict[str, bool] = {}
        self.takes_row: bool | None = None
        """Whether `reset` has a parameter `row`; None before it was looked at."""
        self.has_told_of_endless = False
        """The log has said that an episode does not end."""

    async def make(self) -> Any:
        """Return a new env. An async class or an async function makes it on the loop, everything else in a thread."""
        if self._made_on_loop:
            env = self._factory(**self._args)
            if isinstance(self._factory, type):  # the usual case, which need not be looked at
                return env
            return await env if inspect.isawaitable(env) else env
        made = asyncio.ensure_future(as_async(lambda: self._factory(**self._args))())
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_close_late)
            raise

    def check(self, env: Any) -> None:
        """Raise `EnvError` unless the env has the methods `reset` and `step`."""
        for method in ("reset", "step"):
            if not callable(getattr(env, method, None)):
                raise EnvError(f"env '{self.name}' is a {type(env).__name__} without a method '{method}'")

    def call(self, name: str, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        """Return the async form of the method `name` of an env."""
        on_loop = self._on_loop.get(name)
        if on_loop is None:
            on_loop = self._on_loop[name] = is_async(method)
        return method if on_loop else as_async(method)

    def look_at(self, reset: Callable[..., Any]) -> None:
        """Find out whether the `reset` of these envs has a parameter `row`."""
        try:
            self.takes_row = "row" in inspect.signature(reset).parameters
        except (TypeError, ValueError):  # a callable without a signature
            self.takes_row = False

    def check_observation(self, observation: Any, where: str) -> Any:
        if where == "reset" and _is_observation_and_info(observation):
            raise EnvError(
                f"env '{self.name}' reset returned (observation, info) as gymnasium's envs do; return the observation "
                "alone, or run a gymnasium env by env: 'gymnasium' (cadenza.envs.adapters)"
            )
        if isinstance(observation, np.ndarray):
            fits = observation.ndim == 1 and observation.dtype.kind in "iu"
        else:
            fits = isinstance(observation, OBSERVATION)
        if not fits:
            what = "no observation" if observation is None else f"observation {_short(observation)}"
            raise EnvError(f"env '{self.name}' {where} returned {what}; return text, messages or tokens")
        return observation

    def check_outcome(self, outcome: Any) -> Outcome:
        """Return the result of a step with its types normalised; raises `EnvError` that names what is wrong."""
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise EnvError(
                f"env '{self.name}' step returned {_short(outcome)}; "
                "return (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = outcome
        if type(reward) is not float:
            number = as_number(reward)
            if number is None:
                raise EnvError(f"env '{self.name}' step returned reward {_short(reward)}; return a number or a bool")
            reward = number
        if not math.isfinite(reward):
            raise EnvError(f"env '{self.name}' step returned reward {reward}; return a finite number")
        if type(terminated) is not bool or type(truncated) is not bool:
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if as_number(flag) is None:
                    raise EnvError(f"env '{self.name}' step returned {name} {_short(flag)}; return True or False")
        if not (terminated or truncated):
            self.check_observation(observation, "step")
        if info is not None and not isinstance(info, dict):
            raise EnvError(f"env '{self.name}' step returned info {_short(info)}; return a dict")
        if info and (success := info.get("success")) is not None and as_number(success) is None:
            raise EnvError(
                f"env '{self.name}' step returned info['success'] {_short(success)}; say True or False, or leave it out"
            )
        return observation, reward, bool(terminated), bool(truncated), info or {}


def _close_late(made: asyncio.Future[Any]) -> None:
    """Close an env that a thread made after its attempt was cancelled."""
    if made.cancelled() or made.exception() is not None:
        return
    close = getattr(made.result(), "close", None)
    if close is not None:
        asyncio.ensure_future(as_async(close)())  # noqa: RUF006 - the attempt that could wait for it is gone


def _is_observation_and_info(value: Any) -> bool:
    """Whether this is a pair whose second is a dict; two chat messages are none, their dicts have a role."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict) and "role" not in value[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
