"""The traces: what is drawn, and that every policy replays the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.inference.replica import Finish, Span
from cadenza.rollout.collate import collate
from cadenza.rollout.records import Task, Trajectory, Turn
from cadenza.rollout.trace import TraceRecorder
from cadenza.simulation.comparison.episodes import RecordedTrace, Trace
from cadenza.simulation.comparison.traces import TraceFileError, read_trace
from cadenza.simulation.comparison.workloads import NEVER, WORKLOADS, TraceEpisode, Workload, find_workload, w4


def episodes(workload: Workload, groups: int, seed: int = 0) -> list[list[TraceEpisode]]:
    trace = Trace(workload, seed)
    return [[trace.episode(group, member) for member in range(workload.group_size)] for group in range(groups)]


def responses(workload: Workload, groups: int) -> Any:
    return np.array([[episode.response for episode in group] for group in episodes(workload, groups)])


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_episode_depends_on_nothing_but_seed_group_and_member(name: str) -> None:
    workload = find_workload(name)
    first, second = Trace(workload, 7), Trace(workload, 7)
    places = [(0, 0), (300, 5), (3, 2), (129, 7)]
    assert [first.episode(*place) for place in places] == [second.episode(*place) for place in reversed(places)][::-1]
    other = Trace(workload, 8)
    assert all(first.episode(*place) != other.episode(*place) for place in places)


def test_members_for_redundancy_leave_the_others_as_they_were() -> None:
    workload = find_workload("W2")
    wider = replace(workload, group_size=workload.group_size + 4)
    assert episodes(workload, 3) == [group[: workload.group_size] for group in episodes(wider, 3)]


def test_w2_has_the_median_the_spread_and_the_cut_that_it_says() -> None:
    lengths = responses(find_workload("W2"), 1500)
    logs = np.log(lengths[lengths < 32_768])
    assert np.median(lengths) == pytest.approx(9000, rel=0.05)
    assert np.percentile(np.log(lengths), 69.15) - np.log(np.median(lengths)) == pytest.approx(0.75 / 2, rel=0.08)
    assert lengths.max() == 32_768
    assert (lengths == 32_768).mean() == pytest.approx(0.0425, abs=0.012)
    assert logs.min() > 0


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_log_lengths_correlate_within_a_group(rho: float) -> None:
    logs = np.log(responses(replace(find_workload("W2"), rho=rho), 1500))
    pairs = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1], np.corrcoef(logs[:, 3], logs[:, 15])[0, 1]
    assert pairs == pytest.approx((rho, rho), abs=0.07)
    assert np.corrcoef(logs[:-1, 0], logs[1:, 0])[0, 1] == pytest.approx(0, abs=0.07)


def test_runaways_of_w1_come_one_by_one_and_those_of_w3_in_hard_groups() -> None:
    tail = responses(find_workload("W1"), 1500) > 8192
    assert tail.mean() == pytest.approx(0.01 * 2 / 3, rel=0.3)
    assert tail.sum(axis=1).max() <= 2
    spec = find_workload("W3").responses
    assert spec is not None
    even = responses(replace(find_workload("W3"), responses=replace(spec, body=replace(spec.body, median=1.0))), 1500)
    hard = even > 0.2 * spec.longest
    assert hard.any(axis=1).mean() == pytest.approx(0.02, rel=0.5)
    assert set(hard.sum(axis=1)) == {0, 8}


def test_w4_takes_sigma_and_clips_its_env_at_zero() -> None:
    steps = np.array([s for group in episodes(w4(3.0), 20) for e in group for s in e.steps])
    assert (steps.mean(), steps.std()) == pytest.approx((10, 3), rel=0.05)
    wild = np.array([s for group in episodes(w4(10.0), 20) for e in group for s in e.steps])
    assert wild.min() == 0
    turns = {len(e.lengths) for group in episodes(w4(1.0), 20) for e in group}
    assert turns == set(range(25, 31))


def test_w5_has_short_and_long_tasks_failures_and_slow_envs() -> None:
    workload = find_workload("W5")
    drawn = [episode for group in episodes(workload, 400) for episode in group]
    turns = np.array([len(episode.lengths) for episode in drawn])
    assert turns.max() == 100
    assert (turns <= 4).mean() == pytest.approx(0.5, abs=0.1)
    failing = np.mean([episode.fails_at != NEVER for episode in drawn])
    assert failing == pytest.approx(1 - np.mean(0.999**turns), rel=0.5)
    assert all(episode.fails_at < len(episode.lengths) for episode in drawn)
    assert max(episode.reset for episode in drawn) > 100
    assert {o for episode in drawn for o in episode.observations} <= set(range(300, 2001))


def test_w6_is_w1_with_rewards_that_may_time_out() -> None:
    one, six = episodes(find_workload("W1"), 300), episodes(find_workload("W6"), 300)
    assert [[e.lengths for e in group] for group in one] == [[e.lengths for e in group] for group in six]
    rewards = np.array([episode.reward for group in six for episode in group])
    assert (rewards == 30).mean() == pytest.approx(0.05, rel=0.3)
    assert np.median(rewards) == pytest.approx(0.5, rel=0.15)


def test_the_mean_of_a_range_of_groups_is_that_of_their_members() -> None:
    for name in ("W2", "W5"):
        workload = find_workload(name)
        slow = np.mean([e.response for group in episodes(workload, 140)[120:] for e in group])
        assert Trace(workload, 0).mean_response(120, 140) == pytest.approx(slow)


def test_a_scaled_workload_has_the_same_work_per_gpu() -> None:
    assert (find_workload("W2x1024").gpus, find_workload("W2x1024").groups) == (1024, 2048)
    assert find_workload("W2x16").groups == 32


@pytest.mark.parametrize("name", ["W7", "W2:3", "W4:-1", "W2x0", "W3x7", "W4:x", ""])
def test_a_name_that_means_nothing_says_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="W1, W2"):
        find_workload(name)


# -- a user's own ------------------------------------------------------------------------------------------------------

MEMBERS = [{"lengths": [800]}, {"lengths": [90, 120], "observations": [300], "steps": [1.5, 0.2], "reset": 3.0}]


def trace_file(path: Path, **changes: Any) -> Path:
    groups = [{"prompt": 64 + n, "members": MEMBERS} for n in range(5)]
    path.write_text(json.dumps({"gpus": 4, "groups": 2, "trace": groups} | changes))
    return path


def test_a_trace_file_is_replayed_whole_before_it_begins_again(tmp_path: Path) -> None:
    workload = read_trace(trace_file(tmp_path / "mine.json"))
    trace = RecordedTrace(workload, 0)
    assert (workload.name, workload.group_size) == ("mine", 2)
    assert trace.episode(0, 1).lengths == (90, 120)
    laps = [[trace.episode(lap * 5 + n, 0).observations[0] for n in range(5)] for lap in range(6)]
    assert all(sorted(lap) == list(range(64, 69)) for lap in laps)
    assert any(lap != laps[0] for lap in laps)
    assert trace.mean_response(0, 5) == (800 + 210) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": []}, "no groups"),
        ({"trace": [{"prompt": 5, "members": []}]}, "group 0 has no members"),
        ({"trace": [{"prompt": 5, "members": [{"lengths": [0]}]}]}, "group 0, member 0: .* must be >= 1"),
        ({"trace": [{"prompt": 5, "members": [{"lengths": [4, 5]}]}]}, "2 turns need 1 observations"),
        ({"trace": [{"prompt": 5, "members": [{"lengths": [4], "steps": [-1.0]}]}]}, "no time may be negative"),
        ({"trace": [{"prompt": 5, "members": [{"length": [4]}]}]}, "length"),
        ({"cost": "b200"}, "cost 'b200' is not known; take one of h100"),
        ({"cost": {"a": 0.01}}, "cost lacks b, c, p, kv_capacity"),
        ({"train_seconds": -1.0}, "train_seconds must be a number from 0 on, got -1.0"),
        ({"gpus": 0}, "gpus, groups and group_size must be >= 1, got 0,"),
        ({"gpus": 0}, "must be >= 1"),
    ],
)
def test_a_wrong_trace_file_names_the_place(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceFileError, match=message):
        read_trace(trace_file(tmp_path / "mine.json", **changes))


def test_what_a_run_records_comes_back_as_its_workload(tmp_path: Path) -> None:
    def turn(prompt: int, length: int, asked: float, answered: float) -> Turn:
        tokens, logprobs = np.zeros(length, np.int32), np.zeros(length, np.float32)
        spans = (Span(0, length),)
        return Turn(np.zeros(prompt, np.int32), tokens, logprobs, spans, Finish.STOP, False, asked, answered)

    task = Task("t/0", 0)
    first = Trajectory(0, task, 0, 0, 0, 0, 1, [turn(7, 3, 1.0, 2.0), turn(4, 5, 2.5, 4.0)], started=0.5, ended=4.75)
    second = Trajectory(1, task, 0, 1, 0, 0, 1, [turn(7, 9, 0.5, 3.0)], started=0.5, ended=3.0, scored=4.5)
    recorder = TraceRecorder(collate)
    assert len(recorder([first, second])) == 2
    recorder.save(tmp_path / "run.json", gpus=2, groups=1)
    recorded = read_trace(tmp_path / "run.json").recorded
    assert recorded == ((TraceEpisode((3, 5), (7, 4), (0.5, 0.75), 0.5), TraceEpisode((9,), (7,), (0.0,), reward=1.5)),)
