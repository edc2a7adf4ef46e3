"""Whole runs: `cadenza train`, `resume`, `eval` and `play` on a lake of two by two cells.

Runs that are signalled, killed or starved of disk are processes of their own; all others run here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pipeline_cases import (
    TINY,
    Commands,
    Done,
    cadenza,
    column,
    config_file,
    distance,
    files,
    lines,
    listed,
    rollouts,
    steps,
    texts,
    trained,
    until,
    weights,
)  # fmt: skip
from tokenizer_cases import CHATML, byte_tokenizer

from cadenza import DataProto
from cadenza.errors import EnvError
from cadenza.inference.replica import Generation, Request
from cadenza.inference.torch_engine import TorchReplica
from cadenza.observe.run import RunDirectory
from cadenza.pipelines.agentic import AgenticPipeline
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.config_file import build_config, dump_config, read_config
from cadenza.simulation.comparison.traces import read_run
from cadenza.training import Actor
from cadenza.training.checkpoint import step_of

EXACT = ("train/loss", "train/grad_norm", "train/entropy", "train/score_mean", "train/tokens")
"""What two runs that are the same agree on."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin in a directory of their own, where the user's modules lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as found:
        yield found


def same(one: Path, two: Path, numbers: range) -> None:
    """Two runs made the same updates from the same tokens."""
    for name in EXACT:
        first, second = column(one, name), column(two, name)
        for step in numbers:
            assert first[step] == pytest.approx(second[step], abs=1e-4), f"{name} of step {step}"
    for mode in ("train", "val"):
        first_texts, second_texts = ([text for text in texts(run, mode) if text[0] in numbers] for run in (one, two))
        assert first_texts == second_texts


