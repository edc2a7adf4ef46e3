"""Any gymnasium env as a text env."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cadenza.config import load_object
from cadenza.envs.adapters import extra
from cadenza.envs.protocol import Outcome

gymnasium = extra("gymnasium")

Format = Callable[[Any], str]
"""Turns an observation into text."""
Parse = Callable[[str], Any]
"""Turns an answer into an action; None when it means none."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    """A gymnasium env by its id. Its calls run off the loop."""

    def __init__(
        self,
        id: str,
        *,
        make_args: Mapping[str, Any] | None = None,
        format: Format | str | None = None,
        parse: Parse | str | None = None,
        actions: Sequence[str] | None = None,
        prompt: str = "",
        max_steps: int | None = None,
        invalid_penalty: float = 0.0,
    ) -> None:
        """`make_args` go to `gymnasium.make`.

        `format(observation)` returns the text that the model sees. The default is the rendered text of an env that was
        made with `render_mode='ansi'`, and `str(observation)` otherwise. `prompt` precedes the first one.

        `parse(answer)` returns the action. By default the answer is one of the names `actions`, or the number of an
        action. Both functions may be written as 'package.module:name'. An answer without action does not reach the
        env: it counts as a step, costs `invalid_penalty`, and shows the same observation again.

        `max_steps` is by default the limit that the env is registered with. An episode is a success when the env says
        so (`success` or `is_success` in its info), or else when its rewards reach the threshold that it is
        registered with.
        """
        if invalid_penalty < 0:
            raise ValueError(f"invalid_penalty must be >= 0, got {invalid_penalty}")
        self._format: Format | None = load_object(format) if isinstance(format, str) else format
        self._env: Any = gymnasium.make(id, **(make_args or {}))
        spec = self._env.spec
        try:
            self._parse: Parse = (load_object(parse) if isinstance(parse, str) else parse) or self._by_name(id, actions)
        except ValueError:
            self._env.close()
            raise
        self._prompt = prompt
        self._penalty = invalid_penalty
        self._max_steps: int | None = max_steps or spec.max_episode_steps
        self._threshold: float | None = spec.reward_threshold
        self._shown = ""
        self._steps = self._invalid = 0
        self._return = 0.0

    def reset(self, seed: int) -> str:
        observation, _ = self._env.reset(seed=seed)
        self._steps = self._invalid = 0
        self._return = 0.0
        self._shown = self._text(observation)
        return self._prompt + self._shown

    def step(self, action: str) -> Outcome:
        self._steps += 1
        parsed = self._parse(action)
        terminated = truncated = False
        info: dict[str, Any] = {}
        if parsed is None:
            self._invalid += 1
            reward = 0.0 - self._penalty
        else:
            observation, reward, terminated, truncated, info = self._env.step(parsed)
            self._shown = self._text(observation)
        reward = float(reward)
        self._return += reward
        if self._max_steps is not None and self._steps >= self._max_steps and not terminated:
            truncated = True
        info = {**info, "steps": self._steps, "invalid": self._invalid}
        if "success" not in info and (success := self._success(info)) is not None:
            info["success"] = success
        return self._shown, reward, bool(terminated), bool(truncated), info

    def close(self) -> None:
        self._env.close()

    def _success(self, info: Mapping[str, Any]) -> bool | None:
        if "is_success" in info:
            return bool(info["is_success"])
        return None if self._threshold is None else self._return >= self._threshold

    def _text(self, observation: Any) -> str:
        if self._format is not None:
            return self._format(observation)
        if self._env.render_mode == "ansi":
            return _COLOUR.sub("", str(self._env.render()))
        return str(observation)

    def _by_name(self, id: str, names: Sequence[str] | None) -> Parse:
        """Return a parser of the names and numbers of actions."""
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(
                f"gymnasium env '{id}' has the action space {space}, not Discrete; give a function `parse`"
            )
        first, count = int(space.start), int(space.n)
        if names is not None and len(names) != count:
            raise ValueError(f"actions must name all {count} actions of '{id}', got {list(names)}")
        known = {str(first + i): first + i for i in range(count)}
        known |= {name.strip().lower(): first + i for i, name in enumerate(names or ())}
        return lambda answer: known.get(answer.strip().lower())
