"""FrozenLake: boards, answers, rewards, and whole episodes through the scheduler."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

import pytest
from builders import column, fates, got, playing, responses, simulate
from hypothesis import given
from hypothesis import strategies as st

import cadenza.envs.frozenlake as module
from cadenza.envs.frozenlake import FrozenLake
from cadenza.inference.replica import Request
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.model import Model
from cadenza.rollout.records import Task
from cadenza.rollout.rollout_functions import trajectory as play
from cadenza.testing import FakeReplica

CLASSIC = "P...\n.O.O\n...O\nO..G\n"
seeds = st.integers(0, 2**63 - 1)


def at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a call that waits for nothing, inside a running loop or outside."""
    with pytest.raises(StopIteration) as done:
        call.send(None)
    return done.value.value


def reset(env: FrozenLake, seed: int = 0) -> str:
    return str(at_once(env.reset(seed)))


def start(seed: int = 0, **args: Any) -> FrozenLake:
    env = FrozenLake(**args)
    reset(env, seed)
    return env


def walk(env: FrozenLake, *answers: str) -> list[Any]:
    """The outcomes of these answers."""
    return [at_once(env.step(answer)) for answer in answers]


def where(env: FrozenLake) -> tuple[int, int]:
    """Row and column of the player."""
    rows = env.render().splitlines()
    return next((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell in "PX*")


# -- boards ------------------------------------------------------------------------------------------------------------


def test_the_classic_map_is_shown_as_rows_of_characters() -> None:
    env = FrozenLake(map="4x4")
    assert reset(env) == CLASSIC
    assert env.render() == CLASSIC.strip()


def test_a_fixed_map_is_the_same_for_every_seed() -> None:
    env = FrozenLake(map="8x8")
    assert reset(env, 1) == reset(env, 2)


@given(seed=seeds, size=st.integers(2, 12), holes=st.floats(0, 1))
def test_every_random_board_can_be_solved_by_its_demonstration(seed: int, size: int, holes: float) -> None:
    env = start(seed, size=size, holes=holes)
    assert len(env.render().splitlines()) == size
    demonstration = env.solution()
    assert len(demonstration) == env.optimal_steps <= env.max_steps
    outcomes = walk(env, *demonstration)
    assert [reward for _, reward, *_ in outcomes] == [0.0] * (len(outcomes) - 1) + [1.0]
    _, _, terminated, truncated, info = outcomes[-1]
    assert (terminated, truncated, info["success"], info["steps"]) == (True, False, True, len(demonstration))


@given(seed=seeds, slack=st.integers(0, 3))
def test_every_random_board_can_be_solved_within_max_steps(seed: int, slack: int) -> None:
    env = start(seed, size=5, holes=0.4, max_steps=8 + slack)
    assert env.optimal_steps <= 8 + slack


@given(seed=seeds, size=st.integers(2, 8))
def test_a_seed_means_one_board_whatever_the_global_generator_did(seed: int, size: int) -> None:
    boards = []
    for outside in (1, 2):
        random.seed(outside)
        before = random.getstate()
        module._drawn.cache_clear()
        boards.append(reset(FrozenLake(size=size), seed))
        assert random.getstate() == before
    assert boards[0] == boards[1]


def test_the_board_of_a_seed_stays_the_same_from_release_to_release() -> None:
    assert reset(FrozenLake(size=6), 7) == "P.....\n......\n...O..\nO.O...\n......\n....OG\n"


def test_seeds_have_different_boards() -> None:
    env = FrozenLake(size=8)
    assert len({reset(env, seed) for seed in range(100)}) > 90


def test_holes_are_as_frequent_as_asked_for() -> None:
    env = FrozenLake(size=16, holes=0.1)
    share = sum(reset(env, seed).count("O") for seed in range(50)) / (50 * 256)
    assert share == pytest.approx(0.1, abs=0.02)


@given(seed=seeds, moves=st.lists(st.sampled_from("LDRU"), max_size=8))
def test_the_demonstration_is_a_shortest_way_from_wherever_the_player_is(seed: int, moves: list[str]) -> None:
    env = start(seed, holes=0.0)
    for move in moves:
        if env.optimal_steps:
            walk(env, move)
    row, place = where(env)
    assert len(env.solution()) == env.optimal_steps == (3 - row) + (3 - place)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_reaching_the_goal_pays_one_and_ends_the_episode() -> None:
    env = start(map="4x4")
    board, reward, terminated, truncated, info = walk(env, *"DDRRDR")[-1]
    assert board == "....\n.O.O\n...O\nO..*\n"
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"success": True, "steps": 6, "invalid": 0}


def test_falling_into_a_hole_pays_nothing_and_ends_the_episode() -> None:
    env = start(map="4x4")
    board, reward, terminated, truncated, info = walk(env, *"DR")[-1]
    assert board == "....\n.X.O\n...O\nO..G\n"
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