# -- a run, and what it leaves behind ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of three steps with validation and TensorBoard, as a user starts it: the installed script."""
    directory = tmp_path_factory.mktemp("first")
    config_file(directory, validation={"every": 2, "episodes": 8}, trackers=["tensorboard"])
    script = Path(sys.executable).with_name("cadenza")
    done = subprocess.run(
        [script, "train", "config.yaml", "steps=3", f"out={directory}/runs", "--json"],
        cwd=directory, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def test_train_prints_one_json_object_and_nothing_else(first: Done) -> None:
    assert (first.code, first.err, len(first.out.splitlines())) == (0, "", 1)
    figures = first.figures
    assert (figures["steps"], figures["samples"]) == (3, 24)
    assert 0 <= figures["success_first"] <= 1
    assert 0 <= figures["success_last"] <= 1
    assert 0 < figures["cpu_seconds"] < 100
    assert 0 < figures["wall_seconds"] < 100
    assert Path(figures["run_dir"]).is_dir()


def test_the_config_of_a_run_reads_back(first: Done) -> None:
    stored = yaml.safe_load((first.run / "config.yaml").read_text(encoding="utf-8"))
    config = build_config(stored)
    assert dump_config(config) == stored
    assert (config.steps, config.estimator.name, config.rollout.group_size) == (3, "grpo", 4)


def test_metrics_have_a_line_for_each_step_and_each_validation(first: Done) -> None:
    assert list(steps(first.run)) == [1, 2, 3]
    assert list(column(first.run, "val/success")) == [0, 2, 3]
    documented = {
        "time", "cpu", "samples", "train/score", "train/success", "train/turns", "train/response_tokens",
        "train/episodes", "train/loss", "train/grad_norm", "train/entropy", "train/lr", "train/tokens", "time/step",
        "time/wait", "time/train", "perf/tokens_per_second", "perf/samples_per_second", "staleness/max",
        "fate/trained", "slots/busy",
    }  # fmt: skip
    for line in steps(first.run).values():
        assert documented <= line.keys()
    assert [line["samples"] for line in steps(first.run).values()] == [8, 16, 24]
    figures = first.figures
    success = column(first.run, "val/success")
    assert (figures["success_first"], figures["success_last"]) == (success[0], success[3])


def test_a_cold_start_is_accounted_for(first: Done) -> None:
    assert column(first.run, "cold_start/loss")[0] < 3


def test_samples_are_episodes_as_text(first: Done) -> None:
    samples = lines(first.run, "samples")
    assert {(s["mode"], s["step"]) for s in samples} == {
        ("val", 0), ("train", 1), ("train", 2), ("val", 2), ("train", 3), ("val", 3),
    }  # fmt: skip
    for sample in samples:
        assert sample["turns"][0]["prompt"] == "P.\n.G\n"
        assert sample["success"] is (sample["score"] == 1.0)
        assert 1 <= len(sample["turns"]) <= 4


def test_a_finished_run_is_a_workload_for_the_simulation(first: Done) -> None:
    workload = read_run(first.run, needs_costs=False)  # three steps are too few to measure any
    trained = first.figures["samples"]
    assert sum(len(group) for group in workload.recorded) == trained
    assert (workload.gpus, workload.batch) == (1, trained // first.figures["steps"])
    assert workload.train_seconds > 0
    episodes = [episode for group in workload.recorded for episode in group]
    assert {length for episode in episodes for length in episode.lengths} == {1}
    assert all(episode.fresh == (len(episode.lengths) > 1) for episode in episodes)


def test_report_summary_and_tensorboard_are_there(first: Done) -> None:
    assert "<html" in (first.run / "report.html").read_text(encoding="utf-8").lower()
    assert json.loads((first.run / "summary.json").read_text()) == first.figures
    assert [path.name for path in (first.run / "tensorboard").iterdir() if "tfevents" in path.name]


def test_transformers_loads_the_last_and_the_best_checkpoint(first: Done) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("last", "best"):
        path = first.run / "checkpoints" / name
        model = AutoModelForCausalLM.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids = tokenizer.encode("P.\n.G\n", add_special_tokens=False)
        likely = torch.softmax(model(torch.tensor([ids])).logits[0, -1], 0)
        letters = sum(float(likely.detach()[tokenizer.convert_tokens_to_ids(letter)]) for letter in "LDRU")
        assert letters > 0.8, "the cold start taught the format, and the tokens are those of the tokenizer"


def test_a_second_run_gets_its_own_directory(tmp_path: Path) -> None:
    one, two = trained(tmp_path, "steps=1"), trained(tmp_path, "steps=1")
    assert (one.run.name, two.run.name) == ("tiny", "tiny-2")
    assert len(steps(one.run)) == len(steps(two.run)) == 1


def test_without_json_a_run_says_how_it_went_and_how_to_play_it(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path, validation={"episodes": 4}))
    assert done.code == 0
    assert re.search(r"success .*% -> .*% in 2 steps, 16 episodes", done.out)
    assert "cadenza play runs/tiny" in done.out
    assert "report.html" in done.out


# -- checkpoints, looked at --------------------------------------------------------------------------------------------


def test_eval_measures_a_checkpoint_and_always_finds_the_same(first: Done) -> None:
    once, again = (cadenza("eval", first.run, "--episodes", "20", "--json") for _ in range(2))
    assert (once.code, once.err, len(once.out.splitlines())) == (0, "", 1)
    assert once.figures == again.figures
    assert once.figures.keys() == {"success", "reward_mean", "episodes", "version", "domains", "checkpoint"}
    assert once.figures["episodes"] == 20
    assert once.figures["success"] == once.figures["reward_mean"]


def test_eval_repeats_the_validation_of_the_run(first: Done) -> None:
    for name in ("best", "last"):
        found = cadenza("eval", first.run, "--episodes", "8", "--checkpoint", name, "--json").figures
        assert found["success"] == column(first.run, "val/success")[found["version"]]
    assert found["version"] == 3


def test_eval_takes_greedy_and_prints_a_table(first: Done) -> None:
    done = cadenza("eval", first.run, "--episodes", "2", "--greedy")
    assert done.code == 0
    assert "success" in done.out
    greedy = cadenza("eval", first.run, "--episodes", "6", "--greedy", "--json").figures
    assert greedy["success"] in (0.0, 1.0), "one board and one policy without chance"


def test_play_prints_boards(first: Done) -> None:
    done = cadenza("play", first.run, "--episodes", "2", "--checkpoint", "last")
    assert done.code == 0
    assert len(re.findall(r"^P\.\n\.G$", done.out, re.MULTILINE)) >= 2
    assert len(re.findall(r"^score", done.out, re.MULTILINE)) == 2
    ends = re.findall(r"^(.*)\n(.*)\nscore", done.out, re.MULTILINE)
    assert all("'" not in row for end in ends for row in end), "the last board comes after the last move"


def test_the_command_in_the_report_plays_the_run(first: Done) -> None:
    page = (first.run / "report.html").read_text()
    (command,) = re.findall(r"<code>(cadenza play [^<]*)</code>", page)
    done = cadenza(*command.split()[1:])
    assert (done.code, done.err) == (0, "")
    assert "<small>end</small>" in page


def test_a_checkpoint_that_is_not_there(first: Done) -> None:
    done = cadenza("eval", first.run, "--checkpoint", "step-000099")
    refused(done, "has no checkpoint 'step-000099'; there are best, last, step-")


# -- one seed, one run -------------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path: Path) -> None:
    options = ("steps=3", "samples=8", "actor.mini_batches=2")
    one, two, other = (trained(tmp_path, *options, seed).run for seed in ("seed=0", "seed=0", "seed=1"))
    same(one, two, range(1, 4))
    assert distance(one / "checkpoints" / "last", two / "checkpoints" / "last") == 0
    assert texts(one) != texts(other)
    assert column(one, "train/loss") != column(other, "train/loss")


# -- resume ------------------------------------------------------------------------------------------------------------

LAKES = '''
"""Lakes with an accident: in the reset of that number, once."""
import asyncio, os, signal
from pathlib import Path
from cadenza.envs.frozenlake import FrozenLake

class Lake(FrozenLake):
    resets = 0
    def __init__(self, *, at=0, signals=(signal.SIGKILL,), uneven=False):
        super().__init__(map=("SF", "FG"), max_steps=4)
        self.at, self.signals, self.uneven = at, signals, uneven
    async def reset(self, seed):
        Lake.resets += seed < 2_000_000_000  # a cold start does not count
        self.number = Lake.resets
        self.seed = seed
        if self.number == self.at and not Path("accident").exists():
            Path("accident").touch()
            for number in self.signals:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.2)
        return await super().reset(seed)
    async def step(self, action):
        if self.uneven and self.seed < 1_000_000_000:
            await asyncio.sleep(0.05 * (self.number % 3))
        return await super().step(action)

class Growing(Lake):
    """Every validation finds a better policy than the one before."""
    validated = 0
    async def step(self, action):
        board, reward, terminated, truncated, info = await super().step(action)
        if self.seed >= 1_000_000_000 and (terminated or truncated):
            info["success"] = Growing.validated % 8 < Growing.validated // 8
            Growing.validated += 1
        return board, reward, terminated, truncated, info
'''


def lake(env: str = "Lake", **arguments: Any) -> dict[str, Any]:
    """The envs of a run with an accident."""
    Path("lakes.py").write_text(LAKES)
    return {**TINY["envs"], "domains": {"lake": {"env": f"lakes:{env}", "env_args": arguments}}}


def killed_and_resumed(commands: Commands, directory: Path, *overrides: str, **changes: Any) -> tuple[Path, Path, int]:
    """A run of seven steps as it should be, one that was killed and resumed, and from which step."""
    config_file(directory, **{"steps": 7, "samples": 8, "checkpoint": {"every": 2}, **changes})
    killed = commands.start(directory, "train", "config.yaml", "name=killed", *overrides, "--json").wait()
    assert (killed.code, killed.out) == (-signal.SIGKILL, ""), killed.err
    run = directory / "runs" / "killed"
    came = max(steps(run))
    resumed = commands.start(directory, "resume", run, "--json").wait()
    assert resumed.code == 0, resumed.err
    assert (resumed.figures["steps"], resumed.figures["samples"]) == (7, 56)
    whole = commands.start(directory, "train", "config.yaml", "name=whole", *overrides, "--json").wait()
    assert whole.code == 0, whole.err
    return directory / "runs" / "whole", run, came


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ((), {}),
        (("preset=ppo", "estimator.score_norm=running"), {}),
        (("actor.kl_coef=0.1", "estimator.kl_coef=0.1"), {"validation": {"every": 3, "episodes": 8}}),
    ],
    ids=["grpo", "critic and running moments", "reference and validation"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    commands: Commands, tmp_path: Path, overrides: tuple[str, ...], changes: dict[str, Any]
) -> None:
    at = 8 * 5 + 4 + (2 * 8 if changes else 0)
    whole, run, came = killed_and_resumed(
        commands, tmp_path, "actor.mini_batches=2", *overrides, envs=lake(at=at), **changes
    )
    assert came == 5, "it was killed in the sixth step, and goes on from the fourth"
    same(whole, run, range(1, 8))
    for name in {"train/kl", "train/critic_value_loss", "train/reward_kl"} & steps(whole)[7].keys():
        assert column(run, name) == pytest.approx(column(whole, name), abs=1e-4)
    last = [path / "checkpoints" / "last" for path in (whole, run)]
    assert distance(*last) < 1e-4
    if "preset=ppo" in overrides:
        assert distance(*(path / "critic" for path in last)) < 1e-4
    assert column(run, "val/success") == column(whole, "val/success")
    assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(whole)]


