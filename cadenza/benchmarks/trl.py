"""Cadenza against TRL's GRPOTrainer on a CPU, in CPU seconds per sample.

    cadenza bench trl                        the table: two tasks of a 1M-parameter Llama
    cadenza bench trl --task smollm2         a real model, SmolLM2-135M-Instruct, with a LoRA adapter
    cadenza bench trl --json                 one line of JSON

Both train the same model from the same weights on the same prompts with the same reward, batch, optimizer and number
of samples, in float32 and on one thread, each in a process of its own; they alternate, so that the load of the machine
is the same for both. TRL has a virtual environment of its own, which is made when it is missing.
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
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cadenza.benchmarks.trl_side import SYSTEM, TASKS, BenchRun, BenchRunResult, BenchTask, LetterTask
from cadenza.envs.protocol import Outcome

HERE = Path(__file__).parent
TRL_VENV = Path(sys.prefix).parent / ".venv-trl"
DEFAULT_TASKS = ("short", "long")
TARGETS = {"short": 2.0, "long": 1.3, "smollm2": 1.5}
NOISE = {"short": 0.05, "long": 0.05, "smollm2": 0.15}
"""How far Cadenza's reward may be below TRL's. That of smollm2 is the mean of 256 samples while the model still learns:
runs of one side differ by as much."""
SMOLLM2 = Path("models/smollm2")
SUMS = Path("examples/data/digits-chat.jsonl")
HELD_OUT = 39
"""First rows of SUMS, which examples/smollm2-sums.yaml validates with; they are not trained here either."""


# -- Cadenza's side ----------------------------------------------------------------------------------------------------


class WritingEnv:
    """The task as an env of one turn."""

    def __init__(self, task: str) -> None:
        self._task = letter_task(task)
        self._answer = ""

    async def reset(self, seed: int) -> str:
        prompt = self._task.prompt(seed)
        self._answer = self._task.answer(prompt)
        return prompt

    async def step(self, action: str) -> Outcome:
        return "", self._task.reward(self._answer, action), True, False, {}


def letter_task(name: str) -> LetterTask:
    task = TASKS[name]
    assert isinstance(task, LetterTask), name
    return task


def settings(bench_run: BenchRun) -> dict[str, Any]:
    """Return the config of the run."""
    size = bench_run.batch_size
    model: dict[str, Any] = {"path": bench_run.model}
    if (lora := TASKS[bench_run.task].lora) is not None:
        model |= {"lora": {"r": lora.r, "alpha": lora.alpha}}
    return {
        "preset": "grpo",
        "name": "cadenza",
        "out": bench_run.out,
        "seed": bench_run.seed,
        "steps": bench_run.steps,
        "threads": 1,
        "model": model,
        **prompt_settings(bench_run),
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


def prompt_settings(bench_run: BenchRun) -> dict[str, Any]:
    """Return where the prompts come from: an env that draws them, or a file of rows."""
    name, sampling = bench_run.task, {"max_tokens": TASKS[bench_run.task].max_tokens}
    if bench_run.data:
        data = {"path": bench_run.data, "shuffle": False}
        domains = {name: {"data": data, "reward": "exact"}}
        return {"pipeline": "rlvr", "tokenizer": {"system": SYSTEM}, "domains": domains, "sampling": sampling}
    domain = {"env": "cadenza.benchmarks.trl:WritingEnv", "env_args": {"task": name}}
    envs = {"slots": bench_run.batch_size, "first_seed": bench_run.first_seed, "sampling": sampling}
    return {"envs": {**envs, "domains": {"writing": domain}}}


def train(bench_run: BenchRun) -> BenchRunResult:
    """Run the pipeline; returns its figures."""
    from cadenza import __version__
    from cadenza.observe.run import RunDirectory
    from cadenza.run.config_file import build_config
    from cadenza.run.pipeline import find_pipeline

    result = BenchRunResult(versions={"cadenza": __version__})
    skipped: list[float] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        result.rewards.append(metrics["train/score"])
        result.tokens.append(metrics["train/response_tokens"])
        skipped.append(metrics["train/skipped_rows"] / bench_run.batch_size)
        result.mark()

    config = build_config(settings(bench_run), [f"{key}={value}" for key, value in bench_run.options.items()])
    with RunDirectory(config.out / config.name, trackers=()) as run:
        asyncio.run(find_pipeline(config.pipeline)(config, run, on_step=on_step).train())
    result.notes["skipped"] = fmean(skipped[bench_run.warm_up :])
    return result


def run_here() -> None:
    """Run Cadenza's side in a child process: the run comes from stdin, the result goes to stdout."""
    train(BenchRun(**jsonlib.load(sys.stdin))).print()


# -- the common start, and the common prompts --------------------------------------------------------------------------


def cold_start(task: LetterTask, directory: Path, *, updates: int = 150) -> None:
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


