"""`cadenza plan`: the search, the choice and what it says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.cli import main
from cadenza.simulation.comparison.cli_args import InvalidArgument, with_cost
from cadenza.simulation.comparison.experiment import Trial, TrialPool
from cadenza.simulation.comparison.figures import RunFigures
from cadenza.simulation.comparison.workloads import (
    LogNormal,
    RewardLatency,
    SingleTurnSpec,
    Workload,
    find_workload,
    w4,
)
from cadenza.simulation.planning.plan import ENVS, KV, LONGEST, REWARDS, TRAINER, WORK, StepLimits, make_plan
from cadenza.simulation.virtual_cluster.cost import A100_QWEN25_7B

SMALL = replace(
    find_workload("W2"),
    name="small",
    gpus=8,
    groups=6,
    group_size=4,
    responses=SingleTurnSpec(LogNormal(400, 0.5), longest=2000),
)


class Pretended(TrialPool):
    """Says what a step takes, instead of simulating it."""

    def __init__(self, seconds: dict[float, float], best: int) -> None:
        super().__init__(None)
        self.seconds = seconds
        self.best = best
        self.asked: list[Trial] = []

    def run(self, trials: object) -> list[RunFigures]:
        assert hasattr(trials, "__iter__")
        new = list(trials)
        self.asked += new
        return [self._figures(trial) for trial in new]

    def _figures(self, trial: Trial) -> RunFigures:
        seconds = self.seconds[trial.alpha] * (1 + 0.1 * abs(trial.settings.train_gpus - self.best) * (trial.alpha > 0))
        return RunFigures(
            trial.seed, 10 / seconds, seconds, 5.0, 1.0, trial.alpha / 2, int(trial.alpha), 1.0, {}, 0.0, 1.0
        )


def test_the_best_split_is_chosen_and_runs_longest() -> None:
    pool = Pretended({1.0: 100.0}, best=44)
    plan = make_plan(pool, replace(SMALL, gpus=64), [1.0])
    assert abs(plan.chosen.train_gpus - 44) <= 2
    assert plan.chosen.steps == max(prediction.steps for prediction in plan.predicted)
    assert plan.chosen.figures.step_seconds == min(p.figures.step_seconds for p in plan.predicted)


def test_the_smallest_alpha_that_is_nearly_as_fast_is_chosen() -> None:
    plan = make_plan(Pretended({0.0: 200.0, 1.0: 103.0, 2.0: 100.0}, best=6), SMALL, [0.0, 2.0, 1.0])
    assert plan.chosen.alpha == 1
    assert "94% longer at alpha 0" in plan.why
    assert "3% shorter at alpha 2, not worth its staleness" in plan.why
    assert plan.why.count(".") == plan.why.rstrip(".").count(".") + 1  # one sentence


def test_a_larger_alpha_is_chosen_where_it_pays() -> None:
    assert make_plan(Pretended({0.0: 200.0, 1.0: 110.0, 2.0: 100.0}, best=6), SMALL, [0.0, 1.0, 2.0]).chosen.alpha == 2


def test_a_plan_simulates_a_bounded_number_of_steps() -> None:
    pool = Pretended({0.0: 2.0, 1.0: 1.0}, best=30)
    make_plan(pool, replace(SMALL, gpus=1024), [0.0, 1.0])
    assert sum(trial.steps for trial in pool.asked) < 300
    many_turns = replace(find_workload("W5"), groups=64)
    frugal = Pretended({1.0: 1.0}, best=5)
    make_plan(frugal, many_turns, [1.0])
    assert sum(trial.steps for trial in frugal.asked) < 80


def test_a_real_plan_is_the_same_twice_and_keeps_the_bound() -> None:
    smaller = replace(SMALL, gpus=4, groups=3)
    plans = [make_plan(TrialPool(None), smaller, [0.0, 1.0]).to_json() for _ in range(2)]
    assert plans[0] == plans[1]
    predicted = plans[0]["predicted"]
    assert [found["train_gpus"] for found in predicted if not found["alpha"]] == [0]
    assert {found["staleness_max"] for found in predicted if found["alpha"]} == {1}
    assert plans[0]["chosen"] in predicted
    assert all(max(found["limits"].values()) <= 1.2 * found["step_seconds"] for found in predicted)


@pytest.mark.parametrize(
    ("workload", "alpha", "train_gpus", "reason"),
    [
        (SMALL, 0.0, 0, LONGEST),
        (replace(SMALL, train_seconds=0.1), 1.0, 1, TRAINER),
        (replace(SMALL, groups=600, train_seconds=1e-6), 8.0, 4, WORK),
        (replace(find_workload("W2"), gpus=8), 8.0, 2, KV),
        (replace(w4(10.0), groups=4), 1.0, 4, ENVS),
        (replace(SMALL, rewards=RewardLatency(LogNormal(0.5, 0.8), 0.5, 300.0)), 1.0, 4, REWARDS),
    ],
)
def test_what_limits_a_step_has_a_name(workload: Workload, alpha: float, train_gpus: int, reason: str) -> None:
    limits = StepLimits.of(workload).limits(alpha, train_gpus)
    assert max(limits, key=lambda name: limits[name]) == reason


def test_one_gpu_cannot_train_and_generate_at_once() -> None:
    with pytest.raises(ValueError, match="with one GPU nothing can train while something generates"):
        make_plan(TrialPool(None), replace(SMALL, gpus=1), [0.0, 1.0])


# -- costs -------------------------------------------------------------------------------------------------------------


def test_a_cost_is_a_name_and_what_differs() -> None:
    changed = with_cost(SMALL, "a100-qwen2.5-7b,kv=5e5,train=2e-4")
    assert changed.cost == replace(A100_QWEN25_7B, kv_capacity=500_000)
    assert changed.train_seconds == 2e-4
    assert with_cost(SMALL, "b=1e-5").cost == replace(SMALL.cost, b=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h200", "model cost 'h200' is not known; begin with h100-qwen2.5-7b"),
        ("a=1e-3,d=2", "model cost 'd=2' is not known"),
        ("a=fast", "a must be a number, got 'fast'"),
        ("a=-1", "a must be > 0"),
        ("train=-1", "train must be >= 0, got -1"),
        ("kv=inf", "model cost"),
    ],
)
def test_a_cost_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        with_cost(SMALL, text)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small trace, planned in this process."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    path = tmp_path / "mine.json"
    groups = [{"prompt": 64, "members": [{"lengths": [length]} for length in (300, 90)]} for _ in range(5)]
    path.write_text(json.dumps({"gpus": 2, "groups": 2, "trace": groups}))
    return str(path)


def test_json_says_what_scripts_read(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--workload", mine, "--gpus", "3", "--alpha", "0,1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == 3
    assert {"alpha", "train_gpus", "step_seconds", "efficiency", "staleness_mean", "limited_by"} <= told[
        "chosen"
    ].keys()
    assert told["why"].startswith(f"alpha {told['chosen']['alpha']:g} with ")
    assert len(told["predicted"]) == 3


def test_the_table_has_a_line_per_candidate_and_says_why(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--workload", mine, "--alpha", "0,1", "--model-cost", "a=1e-3"]) == 0
    out = capsys.readouterr().out
    assert "in turn" in out
    assert "chosen alpha" in out
    assert "limited by" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "W9"], "workload 'W9' is not known; take one of W1"),
        (["--gpus", "0"], "Must be >= 1"),
        (["--gpus", "1"], "with one GPU nothing can train while something generates: give --gpus 2, or --alpha 0"),
        (["--alpha", "-1"], "alpha must be from 0 to 64, got -1"),
        (["--model-cost", "gpu"], "model cost 'gpu' is not known"),
        (["--workload", "."], "has no trace of a run: there is no trace.jsonl"),
    ],
)
def test_a_wrong_command_says_why(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