def test_a_run_goes_on_exactly_from_a_checkpoint_that_was_the_best(commands: Commands, tmp_path: Path) -> None:
    """It was written in the middle of things: some members of the next groups were finished, others ran."""
    whole, run, came = killed_and_resumed(
        commands, tmp_path, envs=lake("Growing", at=8 * 4 + 8 * 5 + 3, uneven=True),
        validation={"every": 1, "episodes": 8}, checkpoint={"every": 100},
    )  # fmt: skip
    assert came == 4
    same(whole, run, range(1, 8))
    assert distance(*(path / "checkpoints" / "last" for path in (whole, run))) < 1e-4


def test_an_asynchronous_run_goes_on_within_its_bound(commands: Commands, tmp_path: Path) -> None:
    _, run, came = killed_and_resumed(
        commands, tmp_path, envs=lake(at=8 * 6 + 4, uneven=True), rollout={**TINY["rollout"], "alpha": 1}
    )
    assert came >= 4
    assert list(steps(run)) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(run)[7]["staleness/max"] <= 1
    assert steps(run)[7]["fate/trained"] == 56
    tasks = [(task, step) for step, task, _ in texts(run)]
    assert all(len({step for task, step in tasks if task == name}) == 1 for name, _ in tasks), "none was trained twice"


def test_more_steps_for_a_finished_run(tmp_path: Path) -> None:
    whole = trained(tmp_path, "steps=4", "samples=8").run
    run = trained(tmp_path, "steps=2", "samples=8").run
    refused(cadenza("resume", run), "has done its 2 steps", "steps=4")
    done = cadenza("resume", run, "steps=4", "--json")
    assert (done.code, done.figures["steps"]) == (0, 4), done.err
    same(whole, run, range(1, 5))
    assert (run / "config-until-2.yaml").exists()


def test_a_run_that_reached_its_target_goes_on_to_another(tmp_path: Path) -> None:
    run = trained(tmp_path, "steps=4", "target=0", validation={"episodes": 4}).run
    before = lines(run)
    done = cadenza("resume", run, "--json")
    assert (done.code, done.figures["steps"], lines(run)) == (0, 0, before)
    assert "reached the target 0" in done.figures["ended"]
    done = cadenza("resume", run, "target=1", "--json")
    assert (done.code, done.figures["steps"]) == (0, 4), done.err


