"""Sokoban: boards, pushes, rewards, and whole episodes through the scheduler."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from builders import column, got, playing, responses, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import cadenza.envs.sokoban as module
from cadenza.envs.sokoban import Sokoban
from cadenza.inference.replica import Request
from cadenza.testing import FakeReplica

ROOM = ["######", "#P_XO#", "######"]
"""One push to the right, after one step."""
seeds = st.integers(0, 2**63 - 1)


def reset(env: Sokoban, seed: int = 0) -> str:
    return asyncio.run(env.reset(seed))


def start(seed: int = 0, **args: Any) -> Sokoban:
    env = Sokoban(**args)
    reset(env, seed)
    return env


def walk(env: Sokoban, *answers: str) -> list[Any]:
    """The outcomes of these answers."""

    async def main() -> list[Any]:
        return [await env.step(answer) for answer in answers]

    return asyncio.run(main())


# -- boards ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=seeds,
    size=st.one_of(st.integers(5, 8), st.tuples(st.integers(5, 7), st.integers(5, 9))),
    boxes=st.integers(1, 2),
    walls=st.floats(0, 0.25),
)
def test_every_random_board_is_solved_by_its_demonstration(seed: int, size: Any, boxes: int, walls: float) -> None:
    env = start(seed, size=size, boxes=boxes, walls=walls, max_moves=15)
    board = env.render()
    rows, columns = (size, size) if isinstance(size, int) else size
    assert [len(row) for row in board.splitlines()] == [columns] * rows
    assert board.count("X") + board.count("*") == boxes
    assert board.count("O") + board.count("*") + board.count("S") == boxes
    assert board.count("P") + board.count("S") == 1
    demonstration = env.solution()
    assert demonstration is not None
    assert len(demonstration) <= 15
    _, reward, terminated, truncated, info = walk(env, *demonstration)[-1]
    assert reward == pytest.approx(-0.1 + 1 + 10)
    assert (terminated, truncated, info["success"]) == (True, False, True)
    assert env.optimal_steps == 0


@settings(max_examples=50)
@given(seed=seeds, fewest=st.integers(1, 9), more=st.integers(0, 6))
def test_the_moves_that_a_board_takes_lie_within_the_bounds(seed: int, fewest: int, more: int) -> None:
    env = start(seed, min_moves=fewest, max_moves=fewest + more)
    assert env.optimal_steps is not None
    assert fewest <= env.optimal_steps <= fewest + more


@settings(max_examples=10)
@given(seed=seeds)
def test_a_large_board_with_many_boxes_is_solved_within_its_bound(seed: int) -> None:
    env = start(seed, size=9, boxes=3, max_moves=12)
    assert env.optimal_steps is not None
    assert env.optimal_steps <= 12


@settings(max_examples=30)
@given(seed=seeds, boxes=st.integers(1, 2))
def test_a_seed_means_one_board_whatever_the_global_generator_did(seed: int, boxes: int) -> None:
    boards = []
    for outside in (1, 2):
        random.seed(outside)
        before = random.getstate()
        module._draw.cache_clear()
        boards.append(reset(Sokoban(boxes=boxes), seed))
        assert random.getstate() == before
    assert boards[0] == boards[1]


def test_seeds_have_different_boards() -> None:
    env = Sokoban()
    assert len({reset(env, seed) for seed in range(100)}) > 90


def test_without_inner_walls_the_floor_is_whole() -> None:
    assert start(walls=0.0).render().count("#") == 20


# -- steps -------------------------------------------------------------------------------------------------------------


def test_pushing_the_last_box_onto_its_target_solves_the_board() -> None:
    env = start(map=ROOM)
    first, last = walk(env, "R", "R")
    assert first == ("######\n#_PXO#\n######\n", -0.1, False, False, {"success": False, "steps": 1, "invalid": 0})
    board, reward, terminated, truncated, info = last
    assert board == "######\n#__P*#\n######\n"
    assert reward == pytest.approx(10.9)
    assert (terminated, truncated, info) == (True, False, {"success": True, "steps": 2, "invalid": 0})


def test_a_box_pays_on_its_target_and_takes_it_back_when_it_leaves() -> None:
    env = start(map=["########", "#PXO_OX_#"[:8], "#______#", "########"], step_reward=0.0)
    rewards = [reward for _, reward, *_ in walk(env, "R", "R")]
    assert rewards == [1.0, -1.0]
    assert env.render().splitlines()[1] == "#_SX"[0:1] + "_SXOX#"


def test_the_player_on_a_target_is_shown_as_such() -> None:
    env = start(map=["#####", "#POX#"[:5], "#___#", "#####"][:1] + ["#PO_#", "#_X_#", "#___#", "#####"])
    assert walk(env, "R")[0][0].splitlines()[1] == "#_S_#"


@pytest.mark.parametrize(
    ("rows", "move"),
    [
        (["#####", "#PX_#", "#_XO#", "#_O_#", "#####"], "U"),
        (["######", "#PXXO#", "#__O_#", "#____#", "######"], "R"),
        (["#####", "#_X_#", "#_P_#", "#_XO#", "#_O_#", "#####"], "U"),
    ],
)
def test_walls_and_boxes_hold_the_player_back(rows: list[str], move: str) -> None:
    env = Sokoban.__new__(Sokoban)
    try:
        env = start(map=rows)
    except ValueError:
        pytest.skip("not solvable")
    before = env.render()
    _, reward, _, _, info = walk(env, move)[0]
    assert env.render() == before
    assert (reward, info["invalid"]) == (-0.1, 0)
