"""An estimator and a strategy that are defined outside the package and used by a run through 'module:name'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from pipeline_cases import cadenza, config_file, distance, steps, trained
from torch import nn

from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.checkpoint import Checkpointable
from cadenza.training.estimators import AdvantageEstimator, AdvantageResult
from cadenza.training.strategy import ParallelStrategy


class AboveBar(AdvantageEstimator):
    """Scores less a bar and less what the critic said of each token."""

    needs_critic: ClassVar[bool] = True
    bar: float = 0.5

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        returns = (inputs.scores - self.bar)[:, None].expand(inputs.values.shape)
        return AdvantageResult(returns - inputs.values, returns)


ABOVE_BAR = f"estimator.name={__name__}:AboveBar"


def test_a_run_trains_with_an_estimator_class_of_ones_own(tmp_path: Path) -> None:
    run = trained(tmp_path, ABOVE_BAR, "estimator.bar=0.25", "critic={}").run
    for step in steps(run).values():
        assert abs(step["train/return_mean"] - (step["train/score_mean"] - 0.25)) < 0.3
        assert step["train/grad_norm"] > 0
    written = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["estimator"]
    assert (written["name"], written["bar"]) == (f"{__name__}:AboveBar", 0.25)


def test_a_run_has_what_ones_own_estimator_needs(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}", ABOVE_BAR)
    assert done.code != 0
    assert f"estimator '{__name__}:AboveBar' needs a critic: add 'critic: {{}}'" in done.err + done.out


class Frozen(ParallelStrategy):
    """Gradients come together as nothing at all."""

    def reduce_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        for parameter in named.values():
            parameter.grad = None

    def save(self, directory: Path, role: Checkpointable) -> None:
        super().save(directory, role)
        (directory / "frozen").touch()


class Apart(ParallelStrategy):
    needs_processes: ClassVar[bool] = True


def test_a_run_trains_with_a_strategy_of_ones_own(tmp_path: Path) -> None:
    run = trained(tmp_path, f"actor.strategy={__name__}:Frozen", "checkpoint.every=1", "checkpoint.keep=2").run
    assert all(step["train/grad_norm"] == 0 for step in steps(run).values())
    first, second = sorted((run / "checkpoints").glob("step-*"))
    assert (first / "frozen").is_file()
    assert distance(first, second) == 0
    done = cadenza("resume", run, "steps=3", "--json")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:Apart", f"actor.strategy '{__name__}:Apart' needs ranks in processes of their own"),
        (f"{__name__}:AboveBar", "is not a strategy: derive it from ParallelStrategy"),
        ("json:nothing", "actor.strategy: 'json:nothing' cannot be loaded"),
        ("fsdp", "actor.strategy: must be one of torch, fsdp2 or 'module:name' (got 'fsdp')"),
    ],
)
def test_a_strategy_that_cannot_be_used_is_refused(tmp_path: Path, name: str, message: str) -> None:
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}", f"actor.strategy={name}")
    assert done.code != 0
    assert message in done.err + done.out
