"""The conversations of an attempt that has several (`Model.branch`): which turns are whose, and what keeps them apart.

Invariant: in the trajectory the turns of a branch stand together, in the order in which the branches began, whichever
was answered first. The row of a branch begins with what was said before it, as a prompt that trains nothing. Branches
of one attempt share no seed of a turn and no session in a cache.

An attempt with one conversation has no `Branch` at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cadenza.inference.replica import Tokens
from cadenza.rollout.records import Turn

if TYPE_CHECKING:
    from cadenza.rollout.model import Model

BRANCH_KEY = 0xD1B54A32D192ED03
"""Weyl steps keep the seeds of branches apart."""
BRANCH_SESSIONS = 1 << 56
"""Between the session ids of two branches of an attempt; more than the ids of all schedulers of a sampler."""


@dataclass(slots=True, eq=False)
class Branch:
    """One conversation of an attempt that has several."""

    model: Model
    all: list[Branch]
    """Of the attempt, this one too, in the order in which they began; one list for all."""
    number: int
    turns: int = 0
    last_turn: Turn | None = None

    @classmethod
    def first(cls, model: Model) -> Branch:
        """The conversation from which the first branch is taken: the turns so far are its own."""
        turns = model.trajectory.turns
        branch = cls(model, [], 0, len(turns), turns[-1] if turns else None)
        branch.all.append(branch)
        return branch

    def add(self, model: Model) -> Branch:
        """Another conversation of the same attempt begins."""
        branch = Branch(model, self.all, len(self.all))
        self.all.append(branch)
        return branch

    @property
    def models(self) -> list[Model]:
        """Those of all branches of the attempt."""
        return [branch.model for branch in self.all]

    @property
    def seed_key(self) -> int:
        """What is added to the seeds of its turns."""
        return BRANCH_KEY * self.number

    @property
    def session_offset(self) -> int:
        """What is added to the session id of the attempt."""
        return BRANCH_SESSIONS * self.number

    def record(self, turn: Turn, turns: list[Turn], chunks: tuple[Tokens, ...]) -> int:
        """Insert a turn of this branch among the turns of the trajectory; returns where it stands. `chunks` are the
        context of the turn, its prompt included."""
        if self.number and not self.turns:
            turn.fresh, turn.prompt = True, np.concatenate(chunks)
        before = [branch.last_turn for branch in self.all[: self.number + 1] if branch.last_turn is not None]
        place = next(n for n, other in enumerate(turns, 1) if other is before[-1]) if before else 0
        turns.insert(place, turn)
        self.last_turn = turn
        self.turns += 1
        return place
