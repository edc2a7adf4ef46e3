"""`cadenza bench rewards`: rewards computed sample by sample against rewards computed batch by batch, in real runs.

The rewards have the tail of workload W6, scaled down: most take LN(25 ms, 0.8), and 5 % take a time-out of 1.5 s. The
same sample takes the same time in both runs. Sample by sample, a reward is computed as soon as its answer is there,
while other answers are generated and trained on. Batch by batch, all rewards of a batch are computed side by side once
the batch is whole, and then it is trained; generation goes on meanwhile, up to the same alpha.
"""

from __future__ import annotations

import asyncio
import json as json_format
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cadenza.data import DataProto
from cadenza.observe.run import RunDirectory, read_lines
from cadenza.pipelines.rlvr import RlvrPipeline
from cadenza.rewards import Sample
from cadenza.run.config_file import build_config

ALPHAS = (0.0, 1.0, 4.0)
ROUNDS = 3
STEPS = 14
WARM_UP = 4
"""Steps that do not count: the first batches have no others to overlap with."""
MEDIAN_SECONDS, SIGMA, TIMEOUT_SECONDS, TIMEOUT_SHARE = 0.025, 0.8, 1.5, 0.05
CONFIG: dict[str, Any] = {
    "pipeline": "rlvr",
    "steps": STEPS,
    "preset": "grpo",
    "model": {"layers": 2, "hidden": 64, "heads": 4},
    "sampling": {"max_tokens": 32},
    "rollout": {"batch_size": 128, "group_size": 8},
    "engine": {"max_running": 128},
    "validation": None,
    "checkpoint": {"every": 1000},
    "samples": 0,
    "trackers": [],
}


def reward_seconds(trajectory_key: str) -> float:
    """How long the reward of a trajectory takes."""
    draw = random.Random(trajectory_key)
    if draw.random() < TIMEOUT_SHARE:
        return TIMEOUT_SECONDS
    return min(MEDIAN_SECONDS * draw.lognormvariate(0.0, SIGMA), TIMEOUT_SECONDS)


async def slow_reward(sample: Sample) -> float:
    """A score that takes its time."""
    t = sample.trajectory
    await asyncio.sleep(reward_seconds(f"g{t.group}.{t.member}#{t.attempt}"))
    return quick_reward(sample)


def quick_reward(sample: Sample) -> float:
    """The same score at once: the share of digits in the response."""
    return sum(letter.isdigit() for letter in sample.response) / max(len(sample.response), 1)


class BatchRewards(RlvrPipeline):
    """Waits for the rewards of a batch when it is whole."""

    async def advantages(self, batch: DataProto) -> DataProto:
        await asyncio.gather(*[asyncio.sleep(reward_seconds(key)) for key in batch.non_tensor_batch["traj_key"]])
        return await super().advantages(batch)


def rewards(json: bool) -> int:
    """Measure and print."""
    found = {}
    for alpha in ALPHAS:
        rounds = [
            (_step_seconds(RlvrPipeline, slow_reward, alpha), _step_seconds(BatchRewards, quick_reward, alpha))
            for _ in range(ROUNDS)
        ]
        sample, batch = (statistics.median(times) for times in zip(*rounds, strict=True))
        found[f"alpha_{alpha:g}"] = {
            "sample_level_seconds": round(sample, 3),
            "batch_level_seconds": round(batch, 3),
            "ratio": round(batch / sample, 2),
        }
    if json:
        print(json_format.dumps(found))
        return 0
    table = Table(title="seconds of a step, with a tail of slow rewards")
    for name in ("alpha", "sample by sample", "batch by batch", "ratio"):
        table.add_column(name, justify="right")
    for name, figures in found.items():
        table.add_row(name.removeprefix("alpha_"), *(f"{value:g}" for value in figures.values()))
    Console().print(table)
    return 0


def _step_seconds(pipeline: type[RlvrPipeline], reward: Any, alpha: float) -> float:
    """The mean step of a run behind its warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        rows.write_text("".join(json_format.dumps({"prompt": f"{n}="}) + "\n" for n in range(1000)))
        config = build_config(
            CONFIG
            | {
                "out": directory,
                "rollout": CONFIG["rollout"] | {"alpha": alpha},
                "domains": {"digits": {"data": str(rows), "reward": reward}},
            }
        )
        with RunDirectory(Path(directory) / "run", config={}, trackers=()) as run:
            asyncio.run(pipeline(config, run).train())
            steps = [line["time/step"] for line in read_lines(run.path / "metrics.jsonl") if "time/step" in line]
    return statistics.fmean(steps[WARM_UP:])
