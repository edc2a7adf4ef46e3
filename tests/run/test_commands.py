"""What the commands of a run say, as JSON and in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pipeline_cases import cadenza, config_file, trained

from cadenza.commands import SignalWatch


def test_a_dry_run_with_json_prints_the_config_as_json(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    words, figures = cadenza("train", path, "--dry-run"), cadenza("train", path, "--dry-run", "--json")
    assert json.loads(figures.out) == yaml.safe_load(words.out)
    assert (figures.code, figures.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["train", "config.yaml", "stepz=1", "--json"], 1, "did you mean 'steps'?"),
        (["train", "nowhere.yaml", "--json"], 1, "there is no config file"),
        (["eval", "nowhere", "--json"], 1, "there is no run in nowhere"),
        (["train", "--json"], 2, "--config requires an argument"),
        (["plan", "--nodes", "2", "--json"], 2, "--nodes is for the plan of a config"),
        (["simulate", "--workload", "W99", "--json"], 2, "W99"),
    ],
)
def test_with_json_an_error_is_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config_file(tmp_path)
    done = cadenza(*arguments)
    assert done.code == code
    found = json.loads(done.out)
    assert list(found) == ["error"]
    assert said in found["error"]
    assert "Traceback" not in done.err


def test_a_run_that_fails_is_code_1_and_names_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("thin_lake.py").write_text(
        "from cadenza.envs.frozenlake import FrozenLake\n"
        "class Thin(FrozenLake):\n"
        "    async def step(self, action):\n"
        "        raise ZeroDivisionError('the ice is too thin')\n"
    )
    path = config_file(tmp_path, cold_start=None)
    done = cadenza("train", path, "envs.domains.lake.env=thin_lake:Thin", "rollout.error_budget=3", "--json")
    assert done.code == 1
    assert "ZeroDivisionError" in json.loads(done.out)["error"]


def test_a_directory_that_cannot_be_written_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}/file/runs")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert f"out: no run can be written to {tmp_path}/file/runs" in done.err
    assert "set out to a directory of yours" in done.err


def test_a_second_run_of_one_name_shows_the_directory_that_it_uses(tmp_path: Path) -> None:
    trained(tmp_path, "steps=1")
    again = cadenza("train", config_file(tmp_path), f"out={tmp_path}", "steps=1")
    assert again.out.splitlines()[0].startswith("tiny-2")


def test_a_setting_with_dashes_is_told_how_settings_are_written(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), "--steps", "3")
    assert done.code == 2
    assert done.err.endswith("Try: cadenza train --help. Settings of a run are key=value, without dashes: steps=3\n")


def test_a_module_that_is_missing_is_told_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = cadenza("train", config_file(tmp_path), "envs.domains.lake.env=far_away:Lake")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "envs.domains.lake.env: 'far_away:Lake' cannot be loaded: No module named 'far_away'" in done.err
    assert f"it is looked for in the working directory, {tmp_path}, and on PYTHONPATH" in done.err


def test_train_with_the_directory_of_a_run_names_resume(tmp_path: Path) -> None:
    run = trained(tmp_path, "steps=1").run
    done = cadenza("train", run)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert f"{run} is a directory: name a config file, or go on with a run by `cadenza resume {run}`" in done.err


@pytest.mark.parametrize("command", ["resume", "eval", "play"])
def test_a_run_whose_config_was_cut_off_says_so_and_the_way_out_works(tmp_path: Path, command: str) -> None:
    run = trained(tmp_path, "steps=1").run
    config, more = run / "config.yaml", ["steps=2"] if command == "resume" else []
    whole = config.read_text(encoding="utf-8")
    config.write_text("".join(whole.splitlines(keepends=True)[:12]), encoding="utf-8")
    done = cadenza(command, run, *more)
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert f"{config} was cut off" in done.err
    assert f"--dry-run > {config}" in done.err
    config.write_text(cadenza("train", tmp_path / "config.yaml", f"out={tmp_path}", "steps=1", "--dry-run").out)
    assert config.read_text(encoding="utf-8") == whole
    assert cadenza(command, run, *more).code == 0


def test_ten_steps_without_signal_are_told_once_with_what_to_look_at() -> None:
    said: list[str] = []
    watch = SignalWatch(said.append)
    for _ in range(9):
        watch.update({"train/updates_skipped": 1.0})
    watch.update({"train/updates_skipped": 0.0})
    for _ in range(9):
        watch.update({"train/updates_skipped": 1.0})
        watch.update({"val/success": 0.0})
    assert not said
    for _ in range(20):
        watch.update({"train/updates_skipped": 1.0})
    [line] = said
    assert all(word in line for word in ("10 steps in a row", "group_size", "difficulty", "rewards"))


def test_a_run_imports_nothing_of_the_simulation(tmp_path: Path) -> None:
    program = (
        "import sys; from cadenza.cli import main\n"
        f"assert main(['train', {str(config_file(tmp_path))!r}, 'out={tmp_path}', 'steps=1', '--json']) == 0\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert not [name for name in done.stdout.split() if name.startswith("cadenza.simulation")]
