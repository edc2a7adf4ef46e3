"""Sokoban: boards, pushes, rewards, and whole episodes through the scheduler."""

from __future__ import annotations

import random
from collections.abc import Coroutine
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


def at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call that waits for nothing, inside a running loop or outside."""
    with pytest.raises(StopIteration) as done:
        call.send(None)
    return done.value.value


def reset(env: Sokoban, seed: int = 0) -> str:
    return str(at_once(env.reset(seed)))


def start(seed: int = 0, **args: Any) -> Sokoban:
    env = Sokoban(**args)
    reset(env, seed)
    return env


def walk(env: Sokoban, *answers: str) -> list[Any]:
    """The outcomes of these answers."""
    return [at_once(env.step(answer)) for answer in answers]


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


def test_the_board_of_a_seed_stays_the_same_from_release_to_release() -> None:
    assert reset(Sokoban(size=7, boxes=2), 7) == "#######\n#___O_#\n#P_##_#\n#___X_#\n#___*_#\n#_____#\n#######\n"


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
    env = start(map=["#######", "#PXO__#", "#__XO_#", "#_____#", "#######"], step_reward=0.0, box_reward=2.0)
    assert [reward for _, reward, *_ in walk(env, "R", "R")] == [2.0, -2.0]
    assert env.render().splitlines()[1] == "#__SX_#"


def test_the_rewards_are_what_the_arguments_say() -> None:
    env = start(map=ROOM, step_reward=-1.0, box_reward=3.0, solved_reward=50.0, invalid_penalty=0.5)
    assert [reward for _, reward, *_ in walk(env, "x", "R", "R")] == [-1.5, -1.0, 52.0]


def test_the_player_on_a_target_is_shown_as_such() -> None:
    env = start(map=["#####", "#PO_#", "#_X_#", "#___#", "#####"])
    assert walk(env, "R")[0][0].splitlines()[1] == "#_S_#"


@pytest.mark.parametrize(
    ("rows", "move"),
    [
        (ROOM, "L"),
        (["######", "#_XO_#", "#_P__#", "######"], "U"),
        (["#######", "#___O_#", "#PXXO_#", "#_____#", "#######"], "R"),
    ],
    ids=["a wall", "a box before a wall", "two boxes"],
)
def test_what_is_in_the_way_holds_the_player_back(rows: list[str], move: str) -> None:
    env = start(map=rows)
    board, reward, _, _, info = walk(env, move)[0]
    assert board.splitlines() == rows
    assert (reward, info["invalid"]) == (-0.1, 0)


def test_a_position_that_cannot_be_solved_any_more_has_no_demonstration() -> None:
    env = start(map=["######", "#_XO_#", "#_P__#", "#____#", "######"])
    walk(env, "R", "U", "L")
    assert env.render().splitlines()[1] == "#XPO_#"
    assert env.solution() is None
    assert env.optimal_steps is None


def test_a_search_that_is_too_short_finds_no_demonstration() -> None:
    env = start(map=["######", "#_XO_#", "#_P__#", "#____#", "######"])
    assert env.solution(limit=2) is None
    assert env.solution() == ["L", "U", "R"]


def test_an_episode_is_truncated_after_max_steps() -> None:
    env = start(map=ROOM, max_steps=3)
    assert [outcome[2:4] for outcome in walk(env, *"LLL")] == [(False, False)] * 2 + [(False, True)]


@pytest.mark.parametrize("moves", ["RR", "LLL"])
def test_a_step_after_the_end_is_refused(moves: str) -> None:
    env = start(map=ROOM, max_steps=3)
    walk(env, *moves)
    with pytest.raises(RuntimeError, match="step after the end of the episode; call reset"):
        walk(env, "L")


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is no board yet; call reset"):
        walk(Sokoban(), "L")


def test_an_answer_that_is_no_direction_moves_nothing_and_is_counted() -> None:
    env = start(map=ROOM)
    board, reward, _, _, info = walk(env, "Push")[0]
    assert board.splitlines() == ROOM
    assert (reward, info) == (-0.1, {"success": False, "steps": 1, "invalid": 1})


# -- chat --------------------------------------------------------------------------------------------------------------


def test_the_chat_style_tells_the_rules_once_and_the_board_every_time() -> None:
    env = Sokoban(map=ROOM, style="chat")
    first = reset(env)
    assert first.startswith("You push boxes in a warehouse. # is a wall, _ is floor, O is a target, X is a box,")
    assert first.endswith("<answer>Right</answer>\n\n######\n#P_XO#\n######\n")
    after = [outcome[0] for outcome in walk(env, "<answer>Right</answer>", "up", "Hm")]
    assert after[0] == "39 steps left.\n\n######\n#_PXO#\n######\n"
    assert after[1].startswith("You did not move: something is in the way. 38 steps left.")
    assert after[2].startswith("That was no direction, so you did not move. Answer like this: <answer>Right</answer>")


def test_the_rules_are_repeated_for_rollouts_that_forget() -> None:
    env = start(map=ROOM, style="chat", repeat_rules=True)
    assert "warehouse" in walk(env, "Right")[0][0]


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 2}, "size must be at least 3, the outer walls included, got 2 x 2"),
        ({"boxes": 0}, "boxes must be at least 1, got 0"),
        ({"walls": 1.0}, "walls must be a density between 0 and 1, got 1.0"),
        ({"min_moves": 0}, "min_moves must lie between 1 and max_moves 20, got 0"),
        ({"min_moves": 30}, "min_moves must lie between 1 and max_moves 20, got 30"),
        ({"max_steps": 10}, "max_steps must be at least max_moves 20, got 10"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"style": "loud"}, "style must be one of compact, chat, got 'loud'"),
        ({"invalid_penalty": -1}, "invalid_penalty must be >= 0, got -1"),
        (
            {"map": ["####", "#P?#", "####"]},
            r"map row 1 has the symbol '\?'; use # \(wall\), _ \(floor\), O \(target\)",
        ),
        ({"map": ["####", "#P#"]}, "map must have rows of one length"),
        ({"map": ["#####", "#PXO_", "#####"]}, "map must have walls # all around"),
        ({"map": ["#####", "#PX_#", "#####"]}, "as many targets as boxes.*got 1 players, 1 boxes, 0 targets"),
        ({"map": ["#####", "#_XO#", "#####"]}, "one player.*got 0 players"),
        ({"map": ["#####", "#P*_#", "#####"]}, "not all of them covered"),
        ({"map": ["######", "#OPX_#", "######"]}, "map has no solution among 200,000 positions"),
        ({"map": ROOM, "max_steps": 1}, "max_steps must be at least 2, the solution of the map, got 1"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_its_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sokoban(**args)


@pytest.mark.parametrize("args", [{"size": 4}, {"size": 5, "boxes": 6}, {"size": 5, "min_moves": 20}])
def test_boards_that_do_not_exist_are_refused_with_what_to_change(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no board of .* was found .* lower min_moves, boxes or walls, or raise size"):
        start(**args)


# -- through the scheduler ---------------------------------------------------------------------------------------------


def expert(request: Request) -> str:
    """Reads the board that the model was shown, and answers as the solver does."""
    shown = bytes(request.chunks[-1].astype("u1")).decode()
    *talk, board = shown.rstrip("\n").split("\n\n")
    demonstration = start(map=board.split("\n"), style="chat" if talk else "compact").solution()
    assert demonstration is not None
    return demonstration[0]


@pytest.mark.parametrize("rollout", ["trajectory", "step"])
@pytest.mark.parametrize("style", ["compact", "chat"])
def test_a_replica_that_plays_the_demonstration_solves_every_board(style: Any, rollout: str) -> None:
    async def main() -> None:
        options = {"env": "sokoban", "env_args": {"style": style}, "rollout": rollout}
        async with playing([FakeReplica(expert)], group_size=2, batch_size=8, **options) as scheduler:
            batch = await got(scheduler, 8)
        assert not any(column(batch, "truncated"))
        turns: dict[int, int] = {}
        for row, response in zip(column(batch, "traj_id"), responses(batch), strict=True):
            turns[row] = turns.get(row, 0) + (len(response) if style == "compact" else bytes(response).count(b"</"))
        scores = dict(zip(column(batch, "traj_id"), column(batch, "episode_scores"), strict=True))
        tasks = dict(zip(column(batch, "traj_id"), column(batch, "task_id"), strict=True))
        for row, score in scores.items():
            env = Sokoban()
            await env.reset(int(tasks[row].split("/")[1]))
            assert turns[row] == env.optimal_steps
            assert score == pytest.approx(11 - 0.1 * turns[row], abs=1e-4)

    simulate(main)