@pytest.mark.parametrize(("moves", "board"), [("L", CLASSIC), ("U", CLASSIC), ("RRRR", "...P\n.O.O\n...O\nO..G\n")])
def test_the_edge_holds_the_player_back(moves: str, board: str) -> None:
    env = start(map="4x4")
    after, _, terminated, _, info = walk(env, *moves)[-1]
    assert (after, terminated, info["invalid"]) == (board, False, 0)


def test_an_episode_is_truncated_after_max_steps() -> None:
    env = start(map="4x4", max_steps=6)
    assert [outcome[3] for outcome in walk(env, *"LLLLLL")] == [False] * 5 + [True]


def test_the_goal_at_the_last_step_terminates_and_does_not_truncate() -> None:
    env = start(map="4x4", max_steps=6)
    _, reward, terminated, truncated, _ = walk(env, *"DDRRDR")[-1]
    assert (reward, terminated, truncated) == (1.0, True, False)


@pytest.mark.parametrize("moves", ["DR", "LLLLLLLLLLLLLLLL"])
def test_a_step_after_the_end_is_refused(moves: str) -> None:
    env = start(map="4x4")
    walk(env, *moves)
    with pytest.raises(RuntimeError, match="step after the end of the episode; call reset"):
        walk(env, "L")


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is no board yet; call reset"):
        walk(FrozenLake(), "L")


def test_reset_begins_anew() -> None:
    env = start(map="4x4")
    walk(env, "x", "D", "R")
    assert reset(env) == CLASSIC
    assert walk(env, "D")[0][4] == {"success": False, "steps": 1, "invalid": 0}


@pytest.mark.parametrize("answer", ["", "x", "LL", "Left", "l", "P", "<answer>Left</answer>"])
def test_an_answer_that_is_no_letter_moves_nothing_and_is_counted(answer: str) -> None:
    env = start(map="4x4", invalid_penalty=0.25)
    board, reward, terminated, _, info = walk(env, answer)[0]
    assert (board, reward, terminated) == (CLASSIC, -0.25, False)
    assert info == {"success": False, "steps": 1, "invalid": 1}


def test_an_invalid_answer_costs_nothing_by_default() -> None:
    assert walk(start(map="4x4"), "x")[0][1] == 0.0


def test_space_around_a_letter_does_not_matter() -> None:
    assert walk(start(map="4x4"), " D\n")[0][4]["invalid"] == 0


def test_slippery_ice_goes_ahead_or_to_either_side_and_a_seed_says_which() -> None:
    def slip(seed: int) -> tuple[int, int]:
        env = start(seed, map=["FFFF", "FSFF", "FFFF", "FFFG"], slippery=True)
        walk(env, "R")
        return where(env)

    first = [slip(seed) for seed in range(300)]
    assert first == [slip(seed) for seed in range(300)]
    assert set(first) == {(1, 2), (0, 1), (2, 1)}
    assert all(first.count(cell) > 70 for cell in set(first))


# -- chat --------------------------------------------------------------------------------------------------------------


def test_the_chat_style_tells_the_rules_once_and_the_board_every_time() -> None:
    env = FrozenLake(map="4x4", style="chat")
    first = reset(env)
    assert first.startswith("You walk on a frozen lake. P is you, . is ice, O is a hole, G is the goal.")
    assert first.endswith(f"<answer>Right</answer>\n\n{CLASSIC}")
    assert walk(env, "<answer>Down</answer>")[0][0] == "15 steps left.\n\n....\nPO.O\n...O\nO..G\n"


def test_the_rules_are_repeated_for_rollouts_that_forget() -> None:
    env = start(map="4x4", style="chat", repeat_rules=True)
    after = walk(env, "Down")[0][0]
    assert "frozen lake" in after
    assert "15 steps left" in after


def test_the_rules_say_that_the_ice_is_slippery() -> None:
    assert "slippery" in reset(FrozenLake(style="chat", slippery=True))
    assert "slippery" not in reset(FrozenLake(style="chat"))


@pytest.mark.parametrize(
    "answer",
    [
        "<answer>Down</answer>",
        "<answer> down. </answer>",
        "<answer>D</answer>",
        "Right is a hole.\n<answer>Down</answer> and then Right",
        "<answer>Right</answer> no, <answer>Down</answer>",
        "<answer>Down",
        "I go down",
        "Down!",
        "d",
    ],
)
def test_a_chat_answer_is_the_last_tag_or_else_the_last_word(answer: str) -> None:
    env = start(map="4x4", style="chat")
    walk(env, answer)
    assert env.render().splitlines()[1] == "PO.O"


@pytest.mark.parametrize("answer", ["", "42", "I go home", "<answer>Left or Down</answer>", "<answer></answer> Down"])
def test_a_chat_answer_without_a_direction_is_invalid_and_the_observation_says_so(answer: str) -> None:
    env = start(map="4x4", style="chat")
    said, _, _, _, info = walk(env, answer)[0]
    assert said.startswith("That was no direction, so you did not move. Answer like this: <answer>Right</answer>")
    assert info["invalid"] == 1


