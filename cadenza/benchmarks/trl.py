"""Cadenza against TRL's GRPOTrainer on a CPU, in CPU seconds per sample.

    cadenza bench trl            the table
    cadenza bench trl --json     one line of JSON

Both train the same 1M-parameter Llama from the same weights on the same prompts with the same reward, batch, optimizer
and number of samples, in float32 and on one thread, each in a process of its own; they alternate, so that the load of
the machine is the same for both. TRL has a virtual environment of its own, which is made when it is missing.
docs/trl.md lists what is equal and what is not.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from cadenza.benchmarks.trl_side import TASKS, BenchRun, BenchRunResult, BenchTask
from cadenza.envs.protocol import Outcome

HERE = Path(__file__).parent
TRL_VENV = Path(sys.prefix).parent / ".venv-trl"
ROUNDS = 3
LAST = 20
"""Last steps over which the reward is averaged."""
TARGETS = {"short": 2.0, "long": 1.3}
NOISE = 0.05
"""Largest difference between the rewards of the two sides."""


# -- Cadenza's side ----------------------------------------------------------------------------------------------------


class WritingEnv:
    """The task as an env of one turn."""

    def __init__(self, task: str) -> None:
        self._task = TASKS[task]
        self._prompt = ""

    async def reset(self, seed: int) -> str:
        self._prompt = self._task.prompt(seed)
        return self._prompt

    async def step(self, action: str) -> Outcome:
        return "", self._task.reward(self._prompt, action), True, False, {}


def settings(bench_run: BenchRun) -> dict[str, Any]:
    """Return the config of the run."""
    task, size = TASKS[bench_run.task], bench_run.batch_size
    return {
        "preset": "grpo",
        "name": "cadenza",
        "out": bench_run.out,
        "seed": bench_run.seed,
        "steps": bench_run.steps,
        "threads": 1,
        "model": {"path": bench_run.model},
        "envs": {
            "slots": size,
            "first_seed": bench_run.first_seed,
            "sampling": {"max_tokens": task.max_tokens},
            "domains": {"writing": {"env": "cadenza.benchmarks.trl:WritingEnv", "env_args": {"task": task.name}}},
        },
        "rollout": {"batch_size": size, "group_size": bench_run.group_size},
        "actor": {
            "aggregation": "token_mean",  # TRL's loss_type dapo
            "lr": bench_run.lr,
            "optimizer_args": {"betas": list(bench_run.betas)},
            "max_grad_norm": bench_run.max_grad_norm,
            "token_budget": 1 << 16,
        },
        "engine": {"max_running": size},
        "validation": None,
        "checkpoint": {"every": bench_run.steps + 1},
        "samples": 0,
        "trackers": [],
    }


def train(bench_run: BenchRun) -> BenchRunResult:
    """Run the pipeline; returns its figures."""
    from cadenza import __version__
    from cadenza.observe.run import RunDirectory
    from cadenza.pipelines.agentic import AgenticPipeline
    from cadenza.run.config_file import build_config

    result = BenchRunResult(versions={"cadenza": __version__})
    skipped: list[float] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        result.rewards.append(metrics["train/score"])
        result.tokens.append(metrics["train/response_tokens"])
        skipped.append(metrics["train/skipped_rows"] / bench_run.batch_size)
        result.mark()

    config = build_config(settings(bench_run), [f"{key}={value}" for key, value in bench_run.options.items()])
    with RunDirectory(config.out / config.name, trackers=()) as run:
        asyncio.run(AgenticPipeline(config, run, on_step=on_step).train())
    result.notes["skipped"] = fmean(skipped[bench_run.warm_up :])
    return result


def run_here() -> None:
    """Run Cadenza's side in a child process: the run comes from stdin, the result goes to stdout."""
    train(BenchRun(**jsonlib.load(sys.stdin))).print()


# -- the common start --------------------------------------------------------------------------------------------------


def cold_start(task: BenchTask, directory: Path, *, updates: int = 150) -> None:
    """Train and save a model that knows the form of an answer and a little of the task."""
    import torch

    from cadenza.inference.codec import load_codec
    from cadenza.training import ModelConfig, Supervised, SupervisedConfig, examples, load_model
    from cadenza.training.models import save_model

    torch.set_num_threads(1)
    codec = load_codec(None)
    size = ModelConfig(layers=4, hidden=128, heads=4)
    model = load_model(size, codec.vocab_size, 0, eos_token_id=codec.end_token_id)
    rng = random.Random(0)
    prompts = [task.prompt(10**9 + number) for number in range(64 * updates)]
    pairs = [
        (codec.encode(p, first=True), codec.encode_answer(task.example(p, rng), max_tokens=task.max_tokens))
        for p in prompts
    ]
    trainer = Supervised(model, SupervisedConfig(lr=1e-3, batch_size=64, token_budget=1 << 16), 0)
    for _ in trainer.fit(examples(pairs)):
        pass
    save_model(directory, model)
    codec.save(directory)


# -- the comparison ----------------------------------------------------------------------------------------------------