def test_a_resume_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path, "samples=8").run
    before = (run / "config.yaml").read_text()
    for overrides in (["model.hidden=16"], ["estimator.name=gae", "critic={}"]):
        done = cadenza("resume", run, "steps=4", *overrides, "--json")
        assert (done.code, list(done.figures)) == (1, ["error"])
        assert len(done.err.splitlines()) == 1, done.err
        assert "checkpoint" in done.err
    assert (run / "config.yaml").read_text() == before
    assert not list(run.glob("config-until*"))
    done = cadenza("resume", run, "steps=3", "--json")
    assert (done.code, done.figures["steps"]) == (0, 3), done.err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.group_size=8"], ["group_size was 4 and is 8"]),
        (["preset=ppo"], ["preset"]),
        (["stepz=8"], ["did you mean 'steps'?"]),
    ],
)
def test_what_a_run_cannot_become(tmp_path: Path, overrides: list[str], said: list[str]) -> None:
    run = trained(tmp_path).run
    before = files(run), (run / "metrics.jsonl").read_bytes(), (run / "config.yaml").read_bytes()
    refused(cadenza("resume", run, "steps=9", *overrides, "--json"), *said)
    assert (files(run), (run / "metrics.jsonl").read_bytes(), (run / "config.yaml").read_bytes()) == before


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(cadenza("resume", tmp_path / "empty"), "empty: it has no config.yaml")
    refused(cadenza("resume", tmp_path / "nowhere"), "there is no run in ")
    (tmp_path / "empty" / "config.yaml").write_text(cadenza("train", config_file(tmp_path), "--dry-run").out)
    refused(cadenza("resume", tmp_path / "empty"), "has no checkpoint", "cadenza train")
    refused(cadenza("eval", tmp_path / "empty"), "has no checkpoint")
    refused(cadenza("play", tmp_path / "empty"), "has no checkpoint")


def test_the_newest_checkpoint_counts_and_not_the_link_to_it(tmp_path: Path) -> None:
    """A kill may come between the two."""
    run = trained(tmp_path).run
    (run / "checkpoints" / "last").unlink()
    done = cadenza("resume", run, "steps=3", "--json")
    assert (done.code, done.figures["steps"]) == (0, 3), done.err


# -- stops -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_with_a_checkpoint_and_the_run_goes_on_later(commands: Commands, tmp_path: Path) -> None:
    config_file(tmp_path, envs=lake(at=8 * 3 + 8, signals=[int(signal.SIGINT)], uneven=True), steps=7, samples=8)
    stopped = commands.start(tmp_path, "train", "config.yaml", "--json").wait()
    assert (stopped.code, stopped.figures["ended"]) == (130, "stopped"), stopped.err
    run = tmp_path / stopped.run
    assert stopped.figures["steps"] == max(steps(run)) < 7
    assert rollouts(run / "checkpoints" / "last")["sums"]["fates"]["trained"] == stopped.figures["samples"]
    resumed = commands.start(tmp_path, "resume", run, "--json").wait()
    assert (resumed.code, resumed.figures["steps"], resumed.figures["samples"]) == (0, 7, 56), resumed.err
    assert steps(run)[7]["fate/trained"] == 56


def test_a_second_ctrl_c_breaks_off(commands: Commands, tmp_path: Path) -> None:
    Path("slow.py").write_text("import time\ndef reward(trajectory):\n    open('asked', 'w')\n    time.sleep(60)\n")
    envs = lake()
    envs["domains"]["lake"]["reward"] = "slow:reward"
    config_file(tmp_path, envs=envs, cold_start=None)
    command = commands.start(tmp_path, "train", "config.yaml")
    until((tmp_path / "asked").exists)
    command.signal(signal.SIGINT)
    until(lambda: "once more" in (command.place / "out").read_text())
    command.signal(signal.SIGINT)
    done = command.wait()
    assert done.code == 130
    assert "Traceback" not in done.err


def test_a_second_sigterm_is_the_same_wish(commands: Commands, tmp_path: Path) -> None:
    config_file(tmp_path, envs=lake(), steps=10_000, cold_start=None)
    command = commands.start(tmp_path, "train", "config.yaml", "--json")
    until(lambda: any(steps(run) for run in listed(tmp_path)))
    command.signal(signal.SIGTERM)
    time.sleep(0.02)
    command.signal(signal.SIGTERM)
    done = command.wait()
    assert done.code == 130, done.err
    assert (tmp_path / done.run / "checkpoints" / "last" / "model.safetensors").exists()


def test_a_batch_that_comes_with_the_stop_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(config_file(tmp_path), ["steps=4"])
    inner = RolloutScheduler.get_batch

    async def get_batch(self: RolloutScheduler, *arguments: Any) -> Any:
        batch = await inner(self, *arguments)
        if arguments[0].meta_info["global_step"] == 1:
            pipeline.stop()
        return batch

    monkeypatch.setattr(RolloutScheduler, "get_batch", get_batch)
    with RunDirectory(tmp_path / "run", config=dump_config(config), trackers=()) as run:

        async def main() -> Any:
            nonlocal pipeline
            pipeline = AgenticPipeline(config, run)
            return await pipeline.train()

        pipeline: Any = None
        progress = asyncio.run(main())
    assert progress.ended == "stopped"
    assert rollouts(tmp_path / "run" / "checkpoints" / "last")["sums"]["fates"]["trained"] == progress.samples


def test_a_run_ends_at_its_target(tmp_path: Path) -> None:
    done = trained(tmp_path, "steps=50", "target=0.5", "actor.lr=1e-2", validation={"every": 2, "episodes": 20})
    assert done.figures["steps"] < 50
    assert done.figures["success_last"] >= 0.5
    assert "reached the target 0.5" in done.figures["ended"]
    assert column(done.run, "val/success")[done.figures["steps"]] == done.figures["success_last"]
    best = cadenza("eval", done.run, "--episodes", "20", "--json").figures
    assert (best["version"], best["success"]) == (done.figures["steps"], done.figures["success_last"])


def test_without_validation_the_target_is_about_training(tmp_path: Path) -> None:
    done = trained(tmp_path, "steps=50", "target=0.6", "actor.lr=1e-2")
    success = column(done.run, "train/success")
    assert done.figures["success_first"] == success[1]
    assert done.figures["success_last"] == success[done.figures["steps"]] >= 0.6
    assert not column(done.run, "val/success")
    assert not (done.run / "checkpoints" / "best").exists(), "training tells how good the weights before were"


