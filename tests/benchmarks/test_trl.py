from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.benchmarks import trl, trl_side
from cadenza.benchmarks.trl_side import TASKS, BenchRun
from cadenza.cli import main
from cadenza.inference.codec import load_codec
from cadenza.rewards.exact import Exact
from cadenza.rewards.sample import Sample
from cadenza.run.config_file import build_config
from cadenza.run.rlvr_config import RlvrConfig

ROOT = Path(__file__).parents[2]
SUMS = TASKS["smollm2"]


@pytest.fixture
def sums_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchRun:
    """The run of the task `smollm2` with a file of its rows."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "sums.jsonl"
    trl.write_sums(data, 0, SUMS.steps * SUMS.groups)
    return BenchRun("smollm2", "models/smollm2", str(tmp_path), 0, SUMS.steps, SUMS.groups, SUMS.lr, str(data))


def measured(task: trl_side.BenchTask, *, trl_ms: float = 300.0, trl_reward: float = 0.8) -> dict[str, Any]:
    """What `compare` returns where Cadenza takes 100 ms per sample for a reward of 0.8."""

    def side(milliseconds: float, reward: float) -> dict[str, Any]:
        run = trl_side.BenchRunResult(rewards=[reward] * 10, tokens=[3.0] * 10)
        run.cpu = run.wall = [milliseconds / 1000 * step * task.groups * BenchRun.group_size for step in range(10)]
        return trl.figures(task, [run])

    sides = {"cadenza": side(100.0, 0.8), "trl": side(trl_ms, trl_reward), "cadenza_all_rows": side(150.0, 0.8)}
    return {"ratio": trl_ms / 100.0, "ratio_all_rows": trl_ms / 150.0, **sides}


def test_the_json_of_one_task_has_its_ratio_at_the_top(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trl, "compare", lambda task, rounds, directory: measured(task) | {"rounds": rounds})
    assert main(["bench", "trl", "--task", "smollm2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["ratio"], found["rounds"]) == ("smollm2", 3.0, 1)
    assert found["cadenza"]["cpu_ms_per_sample"] == pytest.approx(100.0)


def test_without_a_task_the_json_has_an_entry_for_each_of_the_tiny_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trl, "compare", lambda task, rounds, directory: measured(task) | {"rounds": rounds})
    assert main(["bench", "trl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: (task["ratio"], task["rounds"]) for name, task in found.items()} == {
        "short": (3.0, 3),
        "long": (3.0, 3),
    }


@pytest.mark.parametrize("missed", [{"trl_ms": 149.0}, {"trl_reward": 0.97}])
def test_too_low_a_ratio_and_too_low_a_reward_fail(
    missed: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trl, "compare", lambda task, rounds, directory: measured(task, **missed))
    assert main(["bench", "trl", "--task", "smollm2"]) == 1
    assert "smollm2" in capsys.readouterr().out


def test_a_missing_model_is_an_error_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "trl", "--task", "smollm2", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "cadenza models fetch smollm2-135m --to models/smollm2" in error


def test_every_sum_passes_once_before_any_passes_again(sums_run: BenchRun) -> None:
    rows = [json.dumps(row) for row in SUMS.rows(sums_run)]
    assert len(rows) == SUMS.steps * SUMS.groups == 96
    assert len(set(rows[:60])) == 60


def test_the_smollm2_runs_of_both_sides_have_the_same_settings(sums_run: BenchRun) -> None:
    ours, theirs = build_config(trl.settings(sums_run)), trl_side.settings(sums_run, SUMS)
    assert isinstance(ours, RlvrConfig)
    assert ours.model.lora is not None
    assert SUMS.lora is not None
    assert (ours.model.lora.r, ours.model.lora.alpha) == (SUMS.lora.r, SUMS.lora.alpha) == (16, 32)
    assert (ours.model.lora.dropout, ours.model.lora.target_modules) == (0.0, "all-linear")
    assert ours.rollout.batch_size == theirs["per_device_train_batch_size"] == 32
    assert ours.rollout.group_size == theirs["num_generations"] == 8
    assert ours.sampling.max_tokens == theirs["max_completion_length"] == 4
    assert ours.actor.lr == theirs["learning_rate"]
    assert ours.steps == theirs["max_steps"]


def test_both_sides_read_the_same_prompt_tokens(sums_run: BenchRun, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    config = build_config(trl.settings(sums_run))
    codec, tokenizer = load_codec(smollm2, system=config.tokenizer.system), AutoTokenizer.from_pretrained(smollm2)
    lines = Path(sums_run.data).read_text(encoding="utf-8").splitlines()
    for line, row in zip(lines, SUMS.rows(sums_run), strict=True):
        theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
        assert codec.encode(json.loads(line)["messages"], first=True).tolist() == theirs["input_ids"]


@pytest.mark.parametrize("written", ["14", " 14\n", "14.", "1 4", "", "4"])
def test_the_reward_of_a_sum_is_that_of_exact(written: str) -> None:
    assert SUMS.reward("14", written) == Exact()(Sample(response=written, row={"answer": "14"}))