def trl_python(venv: Path = TRL_VENV) -> Path:
    """Return the interpreter of TRL's virtual environment, which is made when it is missing."""
    python, done = venv / "bin" / "python", venv / ".done"
    if not done.exists():
        print(f"installing TRL into {venv}", file=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", str(venv)],
            [*pip, "torch==2.13.0"],  # first and alone: what comes later would pick a build for GPUs
            [*pip, "-r", str(HERE / "trl-requirements.txt")],
        ):
            subprocess.run(command, check=True, stdout=sys.stderr)
        done.touch()
    return python


def ran(command: list[str], bench_run: BenchRun) -> BenchRunResult:
    """What a side says of its run, in a process of its own."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, input=jsonlib.dumps(asdict(bench_run)), env=os.environ | quiet, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-4000:]}")
    return BenchRunResult(**jsonlib.loads(done.stdout.splitlines()[-1]))


def compare(task: BenchTask, rounds: int, directory: Path) -> dict[str, Any]:
    """Run all sides alternately; returns the figures of the task."""
    ours = [sys.executable, "-c", "from cadenza.benchmarks.trl import run_here; run_here()"]
    theirs = [str(trl_python()), "-P", str(HERE / "trl_side.py")]
    sides: dict[str, tuple[list[str], dict[str, Any]]] = {
        "cadenza": (ours, {}),
        "trl": (theirs, {}),
        "cadenza_all_rows": (ours, {"actor.skip_idle": False}),
    }
    model = directory / task.name
    cold_start(task, model)
    runs: dict[str, list[BenchRunResult]] = {side: [] for side in sides}
    for seed in range(rounds):
        for side, (command, options) in sides.items():
            out = directory / f"{task.name}-{side}-{seed}"
            bench_run = BenchRun(task.name, str(model), str(out), seed, task.steps, options=options)
            runs[side].append(ran(command, bench_run))
            told = figures(runs[side][-1:])
            text = "{cpu_ms_per_sample:.2f} CPU ms per sample, reward {reward_last:.3f}".format_map(told)
            print(f"{task.name}, {side}, round {seed + 1} of {rounds}: {text}", file=sys.stderr, flush=True)
    found = {side: figures(results) for side, results in runs.items()}
    least = {side: f["cpu_ms_per_sample"] for side, f in found.items()}
    return {
        "ratio": least["trl"] / least["cadenza"],
        "ratio_all_rows": least["trl"] / least["cadenza_all_rows"],
        **found,
    }


def figures(runs: list[BenchRunResult]) -> dict[str, Any]:
    """Return the figures of one side: the least time of all rounds, since the rest is noise; else their means."""
    first, batch_size = BenchRun.warm_up - 1, BenchRun.groups * BenchRun.group_size

    def per_sample(marks: list[float]) -> float:
        return 1000 * (marks[-1] - marks[first]) / ((len(marks) - 1 - first) * batch_size)

    cpu = [per_sample(run.cpu) for run in runs]
    reached = [fmean(run.rewards[-LAST:]) for run in runs]
    return {
        "cpu_ms_per_sample": min(cpu),
        "rounds_cpu_ms_per_sample": cpu,
        "wall_ms_per_sample": min(per_sample(run.wall) for run in runs),
        "samples": len(runs[0].rewards) * batch_size,
        "tokens": fmean(fmean(run.tokens) for run in runs),
        "reward_first": fmean(run.rewards[0] for run in runs),
        "reward_last": fmean(reached),
        "rounds_reward_last": reached,
        **{name: fmean(run.notes[name] for run in runs) for name in runs[0].notes},
        "curve": [fmean(values) for values in zip(*[run.rewards for run in runs], strict=True)],
        "versions": runs[0].versions,
    }


def trl(json: bool = False, rounds: int = ROUNDS) -> int:
    """Print the figures; returns 1 when a ratio misses its target, or TRL reaches more reward."""
    with tempfile.TemporaryDirectory() as directory:
        found = {name: compare(task, rounds, Path(directory)) for name, task in TASKS.items()}
    if json:
        print(jsonlib.dumps(found))
    else:
        show(found)
    return int(any(missed(name, task) for name, task in found.items()))


def missed(name: str, task: Mapping[str, Any]) -> bool:
    """Whether a task misses its target, in time or in reward."""
    behind = task["trl"]["reward_last"] - task["cadenza"]["reward_last"]
    return bool(task["ratio"] < TARGETS[name] or behind > NOISE)


def show(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "side", "tokens", "samples", "reward", "CPU ms per sample", "TRL takes")
    for name, task in found.items():
        for side, ratio in {"trl": None, "cadenza": "ratio", "cadenza_all_rows": "ratio_all_rows"}.items():
            f = task[side]
            table.add_row(
                name, side.replace("_", " "), f"{f['tokens']:.1f}", f"{f['samples']:,}",
                f"{f['reward_first']:.2f} -> {f['reward_last']:.3f}", f"{f['cpu_ms_per_sample']:.2f}",
                f"{task[ratio]:.2f} times as much" if ratio else "",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(trl("--json" in sys.argv))