def test_a_run_ends_with_its_tasks(tmp_path: Path) -> None:
    done = trained(
        tmp_path, "steps=9", "envs.domains.lake.tasks=5", "checkpoint.every=100", validation={"every": 2, "episodes": 4}
    )
    assert (done.figures["steps"], done.figures["samples"]) == (3, 20), "two batches of two groups, and one of one"
    assert done.figures["ended"] == "the tasks ran out"
    assert list(column(done.run, "val/success")) == [0, 2, 3], "the last weights are measured, too"
    assert cadenza("eval", done.run, "--episodes", "4", "--checkpoint", "last", "--json").figures["version"] == 3


def test_a_run_whose_every_attempt_raised_fails_and_names_the_first_error(tmp_path: Path) -> None:
    Path("raising_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Raising(FrozenLake):\n"
        "    async def reset(self, seed):\n"
        "        raise ValueError('no board')\n"
    )
    envs = {**TINY["envs"], "domains": {"lake": {"env": "raising_lake:Raising", "tasks": 3}}}
    done = cadenza("train", config_file(tmp_path, envs=envs, cold_start=None))
    assert done.code == 1
    message = done.err.splitlines()[-1]
    assert message.startswith("cadenza: the tasks ran out")
    assert "The first error was reset of domain 'lake': ValueError: no board" in message


# -- what can be trained -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", AgenticConfig.presets)
def test_every_preset_trains(tmp_path: Path, base: Path, preset: str) -> None:
    teacher = {"reference": {"path": str(base)}} if preset == "distill" else {}
    done = trained(tmp_path, preset=preset, **teacher)
    assert list(steps(done.run)) == [1, 2]
    assert any(column(done.run, "train/grad_norm").values())
    assert ("train/critic_value_loss" in steps(done.run)[1]) is (preset == "ppo")
    if preset == "dapo":
        assert set(column(done.run, "train/groups_without_variance").values()) == {0.0}


def test_contexts_grow_in_trajectories_and_begin_anew_in_steps(tmp_path: Path) -> None:
    for rollout, opened in (("trajectory", [True, False, False, False]), ("step", [True] * 4)):
        run = trained(tmp_path, f"envs.rollout={rollout}", "tokenizer.system=Go", "samples=8").run
        turns = [[turn["prompt"].startswith("Go\n") for turn in sample["turns"]] for sample in lines(run, "samples")]
        assert opened in turns
        assert all(begun == opened[: len(begun)] for begun in turns)
        for line in steps(run).values():
            assert line["train/tokens"] == 8 * line["train/response_tokens"], "every token that was written is trained"


