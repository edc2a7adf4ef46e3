"""The files of a snapshot: what is written is read again, and a file that is damaged is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.inference.replica import Finish, Span
from cadenza.rollout.ledger import GroupState
from cadenza.rollout.pass_counts import PassStart
from cadenza.rollout.records import Fate, Turn
from cadenza.rollout.snapshot_format import (
    FORMAT,
    SavedAttempt,
    SavedGroup,
    SavedState,
    SavedSums,
    SavedTask,
    SavedTrajectory,
    SnapshotError,
    read_state,
    read_turns,
    write,
)

TURNS = 2


def state() -> SavedState:
    """One group, whose one member has finished an episode of two turns."""
    attempt = SavedAttempt(0, 0, 0, 3, 1.0, 2.0, None, "", "", 5, TURNS)
    episode = SavedTrajectory(7, TURNS, True, False, 0.5, {"success": True}, 1.0, 2.0)
    group = SavedGroup(0, "toy", SavedTask(0, "toy/0"), 4, 1.0, GroupState.READY, -1, [attempt], [(0, episode)], None)
    sums = SavedSums(1, {Fate.FAILED: 2}, {}, [(Fate.FAILED, "env: crashed", 2)], {}, 1, {}, {0: 3}, 0.0)
    return SavedState(FORMAT, {"seed": 0}, 9.0, 5, 12, 10, {}, sums, [group], PassStart(1, 2))


def turns() -> list[Turn]:
    prompt, response = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    logprobs, spans = np.array([-0.5, -1.0, -1.5], np.float32), (Span(4, 1), Span(5, 2))
    return [
        Turn(prompt, response, logprobs, spans, Finish.STOP, fresh=number == 0, asked=1.0, answered=2.0, reward=0.25)
        for number in range(TURNS)
    ]


@pytest.fixture(name="saved")
def _saved(tmp_path: Path) -> Path:
    write(tmp_path, state(), turns())
    return tmp_path


def change(saved: Path, act: Callable[[Any], None]) -> None:
    path = saved / "rollouts.json"
    document = json.loads(path.read_text())
    act(document)
    path.write_text(json.dumps(document))


def test_what_is_written_is_read_again(saved: Path) -> None:
    assert read_state(saved) == state()
    read = list(read_turns(saved, clock_offset=10.0, expected=TURNS))
    assert [(turn.asked, turn.answered, turn.fresh) for turn in read] == [(11.0, 12.0, True), (11.0, 12.0, False)]
    for found, written in zip(read, turns(), strict=True):
        assert (found.spans, found.finish, found.reward) == (written.spans, written.finish, written.reward)
        for name in ("prompt", "response", "logprobs"):
            assert getattr(found, name).tolist() == getattr(written, name).tolist()


def test_the_keys_on_disk_are_those_of_format_1(saved: Path) -> None:
    document = json.loads((saved / "rollouts.json").read_text())
    assert (document["format"], document["base"]) == (1, 10)
    assert (document["groups"][0]["begun"], document["groups"][0]["trained"]) == (4, -1)


@pytest.mark.parametrize("name", ["rollouts.json", "turns/data.json", "turns/tensors.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "garbage"])
def test_a_damaged_file_is_named(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "garbage":
            path.write_bytes(b"\x00garbage" * 10)
    read = read_state if name == "rollouts.json" else partial(read_turns, clock_offset=0.0, expected=TURNS)
    with pytest.raises(SnapshotError, match=f"{saved / Path(name).parts[0]} cannot be read"):
        read(saved)


def test_another_format_is_refused(saved: Path) -> None:
    change(saved, lambda state: state.update(format=99, groups="who knows"))
    with pytest.raises(SnapshotError, match=r"rollouts.json has format 99, this version of cadenza reads 1"):
        read_state(saved)


def test_files_that_do_not_belong_together_are_refused(saved: Path) -> None:
    with pytest.raises(SnapshotError, match=r"turns holds 2 turns, but rollouts.json beside it counts 0"):
        read_turns(saved, 0.0, 0)


def test_a_field_of_another_type_is_named(saved: Path) -> None:
    change(saved, lambda state: state.update(consumed="many"))
    message = r"rollouts.json cannot be read: Expected `int`, got `str` - at `\$.consumed`"
    with pytest.raises(SnapshotError, match=message):
        read_state(saved)
