"""The virtual cluster: strategies on one trace, their figures, and the command."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cadenza.cli import main
from cadenza.inference.meter import StepMeter
from cadenza.observe.run import RunDirectory
from cadenza.rollout.trace import RunStep, TraceGroup, TraceMember
from cadenza.simulation.comparison import calibration
from cadenza.simulation.comparison.baselines import BarrierStrategy, GroupQueueStrategy
from cadenza.simulation.comparison.bounds import Demand, alone_seconds
from cadenza.simulation.comparison.episodes import trace_of
from cadenza.simulation.comparison.experiment import (
    STRATEGIES,
    StrategyResult,
    Trial,
    evaluate,
    first_guess,
    search,
    trial_pool,
)
from cadenza.simulation.comparison.figures import BatchRow, FiguresBuilder, RunFigures, UsageTotals
from cadenza.simulation.comparison.recorder import RunRecorder
from cadenza.simulation.comparison.strategy import StrategySettings, run_training
from cadenza.simulation.comparison.traces import TraceFileError, read_run
from cadenza.simulation.comparison.tuned_settings import TUNED_SETTINGS
from cadenza.simulation.comparison.workloads import LogNormal, SingleTurnSpec, TraceEpisode, Workload, find_workload, w4
from cadenza.simulation.virtual_cluster import clock
from cadenza.simulation.virtual_cluster.cost import H100_QWEN3_8B, CostModel

SMALL = replace(
    find_workload("W2"),
    name="small",
    gpus=4,
    groups=6,
    group_size=4,
    responses=SingleTurnSpec(LogNormal(400, 0.8), longest=2000),
)
ASYNCHRONOUS = [name for name, strategy in STRATEGIES.items() if strategy.asynchronous]
SYNCHRONOUS = [name for name in STRATEGIES if name not in ASYNCHRONOUS]


def trial(strategy: str, alpha: float = 1.0, workload: Workload = SMALL, seed: int = 0, **settings: int) -> Trial:
    chosen = StrategySettings(**({"train_gpus": 1} if strategy in ASYNCHRONOUS and alpha else {}) | settings)
    return Trial(workload, strategy, alpha, seed, chosen, steps=10, warm_up=3)


def small_w5() -> Workload:
    workload = find_workload("W5")
    assert workload.turns is not None
    turns = replace(workload.turns, cap=8, long_turns=LogNormal(4, 0.5), fail_stop=0.02)
    return replace(workload, name="small W5", gpus=4, groups=4, group_size=2, turns=turns)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_trial_has_the_same_figures_to_the_last_digit(strategy: str) -> None:
    assert trial(strategy).run() == trial(strategy).run()


def test_another_process_finds_the_same() -> None:
    trials = [trial("queue"), trial("cadenza", seed=1)]
    with trial_pool(2) as pool:
        there = pool.run(trials)
    assert there == [one.run() for one in trials]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_beats_what_cannot_be_beaten(strategy: str) -> None:
    figures = trial(strategy).run()
    assert 0.05 < figures.efficiency < 1
    assert figures.step_seconds > figures.limit_seconds or strategy == "admission"  # which has no hard bound


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_cadenza_keeps_the_bound_drops_nothing_and_is_not_biased(alpha: float) -> None:
    figures = trial("cadenza", alpha).run()
    assert figures.staleness_max == alpha
    assert figures.waste == {}
    assert figures.length_bias == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_synchronous_strategies_train_what_the_current_version_wrote(strategy: str) -> None:
    figures = trial(strategy).run()
    assert (figures.staleness_max, figures.length_bias) == (0, 1)


def test_strategies_stand_in_the_order_in_which_they_should() -> None:
    workload = replace(SMALL, gpus=8, groups=16)
    found = {name: trial(name, 2.0, workload).run().efficiency for name in ("barrier", "queue", "admission", "cadenza")}
    assert found["barrier"] < found["queue"] < min(found["admission"], found["cadenza"])


def test_an_update_costs_group_queue_the_turns_under_way() -> None:
    assert trial("group-queue").run().waste.keys() == {"aborted"}


def test_redundant_groups_of_group_queue_are_dropped_above_the_bound_and_that_is_a_bias() -> None:
    spread = replace(SMALL, rho=1.0, responses=SingleTurnSpec(LogNormal(400, 1.2), longest=4000))
    figures = Trial(spread, "group-queue", 1.0, 0, StrategySettings(1, extra_groups=4), steps=24, warm_up=4).run()
    assert figures.waste["stale"] > 0.01
    assert figures.length_bias < 0.97


def test_redundant_members_end_when_their_group_is_whole() -> None:
    plain = trial("group-queue").run()
    figures = trial("group-queue", extra_members=2).run()
    assert figures.waste["surplus"] > 0.01
    assert figures.length_bias < plain.length_bias


def test_an_env_whose_member_lost_goes_on_with_the_next_group_at_once() -> None:
    strategy = GroupQueueStrategy(SMALL, trace_of(SMALL, 0), 2.0, StrategySettings(1, extra_members=2))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await strategy.start(tasks)
            await strategy.wait_for_change()  # the first group is whole
            assert sum(strategy.running) == 6 * 6
            await strategy.close()
            assert sum(strategy.running) == 0

    clock.run(main)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_episodes_of_several_turns_survive_envs_that_fail(strategy: str) -> None:
    workload = small_w5()
    trace = trace_of(workload, 0)
    failing = [trace.episode(g, m).fails_at >= 0 for g in range(40) for m in range(2)]
    assert any(failing)
    figures = trial(strategy, workload=workload).run()
    assert sum(figures.waste.values()) > 0
    assert figures.staleness_max <= 1 or strategy == "admission"  # which has no hard bound


@pytest.mark.parametrize("strategy", ["queue", "cadenza"])
def test_a_batch_waits_for_its_rewards(strategy: str) -> None:
    slow = replace(find_workload("W6"), name="slow", gpus=4, groups=6, group_size=4, responses=SMALL.responses)
    quick = replace(slow, rewards=None)
    assert trial(strategy, 0.0, slow).run().wait_seconds > trial(strategy, 0.0, quick).run().wait_seconds + 5


def test_the_limit_counts_the_reward_of_the_longest_trajectory() -> None:
    """The longest answer has a quick reward, and another one is longer with its reward."""
    groups = ((TraceEpisode((900,), (5,), reward=0.5), TraceEpisode((300,), (5,), reward=60.0)),)
    workload = replace(SMALL, groups=1, group_size=2, responses=None, recorded=groups)
    figures = Trial(workload, "cadenza", 1.0, 0, StrategySettings(1), steps=6, warm_up=2).run()
    assert figures.limit_seconds == alone_seconds(groups[0][1], SMALL.cost) / 2
    assert figures.limit_seconds <= figures.step_seconds < 1.1 * figures.limit_seconds


def test_the_tail_of_slow_rewards_costs_no_more_than_the_bound_makes_it() -> None:
    settings = TUNED_SETTINGS["W6", "cadenza", 4.0]
    figures = Trial(find_workload("W6"), "cadenza", 4.0, 0, settings, steps=20, warm_up=12).run()
    assert figures.step_seconds <= 1.12 * figures.limit_seconds
    assert (figures.staleness_max, figures.waste) == (4, {})
    assert figures.length_bias == pytest.approx(1, abs=0.02)


def test_the_longest_alone_is_what_a_single_sample_takes() -> None:
    """One GPU, one sample in a batch: nothing can overlap, so the step is the sum of its parts."""
    lone = replace(SMALL, gpus=1, groups=1, group_size=1, recorded=((TraceEpisode((500,), (100,)),),), responses=None)
    builder = clock.run(lambda: run_training(BarrierStrategy(lone, trace_of(lone, 0), 0.0, StrategySettings()), 4))
    figures = builder.figures(0, 1)
    cost = lone.cost
    alone = 500 * (cost.a + cost.b + cost.c * (100 + 499 / 2)) + 100 * cost.p
    again = alone - 99 * cost.p  # the prompt of the only group is cached by then, but for its last token
    assert builder.steps[0].waited == pytest.approx(alone)
    assert figures.wait_seconds == pytest.approx(alone, abs=0.01)
    assert again < figures.wait_seconds
    assert figures.step_seconds == pytest.approx(figures.wait_seconds + 600 * 166e-6 + 2.0)


# -- the figures -------------------------------------------------------------------------------------------------------


def figures_of_steps(rows: list[list[BatchRow]], settled: list[int], wasted: list[int]) -> FiguresBuilder:
    """Steps of ten seconds over a trace of two-member groups."""
    groups = tuple((TraceEpisode((10 + n,), (5,)), TraceEpisode((20 + n,), (5,))) for n in range(8))
    workload = replace(SMALL, groups=1, group_size=2, responses=None, recorded=groups)

    class InOrder:
        def episode(self, group: int, member: int) -> TraceEpisode:
            return groups[group][member]

        def mean_response(self, first: int, last: int) -> float:
            return sum(e.response for group in groups[first:last] for e in group) / (2 * (last - first))

    builder = FiguresBuilder(workload, InOrder(), 1.0, 1)
    for step, batch in enumerate(rows):
        builder.add_chunk(batch, version=step)
        totals = UsageTotals(100 * (step + 1), Counter({"stale": wasted[step]}), settled[step])
        builder.end_step(10.0 * (step + 1), 4.0, totals)
    return builder


def rows(group: int, oldest: int) -> list[BatchRow]:
    return [BatchRow(group, TraceEpisode((length + group,), (5,)), oldest) for length in (10, 20)]


def test_figures_are_those_of_the_counted_steps() -> None:
    batches = [rows(0, 0), rows(1, 0), rows(3, 1), rows(4, 3)]
    figures = figures_of_steps(batches, settled=[1, 2, 4, 5], wasted=[7, 7, 30, 37]).figures(seed=3, warm_up=2)
    assert (figures.step_seconds, figures.wait_seconds) == (10, 4)
    assert (figures.staleness_mean, figures.staleness_max) == (0.5, 1)
    assert figures.tokens_per_second == (13 + 23 + 14 + 24) / 20
    assert figures.length_bias == pytest.approx((13 + 23 + 14 + 24) / 4 / ((12 + 22 + 13 + 23 + 14 + 24) / 6))
    assert figures.waste == {"stale": 30 / 200}


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of small has 2 rows, got 1"):
        figures_of_steps([rows(0, 0)[:1]], [1], [0])


def figures_of(seed: int, efficiency: float, waste: dict[str, float]) -> RunFigures:
    return RunFigures(seed, efficiency, 10.0, 5.0, 100.0, 0.5, seed, 1.0, waste, 1.0, 1.0)


def test_a_result_is_the_median_and_names_the_worst_seed() -> None:
    seeds = (figures_of(0, 0.5, {"stale": 0.1}), figures_of(1, 0.2, {}), figures_of(2, 0.6, {"stale": 0.3}))
    told = StrategyResult("W2", "cadenza", 1.0, StrategySettings(5), seeds).to_json()
    assert (told["efficiency"], told["staleness_max"], told["waste"]) == (0.5, 2, {"stale": 0.1})
    assert (told["worst_seed"]["seed"], told["worst_seed"]["efficiency"]) == (1, 0.2)
    assert {"step_seconds", "limit_seconds", "tokens_per_second", "staleness_mean", "length_bias"} <= told.keys()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_search_finds_nothing_worse_than_the_first_guess() -> None:
    with trial_pool(1) as pool:
        found = search(pool, SMALL, "admission", 1.0)
        guess = first_guess(SMALL, "admission", 1.0)
        best, first = (
            evaluate(pool, SMALL, "admission", 1.0, [10_007], settings=settings, steps=16, warm_up=6).typical
            for settings in (found, guess)
        )
    assert best.efficiency >= first.efficiency
    assert 1 <= found.train_gpus < SMALL.gpus


def test_a_search_leaves_given_settings_as_they_are() -> None:
    given = {"extra_members": 3, "train_gpus": 2}
    with trial_pool(1) as pool:
        found = search(pool, SMALL, "group-queue", 1.0, given)
    assert (found.extra_members, found.train_gpus) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "fifo"}, "policy 'fifo' is not known; take one of barrier"),
        ({"alpha": -1.0}, "alpha must be >= 0, got -1"),
        ({"settings": StrategySettings(train_gpus=4)}, "train_gpus must be from 0 to 3, got 4"),
        ({"settings": StrategySettings(concurrency=-1)}, "must be a number from 0 on"),
        ({"warm_up": 10}, "from 1 to steps - 1 = 9 steps, got 10"),
    ],
)
def test_a_trial_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(trial("cadenza"), **changes)  # type: ignore[arg-type]


def test_gpus_that_train_and_generate_by_turns_beat_every_split_of_a_run_that_waits_for_its_rollouts() -> None:
    def step_seconds(**settings: int) -> float:
        return (
            Trial(find_workload("W2x4"), "cadenza", 1.0, 0, StrategySettings(**settings), steps=12, warm_up=4)
            .run()
            .step_seconds
        )

    splits = min(step_seconds(train_gpus=gpus, parts=parts) for gpus in (1, 2) for parts in (1, 8))
    assert step_seconds(train_gpus=2, shared=2) < splits


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_shared_gpus_keep_the_bound_and_lose_nothing(alpha: float) -> None:
    shared = trial("cadenza", alpha, train_gpus=2, shared=2)
    figures = shared.run()
    assert figures.staleness_max <= alpha
    assert figures.waste == {}
    assert figures.length_bias == pytest.approx(1.0, abs=0.1)
    assert shared.run() == figures


def test_gpus_that_take_long_to_change_hands_are_left_where_they_are() -> None:
    slow = replace(SMALL, switch_seconds=1e4)
    twenty = Trial(slow, "cadenza", 1.0, 0, StrategySettings(train_gpus=2, shared=2), steps=22, warm_up=2).run()
    never = Trial(slow, "cadenza", 1.0, 0, StrategySettings(train_gpus=2), steps=22, warm_up=2).run()
    assert twenty.step_seconds < 1.2 * never.step_seconds


def test_an_asynchronous_run_needs_gpus_that_train() -> None:
    strategy = GroupQueueStrategy(SMALL, trace_of(SMALL, 0), 1.0, StrategySettings())
    with pytest.raises(ValueError, match="train_gpus must be >= 1, got 0"):
        clock.run(lambda: run_training(strategy, 2))


# -- checks ------------------------------------------------------------------------------------------------------------


def test_lockstep_waits_for_the_slowest_env_of_every_turn() -> None:
    workload = replace(w4(3.0), gpus=2, groups=2, group_size=2)
    trace = trace_of(workload, 0)
    drawn = [trace.episode(g, m) for g in range(2) for m in range(2)]
    turns = max(len(episode.steps) for episode in drawn)
    envs = sum(max(e.steps[turn] for e in drawn if turn < len(e.steps)) for turn in range(turns))
    waited = (
        clock.run(lambda: run_training(calibration.LockstepStrategy(workload, trace, 0.0, StrategySettings()), 1))
        .steps[0]
        .waited
    )
    model = 200 * workload.cost.a * turns
    assert envs + model < waited < envs + 1.3 * model


@pytest.mark.parametrize(
    ("value", "shape", "holds"),
    [((1.42, 1.63), True, True), ((1.18, 1.63), True, True), ((1.1, 1.63), True, False), ((1.42, 1.63), False, False)],
)
def test_a_check_holds_within_a_fifth_and_in_shape(value: tuple[float, ...], shape: bool, holds: bool) -> None:
    assert calibration.CalibrationCheck("kv-bound", "", (1.42, 1.63), value, shape).holds is holds


def test_the_calibration_checks_hold() -> None:
    with trial_pool() as pool:
        assert calibration.which_checks_hold(pool) == dict.fromkeys(
            ("admission", "env-level", "kv-bound", "sync-bound"), True
        )


@pytest.mark.parametrize("holds", [True, False])
def test_a_comparison_says_whether_the_calibration_checks_hold(
    mine: str, holds: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_HOLDS", {"admission": True, "kv-bound": holds})
    options = ["--policy", "barrier,queue", "--seeds", "1", "--steps", "3", "--warm-up", "1"]
    assert main(["simulate", "--workload", mine, *options]) == 0
    told = capsys.readouterr().out
    assert ("all 2 calibration checks hold" if holds else "not to be believed: kv-bound") in told
    assert main(["simulate", "--workload", mine, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gates_hold"] is holds


def test_a_limit_is_not_to_be_hit_but_kept() -> None:
    assert calibration.CalibrationCheck("sync-bound", "", (1.05,), (0.5,), True, at_most=True).holds
    assert not calibration.CalibrationCheck("sync-bound", "", (1.05,), (1.06,), True, at_most=True).holds


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small trace of a user's own, with settings that need not be searched."""
    for strategy in ("cadenza", "admission", "barrier"):
        for alpha in (0.0, 1.0, 2.0):
            gpus = int(strategy in ASYNCHRONOUS)
            monkeypatch.setitem(TUNED_SETTINGS, ("mine", strategy, alpha), StrategySettings(train_gpus=gpus))
    path = tmp_path / "mine.json"
    members = [{"lengths": [length]} for length in (300, 90)]
    groups = [{"prompt": 64, "members": members} for _ in range(5)]
    path.write_text(json.dumps({"gpus": 2, "groups": 2, "trace": groups}))
    return str(path)


