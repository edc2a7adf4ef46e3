"""Rollouts are plain async functions of (task, env, model); these three ship.

Write your own like these: whatever the function says to the model is recorded as turns, whatever the env pays is
recorded with them, and when it returns the episode is over. One that fills its context ends there, truncated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cadenza.config import load_object
from cadenza.off_loop import is_async
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.model import Model
from cadenza.rollout.records import Task

RolloutFunction = Callable[[Task, Any, Model], Awaitable[None]]
"""The second argument is the `EnvHandle`; None in a domain without an env."""


async def trajectory(task: Task, env: EnvHandle, model: Model) -> None:
    """One growing context: every turn sees all turns before it."""
    observation = await env.reset(task.seed)
    while not env.done:
        reply = await model.chat(observation)
        observation = await env.step(reply.text)


async def step(task: Task, env: EnvHandle, model: Model) -> None:
    """A fresh context every turn: each observation must say all that the model needs. A batch has a row per turn."""
    observation = await env.reset(task.seed)
    while not env.done:
        reply = await model.chat(observation, fresh=True)
        observation = await env.step(reply.text)


async def single_turn(task: Task, env: None, model: Model) -> None:
    """One answer to the messages of the task's row."""
    await model.chat(row_messages(task))


ROLLOUT_FUNCTIONS: dict[str, RolloutFunction] = {
    "trajectory": trajectory, "step": step, "single_turn": single_turn
}  # fmt: skip


def row_messages(task: Task) -> Any:
    """The chat messages of a task's row, or its prompt."""
    if isinstance(task.data, str):
        return task.data
    if isinstance(task.data, Mapping):
        for name in ("messages", "prompt"):
            if task.data.get(name):
                return task.data[name]
    given = repr(task.data)
    raise ValueError(f"task '{task.id}' has no row with 'messages' or 'prompt' to ask the model, it has {given[:200]}")


def make(spec: str | RolloutFunction) -> RolloutFunction:
    """The rollout that a name, 'module:name' or a function means."""
    if not callable(spec) and spec in ROLLOUT_FUNCTIONS:
        return ROLLOUT_FUNCTIONS[spec]
    if callable(spec) or ":" in spec:
        function: RolloutFunction = spec if callable(spec) else load_object(spec)
        if not is_async(function):
            raise ValueError(f"rollout {spec} must be an async function of (task, env, model)")
        return function
    raise ValueError(
        f"rollout '{spec}' is not known; take one of {', '.join(ROLLOUT_FUNCTIONS)}, or write 'module:function'"
    )
