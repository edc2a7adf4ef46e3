"""`devices.reward` on a real Ray with declared GPUs: where rewards are computed, by which model, and a death."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_cases import Done, cadenza, lines, steps

pytest.importorskip("ray")

from classifier_cases import classifier, logits
from ray_cases import RayTestCluster, actors, until, user_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WHERE = """
import json, os
from pathlib import Path
import ray
from cadenza.rewards import Sample

class Where:
    '''Leaves a file that is named after its process, with the GPUs that Ray gave it. Dies where a file says so.'''

    def __init__(self, directory):
        self.directory = Path(directory)

    async def open(self):
        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        with open(self.directory / f"{os.getpid()}.json", "a") as file:
            file.write(json.dumps(gpus) + "\\n")

    async def __call__(self, sample: Sample) -> float:
        with open(self.directory / f"{os.getpid()}.scored", "a") as file:
            file.write(".")
        if (deaths := self.directory / "deaths").exists():
            left = int(deaths.read_text())
            if left:
                deaths.write_text(str(left - 1))
                os.kill(os.getpid(), 9)
        return 0.0
"""
JUDGE = {
    "name": "judge",
    "model": "policy",
    "template": "{prompt} {response} good? ",
    "max_tokens": 24,
    "temperature": 1.0,
    "pattern": "([a-zA-Z0-9])",
    "labels": {letter: number / 35 for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")},
    "weight": 0.0,
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose rewards are a reward model, a word of the policy itself that does not count, and a file that says
    where they were computed."""
    monkeypatch.chdir(tmp_path)
    user_module(monkeypatch, tmp_path, "where", WHERE)
    rows = [json.dumps({"prompt": f"{n % 10}+{n // 10}=", "answer": str(n)}) + "\n" for n in range(46)]
    (tmp_path / "sums.jsonl").write_text("".join(rows[:40]))
    (tmp_path / "held.jsonl").write_text("".join(rows[40:]))
    rewards = {
        "model": {"name": "reward_model", "model": classifier(tmp_path / "model", template=None)},
        "where": {"name": "where:Where", "directory": str(tmp_path)},
        "policy": JUDGE,
    }
    path = tmp_path / "config.yaml"
    tiny: dict[str, Any] = {
        "pipeline": "rlvr",
        "name": "tiny",
        "steps": 2,
        "preset": "grpo",
        "model": {"layers": 1, "hidden": 32, "heads": 2},
        "domains": {"sums": {"data": "sums.jsonl", "rewards": rewards, "validation": "held.jsonl"}},
        "sampling": {"max_tokens": 2},
        "rollout": {"batch_size": 16, "group_size": 4},
        "trackers": [],
        "samples": 16,
        "backend": "ray",
        "devices": {"actor": 0, "inference": 1, "reward": "2-3"},
    }
    path.write_text(yaml.safe_dump(tiny))
    return path


def train(config: Path, *overrides: str) -> Done:
    return cadenza("train", config, *overrides, "--json")


def processes(directory: Path) -> dict[int, list[str]]:
    """The GPUs of each process that opened the reward, which each does once."""
    return {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}


def scored(directory: Path) -> dict[int, int]:
    return {int(path.stem): len(path.read_text()) for path in directory.glob("*.scored")}


def test_each_device_has_one_process_for_training_and_validation_and_all_env_workers(
    nodes: RayTestCluster, config: Path, tmp_path: Path
) -> None:
    done = train(config, "workers=2")
    assert done.code == 0, done.err
    found = processes(tmp_path)
    assert len(found) == 2
    assert os.getpid() not in found
    gpus = sorted(gpu for own in found.values() for gpu in own)
    assert len(gpus) == len(set(gpus)) == 2, "one GPU each"
    counts = scored(tmp_path)
    assert counts.keys() == found.keys()
    assert sum(counts.values()) >= 2 * 16 + 2 * 6
    samples = lines(done.run, "samples")
    assert {sample["mode"] for sample in samples} == {"train", "val"}
    for sample in samples:
        turn = sample["turns"][0]
        alone = logits(str(tmp_path / "model"), turn["prompt"] + turn["response"]).item()
        assert sample["score"] == pytest.approx(alone, abs=1e-4)
    assert steps(done.run)[2]["judge/calls"] >= 32
    assert steps(done.run)[2]["tokens/trained"] <= 2 * 16 * 2
    until(lambda: not actors())


def test_a_reward_process_that_dies_costs_nothing_while_another_is_left(
    nodes: RayTestCluster, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "deaths").write_text("1")
    done = train(config)
    assert done.code == 0, done.err
    assert steps(done.run)[2]["fate/failed"] == 0
    assert len(processes(tmp_path)) == 2, "it is not replaced"


def test_the_run_ends_when_the_last_reward_process_dies_and_says_so(
    nodes: RayTestCluster, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "deaths").write_text("2")
    done = train(config)
    assert done.code != 0
    assert "no reward process is left for a sample of domain 'sums'" in " ".join(done.err.split())
    until(lambda: not actors())
