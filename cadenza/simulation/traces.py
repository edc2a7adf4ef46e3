"""A user's own workload: a JSON file of groups, written by hand or recorded by a run.

    {"gpus": 8, "groups": 16, "cost": "h100-qwen3-8b",
     "trace": [{"prompt": 512, "members": [{"lengths": [811]}, {"lengths": [90, 120], "observations": [300],
                                            "steps": [1.5, 0.2], "reset": 3.0, "reward": 0.5}]}]}

`lengths` are the tokens that the model wrote, turn by turn; `observations` what it was shown before the second turn
and later ones; `steps`, `reset` and `reward` are seconds, 0 where they are left out. A group of the batch has as many
members as the smallest group of the trace. The groups are replayed over and over, in an order that depends on the seed.

Every run of `cadenza train` records what it trains in `trace.jsonl` (see `RunStep`), and its directory is a workload
too; a scheduler of one's own records through a `TraceRecorder` (`RolloutScheduler(collator=recorder)`). Lengths and env
times are those of the trajectories that were trained. Where a rollout begins a fresh context every turn (`fresh`),
contexts do not grow, but the simulated prefix cache takes a fresh context for the continuation of the one before: most
of its prefill is free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from cadenza.data import DataProto
from cadenza.rollout.records import Trajectory
from cadenza.simulation.cost import A100_QWEN25_7B, H100_QWEN3_8B, H100_QWEN25_7B, CostModel
from cadenza.simulation.workloads import SYNC_SECONDS, TRAIN_SECONDS_PER_TOKEN, TraceEpisode, Workload

LAST_GROUPS = 2048
"""Of a run, that are replayed."""
COSTS = {
    "h100-qwen2.5-7b": H100_QWEN25_7B,
    "h100-qwen3-8b": H100_QWEN3_8B,
    "a100-qwen2.5-7b": A100_QWEN25_7B,
}


class TraceFileError(ValueError):
    """A trace file does not say what it must."""


class TraceMember(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    lengths: list[int]
    observations: list[int] = []
    steps: list[float] = []
    reset: float = 0.0
    reward: float = 0.0
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
    except FileNotFoundError:
        raise TraceFileError(f"there is no trace file {path}") from None
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise TraceFileError(f"{path}: {error}") from error


def _cost(cost: str | dict[str, float]) -> CostModel:
    if isinstance(cost, str):
        if cost not in COSTS:
            raise ValueError(
                f"cost '{cost}' is not known; take one of {', '.join(COSTS)}, or give a, b, c, p, kv_capacity"
            )
        return COSTS[cost]
    fields: dict[str, Any] = dict(cost)
    if missing := [name for name in ("a", "b", "c", "p", "kv_capacity") if name not in cost]:
        raise ValueError(f"cost lacks {', '.join(missing)}")
    fields |= {name: int(cost[name]) for name in ("kv_capacity", "max_running") if name in cost}
    return CostModel(**fields)


def _group(number: int, group: TraceGroup) -> tuple[TraceEpisode, ...]:
    if not group.members:
        raise ValueError(f"group {number} has no members")
    return tuple(
        _episode(f"group {number}, member {m}", group.prompt, member) for m, member in enumerate(group.members)
    )


def _episode(where: str, prompt: int, member: TraceMember) -> TraceEpisode:
    turns = len(member.lengths)
    if not turns or min(member.lengths) < 1 or prompt < 1:
        raise ValueError(f"{where}: the prompt and every length must be >= 1, got {prompt} and {member.lengths}")
    if len(member.observations) != turns - 1 or min(member.observations, default=0) < 0:
        raise ValueError(f"{where}: {turns} turns need {turns - 1} observations >= 0, got {member.observations}")
    steps = member.steps or [0.0] * turns
    if len(steps) != turns or min(*steps, member.reset, member.reward) < 0:
        raise ValueError(f"{where}: {turns} turns need {turns} steps, and no time may be negative, got {member}")
    return TraceEpisode(
        tuple(member.lengths), (prompt, *member.observations), tuple(steps), member.reset, member.reward,
        fresh=member.fresh,
    )  # fmt: skip


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
    return TraceMember(lengths, observations[1:], steps if any(steps) else [], reset, fresh=fresh)


def _cut(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return int(seconds * 1e4) / 1e4


# -- a finished run ----------------------------------------------------------------------------------------------------


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


def read_run(path: Path, *, needs_costs: bool = True) -> Workload:
    """The workload of a finished run, as it was in its last steps: its trajectories, its batches, its costs. Where
    these are going to be replaced, a run need not have measured any.

    Training is charged with everything that is neither waiting for a batch nor handing out weights.
    """
    file = path / "trace.jsonl"
    try:
        steps = _last_steps(file)
        if not steps:
            raise ValueError("no step of it was recorded")
        last = steps[-1]
        if last.cost is None and needs_costs:
            raise ValueError(
                "the engine of this run measured no costs, for it made too few steps or is a server: make a longer "
                "run, or give `cadenza plan` a --model-cost"
            )
        recorded = tuple(
            _group(number, group) for number, group in enumerate(group for step in steps for group in step.groups)
        )
        return Workload(
            name=path.resolve().name,
            like=f"the run {path}, {len(recorded)} groups",
            cost=_cost(last.cost or "h100-qwen3-8b"),
            gpus=last.gpus,
            groups=max(len(step.groups) for step in steps),  # the last batch may be short
            group_size=min(len(group) for group in recorded),
            train_seconds=median(
                (step.seconds - step.wait_seconds - step.publish_seconds) / step.tokens for step in steps
            ),
            sync_seconds=median(step.publish_seconds for step in steps),
            recorded=recorded,
        )
    except FileNotFoundError:
        raise TraceFileError(f"{path} is no run that recorded its trace: it has no trace.jsonl") from None
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise TraceFileError(f"{file}: {error}") from error


def _last_steps(file: Path) -> list[RunStep]:
    """As many as have `LAST_GROUPS` groups together. The last line may be half-written."""
    lines: deque[bytes] = deque()
    groups: deque[int] = deque()
    with file.open("rb") as rows:
        for row in rows:
            if not row.endswith(b"\n"):
                break
            lines.append(row)
            groups.append(row.count(b'"prompt"'))
            while sum(groups) - groups[0] >= LAST_GROUPS:
                lines.popleft()
                groups.popleft()
    return [msgspec.json.decode(line, type=RunStep) for line in lines]
