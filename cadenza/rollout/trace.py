"""What rollouts cost: the lengths, turns, env and reward times of what was trained, recorded for the simulation.

Every run of `cadenza train` writes a `RunStep` for each step into `trace.jsonl` of its directory. A scheduler of one's
own records through a `TraceRecorder`: `RolloutScheduler(..., collator=TraceRecorder(collate))`. The simulation reads
both (`simulation/comparison/traces.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from cadenza.data import DataProto
from cadenza.rollout.records import Trajectory


class TraceMember(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    lengths: list[int]
    observations: list[int] = []
    steps: list[float] = []
    reset: float = 0.0
    reward: float = 0.0
    """From the end of the rollout until its reward was known."""
    fresh: bool = False
    """Every turn begins a context of its own."""


class TraceGroup(msgspec.Struct, forbid_unknown_fields=True):
    prompt: int
    members: list[TraceMember]


class TraceFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    gpus: int
    groups: int
    trace: list[TraceGroup]
    cost: str | dict[str, float] = "h100-qwen3-8b"
    train_seconds: float | None = None
    """Of one token on one GPU; None leaves it to the simulation, and so does the next one."""
    sync_seconds: float | None = None
    """For how long a weight update keeps a replica from generating."""


class TraceRecorder:
    """A collator that passes batches on, and remembers how long everything in them took."""

    def __init__(self, collate: Callable[[list[Trajectory]], DataProto]) -> None:
        self._collate = collate
        self.trace: list[TraceGroup] = []

    def __call__(self, trajectories: list[Trajectory]) -> DataProto:
        batch = self._collate(trajectories)
        self.trace += trace_groups(trajectories)
        return batch

    def save(self, path: Path, *, gpus: int, groups: int, cost: str | dict[str, float] = "h100-qwen3-8b") -> None:
        """Write a trace file for a run on so many GPUs in batches of so many groups."""
        path.write_bytes(msgspec.json.encode(TraceFile(gpus, groups, self.trace, cost)))


def trace_groups(trajectories: Iterable[Trajectory]) -> list[TraceGroup]:
    """How long everything in them took, by group."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    return [
        TraceGroup(len(members[0].turns[0].prompt), [_member(member) for member in members])
        for members in groups.values()
    ]


def _member(trajectory: Trajectory) -> TraceMember:
    """One pass over the turns: a run does this for everything it trains."""
    lengths, observations, waits = [], [], []
    before = trajectory.started
    for turn in trajectory.turns:
        lengths.append(len(turn.response) or 1)
        observations.append(len(turn.prompt))
        waits.append(_cut(turn.asked - before))
        before = turn.answered
    waits.append(_cut(trajectory.ended - before))
    reset, *steps = waits
    fresh = len(lengths) > 1 and trajectory.turns[1].fresh
    reward = _cut(max(trajectory.scored - trajectory.ended, 0.0))
    return TraceMember(lengths, observations[1:], steps if any(steps) else [], reset, reward, fresh)


def _cut(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return int(seconds * 1e4) / 1e4


class RunStep(msgspec.Struct, omit_defaults=True):
    """A line of the `trace.jsonl` of a run: what a step asked of the machine, and what it took."""

    step: int
    gpus: int
    """Devices that work at the same time: those that generate, and unless the run is synchronous those that train."""
    seconds: float
    """Of the whole step."""
    wait_seconds: float
    """Until there was a batch."""
    publish_seconds: float
    groups: list[TraceGroup]
    cost: dict[str, float] | None = None
    """Of the engine, as far as it has measured itself."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def tokens(self) -> int:
        """Of the rows that were trained."""
        shown = sum(group.prompt * len(group.members) for group in self.groups)
        members = [member for group in self.groups for member in group.members]
        return shown + sum(sum(member.lengths) + sum(member.observations) for member in members)
