"""Group filters that ship: whether a whole group is worth training on."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.rollout.records import Trajectory


async def has_variance(group: Sequence[Trajectory]) -> bool:
    """Its scores differ: else a comparison within the group teaches nothing (DAPO's dynamic sampling)."""
    return len({trajectory.score for trajectory in group}) > 1