def test_the_chat_style_says_when_the_edge_held_the_player_back() -> None:
    assert walk(start(map="4x4", style="chat"), "Up")[0][0].startswith("You did not move: that is the edge")


@pytest.mark.parametrize("style", ["compact", "chat"])
def test_all_four_actions_are_valid_answers_in_their_style(style: Any) -> None:
    for action in FrozenLake(style=style).actions:
        assert walk(start(map="4x4", style=style), action)[0][4]["invalid"] == 0


@given(seed=seeds)
def test_a_chat_demonstration_solves_the_board_too(seed: int) -> None:
    env = start(seed, style="chat")
    assert walk(env, *env.solution())[-1][1] == 1.0


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 1}, "size must be at least 2, got 1"),
        ({"holes": 1.5}, "holes must be a probability between 0 and 1, got 1.5"),
        ({"max_steps": 5}, "max_steps must be at least 6, the way from corner to corner, got 5"),
        ({"map": "4x4", "max_steps": 5}, "max_steps must be at least 6, the way to the goal, got 5"),
        ({"style": "loud"}, "style must be one of compact, chat, got 'loud'"),
        ({"invalid_penalty": -1}, "invalid_penalty must be >= 0, got -1"),
        ({"map": "5x5"}, "map must be one of 4x4, 8x8 or a list of rows, got '5x5'"),
        ({"map": ["SF", "Q?"]}, r"map row 1 has the symbol 'Q'; use S \(start\), F or \. \(ice\), H or O \(hole\)"),
        ({"map": ["SF", "FFG"]}, "map must have rows of one length"),
        ({"map": []}, "map must have rows of one length"),
        ({"map": ["FF", "FG"]}, "map must have one start S and a goal G"),
        ({"map": ["SS", "FG"]}, "map must have one start S and a goal G"),
        ({"map": ["SF", "FF"]}, "map must have one start S and a goal G"),
        ({"map": ["SH", "HG"]}, "map has no way from the start to the goal"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_its_name(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrozenLake(**args)


def test_an_own_map_need_not_be_square() -> None:
    env = start(map=["SFF", "HHG"])
    assert env.solution() == ["R", "R", "D"]


# -- through the scheduler ---------------------------------------------------------------------------------------------


def expert(request: Request) -> str:
    """Reads the board that the model was shown, and answers as the solver does."""
    shown = bytes(request.chunks[-1].astype("u1")).decode()
    *talk, board = shown.rstrip("\n").split("\n\n")
    env = start(map=board.split("\n"), style="chat" if talk else "compact")
    return env.solution()[0]


@pytest.mark.parametrize("rollout", ["trajectory", "step"])
@pytest.mark.parametrize("style", ["compact", "chat"])
def test_a_replica_that_plays_the_demonstration_gets_whole_trajectories_with_reward_one(
    style: Any, rollout: str
) -> None:
    async def main() -> None:
        options = {"env": "frozenlake", "env_args": {"size": 5, "style": style}, "rollout": rollout}
        async with playing([FakeReplica(expert)], group_size=2, batch_size=8, **options) as scheduler:
            batch = await got(scheduler, 8)
        assert set(column(batch, "episode_scores")) == {1.0}
        assert not any(column(batch, "truncated"))
        assert fates(scheduler)["trained"] == 8
        said: dict[int, str] = {}
        for row, response in zip(column(batch, "traj_id"), responses(batch), strict=True):
            said[row] = said.get(row, "") + bytes(response).decode()
        seed = dict(zip(column(batch, "traj_id"), column(batch, "task_id"), strict=True))
        for row, text in said.items():
            env = FrozenLake(size=5, style=style)
            await env.reset(int(seed[row].split("/")[1]))
            assert text == "".join(env.solution())

    simulate(main)


def test_the_info_of_the_last_step_is_in_the_trajectory() -> None:
    infos: list[Any] = []

    async def watched(task: Task, env: EnvHandle, model: Model) -> None:
        await play(task, env, model)
        infos.append(env.info)

    async def main() -> None:
        options = {"env": "frozenlake", "env_args": {"map": "4x4"}, "rollout": watched}
        async with playing([FakeReplica(expert)], batch_size=1, slots=1, **options) as scheduler:
            await got(scheduler, 1)

    simulate(main)
    assert infos[0] == {"success": True, "steps": 6, "invalid": 0}


def test_a_replica_that_only_talks_is_truncated_with_reward_zero() -> None:
    async def main() -> None:
        options = {"env": "frozenlake", "env_args": {"map": "4x4", "max_steps": 7}}
        async with playing([FakeReplica(lambda request: "hm")], batch_size=4, **options) as scheduler:
            batch = await got(scheduler, 4)
        assert column(batch, "episode_scores") == [0.0] * 4
        assert all(column(batch, "truncated"))
        assert [len(response) for response in responses(batch)] == [7 * 2] * 4

    simulate(main)