@pytest.mark.parametrize("tokenizer", ["characters", "chat", pytest.param("smollm2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rollout", ["trajectory", "step"])
def test_the_tokens_trained_are_the_tokens_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tokenizer: str, rollout: str
) -> None:
    """Seen at both ends: what the engine was given and wrote, and what the actor trains."""
    asked: list[tuple[Request, asyncio.Future[Generation]]] = []
    batches: list[DataProto] = []
    generate, train = TorchReplica.generate, Actor.train

    def hear(self: TorchReplica, request: Request) -> asyncio.Future[Generation]:
        asked.append((request, generate(self, request)))
        return asked[-1][1]

    def watch(self: Actor, batch: DataProto) -> dict[str, float]:
        batches.append(batch)
        return train(self, batch)

    monkeypatch.setattr(TorchReplica, "generate", hear)
    monkeypatch.setattr(Actor, "train", watch)
    overrides = [f"envs.rollout={rollout}", "envs.sampling.max_tokens=5", "steps=2"]
    if tokenizer != "characters":
        path = tmp_path / "tokenizer"
        if tokenizer == "smollm2":
            path = request.getfixturevalue("smollm2")
        else:
            byte_tokenizer(CHATML).save_pretrained(path)
        overrides += [f"tokenizer.path={path}", "tokenizer.template=chat"]
    trained(tmp_path, *overrides, cold_start=None)
    seen = {}
    for request_, future in asked:
        answer = future.result()
        context = tuple(np.concatenate(request_.chunks).tolist())
        seen[context + tuple(answer.tokens.tolist())] = (len(context), answer)
    rows = turns = 0
    for batch in batches:
        ids, mask, logprobs = (batch.batch.ragged(name) for name in ("input_ids", "response_mask", "infer_logprobs"))
        for row in range(len(batch)):
            tokens, trained_, said = tuple(ids[row].tolist()), mask[row].astype(bool), logprobs[row]
            while tokens:  # from the last turn to the first
                context, answer = seen[tokens]
                assert trained_[context : len(tokens)].all()
                np.testing.assert_array_equal(said[context : len(tokens)], answer.logprobs)
                prompt = context
                while prompt and not trained_[prompt - 1]:
                    prompt -= 1
                tokens = tokens[:prompt]
                turns += 1
            rows += 1
    assert (rows < turns) is (rollout == "trajectory")
    assert rows >= 16


def test_a_cold_start_teaches_what_its_source_shows(tmp_path: Path) -> None:
    plan = {"episodes": 48, "passes": 6, "trainer": {"lr": 1e-2, "batch_size": 32}}
    for rollout in ("step", "trajectory"):
        found = {
            source: trained(
                tmp_path, "steps=1", f"envs.rollout={rollout}", cold_start={**plan, "source": source},
                validation={"episodes": 40},
            ).figures["success_first"]
            for source in ("format", "demonstrations")
        }  # fmt: skip
        assert found["format"] < 0.8 < 0.9 < found["demonstrations"], rollout


def test_kl_in_the_loss_and_in_the_reward_is_measured_from_the_cold_start(tmp_path: Path) -> None:
    done = trained(
        tmp_path, "steps=3", "actor.lr=1e-2", "actor.kl_coef=0.1", "estimator.kl_coef=0.1", "estimator.kl_logprobs=old"
    )
    kl, reward_kl = column(done.run, "train/kl"), column(done.run, "train/reward_kl")
    assert (kl[1], reward_kl[1]) == pytest.approx((0, 0), abs=1e-6), "the policy has not moved yet"
    assert kl[3] > 1e-4
    assert reward_kl[3] != 0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to go on from: model and tokenizer."""
    return trained(tmp_path_factory.mktemp("base"), "steps=1").run / "checkpoints" / "last"


def test_an_adapter_is_trained_published_and_kept(tmp_path: Path, base: Path) -> None:
    done = trained(
        tmp_path, "steps=3", "actor.lr=2e-2", "actor.kl_coef=0.01", "envs.sampling.temperature=1",
        model={"path": str(base), "lora": {"r": 4}}, cold_start=None, validation={"every": 3, "episodes": 16},
    )  # fmt: skip
    last = done.run / "checkpoints" / "last"
    adapter = weights(last, "adapter_model")
    assert not (last / "model.safetensors").exists()
    assert any(abs(tensor).max() > 1e-3 for name, tensor in adapter.items() if "lora_B" in name)
    assert column(done.run, "train/kl")[3] > 0, "the reference is the model under the adapter"
    # The sampler has the adapter: it reports the logprobs that the trainer computes.
    assert max(column(done.run, "train/logprob_gap_max").values()) < 1e-3
    found = cadenza("eval", done.run, "--episodes", "16", "--checkpoint", "last", "--json")
    assert found.figures["success"] == column(done.run, "val/success")[3]
    more = cadenza("resume", done.run, "steps=4", "--json")
    assert (more.code, more.figures["steps"]) == (0, 4), more.err


def test_another_run_may_begin_with_a_checkpoint(tmp_path: Path, base: Path) -> None:
    done = trained(tmp_path, model={"path": str(base)}, cold_start=None)
    assert min(column(done.run, "train/entropy").values()) < 2, "it knows the format"


def test_envs_and_rewards_of_the_user_lie_in_the_working_directory(tmp_path: Path) -> None:
    Path("guessing.py").write_text(
        "class Guess:\n"
        "    actions = ('a', 'b')\n"
        "    def reset(self, seed):\n"
        "        return f'guess {seed % 2}:'\n"
        "    def step(self, action):\n"
        "        return '', 0.25, True, False, {'success': action == 'a'}\n"
        "async def reward(sample):\n"
        "    return 3.0 if sample.trajectory.info['success'] else 1.0\n"
    )
    envs = {**TINY["envs"], "domains": {"guess": {"env": "guessing:Guess", "reward": "guessing:reward"}}}
    done = trained(tmp_path, envs=envs, validation={"episodes": 8})
    scores = {sample["score"] for sample in lines(done.run, "samples")}
    assert scores <= {1.0, 3.0}
    success = column(done.run, "train/success")
    assert column(done.run, "train/score") == pytest.approx({step: 1 + 2 * share for step, share in success.items()})


def test_domains_share_a_run_by_their_weights(tmp_path: Path) -> None:
    lakes = {
        "near": {"env": "frozenlake", "env_args": {"map": ["SG"]}, "weight": 1},
        "far": {"env": "frozenlake", "env_args": {"map": ["SF", "FG"]}, "weight": 3},
    }
    done = trained(
        tmp_path, "rollout.batch_size=16", "samples=16", envs={**TINY["envs"], "domains": lakes},
        validation={"episodes": 7},
    )  # fmt: skip
    domains = [s["domain"] for s in lines(done.run, "samples") if s["mode"] == "train"]
    assert (domains.count("near"), domains.count("far")) == (8, 24)
    assert column(done.run, "val/episodes")[0] == 7, "all of them, though they cannot be shared evenly"


def test_validation_may_have_tasks_of_its_own(tmp_path: Path) -> None:
    one = TINY["envs"]["domains"]["lake"]
    envs = {**TINY["envs"], "domains": {"lake": {**one, "tasks": list("abcd")}}}
    plan = {"episodes": 2, "domains": {"rows": {**one, "tasks": list("vwxyz")}, "seeds": one}}
    run = trained(tmp_path, "steps=1", "samples=9", envs=envs, validation=plan).run
    tasks = {sample["task"] for sample in lines(run, "samples") if sample["mode"] == "val"}
    assert tasks == {*(f"rows/{number}" for number in range(5)), "seeds/1000000000"}
    assert cadenza("eval", run, "--episodes", "4", "--json").figures["episodes"] == 4
    plan = {"episodes": 2, "domains": {"seeds": {**one, "tasks": 3}}}
    done = trained(tmp_path, "steps=1", envs=envs, validation=plan)
    assert set(column(done.run, "val/episodes").values()) == {3.0}, "what is said of a domain counts"


# -- bad input ---------------------------------------------------------------------------------------------------------


def refused(done: Done, *said: str, code: int = 1) -> None:
    """A short message and nothing else; with --json, as an object too."""
    assert done.code == code, done
    assert not done.out or (list(done.figures), len(done.out.splitlines())) == (["error"], 1), done
    assert done.err.startswith("cadenza: ")
    assert len(done.err.splitlines()) == 1, done.err
    for text in said:
        assert text in done.err


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    path = config_file(tmp_path, model={"path": "./nowhere"})
    refused(cadenza("train", path, "--json"), "model.path: ", "nowhere does not exist", "save_pretrained")


def test_a_tokenizer_without_chat_template(tmp_path: Path, base: Path) -> None:
    path = config_file(tmp_path, model={"path": str(base)}, tokenizer={"template": "chat"})
    refused(cadenza("train", path, "--json"), "has no chat template", "template 'plain'")


def test_a_tokenizer_that_is_too_large_for_the_model(tmp_path: Path, base: Path) -> None:
    shutil.copytree(base, "small")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("small")
    model.resize_token_embeddings(50)
    model.save_pretrained("small")
    path = config_file(tmp_path, model={"path": "./small"})
    refused(cadenza("train", path, "--json"), "knows 50 tokens, the tokenizer 98")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("envs.domains.lake.env=frozenlak", "envs.domains.lake.env: env 'frozenlak' is not registered; did you mean"),
        ("envs.domains.lake.env=nothing_here:Env", "envs.domains.lake.env: 'nothing_here:Env' cannot be loaded"),
        ("envs.domains.lake.reward=json:nothing", "envs.domains.lake.reward: 'json:nothing' cannot be loaded"),
        ("envs.rollout=stepp", "envs.rollout: rollout 'stepp' is not known"),
        ("rollout.group_filter=json:nothing", "rollout.group_filter: 'json:nothing' cannot be loaded"),
        ("actor.loss=json:nothing", "actor.loss: 'json:nothing' cannot be loaded"),
        ("estimator.name=json:nothing", "estimator.name: 'json:nothing' cannot be loaded"),
    ],
)
def test_names_that_mean_nothing_are_found_before_the_run_begins(tmp_path: Path, override: str, said: str) -> None:
    refused(cadenza("train", config_file(tmp_path), override), said)
    assert not (tmp_path / "runs").exists()


def test_an_env_that_always_raises(tmp_path: Path) -> None:
    Path("broken_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Broken(FrozenLake):\n"
        "    steps = 0\n"
        "    async def step(self, action):\n"
        "        Broken.steps += 1\n"
        "        if Broken.steps > 40:\n"
        "            raise ZeroDivisionError('the ice is too thin')\n"
        "        return await super().step(action)\n"
    )
    domains = {"lake": {"env": "broken_lake:Broken", "env_args": {"map": ["SG"]}}}
    path = config_file(tmp_path, envs={**TINY["envs"], "domains": domains}, cold_start=None)
    done = cadenza("train", path, "steps=50", "rollout.error_budget=5", "checkpoint.every=100")
    assert done.code == 1
    message = done.err.splitlines()[-1]
    assert "ZeroDivisionError" in message
    assert "error_budget" in message
    run = tmp_path / "runs" / "tiny"
    assert len(steps(run)) >= 1
    assert cadenza("eval", run, "--checkpoint", "last", "--episodes", "1").code == 1, "the env is still broken"
    assert step_of(run / "checkpoints" / "last") == max(steps(run)), "what was learned is kept"
    assert (run / "report.html").exists()


def test_a_validation_without_episodes(tmp_path: Path) -> None:
    Path("ended_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Ended(FrozenLake):\n"
        "    async def reset(self, seed):\n"
        "        raise ValueError('no board')\n"
    )
    envs = {**TINY["envs"], "domains": {"lake": {"env": "ended_lake:Ended"}}}
    done = cadenza("train", config_file(tmp_path, envs=envs, cold_start=None, validation={"episodes": 2}))
    assert done.code == 1
    message = done.err.splitlines()[-1]
    assert "in the validation: the tasks ran out" in message
    assert "The first error was reset of domain 'lake': ValueError: no board" in message
    assert not (tmp_path / "runs" / "tiny").exists(), "a run that never began leaves nothing behind"


def test_a_validation_has_the_patience_of_the_run(tmp_path: Path) -> None:
    Path("flaky_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Flaky(FrozenLake):\n"
        "    resets = 0\n"
        "    async def reset(self, seed):\n"
        "        Flaky.resets += 1\n"
        "        if Flaky.resets % 2:\n"
        "            raise ValueError('no board')\n"
        "        return await super().reset(seed)\n"
    )
    domains = {"lake": {"env": "flaky_lake:Flaky", "env_args": {"map": ["SG"]}}}
    envs = {**TINY["envs"], "domains": domains}
    options = {"envs": envs, "cold_start": None, "validation": {"episodes": 300}}
    done = trained(tmp_path, "steps=1", "rollout.error_budget=100000", "rollout.max_attempts=50", **options)
    assert set(column(done.run, "val/episodes").values()) == {300.0}


def test_an_env_that_raises_in_the_cold_start_is_named(tmp_path: Path) -> None:
    Path("torn_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Torn(FrozenLake):\n"
        "    async def step(self, action):\n"
        "        raise ConnectionError('the line is dead')\n"
    )
    envs = {**TINY["envs"], "domains": {"lake": {"env": "torn_lake:Torn"}}}
    with pytest.raises(EnvError, match=r"env 'lake' failed in the cold start, with seed .*the line is dead") as found:
        cadenza("train", config_file(tmp_path, envs=envs))
    assert isinstance(found.value.__cause__, ConnectionError), "the traceback shows the place"


def test_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    Path("nan_loss.py").write_text(
        "from cadenza.algorithms import policy_gradient\n"
        "calls = 0\n"
        "def loss(logprobs, old, advantages, mask):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    found = policy_gradient(logprobs, old, advantages, mask)\n"
        "    if calls == 3:\n"
        "        found.values[0, 0] = float('nan')\n"
        "    return found\n"
    )
    done = cadenza("train", config_file(tmp_path), "steps=9", "actor.loss=nan_loss:loss", "checkpoint.every=1")
    refused(Done(done.code, "", done.err), "the loss is nan at update 2", "the batch is in runs/tiny/failures/update-2")
    run = tmp_path / "runs" / "tiny"
    from cadenza import DataProto

    batch = DataProto.from_disk(run / "failures" / "update-2-0")
    assert {"input_ids", "response_mask", "advantages", "scores"} <= set(batch.batch.keys())
    assert len({*batch.batch.numpy("traj_id").tolist()}) == 8
    assert list(steps(run)) == [1, 2]
    done = cadenza("resume", run, "steps=4", "actor.loss=policy_gradient", "--json")
    assert (done.code, done.figures["steps"]) == (0, 4), done.err


def test_a_run_that_breaks_before_its_first_checkpoint_keeps_what_it_wrote(tmp_path: Path) -> None:
    Path("odd_loss.py").write_text(
        "from cadenza.algorithms import policy_gradient\n"
        "calls = 0\n"
        "def loss(logprobs, old, advantages, mask):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    found = policy_gradient(logprobs, old, advantages, mask)\n"
        "    return found if calls < 3 else found.values\n"
    )
    done = cadenza("train", config_file(tmp_path), "steps=9", "actor.loss=odd_loss:loss", "checkpoint.every=100")
    assert done.code == 1
    assert "actor.loss must return a TokenLoss(values, metrics, tokens), got Tensor" in done.err
    assert list(steps(tmp_path / "runs" / "tiny")) == [1, 2]
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_a_full_disk_leaves_the_old_checkpoint(commands: Commands, tmp_path: Path) -> None:
    config_file(tmp_path, steps=5, samples=0, checkpoint={"every": 2})
    whole = commands.start(tmp_path, "train", "config.yaml", "name=whole", "--json").wait()
    config_file(tmp_path, steps=2, samples=0)
    run = tmp_path / commands.start(tmp_path, "train", "config.yaml", "--json").wait().run
    before = files(run / "checkpoints")
    size = (run / "checkpoints" / "last" / "model.safetensors").stat().st_size
    full = commands.start(
        tmp_path, "resume", run, "steps=5", "checkpoint.every=2", "--json", largest_file=size // 2
    ).wait()
    refused(full, "step-000004 could not be saved", "step-000002", "is intact")
    assert files(run / "checkpoints") == before
    resumed = commands.start(tmp_path, "resume", run, "--json").wait()
    assert (resumed.code, resumed.figures["steps"]) == (0, 5), resumed.err
    same(tmp_path / whole.run, run, range(1, 6))


def test_a_full_disk_when_the_reference_is_kept(commands: Commands, tmp_path: Path) -> None:
    config_file(tmp_path)
    full = commands.start(tmp_path, "train", "config.yaml", "actor.kl_coef=0.1", "--json", largest_file=20_000).wait()
    refused(full, "reference could not be saved")


def test_two_processes_cannot_write_one_run(commands: Commands, tmp_path: Path) -> None:
    run = trained(tmp_path).run
    with RunDirectory(run, resume=2, trackers=()):
        refused(commands.start(tmp_path, "resume", run, "steps=3").wait(), "is being written by another process")


def test_a_target_without_success_is_refused_with_a_message(tmp_path: Path) -> None:
    Path("mute.py").write_text(
        "class Mute:\n"
        "    def reset(self, seed):\n"
        "        return 'say:'\n"
        "    def step(self, action):\n"
        "        return '', float(ord(action or 'a')), True, False, {}\n"
    )
    envs = {**TINY["envs"], "domains": {"mute": {"env": "mute:Mute"}}}
    path = config_file(tmp_path, envs=envs, cold_start=None)
    refused(cadenza("train", path, "target=0.5", "--json"), "or an env say 'success' in its info")
    done = trained(tmp_path, envs=envs, cold_start=None)
    assert (done.figures["success_first"], done.figures["steps"]) == (None, 2)
    assert cadenza("eval", done.run, "--episodes", "2", "--json").figures["success"] is None


@pytest.mark.parametrize(
    ("plan", "env", "said"),
    [
        ({"source": "demonstrations"}, {"env": "blank:Blank"}, "needs envs with 'solution'"),
        ({"source": "format"}, {"env": "blank:Blank"}, "needs envs with 'actions'"),
        ({}, {"env": "frozenlake", "env_args": {"style": "chat"}}, "more than max_tokens 1"),
    ],
)
def test_a_cold_start_that_cannot_be(tmp_path: Path, plan: Any, env: Any, said: str) -> None:
    Path("blank.py").write_text(
        "class Blank:\n"
        "    closed = 0\n"
        "    def reset(self, seed): return ''\n"
        "    def step(self, action): return '', 0.0, True, False, {}\n"
        "    def close(self): Blank.closed += 1\n"
    )
    path = config_file(tmp_path, cold_start=plan, envs={**TINY["envs"], "domains": {"one": env}})
    refused(cadenza("train", path, "--json"), said)
    if "blank" in env["env"]:
        assert sys.modules["blank"].Blank.closed > 0


def test_a_wrong_command_line_is_code_2(tmp_path: Path) -> None:
    for arguments in (["train"], ["train", config_file(tmp_path), "--jsonn"], ["eval", tmp_path, "--episodes", "0"]):
        done = cadenza(*arguments)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("cadenza: ")
    assert not list(listed(tmp_path))
    assert os.getcwd() == str(tmp_path)
