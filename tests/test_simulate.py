"""The virtual cluster: policies on one trace, their figures, and the command."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.cli import main
from cadenza.simulation import clock, gates
from cadenza.simulation.account import Account, Figures, Meters, Row
from cadenza.simulation.experiment import POLICIES, Result, Trial, evaluate, first_guess, search, workers
from cadenza.simulation.policy import Settings, drive
from cadenza.simulation.rivals import Barrier, GroupQueue
from cadenza.simulation.tuned import TUNED
from cadenza.simulation.workloads import Episode, LogNormal, Responses, Workload, find, trace_of, w4

SMALL = replace(
    find("W2"), name="small", gpus=4, groups=6, group_size=4, responses=Responses(LogNormal(400, 0.8), longest=2000)
)
ASYNCHRONOUS = [name for name, policy in POLICIES.items() if policy.asynchronous]
SYNCHRONOUS = [name for name in POLICIES if name not in ASYNCHRONOUS]


def trial(policy: str, alpha: float = 1.0, workload: Workload = SMALL, seed: int = 0, **settings: int) -> Trial:
    chosen = Settings(**({"train_gpus": 1} if policy in ASYNCHRONOUS and alpha else {}) | settings)
    return Trial(workload, policy, alpha, seed, chosen, steps=10, warm_up=3)


def small_w5() -> Workload:
    workload = find("W5")
    assert workload.turns is not None
    turns = replace(workload.turns, cap=8, long_turns=LogNormal(4, 0.5), fail_stop=0.02)
    return replace(workload, name="small W5", gpus=4, groups=4, group_size=2, turns=turns)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_trial_has_the_same_figures_to_the_last_digit(policy: str) -> None:
    assert trial(policy).run() == trial(policy).run()


def test_another_process_finds_the_same() -> None:
    trials = [trial("queue"), trial("cadenza", seed=1)]
    with workers(2) as crew:
        there = crew.run(trials)
    assert there == [one.run() for one in trials]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_what_cannot_be_beaten(policy: str) -> None:
    figures = trial(policy).run()
    assert 0.05 < figures.efficiency < 1
    assert figures.step_seconds > figures.limit_seconds or policy == "admission"  # which has no hard bound


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_cadenza_keeps_the_bound_drops_nothing_and_is_not_biased(alpha: float) -> None:
    figures = trial("cadenza", alpha).run()
    assert figures.staleness_max == alpha
    assert figures.waste == {}
    assert figures.length_bias == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_synchronous_policies_train_what_the_current_version_wrote(policy: str) -> None:
    figures = trial(policy).run()
    assert (figures.staleness_max, figures.length_bias) == (0, 1)


def test_policies_stand_in_the_order_in_which_they_should() -> None:
    workload = replace(SMALL, gpus=8, groups=16)
    found = {name: trial(name, 2.0, workload).run().efficiency for name in ("barrier", "queue", "admission", "cadenza")}
    assert found["barrier"] < found["queue"] < min(found["admission"], found["cadenza"])


def test_an_update_costs_group_queue_the_turns_under_way() -> None:
    assert trial("group-queue").run().waste.keys() == {"aborted"}


def test_redundant_groups_of_group_queue_are_dropped_above_the_bound_and_that_is_a_bias() -> None:
    spread = replace(SMALL, rho=1.0, responses=Responses(LogNormal(400, 1.2), longest=4000))
    figures = Trial(spread, "group-queue", 1.0, 0, Settings(1, extra_groups=4), steps=24, warm_up=4).run()
    assert figures.waste["stale"] > 0.01
    assert figures.length_bias < 0.97


def test_redundant_members_end_when_their_group_is_whole() -> None:
    plain = trial("group-queue").run()
    figures = trial("group-queue", extra_members=2).run()
    assert figures.waste["surplus"] > 0.01
    assert figures.length_bias < plain.length_bias


def test_an_env_whose_member_lost_goes_on_with_the_next_group_at_once() -> None:
    policy = GroupQueue(SMALL, trace_of(SMALL, 0), 2.0, Settings(1, extra_members=2))

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            await policy.start(tasks)
            await policy.changed()  # the first group is whole
            assert sum(policy.running) == 6 * 6
            await policy.close()
            assert sum(policy.running) == 0

    clock.run(main)


@pytest.mark.parametrize("policy", POLICIES)
def test_episodes_of_several_turns_survive_envs_that_fail(policy: str) -> None:
    workload = small_w5()
    trace = trace_of(workload, 0)
    failing = [trace.episode(g, m).fails_at >= 0 for g in range(40) for m in range(2)]
    assert any(failing)
    figures = trial(policy, workload=workload).run()
    assert sum(figures.waste.values()) > 0
    assert figures.staleness_max <= 1 or policy == "admission"  # which has no hard bound


@pytest.mark.parametrize("policy", ["queue", "cadenza"])
def test_a_batch_waits_for_its_rewards(policy: str) -> None:
    slow = replace(find("W6"), name="slow", gpus=4, groups=6, group_size=4, responses=SMALL.responses)
    quick = replace(slow, rewards=None)
    assert trial(policy, 0.0, slow).run().wait_seconds > trial(policy, 0.0, quick).run().wait_seconds + 5


def test_the_longest_alone_is_what_a_single_sample_takes() -> None:
    """One GPU, one sample in a batch: nothing can overlap, so the step is the sum of its parts."""
    lone = replace(SMALL, gpus=1, groups=1, group_size=1, recorded=((Episode((500,), (100,)),),), responses=None)
    account = clock.run(lambda: drive(Barrier(lone, trace_of(lone, 0), 0.0, Settings()), 4))
    figures = account.figures(0, 1)
    cost = lone.cost
    alone = 500 * (cost.a + cost.b + cost.c * (100 + 499 / 2)) + 100 * cost.p
    again = alone - 99 * cost.p  # the prompt of the only group is cached by then, but for its last token
    assert account.lines[0].waited == pytest.approx(alone)
    assert figures.wait_seconds == pytest.approx(alone, abs=0.01)
    assert again < figures.wait_seconds
    assert figures.step_seconds == pytest.approx(figures.wait_seconds + 600 * 166e-6 + 2.0)


# -- the account -------------------------------------------------------------------------------------------------------


def account_of(rows: list[list[Row]], settled: list[int], wasted: list[int]) -> Account:
    """Steps of ten seconds over a trace of two-member groups."""
    groups = tuple((Episode((10 + n,), (5,)), Episode((20 + n,), (5,))) for n in range(8))
    workload = replace(SMALL, groups=1, group_size=2, responses=None, recorded=groups)

    class InOrder:
        def episode(self, group: int, member: int) -> Episode:
            return groups[group][member]

        def mean_response(self, first: int, last: int) -> float:
            return sum(e.response for group in groups[first:last] for e in group) / (2 * (last - first))

    account = Account(workload, InOrder(), 1.0, 1)
    for step, batch in enumerate(rows):
        account.train(batch, version=step)
        meters = Meters(100 * (step + 1), Counter({"stale": wasted[step]}), settled[step])
        account.trained(10.0 * (step + 1), 4.0, meters)
    return account


def rows(group: int, oldest: int) -> list[Row]:
    return [Row(group, Episode((length + group,), (5,)), oldest) for length in (10, 20)]


def test_figures_are_those_of_the_counted_steps() -> None:
    batches = [rows(0, 0), rows(1, 0), rows(3, 1), rows(4, 3)]
    figures = account_of(batches, settled=[1, 2, 4, 5], wasted=[7, 7, 30, 37]).figures(seed=3, warm_up=2)
    assert (figures.step_seconds, figures.wait_seconds) == (10, 4)
    assert (figures.staleness_mean, figures.staleness_max) == (0.5, 1)
    assert figures.tokens_per_second == (13 + 23 + 14 + 24) / 20
    assert figures.length_bias == pytest.approx((13 + 23 + 14 + 24) / 4 / ((12 + 22 + 13 + 23 + 14 + 24) / 6))
    assert figures.waste == {"stale": 30 / 200}


def test_a_batch_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of small has 2 rows, got 1"):
        account_of([rows(0, 0)[:1]], [1], [0])


def figures_of(seed: int, efficiency: float, waste: dict[str, float]) -> Figures:
    return Figures(seed, efficiency, 10.0, 5.0, 100.0, 0.5, seed, 1.0, waste, 1.0)


def test_a_result_is_the_median_and_names_the_worst_seed() -> None:
    seeds = (figures_of(0, 0.5, {"stale": 0.1}), figures_of(1, 0.2, {}), figures_of(2, 0.6, {"stale": 0.3}))
    told = Result("W2", "cadenza", 1.0, Settings(5), seeds).to_json()
    assert (told["efficiency"], told["staleness_max"], told["waste"]) == (0.5, 2, {"stale": 0.1})
    assert (told["worst_seed"]["seed"], told["worst_seed"]["efficiency"]) == (1, 0.2)
    assert {"step_seconds", "limit_seconds", "tokens_per_second", "staleness_mean", "length_bias"} <= told.keys()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_search_finds_nothing_worse_than_the_first_guess() -> None:
    with workers(1) as crew:
        found = search(crew, SMALL, "admission", 1.0)
        guess = first_guess(SMALL, "admission", 1.0)
        best, first = (
            evaluate(crew, SMALL, "admission", 1.0, [10_007], settings=settings, steps=16, warm_up=6).typical
            for settings in (found, guess)
        )
    assert best.efficiency >= first.efficiency
    assert 1 <= found.train_gpus < SMALL.gpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "fifo"}, "policy 'fifo' is not known; take one of barrier"),
        ({"alpha": -1.0}, "alpha must be >= 0, got -1"),
        ({"settings": Settings(train_gpus=4)}, "train_gpus must be from 0 to 3, got 4"),
        ({"settings": Settings(concurrency=-1)}, "must not be negative"),
        ({"warm_up": 10}, "from 1 to steps - 1 = 9 steps, got 10"),
    ],
)
def test_a_trial_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(trial("cadenza"), **changes)  # type: ignore[arg-type]


def test_an_asynchronous_run_needs_gpus_that_train() -> None:
    policy = GroupQueue(SMALL, trace_of(SMALL, 0), 1.0, Settings())
    with pytest.raises(ValueError, match="train_gpus must be >= 1, got 0"):
        clock.run(lambda: drive(policy, 2))


# -- gates -------------------------------------------------------------------------------------------------------------


def test_lockstep_waits_for_the_slowest_env_of_every_turn() -> None:
    workload = replace(w4(3.0), gpus=2, groups=2, group_size=2)
    trace = trace_of(workload, 0)
    drawn = [trace.episode(g, m) for g in range(2) for m in range(2)]
    turns = max(len(episode.steps) for episode in drawn)
    envs = sum(max(e.steps[turn] for e in drawn if turn < len(e.steps)) for turn in range(turns))
    waited = clock.run(lambda: drive(gates.Lockstep(workload, trace, 0.0, Settings()), 1)).lines[0].waited
    model = 200 * workload.cost.a * turns
    assert envs + model < waited < envs + 1.3 * model


@pytest.mark.parametrize(
    ("value", "shape", "holds"),
    [((1.42, 1.63), True, True), ((1.18, 1.63), True, True), ((1.1, 1.63), True, False), ((1.42, 1.63), False, False)],
)
def test_a_gate_holds_within_a_fifth_and_in_shape(value: tuple[float, ...], shape: bool, holds: bool) -> None:
    assert gates.Gate("kv-bound", "", (1.42, 1.63), value, shape).holds is holds


def test_a_limit_is_not_to_be_hit_but_kept() -> None:
    assert gates.Gate("sync-bound", "", (1.05,), (0.5,), True, at_most=True).holds
    assert not gates.Gate("sync-bound", "", (1.05,), (1.06,), True, at_most=True).holds


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small trace of a user's own, with settings that need not be searched."""
    for policy in ("cadenza", "admission", "barrier"):
        for alpha in (0.0, 1.0, 2.0):
            gpus = int(policy in ASYNCHRONOUS)
            monkeypatch.setitem(TUNED, ("mine", policy, alpha), Settings(train_gpus=gpus))
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


def test_policies_stand_side_by_side_and_the_synchronous_ones_once(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--policy", "barrier,admission", "--alpha", "1,2", "--seeds", "1", "--steps", "5", "--warm-up", "2"]
    assert main(["simulate", "--workload", mine, *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[0] for line in lines if line[0] in POLICIES] == ["barrier", "admission", "admission"]


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
    ],
)
def test_a_wrong_command_says_why(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload", "nowhere.json"]) == 1
    assert "nowhere.json" in capsys.readouterr().err
