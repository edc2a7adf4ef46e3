"""Estimators that are defined outside the package and used by a run through 'module:name'."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import yaml
from pipeline_cases import cadenza, config_file, steps, trained

from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators import AdvantageEstimator, AdvantageResult


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
