"""`cadenza plan CONFIG`: who sits where and when, and what is chosen where the config leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_cases import Done, cadenza, config_file, trained

TRACE = {
    "gpus": 2,
    "groups": 2,
    "trace": [{"prompt": 64, "members": [{"lengths": [length]} for length in (300, 90, 40, 70)]} for _ in range(5)],
}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(TRACE))
    return str(path)


def planned(directory: Path, *arguments: str, **changes: Any) -> Done:
    return cadenza("plan", config_file(directory, **changes), f"out={directory}", *arguments)


def test_auto_chooses_among_the_splits_and_says_why(tmp_path: Path, workload: str) -> None:
    asked = ("devices=auto", "rollout.alpha=1", "--gpus", "4", "--workload", workload, "--json")
    done = planned(tmp_path, *asked)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    chosen = told["chosen"]
    tried = {found["train_gpus"] for found in told["predicted"]}
    assert 1 < len(tried) <= len(tried | {1, 2, 3}) == 3
    assert chosen in told["predicted"]
    assert {"alpha", "efficiency", "limited_by"} <= chosen.keys()
    train, generate = chosen["train_gpus"], chosen["rollout_gpus"]
    assert told["roles"]["actor"]["devices"] == ("0" if train == 1 else f"0-{train - 1}")
    assert told["roles"]["inference"]["devices"] == ("3" if generate == 1 else f"{train}-3")
    assert {role["mode"] for role in told["roles"].values()} == {"disaggregated"}
    assert told["why"].startswith(f"alpha 1 with {train} training and {generate} generating GPUs: steps of ")
    assert told["why"].endswith("as --workload says.")
    assert json.loads(planned(tmp_path, *asked).out) == told


def test_a_synchronous_run_takes_all_devices_in_turn(tmp_path: Path, workload: str) -> None:
    told = json.loads(planned(tmp_path, "devices=auto", "--gpus", "2", "--workload", workload, "--json").out)
    assert told["roles"]["actor"] == {
        "devices": "0-1", "mode": "colocated", "when": "in turn with generation", "workers": 2,
    }  # fmt: skip
    assert told["roles"]["inference"]["devices"] == "0-1"
    assert [found["train_gpus"] for found in told["predicted"]] == [0]


def test_named_devices_are_shown_and_predicted(tmp_path: Path, workload: str) -> None:
    devices = "devices={actor: 0, inference: 1-2}"
    done = planned(tmp_path, devices, "rollout.alpha=1", "--workload", workload)
    assert done.code == 0, done.err
    assert "actor and inference: disaggregated" in done.out
    assert "actor: all the time, beside generation" in done.out
    told = json.loads(planned(tmp_path, devices, "rollout.alpha=1", "--workload", workload, "--json").out)
    assert [(found["train_gpus"], found["rollout_gpus"]) for found in told["predicted"]] == [(1, 2)]
    assert told["why"].startswith("the devices are those of the config: alpha 1 with 1 training and 2 generating GPUs")


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_partial_mapping_is_shown_and_predicted(tmp_path: Path, workload: str, alpha: int) -> None:
    asked = ("devices={actor: 0, inference: 0-1}", f"rollout.alpha={alpha}", "--workload", workload)
    done = planned(tmp_path, *asked)
    assert "actor and inference: partial, both on 0" in done.out
    assert "actor: in turn with generation on 0" in done.out
    told = json.loads(planned(tmp_path, *asked, "--json").out)
    [found] = told["predicted"]
    assert (found["train_gpus"], found["shared_gpus"], found["rollout_gpus"]) == (1, 1, 2)
    assert f"alpha {alpha} with 2 generating GPUs, 1 of which train by turns: steps of" in told["why"]


def test_where_no_device_only_generates_nothing_is_predicted(tmp_path: Path) -> None:
    done = planned(tmp_path, "devices={actor: 0-1, inference: 0}", "backend=ray")
    assert "partial devices at alpha 0 are not simulated" in done.out
    told = json.loads(planned(tmp_path, "devices={actor: 0-1, inference: 0}", "backend=ray", "--json").out)
    assert (told["predicted"], told["chosen"]) == ([], None)


def test_auto_may_choose_shared_devices(tmp_path: Path, workload: str) -> None:
    asked = ("devices=auto", "rollout.alpha=1", "--gpus", "4", "--workload", workload, "--json")
    plain = json.loads(planned(tmp_path, *asked).out)
    told = json.loads(planned(tmp_path, *asked, "--shared").out)
    assert {found["shared_gpus"] for found in plain["predicted"]} == {0}
    assert [found for found in told["predicted"] if not found["shared_gpus"]] == plain["predicted"]
    assert {found["shared_gpus"] for found in told["predicted"]} > {0}
    chosen = told["chosen"]
    assert chosen["step_seconds"] == min(p["step_seconds"] for p in (plain["chosen"], chosen))
    first = chosen["train_gpus"] - chosen["shared_gpus"]
    assert told["roles"]["inference"]["devices"] == ("3" if first == 3 else f"{first}-3")


def test_what_the_run_measured_before_is_what_is_planned_with(tmp_path: Path) -> None:
    trained(tmp_path, "steps=40", "engine.max_running=8")
    told = json.loads(planned(tmp_path, "devices=auto", "rollout.alpha=1", "--gpus", "2", "--json").out)
    assert told["why"].endswith(f"Costs and lengths: measured in {tmp_path / 'tiny'}.")
    assert told["batch"] == 8


def test_a_run_that_was_too_short_to_measure_costs_is_planned_with_stated_ones(tmp_path: Path) -> None:
    trained(tmp_path, "steps=1")
    told = json.loads(planned(tmp_path, "devices=auto", "rollout.alpha=1", "--gpus", "2", "--json").out)
    assert "Costs and lengths: stated, those of W2" in told["why"]


def test_without_measurements_it_says_that_costs_are_stated(tmp_path: Path) -> None:
    told = json.loads(planned(tmp_path, "devices=auto", "--gpus", "2", "--json", "--model-cost", "a=0.01").out)
    assert "Costs and lengths: stated, those of W2" in told["why"]
    assert told["why"].endswith("with --model-cost a=0.01.")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["devices={inference: 0-3}", "--gpus", "2"], 1, "inference: devices 2-3 do not exist: there are 2"),
        (["devices={actor: auto}"], 1, "devices: 'auto' is for actor and inference together"),
        (["devices=auto", "--gpus", "3", "--nodes", "2"], 2, "2 nodes cannot have equally many of all 3 devices"),
        (["devices={actors: 0}"], 1, "this run has no role 'actors'"),
        (["--workload", "W9"], 2, "workload 'W9' is not known"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    done = planned(tmp_path, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_an_impossible_mapping_is_refused_with_the_map(tmp_path: Path) -> None:
    done = planned(tmp_path, "devices={actor: 0, inference: 0-3}", "--gpus", "2")
    assert "node-0          0  1\n  actor         0  .\n  inference     0  1\nno such device  2  3" in done.err


def test_nodes_belong_to_the_plan_of_a_config() -> None:
    done = cadenza("plan", "--nodes", "2")
    assert done.code == 2
    assert "--nodes is for the plan of a config" in done.err


def test_a_run_does_not_guess_its_devices(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}", "devices=auto")
    assert done.code == 1
    assert "devices: 'auto' of actor, inference is for `cadenza plan CONFIG`" in done.err


def test_rewards_on_devices_are_in_the_map_and_work_beside_the_others(tmp_path: Path, workload: str) -> None:
    reward = ("envs.domains.lake.reward=exact", "backend=ray", "rollout.alpha=1", "--workload", workload)
    devices = "devices={actor: 0, inference: 1-2, reward: 2-3}"
    told = json.loads(planned(tmp_path, devices, *reward, "--json").out)
    assert told["roles"]["reward"] == {
        "devices": "2-3", "mode": "partial", "when": "whenever an answer is finished", "workers": 2,
    }  # fmt: skip
    done = planned(tmp_path, devices, *reward)
    assert "reward: whenever an answer is finished" in done.out
    assert "inference and reward: partial, both on 2" in done.out
    refused = planned(tmp_path, devices, *reward, "--gpus", "3")
    assert "reward: devices 3 do not exist: there are 3, numbered 0-2" in refused.err
