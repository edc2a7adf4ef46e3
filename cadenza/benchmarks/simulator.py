"""`cadenza bench simulator`: the simulation against reality. One real run is measured, another is predicted from it.

The pipeline trains a tiny policy, with engine and trainer in this process. The first run of a case is the calibration:
its directory holds the costs of a decode step, of a token of prefill and of a trained token, the lengths of the answers
and the times of the envs (`rollout/trace.py`). From these alone the simulation predicts the step time of a run with
another batch, other slots and other envs, which is then measured. The learning rate is close to 0, so that both runs
write answers of the same lengths: the benchmark checks the simulation, and not the progress of learning.

Calibrations and measured runs alternate (C M C M C M C). The prediction for a measured run is the mean of the
predictions from the calibrations before and after it, and the median of the errors counts, because a machine with other
work is never equally fast in two runs. The output also shows how long the event loop waited for a CPU.
"""

from __future__ import annotations

import asyncio
import json as json_format
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from rich.console import Console

from cadenza.envs.protocol import Outcome
from cadenza.observe.run import RunDirectory
from cadenza.pipelines.agentic import AgenticPipeline
from cadenza.rollout.trace import RunStep
from cadenza.run.config_file import build_config
from cadenza.simulation.comparison.experiment import Trial
from cadenza.simulation.comparison.strategy import StrategySettings
from cadenza.simulation.comparison.traces import read_run
from cadenza.simulation.comparison.workloads import TraceEpisode, Workload

TOLERANCE = 0.15
GROUP_SIZE = 8
STEPS, WARM_UP = 12, 4
ROUNDS = 3
"""Measured runs of a case."""
SEEDS = 3
"""Seeds of the simulation, each another order of the recorded groups."""


class ConversationEnv:
    """A conversation of some turns; every step takes time, as with a game server or a tool."""

    def __init__(self, turns: int, latency: float) -> None:
        self._turns = turns
        self._latency = latency

    async def reset(self, seed: int) -> str:
        return f"say something about {seed % 1000}: "

    async def step(self, action: str) -> Outcome:
        if self._latency:
            await asyncio.sleep(random.expovariate(1 / self._latency))
        self._turns -= 1
        reward = sum(map(ord, action)) % 97 / 97  # the rewards differ, so that training uses every row
        return "go on: ", reward, self._turns == 0, False, {}


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The settings in which the two runs of a case differ."""

    batch: int
    slots: int
    latency: float = 0.0
    """Mean seconds of a step of the env, exponentially distributed."""


@dataclass(frozen=True, slots=True)
class PredictionCase:
    """A kind of run: one setup is measured for calibration, the other one is predicted."""

    name: str
    alpha: float
    turns: int
    max_tokens: int
    calibration: RunSetup
    predicted: RunSetup


CASES = (
    PredictionCase("sync, one long answer", 0.0, 1, 192, RunSetup(32, 32), RunSetup(96, 64)),
    PredictionCase("sync, slow envs", 0.0, 3, 48, RunSetup(32, 32, 0.05), RunSetup(64, 48, 0.1)),
    PredictionCase("alpha 1, slow envs", 1.0, 3, 48, RunSetup(32, 32, 0.05), RunSetup(64, 48, 0.1)),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The predicted and the measured step time of a run."""

    measured_step_seconds: float
    predicted_step_seconds: float
    cpu_wait: float
    """Share of the time for which the event loop was ready and had no CPU: the load by other programs."""

    @property
    def error(self) -> float:
        return self.predicted_step_seconds / self.measured_step_seconds - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def run(case: PredictionCase, setup: RunSetup, seed: int, out: Path) -> float:
    """Make a real run in this directory; returns its mean step in seconds, without the first steps."""
    config = build_config(
        {
            "name": "run",
            "seed": seed,
            "steps": STEPS,
            "preset": "grpo",
            "model": {"layers": 2, "hidden": 64, "heads": 4},
            "envs": {
                "slots": setup.slots,
                "sampling": {"max_tokens": case.max_tokens},
                "domains": {
                    "talk": {"env": ConversationEnv, "env_args": {"turns": case.turns, "latency": setup.latency}}
                },
            },
            "rollout": {
                "batch_size": setup.batch, "group_size": GROUP_SIZE, "alpha": case.alpha, "suspend_mode": "keep",
            },
            "actor": {"lr": 1e-7},
            "engine": {"max_running": setup.slots, "keep_kv": True},
            "validation": None,
            "checkpoint": {"every": STEPS + 1},
            "samples": 0,
            "trackers": [],
        }
    )  # fmt: skip
    with RunDirectory(out, trackers=()) as files:
        asyncio.run(AgenticPipeline(config, files).train())
    lines = (out / "trace.jsonl").read_bytes().splitlines()
    return fmean(msgspec.json.decode(line, type=RunStep).seconds for line in lines[WARM_UP:])


