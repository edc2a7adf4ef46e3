"""Single-player games of textarena.

textarena draws from the global random generators, and every game seeds them again. Each game here has a random state
of its own, which is installed for the time of a call under a lock, so a seed means one game however many run at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any, Literal

import numpy as np

from cadenza.envs.adapters import extra
from cadenza.envs.protocol import Outcome
from cadenza.errors import EnvError, InfrastructureError

textarena = extra("textarena")

LOCK_SECONDS = 60.0
"""Seconds that a call waits for the calls of other games."""

_globals = Lock()
"""Held by the one game whose state is in the global generators."""


class TextArena:
    """A textarena game by its id. Its calls run off the loop."""

    def __init__(
        self, id: str, *, make_args: Mapping[str, Any] | None = None, observe: Literal["new", "whole"] = "new"
    ) -> None:
        """`make_args` go to `textarena.make`.

        With 'new' the model sees the messages of the game since its last turn, for rollouts with a growing context;
        with 'whole' all messages as the game's own wrapper formats them, for a fresh context every turn.

        The reward comes with the last step. A success is a reward of 1: textarena pays it for a game that is solved.
        """
        if observe not in ("new", "whole"):
            raise ValueError(f"observe must be 'new' or 'whole', got '{observe}'")
        self._id = id
        self._env: Any = textarena.make(id, **(make_args or {}))
        self._game: Any = self._env
        while isinstance(self._game, textarena.Wrapper):
            self._game = self._game.env
        self._seen_by: Any = self._game if observe == "new" else self._env
        self._random: tuple[Any, Any] = (None, None)
        self._steps = 0

    def reset(self, seed: int) -> str:
        self._steps = 0
        self._random = random.Random(seed).getstate(), np.random.RandomState(seed % (1 << 32)).get_state()
        with self._own_random():
            try:
                self._env.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise EnvError(f"textarena game '{self._id}' cannot be played by one player: {error}") from error
            return self._observation()

    def step(self, action: str) -> Outcome:
        self._steps += 1
        with self._own_random():
            done, info = self._env.step(action=action)
            observation = self._observation()
        info = {**info, "steps": self._steps, "success": False}
        if not done:
            return observation, 0.0, False, False, info
        rewards, said = self._env.close()
        if not rewards or not isinstance(rewards.get(0), (int, float)):
            raise EnvError(f"textarena game '{self._id}' ended without a number as reward of its player: {rewards}")
        info |= {key: value for key, value in said.get(0, {}).items() if key in ("reason", "invalid_move")}
        info["success"] = rewards[0] >= 1
        return observation, float(rewards[0]), True, False, info

    def _observation(self) -> str:
        player, said = self._seen_by.get_observation()
        if player != 0:
            raise EnvError(f"textarena game '{self._id}' is for several players: it is the turn of player {player}")
        if isinstance(said, str):
            return said
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n\n".join(str(text) for _, text, kind in said if kind is not own)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Install the random state of this game in the global generators."""
        if not _globals.acquire(timeout=LOCK_SECONDS):
            raise InfrastructureError(f"another textarena game did not return within {LOCK_SECONDS:.0f} s")
        outside = random.getstate(), np.random.get_state()
        try:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
            _globals.release()
