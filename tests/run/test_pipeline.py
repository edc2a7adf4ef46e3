"""A pipeline of one's own: a supervised program in a file of the user, found by `pipeline: module:name`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_cases import TINY, cadenza, config_file, distance, lines

PROGRAM = '''
"""Supervised training on pairs of texts: no envs, no rollouts."""

from cadenza.cluster import dispatch
from cadenza.data import DataProto
from cadenza.run.config import RunConfig
from cadenza.run.pipeline import Pipeline
from cadenza.run.roles import Roles
from cadenza.run.workers import LearnerWorker
from cadenza.training import Supervised, SupervisedConfig, examples


class CopyConfig(RunConfig):
    actor: SupervisedConfig = SupervisedConfig(lr=1e-2, batch_size=4)
    words: tuple[str, ...] = ("up", "down", "left", "right", "stay", "jump")


class CopyWorker(LearnerWorker):
    def __init__(self, model_spec, config, failures) -> None:
        self._model_spec, self._config, self._failures = model_spec, config, failures

    def make(self, strategy) -> Supervised:
        spec = self._model_spec
        return Supervised(spec.build(), self._config, spec.seed, failures=self._failures, strategy=strategy)

    @dispatch("broadcast", gather=lambda metrics: metrics[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        return self.learner.train(batch)


class CopyRoles(Roles):
    async def start(self) -> None:
        self.student = await self.start_trainers(
            "actor", CopyWorker, config=self.config.actor, failures=self.failures
        )


class CopyPipeline(Pipeline):
    config_class, roles_class = CopyConfig, CopyRoles
    examples_seen = 0

    async def program(self) -> None:
        async for step in self.steps():
            await self.checkpoint(step)
            batch = self.batch()
            with self.timed("train"):
                metrics = await self.roles.student.train(batch)
            self.add_metrics("train", metrics)
            self.end_step(samples=len(batch), tokens=int(metrics["tokens"]))

    def batch(self) -> DataProto:
        words, codec = self.config.words, self.roles.codec
        chosen = [words[(self.examples_seen + n) % len(words)] for n in range(self.config.actor.batch_size)]
        self.examples_seen += len(chosen)
        return examples([(codec.encode(word, first=True), codec.encode_answer(word)) for word in chosen])

    def state(self) -> dict:
        return {"examples_seen": self.examples_seen}

    def load_state(self, state) -> None:
        self.examples_seen = state["examples_seen"]
'''
CONFIG: dict[str, Any] = {
    "pipeline": "copying:CopyPipeline",
    "name": "copy",
    "steps": 8,
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "checkpoint": {"every": 3},
    "trackers": [],
}


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directory, with a program and a config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "copying", raising=False)
    (tmp_path / "copying.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "copy.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return tmp_path


def test_a_program_of_the_user_trains_and_resumes_exactly() -> None:
    whole = cadenza("train", "copy.yaml", "--json")
    assert whole.code == 0, whole.err
    assert (whole.figures["steps"], whole.figures["samples"], whole.figures["success_last"]) == (8, 32, None)
    losses = [line["train/loss"] for line in lines(whole.run)]
    assert losses[-1] < losses[0] / 2
    begun = cadenza("train", "copy.yaml", "steps=4", "--json")
    resumed = cadenza("resume", begun.run, "steps=8", "--json")
    assert resumed.code == 0, resumed.err
    assert distance(begun.run / "checkpoints" / "last", whole.run / "checkpoints" / "last") < 1e-6
    assert [line["train/loss"] for line in lines(begun.run)] == pytest.approx(losses, abs=1e-6)
    assert yaml.safe_load((begun.run / "config.yaml").read_text())["pipeline"] == "copying:CopyPipeline"


def test_a_pipeline_has_the_keys_of_its_own_config_and_no_others() -> None:
    shown = cadenza("train", "copy.yaml", "words=[a, b]", "--dry-run")
    found = yaml.safe_load(shown.out)
    assert found["words"] == ["a", "b"]
    assert not {"envs", "rollout", "critic", "engine", "validation"} & found.keys()
    refused = cadenza("train", "copy.yaml", "rollout.alpha=1")
    assert refused.code == 1
    assert "CopyConfig has no key 'rollout'" in refused.err


@pytest.mark.parametrize("command", ["eval", "play"])
def test_a_run_without_envs_cannot_be_played(command: str) -> None:
    run = cadenza("train", "copy.yaml", "steps=1", "--json").run
    done = cadenza(command, run)
    assert done.code == 1
    assert "plays no episodes: its pipeline 'copying:CopyPipeline' has no rollouts" in done.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("agentik", "pipeline 'agentik' is not known; there are agentic, "),
        ("copying:Nothing", "pipeline: 'copying:Nothing' cannot be loaded"),
        ("nowhere:Nothing", "pipeline: 'nowhere:Nothing' cannot be loaded"),
        ("json:dumps", "name a subclass of cadenza.run.pipeline.Pipeline"),
    ],
)
def test_a_pipeline_that_is_none(tmp_path: Path, name: str, said: str) -> None:
    done = cadenza("train", config_file(tmp_path), f"pipeline={name}")
    assert (done.code, done.out, len(done.err.splitlines())) == (1, "", 1)
    assert said in done.err
    assert not (tmp_path / "runs").exists()


def test_agentic_is_the_pipeline_of_a_config_that_names_none(tmp_path: Path) -> None:
    named = cadenza("train", config_file(tmp_path), "--dry-run").out
    assert yaml.safe_load(named)["pipeline"] == "agentic"
    assert cadenza("train", config_file(tmp_path, pipeline="agentic"), "--dry-run").out == named
    assert "pipeline" not in TINY
