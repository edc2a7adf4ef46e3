"""A user's own workload: a JSON file of groups, written by hand or recorded by a run.

    {"gpus": 8, "groups": 16, "cost": "h100-qwen3-8b",
     "trace": [{"prompt": 512, "members": [{"lengths": [811]}, {"lengths": [90, 120], "observations": [300],
                                            "steps": [1.5, 0.2], "reset": 3.0, "reward": 0.5}]}]}

`lengths` are the tokens that the model wrote, turn by turn; `observations` what it was shown before the second turn
and later ones; `steps`, `reset` and `reward` are seconds, 0 where they are left out. A group of the batch has as many
members as the smallest group of the trace. The groups are replayed over and over, in an order that depends on the seed.

A run records its trace when its scheduler collates through a `TraceRecorder` (`RolloutScheduler(collator=recorder)`).
Lengths and env times are then those of the trajectories it trained. The directory of a run that did not record holds
text and totals, which is too little to replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cadenza.data import DataProto
from cadenza.rollout.records import Trajectory
from cadenza.simulation.cost import A100_QWEN25_7B, H100_QWEN3_8B, H100_QWEN25_7B, CostModel
from cadenza.simulation.workloads import SYNC_SECONDS, TRAIN_SECONDS_PER_TOKEN, Episode, Workload

COSTS = {
    "h100-qwen2.5-7b": H100_QWEN25_7B,
    "h100-qwen3-8b": H100_QWEN3_8B,
    "a100-qwen2.5-7b": A100_QWEN25_7B,
}


class TraceFileError(ValueError):
    """A trace file does not say what it must."""


class Member(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    lengths: list[int]
    observations: list[int] = []
    steps: list[float] = []
    reset: float = 0.0
    reward: float = 0.0


class TraceGroup(msgspec.Struct, forbid_unknown_fields=True):
    prompt: int
    members: list[Member]


class TraceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    gpus: int
    groups: int
    trace: list[TraceGroup]
    cost: str | dict[str, float] = "h100-qwen3-8b"
    train_seconds: float = TRAIN_SECONDS_PER_TOKEN
    sync_seconds: float = SYNC_SECONDS


def read_trace(path: Path) -> Workload:
    """The workload that a file describes."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TraceFile)
        cost = _cost(file.cost)
        if not file.trace:
            raise ValueError("the trace has no groups")
        recorded = tuple(_group(number, group) for number, group in enumerate(file.trace))
        return Workload(
            name=path.stem,
            like=f"recorded, {len(recorded)} groups",
            cost=cost,
            gpus=file.gpus,
            groups=file.groups,
            group_size=min(len(group) for group in recorded),
            train_seconds=file.train_seconds,
            sync_seconds=file.sync_seconds,
            recorded=recorded,
        )
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise TraceFileError(f"{path}: {error}") from error


def _cost(cost: str | dict[str, float]) -> CostModel:
    if isinstance(cost, str):
        if cost not in COSTS:
            raise ValueError(
                f"cost '{cost}' is not known; take one of {', '.join(COSTS)}, or give a, b, c, p, kv_capacity"
            )
        return COSTS[cost]
    fields: dict[str, Any] = dict(cost)
    fields |= {name: int(cost[name]) for name in ("kv_capacity", "max_running") if name in cost}
    return CostModel(**fields)


def _group(number: int, group: TraceGroup) -> tuple[Episode, ...]:
    if not group.members:
        raise ValueError(f"group {number} has no members")
    return tuple(
        _episode(f"group {number}, member {m}", group.prompt, member) for m, member in enumerate(group.members)
    )


def _episode(where: str, prompt: int, member: Member) -> Episode:
    turns = len(member.lengths)
    if not turns or min(member.lengths) < 1 or prompt < 1:
        raise ValueError(f"{where}: the prompt and every length must be >= 1, got {prompt} and {member.lengths}")
    if len(member.observations) != turns - 1 or min(member.observations, default=0) < 0:
        raise ValueError(f"{where}: {turns} turns need {turns - 1} observations >= 0, got {member.observations}")
    steps = member.steps or [0.0] * turns
    if len(steps) != turns or min(*steps, member.reset, member.reward) < 0:
        raise ValueError(f"{where}: {turns} turns need {turns} steps, and no time may be negative, got {member}")
    return Episode(tuple(member.lengths), (prompt, *member.observations), tuple(steps), member.reset, member.reward)


class TraceRecorder:
    """A collator that passes batches on, and remembers how long everything in them took."""

    def __init__(self, collate: Callable[[list[Trajectory]], DataProto]) -> None:
        self._collate = collate
        self.trace: list[TraceGroup] = []

    def __call__(self, trajectories: list[Trajectory]) -> DataProto:
        batch = self._collate(trajectories)
        groups: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            groups[trajectory.group].append(trajectory)
        for members in groups.values():
            self.trace.append(TraceGroup(len(members[0].turns[0].prompt), [_member(member) for member in members]))
        return batch

    def save(self, path: Path, *, gpus: int, groups: int, cost: str | dict[str, float] = "h100-qwen3-8b") -> None:
        """Write a trace file for a run on so many GPUs in batches of so many groups."""
        path.write_bytes(msgspec.json.encode(TraceFile(gpus, groups, self.trace, cost)))


def _member(trajectory: Trajectory) -> Member:
    turns = trajectory.turns
    ends = [turn.asked for turn in turns[1:]] + [trajectory.ended]
    return Member(
        lengths=[max(1, len(turn.response)) for turn in turns],
        observations=[len(turn.prompt) for turn in turns[1:]],
        steps=[end - turn.answered for turn, end in zip(turns, ends, strict=True)],
        reset=turns[0].asked - trajectory.started,
    )