def predict(calibrated: Workload, case: PredictionCase, setup: RunSetup) -> float:
    """Predict the step in seconds of a run with another setup."""
    ratio = setup.latency / case.calibration.latency if case.calibration.latency else 1.0
    workload = replace(
        calibrated,
        groups=setup.batch // GROUP_SIZE,
        cost=replace(calibrated.cost, max_running=setup.slots),
        recorded=tuple(tuple(_slower(episode, ratio) for episode in group) for group in calibrated.recorded),
    )
    settings = StrategySettings(train_gpus=calibrated.gpus - 1, concurrency=setup.slots)
    trials = [Trial(workload, "cadenza", case.alpha, seed, settings, STEPS, WARM_UP) for seed in range(SEEDS)]
    return median(trial.run().step_seconds for trial in trials)


def _slower(episode: TraceEpisode, ratio: float) -> TraceEpisode:
    return replace(episode, steps=tuple(seconds * ratio for seconds in episode.steps))


def compare(case: PredictionCase, out: Path) -> list[Comparison]:
    """Compare every measured run with the predictions from the calibrations around it; ordered by error."""
    runs: list[tuple[float, float]] = []
    predictions: list[float] = []
    for round in range(ROUNDS + 1):
        directory = out / f"calibration-{round}"
        run(case, case.calibration, 2 * round, directory)
        predictions.append(predict(read_run(directory), case, case.predicted))
        if round < ROUNDS:
            began, waited = time.monotonic(), _cpu_wait()
            seconds = run(case, case.predicted, 2 * round + 1, out / f"measured-{round}")
            runs.append((seconds, (_cpu_wait() - waited) / (time.monotonic() - began)))
    found = [
        Comparison(seconds, fmean(around), wait)
        for (seconds, wait), around in zip(runs, pairwise(predictions), strict=True)
    ]
    return sorted(found, key=lambda comparison: comparison.error)


def _cpu_wait() -> float:
    """Return the seconds for which the event loop's thread has waited for a CPU; 0 where the system has no count."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def simulator(json: bool) -> int:
    """Print the comparison; returns 0 if the median error of every case is within the tolerance."""
    console = Console(highlight=False)
    cases: dict[str, Any] = {}
    typical: list[Comparison] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            rounds = compare(case, Path(directory))
        one = rounds[len(rounds) // 2]
        typical.append(one)
        cases[case.name] = {**one.to_json(), "errors": [comparison.error for comparison in rounds]}
        if not json:
            errors = ", ".join(f"{comparison.error:+.1%}" for comparison in rounds)
            console.print(
                f"[bold]{case.name}[/], calibrated on {_told(case.calibration)}, predicted for "
                f"{_told(case.predicted)}\n  step {one.predicted_step_seconds:.2f} s predicted, "
                f"{one.measured_step_seconds:.2f} s measured: error {one.error:+.1%} (all rounds {errors}); the event "
                f"loop waited for a CPU {one.cpu_wait:.0%} of the time",
                soft_wrap=True,
            )
    worst = max(typical, key=lambda comparison: abs(comparison.error))
    if json:
        print(json_format.dumps({**worst.to_json(), "cases": cases}))
    else:
        console.print(f"largest error {worst.error:+.1%}, tolerance {TOLERANCE:.0%}")
    return 0 if abs(worst.error) <= TOLERANCE else 1


def _told(setup: RunSetup) -> str:
    envs = f", envs {1000 * setup.latency:.0f} ms" if setup.latency else ""
    return f"batch {setup.batch}, {setup.slots} slots{envs}"