def check_files() -> None:
    """Raise where the real model or its prompts are missing."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        raise FileNotFoundError(f"{SMOLLM2} has no model: cadenza models fetch smollm2-135m --to {SMOLLM2}")
    if not SUMS.is_file():
        raise FileNotFoundError(f"{SUMS} does not exist: run the benchmark in the directory of the repository")


def write_sums(path: Path, seed: int, count: int) -> None:
    """Write so many sums in an order of the seed; each passes once before any passes again."""
    sums = SUMS.read_text(encoding="utf-8").splitlines(keepends=True)[HELD_OUT:]
    rng = random.Random(seed)
    lines: list[str] = []
    while len(lines) < count:
        lines += rng.sample(sums, len(sums))
    path.write_text("".join(lines[:count]), encoding="utf-8")


def prepare(task: BenchTask, rounds: int, directory: Path) -> list[BenchRun]:
    """Make what both sides begin with; returns a run for each round, whose `out` is still to be named."""
    model = directory / task.name
    if isinstance(task, LetterTask):
        cold_start(task, model)
    else:
        check_files()
        model = SMOLLM2
    runs = []
    for seed in range(rounds):
        run = BenchRun(task.name, str(model), "", seed, task.steps, task.groups, task.lr)
        if not isinstance(task, LetterTask):
            data = directory / f"{task.name}-{seed}.jsonl"
            write_sums(data, seed, task.steps * task.groups)
            run = replace(run, data=str(data))
        runs.append(run)
    return runs


# -- the comparison ----------------------------------------------------------------------------------------------------


def trl_python(venv: Path = TRL_VENV) -> Path:
    """Return the interpreter of TRL's virtual environment, which is made when it is missing or has other versions."""
    python, done, requirements = venv / "bin" / "python", venv / ".done", HERE / "trl-requirements.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if not done.exists() or done.read_text(encoding="utf-8") != wanted:
        print(f"installing TRL into {venv}", file=sys.stderr)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", str(venv)],
            [*pip, "torch==2.13.0"],  # first and alone: what comes later would pick a build for GPUs
            [*pip, "-r", str(requirements)],
        ):
            subprocess.run(command, check=True, stdout=sys.stderr)
        done.write_text(wanted, encoding="utf-8")
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
    prepared = prepare(task, rounds, directory)
    ours = [sys.executable, "-c", "from cadenza.benchmarks.trl import run_here; run_here()"]
    theirs = [str(trl_python()), "-P", str(HERE / "trl_side.py")]
    sides: dict[str, tuple[list[str], dict[str, Any]]] = {
        "cadenza": (ours, {}),
        "trl": (theirs, {}),
        "cadenza_all_rows": (ours, {"actor.skip_idle": False}),
    }
    runs: dict[str, list[BenchRunResult]] = {side: [] for side in sides}
    for bench_run in prepared:
        for side, (command, options) in sides.items():
            out = directory / f"{task.name}-{side}-{bench_run.seed}"
            runs[side].append(ran(command, replace(bench_run, out=str(out), options=options)))
            told = figures(task, runs[side][-1:])
            text = "{cpu_ms_per_sample:.2f} CPU ms per sample, reward {reward_last:.3f}".format_map(told)
            print(f"{task.name}, {side}, round {bench_run.seed + 1} of {rounds}: {text}", file=sys.stderr, flush=True)
    found = {side: figures(task, results) for side, results in runs.items()}
    least = {side: f["cpu_ms_per_sample"] for side, f in found.items()}
    return {
        "ratio": least["trl"] / least["cadenza"],
        "ratio_all_rows": least["trl"] / least["cadenza_all_rows"],
        **found,
    }


def figures(task: BenchTask, runs: list[BenchRunResult]) -> dict[str, Any]:
    """Return the figures of one side: the least time of all rounds, since the rest is noise; else their means."""
    first, batch_size = BenchRun.warm_up - 1, task.groups * BenchRun.group_size

    def per_sample(marks: list[float]) -> float:
        return 1000 * (marks[-1] - marks[first]) / ((len(marks) - 1 - first) * batch_size)

    cpu = [per_sample(run.cpu) for run in runs]
    reached = [fmean(run.rewards[-task.last :]) for run in runs]
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


def trl(json: bool = False, rounds: int | None = None, task: str | None = None) -> int:
    """Print the figures of one task or of the DEFAULT_TASKS; returns 1 when a ratio misses its target, or TRL reaches
    more reward. The JSON of one task has its `ratio` at the top, that of several has an entry for each."""
    chosen = [TASKS[name] for name in (DEFAULT_TASKS if task is None else (task,))]
    with tempfile.TemporaryDirectory() as directory:
        found = {one.name: compare(one, rounds or one.rounds, Path(directory)) for one in chosen}
    if json:
        print(jsonlib.dumps(found if task is None else {"task": task, **found[task]}))
    else:
        show(found)
    return int(any(missed(name, figures) for name, figures in found.items()))


def missed(name: str, task: Mapping[str, Any]) -> bool:
    """Whether a task misses its target, in time or in reward."""
    behind = task["trl"]["reward_last"] - task["cadenza"]["reward_last"]
    return bool(task["ratio"] < TARGETS[name] or behind > NOISE[name])


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