def test_json_says_what_scripts_read(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "cadenza", "--seeds", "1", "--steps", "5", "--warm-up", "2", "--json"]
    assert main(["simulate", "--workload", mine, *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["workload"], told["policy"], told["alpha"], told["staleness_max"]) == ("mine", "cadenza", 1.0, 1)
    assert {
        "efficiency", "step_seconds", "limit_seconds", "tokens_per_second", "staleness_mean", "length_bias", "waste",
        "worst_seed",
    } <= told.keys()  # fmt: skip


def test_strategies_stand_side_by_side_and_the_synchronous_ones_once(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy", "barrier,admission", "--alpha", "1,2", "--seeds", "1", "--steps", "5", "--warm-up", "2"]
    assert main(["simulate", "--workload", mine, *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[0] for line in lines if line[0] in STRATEGIES] == ["barrier", "admission", "admission"]


def test_workloads_of_one_name_are_told_apart(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "other" / "mine.json", tmp_path / "W2.json"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Path(mine).read_bytes())
    options = ["--policy", "barrier", "--seeds", "1", "--steps", "3", "--warm-up", "1", "--json"]
    assert main(["simulate", "--workload", ",".join(map(str, (mine, *paths))), *options]) == 0
    told = json.loads(capsys.readouterr().out)["results"]
    assert [result["workload"] for result in told] == [mine, *map(str, paths)]


@pytest.mark.parametrize("strategy", ["barrier", "cadenza"])
def test_a_long_prompt_is_as_long_as_it_is(strategy: str) -> None:
    def seconds(prompt: int) -> float:
        recorded = ((TraceEpisode((10,), (prompt,)),),)
        workload = Workload("mine", "", H100_QWEN3_8B, 1, 1, 1, train_seconds=0.0, recorded=recorded)
        return Trial(workload, strategy, 0.0, 0, StrategySettings(), 3, 1).run().step_seconds

    assert seconds(150_000) - seconds(50_000) == pytest.approx(100_000 * H100_QWEN3_8B.p, rel=0.05)


def test_a_context_that_no_replica_holds_is_refused() -> None:
    workload = Workload("mine", "", H100_QWEN3_8B, 1, 1, 1, recorded=((TraceEpisode((10,), (400_000,)),),))
    with pytest.raises(ValueError, match="a context of mine has 400010 tokens, but a KV cache holds 350000"):
        Trial(workload, "cadenza", 0.0, 0, StrategySettings(), 3, 1)


def test_a_directory_that_cannot_be_is_told_before_the_simulation(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(Trial, "run", lambda trial: pytest.fail("it began to simulate"))
    options = ["--policy", "barrier", "--seeds", "1", "--out", str(tmp_path / "file" / "plots")]
    assert main(["simulate", "--workload", mine, *options]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_settings_can_be_given_by_hand(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "admission", "--alpha", "1", "--seeds", "1", "--steps", "5", "--warm-up", "2", "--json"]
    told = []
    for given in ("train_gpus=1", "train_gpus=1,concurrency=1"):
        assert main(["simulate", "--workload", mine, *options, "--settings", given]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [result["settings"]["concurrency"] for result in told] == [0, 1]
    assert told[0]["settings"]["train_gpus"] == told[1]["settings"]["train_gpus"] == 1
    assert told[1]["step_seconds"] > told[0]["step_seconds"]  # one trajectory at a time takes longer


def test_shared_gpus_are_told_as_such(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "cadenza", "--seeds", "1", "--steps", "5", "--warm-up", "2", "--settings"]
    assert main(["simulate", "--workload", mine, *options, "train_gpus=1,shared=1"]) == 0
    assert "1 train, 1 of them generate too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "W9"], "workload 'W9' is not known; take one of W1"),
        (["--policy", "fifo"], "policy 'fifo' is not known; take some of barrier"),
        (["--policy", "queue,"], "policy must be names with commas between them, got 'queue,'"),
        (["--alpha", "one"], "alpha must be numbers with commas between them, got 'one'"),
        (["--alpha", "-1"], "alpha must be from 0 to 64, got -1"),
        (["--alpha", "nan"], "alpha must be from 0 to 64, got nan"),
        (["--steps", "5", "--warm-up", "5"], "--warm-up must be below --steps 5, got 5"),
        (["--seeds", "0"], "Must be >= 1"),
        (["--settings", "part=1"], "settings 'part=1' is not known; give key=value of train_gpus"),
        (
            ["--policy", "cadenza", "--settings", "balance_seconds=nan"],
            "cadenza on W2: balance_seconds must be a number from 0 on, got nan",
        ),
        (["--policy", "admission", "--settings", "parts=4"], "parts is a setting of cadenza, got 4 for 'admission'"),
        (["--workload", "W2x99999936"], "at most 16384 GPUs can be simulated"),
        (["--gates", "--settings", "parts=1"], "leave out --settings and --out"),
        (["--settings", "parts=1.5"], "settings: parts must be a whole number, got '1.5'"),
        (
            ["--policy", "cadenza", "--seeds", "1", "--settings", "train_gpus=99"],
            "cadenza on W2: train_gpus must be from",
        ),
        (
            ["--policy", "cadenza", "--seeds", "1", "--settings", "shared=8"],
            "cadenza on W2: shared must be from 0 to train_gpus 5, got 8",
        ),
        (
            ["--policy", "queue", "--seeds", "1", "--settings", "train_gpus=8,shared=8"],
            "shared is a setting of cadenza, got 8 for 'queue'",
        ),
    ],
)
def test_a_wrong_command_says_why(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", "nowhere.json"]) == 2
    assert "there is no trace file nowhere.json" in capsys.readouterr().err


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["queue", "cadenza"])
def test_a_run_that_is_recorded_is_the_same_run(strategy: str) -> None:
    plain = trial(strategy)
    recorded = STRATEGIES[strategy](SMALL, trace_of(SMALL, 0), plain.alpha, plain.settings)
    recorded.recorder = recorder = RunRecorder()
    figures = clock.run(lambda: run_training(recorded, plain.steps)).figures(0, plain.warm_up)
    assert figures == plain.run()
    assert len(recorder.steps) == plain.steps


@pytest.mark.parametrize("parts", [1, 2])
def test_a_window_shows_what_ran_and_when_the_trainer_worked(parts: int) -> None:
    strategy = STRATEGIES["cadenza"](SMALL, trace_of(SMALL, 0), 1.0, StrategySettings(train_gpus=1, parts=parts))
    strategy.recorder = recorder = RunRecorder()
    builder = clock.run(lambda: run_training(strategy, 6))
    window = recorder.window(1, 1e9, 50)
    written = sum(step.demand.written for step in builder.steps[2:])
    decoded = window.running.sum() * (window.end - window.start) / 50
    assert window.running.shape == (3, 50)
    assert [version for _, version in window.published] == [2, 3, 4, 5]
    assert 0 < window.busy < 1
    steps = window.end - window.start
    shown = sum(end - start for start, end in (*window.trained, *window.waited))
    assert shown == pytest.approx(steps - 4 * SMALL.sync_seconds, abs=0.1)  # else weights are handed out
    assert decoded == pytest.approx(written * SMALL.cost.a, rel=0.4)


def test_more_replicas_than_rows_share_them() -> None:
    recorder = RunRecorder()
    for replica in range(200):
        recorder.replica_listener(replica)
    recorder.spans[0].append((0.0, 10.0))
    recorder.versions = [0.0, 10.0]
    window = recorder.window(0, 100.0, 4)
    assert window.running.shape == (64, 4)
    assert window.running.sum() == pytest.approx(4 / 4)  # four replicas share the first row


def test_out_draws_the_strategies_and_a_timeline(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    options = ["--policy", "barrier,cadenza", "--seeds", "1", "--steps", "5", "--warm-up", "2"]
    assert main(["simulate", "--workload", mine, *options, "--out", str(tmp_path / "plots")]) == 0
    assert str(tmp_path / "plots" / "index.html") in capsys.readouterr().out
    for name in ("mine-policies.png", "mine-timeline.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "plots" / "index.html").read_text()
    assert "http" not in page
    data = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert [scene["name"] for scene in data["workloads"][0]["scenes"]] == ["barrier", "cadenza, alpha 1"]


# -- a finished run ----------------------------------------------------------------------------------------------------


def run_step(step: int, groups: int = 2, **changes: object) -> RunStep:
    members = [TraceMember([10 * step, 4], [3], [0.5, 0.25], 1.0), TraceMember([7])]
    made = RunStep(
        step, 2, 3.0, 1.0, 0.5, [TraceGroup(6, members) for _ in range(groups)], {"a": 1e-3, "kv_capacity": 9}
    )
    return msgspec.structs.replace(made, **changes)


def run_directory(path: Path, *steps: RunStep, tail: bytes = b"") -> Path:
    with RunDirectory(path, trackers=()) as run:
        for step in steps:
            run.trace(step.encode())
    with (path / "trace.jsonl").open("ab") as file:
        file.write(tail)
    return path


COSTS = {"a": 1e-3, "b": 2e-6, "c": 3e-9, "p": 4e-5, "kv_capacity": 1000, "max_running": 8}


def test_a_finished_run_is_a_workload_with_its_own_costs(tmp_path: Path) -> None:
    steps = [run_step(1, cost=COSTS), run_step(2, 1, cost=COSTS | {"a": 2e-3})]
    workload = read_run(run_directory(tmp_path / "mine", *steps, tail=b'{"step": 3, "gp'))
    assert (workload.name, workload.gpus, workload.groups, workload.group_size) == ("mine", 2, 2, 2)
    assert workload.cost == CostModel(2e-3, 2e-6, 3e-9, 4e-5, 1000, 8)
    assert workload.recorded[2] == (TraceEpisode((20, 4), (6, 3), (0.5, 0.25), 1.0), TraceEpisode((7,), (6,)))
    assert workload.sync_seconds == 0.5
    tokens = [2 * (6 + 10 + 3 + 4 + 6 + 7), 6 + 20 + 3 + 4 + 6 + 7]
    assert workload.train_seconds == pytest.approx((1.5 / tokens[0] + 1.5 / tokens[1]) / 2)


def test_the_last_groups_of_a_long_run_are_replayed(tmp_path: Path) -> None:
    workload = read_run(run_directory(tmp_path / "long", *(run_step(step, 1000, cost=COSTS) for step in (1, 2, 3, 4))))
    assert {group[0].lengths[0] for group in workload.recorded} == {20, 30, 40}


def test_a_resumed_run_forgets_the_steps_that_happen_again(tmp_path: Path) -> None:
    path = run_directory(tmp_path / "run", run_step(1, cost=COSTS), run_step(2, cost=COSTS))
    RunDirectory(path, resume=1, trackers=()).close()
    assert len(read_run(path).recorded) == 2


def test_a_run_that_measured_no_costs_is_refused_unless_others_are_given(tmp_path: Path) -> None:
    path = run_directory(tmp_path / "run", run_step(1, cost=None))
    with pytest.raises(TraceFileError, match="this run measured no costs"):
        read_run(path)
    assert read_run(path, needs_costs=False).groups == 2


def test_a_run_that_recorded_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no step of it was recorded"):
        read_run(run_directory(tmp_path / "run"))
    with pytest.raises(TraceFileError, match=r"there is no trace\.jsonl"):
        read_run(tmp_path)


def test_simulate_takes_the_directory_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path / "mine", *(run_step(step, cost=COSTS) for step in range(1, 5)))
    options = ["--policy", "barrier", "--seeds", "1", "--steps", "5", "--warm-up", "2", "--json"]
    assert main(["simulate", "--workload", str(path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "mine"


def test_a_run_on_one_gpu_is_simulated_synchronously_unless_alpha_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_directory(tmp_path / "mine", *(run_step(step, gpus=1, cost=COSTS) for step in range(1, 5)))
    options = ["--policy", "cadenza", "--seeds", "1", "--steps", "5", "--warm-up", "2", "--json"]
    assert main(["simulate", "--workload", str(path), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["alpha"], told["settings"]["train_gpus"], told["staleness_max"]) == (0.0, 0, 0)
    assert main(["simulate", "--workload", str(path), "--alpha", "1", *options]) == 2
    message = "mine has one GPU, on which nothing can train while something generates: give --alpha 0"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["barrier", "cadenza"])
def test_fresh_contexts_do_not_grow(strategy: str) -> None:
    def seconds(fresh: bool) -> float:
        episode = TraceEpisode((50,) * 8, (100,) * 8, (0.0,) * 8, fresh=fresh)
        cost = replace(SMALL.cost, c=1e-4, p=0.0)
        load = replace(SMALL, gpus=1, groups=1, group_size=1, responses=None, recorded=((episode,),), cost=cost)
        assert Demand.of([[episode]]).context == sum(
            50 * (100 + (0 if fresh else 150 * turn)) + 50 * 49 // 2 for turn in range(8)
        )
        return trial(strategy, 0.0, load).run().wait_seconds

    context = 50 * 150 * sum(range(8))
    assert seconds(False) - seconds(True) == pytest.approx(1e-4 * context, rel=0.01)


# -- what an engine measures of itself ---------------------------------------------------------------------------------


def test_a_meter_finds_the_costs_of_steps() -> None:
    random = np.random.default_rng(0)
    meter = StepMeter()
    truth = CostModel(a=1e-3, b=2e-5, c=3e-8, p=5e-5, kv_capacity=10)
    for _ in range(200):
        running, fill = int(random.integers(0, 40)), int(random.integers(0, 3)) * 30
        context = running * int(random.integers(50, 500))
        meter.add(running, context, fill, (truth.decode(1, running, context) if running else 0.0) + truth.p * fill)
    costs = meter.costs()
    assert costs is not None
    assert costs == pytest.approx((truth.a, truth.b, truth.c, truth.p), rel=1e-4)


def test_costs_are_never_negative_and_not_told_too_early() -> None:
    meter = StepMeter()
    for number in range(100):
        assert meter.costs() is None or number > 40
        meter.add(1 + number % 7, 100 * (number % 7), 0, 1e-3 - 1e-5 * (number % 7))
    costs = meter.costs()
    assert costs is not None
    assert min(costs) >= 0
    assert costs.a == pytest.approx(9.7e-4, rel=0.02)
