"""`cadenza bench asynchrony`: the samples and the wall time to the same success, asynchronous against synchronous.

FrozenLake 4x4 is trained for each seed once with alpha 0 and once with alpha 1, until the success in validation reaches
90 %. In the second half every step of an env takes time, as with a game server or a tool: a synchronous run waits for
its envs, and an asynchronous one trains meanwhile.
"""

from __future__ import annotations

import asyncio
import json as json_format
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from cadenza.envs.frozenlake import FrozenLake
from cadenza.envs.protocol import Outcome
from cadenza.observe.run import RunDirectory, read_lines
from cadenza.pipelines.agentic import AgenticPipeline
from cadenza.run.config_file import build_config

TARGET = 0.9
LATENCY = 0.03
"""Mean seconds of a step of a slow env, exponentially distributed."""
LAKE = {"env": "frozenlake", "env_args": {"map": "4x4", "max_steps": 16}}
CONFIG: dict[str, Any] = {
    "name": "asynchrony",
    "steps": 200,
    "target": TARGET,
    "preset": "grpo",
    "model": {"layers": 2, "hidden": 64, "heads": 4},
    "cold_start": {"source": "format", "episodes": 128, "trainer": {"lr": 3e-3, "batch_size": 32}},
    "envs": {
        "slots": 256,
        "rollout": "step",
        "sampling": {"max_tokens": 1},
        "domains": {"lake": LAKE},
    },
    "rollout": {"batch_size": 128, "group_size": 16, "suspend_mode": "keep"},
    "actor": {"lr": 2e-3},
    "engine": {"max_running": 256},
    "validation": {"every": 2, "episodes": 100, "domains": {"lake": LAKE}},
    "checkpoint": {"every": 1000},
    "samples": 0,
    "trackers": [],
}


class SlowLake(FrozenLake):
    """FrozenLake whose steps take time."""

    async def step(self, action: str) -> Outcome:
        await asyncio.sleep(random.expovariate(1 / LATENCY))
        return await super().step(action)


class AsynchronyResult(NamedTuple):
    """The cost of one run to the target."""

    samples: int
    """Trajectories trained."""
    seconds: float
    """Seconds from the first validation, after the cold start, to the last."""
    success: float


def run(seed: int, alpha: float, slow: bool) -> AsynchronyResult:
    """Train until the target. Validation always uses the fast env, so it takes the same time on both sides."""
    overrides = [f"seed={seed}", f"rollout.alpha={alpha}"]
    if slow:
        overrides.append(f"envs.domains.lake.env={__name__}:SlowLake")
    with tempfile.TemporaryDirectory() as directory:
        config = build_config(CONFIG, overrides)
        with RunDirectory(Path(directory) / "run", trackers=()) as files:
            progress = asyncio.run(AgenticPipeline(config, files).train())
            seconds = [line["time"] for line in read_lines(files.path / "metrics.jsonl") if "val/success" in line]
            return AsynchronyResult(progress.samples, seconds[-1] - seconds[0], progress.success_last or 0.0)


def asynchrony(json: bool, seeds: int = 5) -> int:
    """Print the table; returns 0 if every run reached the target."""
    rows = [(seed, slow, run(seed, 0.0, slow), run(seed, 1.0, slow)) for slow in (False, True) for seed in range(seeds)]
    fast = [(sync.samples, other.samples) for _, slow, sync, other in rows if not slow]
    walls = [sync.seconds / other.seconds for _, slow, sync, other in rows if slow]
    figures = {
        "samples_sync": statistics.median(a for a, _ in fast),
        "samples_async": statistics.median(b for _, b in fast),
        "samples_ratio": statistics.median(b for _, b in fast) / statistics.median(a for a, _ in fast),
        "wall_ratio_slow_envs": statistics.median(walls),
    }
    if json:
        print(json_format.dumps(figures))
    else:
        table = Table("seed", "envs", "samples, alpha 0", "alpha 1", "seconds, alpha 0", "alpha 1", "wall ratio")
        for seed, slow, sync, other in rows:
            seconds = f"{sync.seconds:.1f}", f"{other.seconds:.1f}", f"{sync.seconds / other.seconds:.2f}"
            envs = f"{1000 * LATENCY:.0f} ms a step" if slow else "instant"
            table.add_row(str(seed), envs, str(sync.samples), str(other.samples), *seconds)
        console = Console(highlight=False)
        console.print(table)
        console.print(f"median samples until {TARGET:.0%}: {figures['samples_ratio']:.2f} x those of alpha 0")
        console.print(f"median wall time with slow envs: alpha 0 takes {figures['wall_ratio_slow_envs']:.2f} x as long")
    return 0 if all(min(sync.success, other.success) >= TARGET for *_, sync, other in rows) else 1
