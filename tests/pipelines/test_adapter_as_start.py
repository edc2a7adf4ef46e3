"""The checkpoint of a run that trained an adapter is what the next run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from example_cases import PAIRS, SUMS, config_file, trained, write_rows
from pipeline_cases import cadenza

VALIDATED: dict[str, Any] = {"validation": {"data": "train.jsonl"}, "actor": {"lr": 5e-2, "batch_size": 8}}
FROZEN: dict[str, Any] = {**VALIDATED, "actor": {"lr": 0, "batch_size": 8}, "steps": 1}


RL: dict[str, Any] = {
    "pipeline": "rlvr",
    "name": "rl",
    "steps": 1,
    "domains": {"sums": {"data": "sums.jsonl", "reward": "exact"}},
    "sampling": {"max_tokens": 3},
    "rollout": {"batch_size": 4, "group_size": 2},
    "validation": None,
    "estimator": {"kl_coef": 0.1},
    "trackers": [],
}


def rl_config(**values: Any) -> Path:
    path = Path("rl.yaml")
    path.write_text(yaml.safe_dump({**RL, **values}), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(SUMS)
    write_rows(PAIRS, "pairs.jsonl")
    write_rows([{"prompt": row["prompt"], "answer": row["response"]} for row in SUMS], "sums.jsonl")


@pytest.fixture
def adapter(in_tmp_path: None) -> tuple[str, float]:
    """The checkpoint of an SFT run that trained an adapter, and its loss; that of its base is another."""
    base = trained(pipeline="sft", name="base", steps=2).run / "checkpoints" / "last"
    done = trained(pipeline="sft", name="one", **VALIDATED, model={"path": str(base), "lora": {"r": 4}})
    assert abs(done.figures["loss_first"] - done.figures["loss_last"]) > 0.01
    return str(done.run / "checkpoints" / "last"), done.figures["loss_last"]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_run_begins_with_what_the_adapter_learned(adapter: tuple[str, float], lora: dict[str, int] | None) -> None:
    path, loss = adapter
    done = trained(pipeline="sft", name="two", **FROZEN, model={"path": path, "lora": lora})
    assert done.figures["loss_first"] == pytest.approx(loss, abs=1e-4)
    resumed = cadenza("resume", done.run, "steps=2", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.figures["loss_last"] == pytest.approx(loss, abs=1e-4)
    last = str(done.run / "checkpoints" / "last")
    third = trained(pipeline="sft", name="three", **FROZEN, model={"path": last, "lora": lora})
    assert third.figures["loss_first"] == pytest.approx(loss, abs=1e-4), "an adapter to an adapter too"


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_every_pipeline_takes_an_adapter(adapter: tuple[str, float], lora: dict[str, int] | None) -> None:
    model = {"path": adapter[0], "lora": lora}
    trained(pipeline="dpo", name="dpo", steps=1, model=model, data="pairs.jsonl")
    trained(pipeline="reward_model", name="rm", steps=1, model=model, data="pairs.jsonl")
    trained(pipeline="distill", name="distill", steps=1, model=model, teacher={"path": adapter[0]})
    done = cadenza("train", rl_config(model=model), "--json")
    assert done.code == 0, done.err
    played = cadenza("eval", done.run, "--episodes", "4", "--json")
    assert played.code == 0, played.err


def test_engines_that_load_the_model_themselves_need_a_whole_one(adapter: tuple[str, float]) -> None:
    engine = {"kind": "vllm", "python": "python"}
    done = cadenza("train", rl_config(model={"path": adapter[0]}, backend="ray", engine=engine))
    assert done.code == 1
    assert "is an adapter, and engine.kind 'vllm' loads whole models" in done.err
    assert "cadenza export RUN --to DIR --merged" in done.err


def test_an_adapter_whose_base_is_gone_says_where_it_is_named(adapter: tuple[str, float]) -> None:
    Path("runs/base").rename("runs/moved")
    done = cadenza("train", config_file(pipeline="sft", name="two", model={"path": adapter[0]}))
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "set base_model_name_or_path in" in done.err


def test_the_adapter_of_a_reward_model_is_no_policy(adapter: tuple[str, float]) -> None:
    model = {"path": adapter[0], "lora": {"r": 2}}
    scorer = trained(pipeline="reward_model", name="rm", steps=1, model=model, data="pairs.jsonl").run
    done = cadenza("train", config_file(pipeline="sft", name="two", model={"path": str(scorer / "checkpoints/last")}))
    assert done.code == 1
    assert "is the adapter of a reward model, which writes no text" in done.err
