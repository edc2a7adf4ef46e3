"""An environment and a reward of your own; guess.yaml trains on them."""

from typing import Any


class Guess:  # reset and step may be async
    actions = tuple("0123456789")  # optional: lets a cold start teach the format

    def reset(self, seed: int) -> str:
        self.secret = seed % 10
        return f"{self.secret} again: "

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, bool]]:
        right = action == str(self.secret)
        return "", float(right), True, False, {"success": right}


def reward(trajectory: Any) -> float:  # optional, may be async: what the env paid is the default
    return trajectory.episode_score
