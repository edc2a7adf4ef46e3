"""`cadenza bench schedule`: the gain of scheduling ideas in real processes, beside the prediction of the simulation.

Every replica is a process on Ray, the clock is the wall clock, and the scheduler and its program are those of the
strategy `cadenza`. Replicas and trainer sleep for the times of the cost model, divided by SPEED. So messages, processes
and their delays are real, and no figure depends on the speed of the CPU.
"""

from __future__ import annotations

import asyncio
import json as json_format
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cadenza.benchmarks.paced import own_ray, paced_replicas
from cadenza.inference.replica import Replica, Request
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.model import Model
from cadenza.rollout.records import Task
from cadenza.simulation.comparison.cadenza_strategy import CadenzaStrategy, reset_seed
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.experiment import Trial
from cadenza.simulation.comparison.figures import RunFigures, UsageTotals
from cadenza.simulation.comparison.strategy import StrategySettings, run_training
from cadenza.simulation.comparison.workloads import TRAIN_SECONDS_PER_TOKEN, Workload, find_workload

SPEED = 50.0
"""Seconds of the cost model per second of the wall clock."""
GPUS = 8
SEEDS = (0, 1)
WHOLE = StrategySettings(train_gpus=1, balance_seconds=0.0)


@dataclass(frozen=True, slots=True)
class ScheduleCase:
    """A workload on GPUS GPUs, and the settings to compare on it."""

    workload: Workload
    alpha: float
    steps: int
    warm_up: int
    ideas: dict[str, StrategySettings]


CASES = (
    ScheduleCase(
        # The one training GPU is faster by a factor that makes it the share of 5 in 32.
        replace(find_workload(f"W2x{GPUS}"), train_seconds=TRAIN_SECONDS_PER_TOKEN * (1 / GPUS) / (5 / 32)),
        alpha=1.0,
        steps=12,
        warm_up=4,
        ideas={
            "whole batches, no moves": WHOLE,
            "whole batches, moves": replace(WHOLE, balance_seconds=5.0),
            "in 8 parts, no moves": replace(WHOLE, parts=8),
            "in 8 parts, moves": replace(WHOLE, parts=8, balance_seconds=5.0),
        },
    ),
    ScheduleCase(
        find_workload(f"W3x{GPUS}"),
        alpha=0.0,
        steps=2,
        warm_up=1,
        ideas={"whole answers": StrategySettings(slice_tokens=0), "answers in slices": StrategySettings()},
    ),
)


def sped_up(workload: Workload, speed: float) -> Workload:
    """Return the workload with all its times divided by `speed`."""
    cost = workload.cost
    faster = replace(cost, a=cost.a / speed, b=cost.b / speed, c=cost.c / speed, p=cost.p / speed)
    return replace(
        workload,
        cost=faster,
        train_seconds=workload.train_seconds / speed,
        sync_seconds=workload.sync_seconds / speed,
    )


class RayCadenzaStrategy(CadenzaStrategy):
    """The strategy `cadenza` with its replicas in processes of their own. An episode is one answer; the first token of
    its prompt is the length of that answer."""

    async def _make_replicas(self) -> Sequence[Replica]:
        self._stack = AsyncExitStack()
        engines = paced_replicas(
            self.generating_gpus, self.workload.cost, _length, load_seconds=self.workload.sync_seconds
        )
        return await self._stack.enter_async_context(engines)

    async def _rollout(self, task: Task, env: EnvHandle, model: Model) -> None:
        prompt = np.array(await env.reset(reset_seed(task, model.trajectory)))
        prompt[0] = self.trace.episode(task.seed, model.trajectory.member).response
        await model.generate(prompt)
        await env.step("")

    async def close(self) -> None:
        await super().close()
        await self._stack.aclose()

    def totals(self) -> UsageTotals:
        """Count the tokens that the ledger has: remote replicas do not report theirs."""
        return replace(super().totals(), generated=sum(self.scheduler.ledger.tokens.values()))


def _length(request: Request) -> int:
    return int(request.chunks[0][0])


def measured(case: ScheduleCase, idea: str, seed: int) -> RunFigures:
    """Measure a real run; its times are converted to seconds of the cost model."""
    fast, settings = sped_up(case.workload, SPEED), case.ideas[idea]
    settings = replace(settings, balance_seconds=settings.balance_seconds / SPEED)
    strategy = RayCadenzaStrategy(fast, trace_of(fast, seed), case.alpha, settings)
    figures = asyncio.run(run_training(strategy, case.steps)).figures(seed, case.warm_up)
    return replace(figures, step_seconds=figures.step_seconds * SPEED, wait_seconds=figures.wait_seconds * SPEED)


def simulated(case: ScheduleCase, idea: str, seed: int) -> RunFigures:
    """Simulate the same run under the virtual clock."""
    return Trial(case.workload, "cadenza", case.alpha, seed, case.ideas[idea], case.steps, case.warm_up).run()


def schedule(json: bool) -> int:
    """Print the comparison; returns the exit code."""
    everything: dict[str, dict[str, Any]] = {}
    with own_ray(GPUS):
        for case in CASES:
            found = {}
            for idea in case.ideas:
                real = [measured(case, idea, seed) for seed in SEEDS]
                found[idea] = _compared(real, [simulated(case, idea, seed) for seed in SEEDS])
            everything |= found
            if not json:
                _show(case, found)
    if json:
        print(json_format.dumps(everything))
    return 0


def _compared(real: Sequence[RunFigures], virtual: Sequence[RunFigures]) -> dict[str, Any]:
    return {
        name: fmean(getattr(figures, field) for figures in figures_of)
        for prefix, figures_of in (("", real), ("simulated_", virtual))
        for field in ("efficiency", "step_seconds", "wait_seconds")
        for name in (prefix + field,)
    } | {"staleness_max": max(figures.staleness_max for figures in real)}


def _show(case: ScheduleCase, found: dict[str, dict[str, Any]]) -> None:
    runs = f"{len(SEEDS)} runs of {case.steps} steps, {case.warm_up} not counted"
    title = f"{case.workload.name}, alpha {case.alpha:g}: {runs}, on Ray, {SPEED:g} times as fast"
    table = Table("", "efficiency", "simulated", "step s", "simulated", "trainer waits s", "simulated", title=title)
    for idea, figures in found.items():
        cells = [f"{figures[name]:.3f}" for name in ("efficiency", "simulated_efficiency")]
        seconds = ("step_seconds", "simulated_step_seconds", "wait_seconds", "simulated_wait_seconds")
        table.add_row(idea, *cells, *(f"{figures[name]:,.0f}" for name in seconds))
    Console().print(table)
