"""A run that begins with a supervised phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from example_cases import write_rows
from pipeline_cases import TINY, cadenza, column, config_file, trained

from cadenza.errors import EnvError


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's directory; its modules are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("stuck_lake", "odd_env"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def envs(env: str, **changes: Any) -> dict[str, Any]:
    return {**TINY["envs"], "domains": {"lake": {"env": env}}, **changes}


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("where", ["reset", "step", "solution"])
def test_an_env_that_hangs_in_the_cold_start_is_named(tmp_path: Path, kind: str, where: str) -> None:
    hangs = f"    {kind if where != 'solution' else 'def'} {where}(self, *args):\n        released.wait()\n"
    plain = {
        "reset": f"    {kind} reset(self, seed): return ''\n",
        "step": f"    {kind} step(self, action): return '', 0.0, True, False, {{}}\n",
        "solution": "    def solution(self): return ['a']\n",
    }
    body = "".join(hangs if name == where else text for name, text in plain.items())
    Path("stuck_lake.py").write_text(f"import threading\nreleased = threading.Event()\nclass Stuck:\n{body}")
    path = config_file(tmp_path, envs=envs("stuck_lake:Stuck", lease_seconds=0.2))
    done = cadenza("train", path, "cold_start.source=demonstrations", "--json")
    sys.modules["stuck_lake"].released.set()
    asked = "give its solution" if where == "solution" else where
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert f"env 'lake' was asked to {asked} in the cold start, with seed 2000000000, and did not answer" in done.err
    assert "envs.lease_seconds 0.2" in done.err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def reset(self, seed): return ''", "without a method 'step'"),
        (
            "def reset(self, seed): return None\n    def step(self, a): return '', 0.0, True, False, {}",
            "no observation",
        ),
        ("def reset(self, seed): return ''\n    def step(self, a): return ''", "step returned ''; return (observation"),
        (
            "def reset(self, seed): return ''\n    def step(self, a): return '', float('nan'), True, False, {}",
            "return a finite number",
        ),
    ],
)
def test_an_env_keeps_its_contract_in_the_cold_start(tmp_path: Path, body: str, said: str) -> None:
    Path("odd_env.py").write_text(f"class Odd:\n    actions = ('a',)\n    {body}\n")
    with pytest.raises(EnvError, match="env 'lake' failed in the cold start, with seed 2000000000") as found:
        cadenza("train", config_file(tmp_path, envs=envs("odd_env:Odd")))
    assert said in str(found.value.__cause__)


def test_a_cold_start_learns_from_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}:", "response": "L"} for n in range(20)]
    write_rows(rows)
    start = {"data": "train.jsonl", "passes": 20, "trainer": {"lr": 1e-2, "batch_size": 10}}
    done = trained(tmp_path, "steps=1", cold_start=start)
    assert column(done.run, "cold_start/loss")[0] < 0.1
    again = trained(tmp_path, "steps=1", cold_start={**start, "passes": 1})
    assert column(again.run, "cold_start/loss")[0] > 0.5


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"data": "nowhere.jsonl"}, "cold_start.data: there is no file nowhere.jsonl"),
        ({"data": "train.jsonl", "source": "format"}, "source='format' does nothing with data"),
        ({"data": "train.jsonl", "episodes": 3}, "episodes=3 does nothing with data"),
        ({"data": {"path": "train.jsonl", "epochs": 2}}, "data.epochs 2 does nothing in a cold start: set passes"),
        ({"data": "train.jsonl"}, "train.jsonl line 2: the field 'response' is missing"),
    ],
)
def test_rows_that_cannot_be_learned_from(tmp_path: Path, start: Any, said: str) -> None:
    write_rows([{"prompt": "1", "response": "L"}, {"prompt": "2"}])
    done = cadenza("train", config_file(tmp_path, cold_start=start), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert said in done.err
