"""A user's own workload: a JSON file of groups, written by hand or recorded by a run.

    {"gpus": 8, "groups": 16, "cost": "h100-qwen3-8b",
     "trace": [{"prompt": 512, "members": [{"lengths": [811]}, {"lengths": [90, 120], "observations": [300],
                                            "steps": [1.5, 0.2], "reset": 3.0, "reward": 0.5}]}]}

`lengths` are the tokens that the model wrote, turn by turn; `observations` the tokens that it was shown before the
second turn and later ones; `steps`, `reset` and `reward` are seconds, 0 where they are left out. A group of the batch
has as many members as the smallest group of the trace. The groups are repeated in an order that depends on the seed.

Every run of `cadenza train` records its training in `trace.jsonl` (see `RunStep`), so the directory of a run is a
workload too; a scheduler of your own records through a `TraceRecorder` (`RolloutScheduler(collator=recorder)`). Lengths
and env times are those of the trained trajectories. Where a rollout begins a fresh context every turn (`fresh`),
contexts do not grow, but the simulated prefix cache takes a fresh context for a continuation of the previous one, so
that most of its prefill is free.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from cadenza.rollout.trace import RunStep, TraceFile, TraceGroup, TraceMember
from cadenza.simulation.comparison.workloads import SYNC_SECONDS, TRAIN_SECONDS_PER_TOKEN, TraceEpisode, Workload
from cadenza.simulation.virtual_cluster.cost import A100_QWEN25_7B, H100_QWEN3_8B, H100_QWEN25_7B, CostModel

LAST_GROUPS = 2048
"""Last groups of a run that are replayed."""
COSTS = {
    "h100-qwen2.5-7b": H100_QWEN25_7B,
    "h100-qwen3-8b": H100_QWEN3_8B,
    "a100-qwen2.5-7b": A100_QWEN25_7B,
}


class TraceFileError(ValueError):
    """A trace file lacks something, or has a wrong value."""


def read_trace(path: Path) -> Workload:
    """Return the workload that a trace file describes."""
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
            train_seconds=TRAIN_SECONDS_PER_TOKEN if file.train_seconds is None else file.train_seconds,
            sync_seconds=SYNC_SECONDS if file.sync_seconds is None else file.sync_seconds,
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
        lengths=tuple(member.lengths),
        observations=(prompt, *member.observations),
        steps=tuple(steps),
        reset=member.reset,
        reward=member.reward,
        fresh=member.fresh,
    )


# -- a finished run ----------------------------------------------------------------------------------------------------


def read_run(path: Path, *, needs_costs: bool = True) -> Workload:
    """Return the workload of a finished run, from its last steps: its trajectories, its batches, its costs.

    A run without measured costs is refused, unless `needs_costs` is false because the caller replaces them. The
    training time of a step is everything that is neither the wait for a batch nor the publishing of weights.
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
        raise TraceFileError(f"{path} has no trace of a run: there is no trace.jsonl") from None
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise TraceFileError(f"{file}: {error}") from error


def _last_steps(file: Path) -> list[RunStep]:
    """Return the last steps that have `LAST_GROUPS` groups together. A half-written last line is left out."""
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
