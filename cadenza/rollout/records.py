"""The nouns of a rollout: task, turn, trajectory, fate.

Token bytes live in the turns, ragged, written once where they were made. Everything else in this package moves
small records around.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cadenza.inference.replica import Finish, Logprobs, Span, Tokens


class Fate(StrEnum):
    """How an attempt ended; exactly one."""

    TRAINED = "trained"
    VALIDATED = "validated"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    STALE = "stale"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is about."""

    id: str
    """Unique among the tasks of a run, stable between runs: sampling randomness is keyed by it."""
    seed: int
    """What the environment is reset with; the same for all members of a group."""
    domain: str = "default"
    data: object = None
    """The dataset row, if there is one."""
    row: int = -1
    """Its number in the source; -1 where tasks are seeds."""
    epoch: int = 0
    """Which pass over the rows this is, from 0."""


@dataclass(slots=True)
class Turn:
    """One call of the model inside a trajectory."""

    prompt: Tokens
    """[P] the tokens that are new since the previous turn."""
    response: Tokens
    """[R]"""
    logprobs: Logprobs
    """[R]"""
    spans: tuple[Span, ...]
    """Which version wrote how many of the response tokens."""
    finish: Finish
    fresh: bool
    """The context starts anew at this turn: its row of a batch does too."""
    asked: float
    """Loop time of the call."""
    answered: float
    reward: float = 0.0
    """Of the env step that followed."""


@dataclass(slots=True)
class Trajectory:
    """One episode."""

    id: int
    """Unique per attempt."""
    task: Task
    group: int
    member: int
    attempt: int
    slot: int
    seed: int
    """Key of the sampling randomness of this attempt."""
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    score: float = 0.0
    """What the advantage estimator sees: the reward function's verdict, or else the sum of the step rewards."""
    info: dict[str, object] | None = None
    """What the last env step said besides."""
    final: str | None = None
    """What the env showed when the episode was over, if that is text. It is in no turn, because the model did not
    answer it."""
    started: float = 0.0
    ended: float = -1.0
    """When the rollout returned; negative while it runs."""
    scored: float = -1.0
    """When its reward was known; negative until then."""

    @property
    def episode_score(self) -> float:
        """The sum of what the env paid."""
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool | None:
        """What the env or the reward says of the episode; None when neither says anything."""
        success = (self.info or {}).get("success")
        return None if success is None else bool(success)

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.response) for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest version that wrote any token; None when no token was written."""
        versions = [span.version for turn in self.turns for span in turn.spans if span.length]
        return (min(versions), max(versions)) if versions else None
