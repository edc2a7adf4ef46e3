"""The eight invariants of the design, over random schedules with faults under the virtual clock."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from cadenza.observe.events import Event
from cadenza.rollout.staleness_bound import StalenessBound
from cadenza.simulation.fuzzing.difference import first_difference
from cadenza.simulation.fuzzing.fuzz import Findings, cli_fuzz, examine, fuzz
from cadenza.simulation.fuzzing.monitor import LoggedEvent
from cadenza.simulation.fuzzing.scenario import ALPHAS, MIN_TRAJECTORIES, MIN_VERSIONS, Order, Scenario
from cadenza.simulation.fuzzing.schedule import run
from cadenza.simulation.virtual_cluster.faults import KINDS

SCHEDULES = 2000
CHUNKS = 20


def told(findings: Findings) -> str:
    return "\n".join(f"invariant {v.invariant}, seed {v.seed}: {v.message}" for v in findings.violations[:10])


# -- the invariants ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_random_schedule_violates_an_invariant(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    findings = fuzz(count, seed=chunk * count, workers=1)
    assert not findings.violations, told(findings)
    assert findings.schedules == count
    assert (findings.min_trajectories or 0) >= MIN_TRAJECTORIES
    assert (findings.min_versions or 0) >= MIN_VERSIONS
    assert (findings.min_faults or 0) >= 1


def waiting(seed: int, alpha: float) -> Scenario:
    drawn = Scenario.draw(seed)
    order: Order = "rolling" if drawn.order == "prefetch" and not alpha else drawn.order
    prefetch = min(drawn.prefetch, max(1, math.ceil(alpha)))
    return replace(drawn, alpha=alpha, staleness="wait", order=order, prefetch=prefetch)


def outpaced(seed: int, alpha: float) -> Scenario:
    """Training takes so long that generation is always as far ahead as it may be."""
    return replace(
        waiting(seed, alpha), train_seconds=500.0, order="no_resume", doomed=False, filter="none", odd_size="same",
        patience=0.0,
        domains=tuple(replace(domain, tasks=None) for domain in Scenario.draw(seed).domains),
        take_all=False, steps=8, group_size=2, groups=4, faults=Scenario.draw(seed).faults[:1],
    )  # fmt: skip


@pytest.mark.parametrize("alpha", ALPHAS)
def test_under_wait_the_largest_staleness_is_the_ceiling_of_alpha_and_nothing_is_dropped(alpha: float) -> None:
    findings = fuzz(60, seed=100_000, workers=1, draw=partial(waiting, alpha=alpha))
    assert not findings.violations, told(findings)
    assert findings.staleness_max == {f"{alpha:g}": math.ceil(alpha)}
    assert findings.stale_under_wait == 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_every_schedule_reaches_the_bound_when_generation_outpaces_training(alpha: float) -> None:
    for seed in range(200_000, 200_012):
        outcome = examine(outpaced(seed, alpha), twice=False)
        assert not outcome.violations
        assert (outcome.max_staleness, outcome.stale) == (math.ceil(alpha), 0)


def with_outage(seed: int) -> Scenario:
    """The rewards of one domain of several are out of service for a while, or until the end."""
    drawn = Scenario.draw(seed)
    domains = [replace(domain, tasks=None) for domain in drawn.domains]
    begin = float(seed % 4)
    outage = (begin, math.inf if seed % 3 else begin + 20.0)
    hit = replace(domains[-1], name="hit", reward="async", outage=outage)
    return replace(drawn, domains=(*(domains[:-1] or domains), hit), take_all=False)


def test_schedules_with_an_outage_of_rewards_keep_the_invariants_and_end() -> None:
    paused = 0
    for seed in range(400_000, 400_060):
        outcome = examine(with_outage(seed), twice=seed % 10 == 0)
        assert not outcome.violations, f"seed {seed}: {outcome.violations}"
        paused += any(line.event.detail == "domain paused" for line in outcome.events)
    assert paused > 20


@pytest.mark.parametrize("seed", [509, 3305, 7046, 11446, 14187, 18277, 20558, 25147, 26768, 27853, 8010752])
def test_a_schedule_that_found_something_once_is_clean(seed: int) -> None:
    scenario = replace(Scenario.draw(seed), chunks=1)  # as it was then
    assert examine(scenario, twice=False).violations == ()


# -- the scenarios -----------------------------------------------------------------------------------------------------


def test_a_seed_is_a_scenario() -> None:
    assert Scenario.draw(7) == Scenario.draw(7) != Scenario.draw(8)


def test_the_scenarios_cover_what_users_vary() -> None:
    drawn = [Scenario.draw(seed) for seed in range(SCHEDULES)]

    def seen(of: Callable[[Scenario], object]) -> Counter[object]:
        return Counter(of(scenario) for scenario in drawn)

    assert set(seen(lambda s: s.alpha)) == set(ALPHAS)
    assert set(seen(lambda s: s.order)) == set(get_args(Order))
    assert set(seen(lambda s: s.group_size)) == set(range(1, 9))
    assert set(seen(lambda s: s.replicas)) == {1, 2, 3, 4, 6}
    assert set(seen(lambda s: s.suspend_mode)) == {"abort", "drain", "keep"}
    assert set(seen(lambda s: s.filter)) == {"none", "instant", "slow", "off_loop"}
    assert set(seen(lambda s: s.odd_size)) == {"same", "double", "twice", "halves"}
    assert set(seen(lambda s: s.chunks)) == {1, 2, 4}
    assert set(seen(lambda s: s.play)) == {"trajectory", "step"}
    assert set(seen(lambda s: len(s.domains))) == {1, 2, 3}
    assert set(seen(lambda s: s.workers)) == {0, 1, 2, 3}
    for flag in ("doomed", "take_all", "repeated", "keep_kv", "patience", "extra_members", "extra_groups"):
        assert set(seen(lambda s, flag=flag: bool(getattr(s, flag)))) == {True, False}
    for part in ("shuffle", "validation", "tasks"):
        assert set(seen(lambda s, part=part: getattr(s, part) is None)) == {True, False}
    assert seen(lambda s: s.staleness)["wait"] > SCHEDULES / 2
    assert {fault.kind for scenario in drawn for fault in scenario.faults} == set(KINDS)


def test_every_kind_of_fault_takes_effect() -> None:
    findings = fuzz(150, seed=300_000, workers=1)
    assert not findings.violations, told(findings)
    assert set(findings.faults_injected) == set(KINDS)
    assert findings.repeated == 15


def test_a_schedule_that_loses_its_last_replica_ends_in_a_clean_error() -> None:
    seed = next(seed for seed in range(1000) if Scenario.draw(seed).doomed)
    outcome = run(Scenario.draw(seed))
    assert not outcome.violations
    assert outcome.injected["kill"] >= outcome.scenario.replicas - 1
    assert any(line.event.kind == "cancelled" and line.event.detail == "NoReplicas" for line in outcome.events)


# -- many of them ------------------------------------------------------------------------------------------------------


def test_the_findings_do_not_depend_on_the_number_of_processes() -> None:
    assert fuzz(60, seed=11, workers=1) == fuzz(60, seed=11, workers=2)


def test_a_number_of_schedules_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="schedules must be at least 1, got 0"):
        fuzz(0)


def test_the_command_prints_one_json_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_fuzz(3, 5, None, True) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed)
    assert printed.count("\n") == 1
    assert (report["schedules"], report["violations"]) == (3, [])
    assert set(report["faults_injected"]) == set(KINDS)
    assert report["trajectories"] >= 3 * MIN_TRAJECTORIES


@pytest.mark.parametrize("as_json", [True, False])
def test_a_violation_is_told_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(StalenessBound, "max_started", lambda self: self.consumed + 40)
    assert cli_fuzz(4, 0, None, as_json) == 1
    printed = capsys.readouterr().out
    assert "cadenza fuzz --replay " in printed
    seed = int(re.findall(r"--replay (\d+)", printed)[0])
    assert cli_fuzz(1, 0, seed, False) == 1
    captured = capsys.readouterr()
    assert f"seed: {seed}" in captured.out
    assert "invariant 3 violated" in captured.err


def test_a_replay_tells_the_scenario_its_faults_and_its_last_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_fuzz(1, 0, 5, False) == 0
    printed = capsys.readouterr().out
    for words in ("schedule 5", "suspend_mode: ", "faults that took effect: ", "events:", "no invariant violated"):
        assert words in printed


# -- the same seed, the same schedule ----------------------------------------------------------------------------------


def test_two_runs_that_differ_name_the_first_difference() -> None:
    events = run(Scenario.draw(22)).events
    changed = list(events)
    source, event = events[100]
    changed[100] = LoggedEvent(source, event._replace(time=event.time + 0.125))
    difference = first_difference(events, changed)
    assert difference is not None
    assert (difference.number, difference.first, difference.second) == (100, events[100], changed[100])
    assert f"event 100: first {source} {event.kind} {event.subject}" in str(difference)


def test_a_run_that_ends_early_differs_at_its_end() -> None:
    lines = [LoggedEvent("train", Event(float(number), "issue", f"g{number}.0#0", "slot 0")) for number in range(3)]
    difference = first_difference(lines[:2], lines)
    assert difference is not None
    assert (difference.number, difference.first, difference.second) == (2, None, lines[2])
    assert "first the end" in str(difference)


def test_another_process_runs_the_same_schedule() -> None:
    program = (
        "import sys; from cadenza.simulation.fuzzing.scenario import Scenario; "
        "from cadenza.simulation.fuzzing.schedule import run; "
        "print([tuple(logged) for logged in run(Scenario.draw(int(sys.argv[1]))).events])"
    )
    for seed in (31, 32, 33):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", program, str(seed)], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == str([tuple(logged) for logged in run(Scenario.draw(seed)).events])
