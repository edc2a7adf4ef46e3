"""Names of envs, and the envs of other libraries: alone and through the scheduler on a real loop."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from builders import OneStepEnv, build, column, got, playing, responses, simulate
from hypothesis import given
from hypothesis import strategies as st

import cadenza.envs as envs
from cadenza.envs.adapters import extra
from cadenza.envs.frozenlake import FrozenLake
from cadenza.envs.sokoban import Sokoban
from cadenza.errors import EnvError
from cadenza.inference.replica import Request
from cadenza.testing import FakeReplica

# -- names -------------------------------------------------------------------------------------------------------------


def test_built_in_envs_are_known_by_name() -> None:
    assert envs.find_factory("frozenlake") is FrozenLake
    assert envs.find_factory("sokoban") is Sokoban
    assert {"frozenlake", "sokoban", "gymnasium", "textarena"} <= set(envs.registered())


def test_built_in_envs_are_loaded_only_when_asked_for() -> None:
    program = "import sys, cadenza.envs; cadenza.envs.registered(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"gymnasium", "textarena", "cadenza.envs.frozenlake"}.isdisjoint(done.stdout.split())


def test_an_unknown_name_near_a_built_in_one_gets_it_as_a_hint() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="env 'frozen_lake' is not registered; did you mean 'frozenlake'"):
            build(env="frozen_lake")

    simulate(main)


def test_an_unknown_name_near_to_none_gets_the_list_with_the_built_in_ones() -> None:
    with pytest.raises(ValueError, match=r"known envs: .*frozenlake, gymnasium, .*sokoban, textarena"):
        envs.find_factory("zzz")


def test_the_name_of_a_built_in_env_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match=r"env 'sokoban' is built in, as .*:Sokoban; choose another name"):
        envs.env("sokoban")(OneStepEnv)


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"no_such_library is not installed; pip install 'cadenza\[envs\]'"):
        extra("no_such_library")


def test_an_env_whose_library_is_missing_is_refused_before_anything_runs() -> None:
    program = (
        "import sys; sys.modules['textarena'] = None\n"
        "import cadenza.envs\n"
        "try: cadenza.envs.find_factory('textarena')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "textarena is not installed; pip install 'cadenza[envs]'" in done.stdout


def test_an_adapter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'cadenza.envs.adapters:Atari' cannot be loaded: .*no attribute 'Atari'"):
        envs.find_factory("cadenza.envs.adapters:Atari")


# -- gymnasium ---------------------------------------------------------------------------------------------------------

NAMES = ["Left", "Down", "Right", "Up"]
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "make_args": {"is_slippery": False, "render_mode": "ansi"},
    "actions": NAMES,
}
WAY = ["Down", "Down", "Right", "Right", "Down", "Right"]


@pytest.fixture
def lake() -> Any:
    pytest.importorskip("gymnasium")
    return envs.find_factory("gymnasium")


def test_the_adapters_are_found_by_name_and_by_path(lake: Any) -> None:
    assert envs.find_factory("cadenza.envs.adapters:Gymnasium") is lake


def test_a_gymnasium_env_shows_what_it_renders_and_takes_names_of_actions(lake: Any) -> None:
    env = lake(**LAKE, prompt="Reach G.\n")
    assert env.reset(0) == "Reach G.\n\nSFFF\nFHFH\nFFFH\nHFFG\n"
    *_, last = [env.step(name) for name in WAY]
    observation, reward, terminated, truncated, info = last
    assert "(Right)" in observation
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["success"], info["steps"], info["invalid"]) == (True, 6, 0)
    env.close()


def test_a_gymnasium_observation_is_its_str_by_default(lake: Any) -> None:
    env = lake("FrozenLake-v1", make_args={"is_slippery": False})
    assert env.reset(0) == "0"
    assert env.step("1")[0] == "4"
    env.close()


def upper(text: str) -> Any:
    return {"GO DOWN": 1}.get(text.upper())


def cell(observation: Any) -> str:
    return f"cell {observation}"


def test_a_formatter_and_a_parser_may_be_functions_or_paths(lake: Any) -> None:
    for format, parse in [(cell, upper), (f"{__name__}:cell", f"{__name__}:upper")]:
        env = lake("FrozenLake-v1", make_args={"is_slippery": False}, format=format, parse=parse)
        assert env.reset(0) == "cell 0"
        assert env.step("go down")[0] == "cell 4"
        env.close()


@pytest.mark.parametrize("answer", ["", "Home", "4", "-1", "Left Down"])
def test_an_answer_that_means_no_action_does_not_reach_the_gymnasium_env(lake: Any, answer: str) -> None:
    env = lake("FrozenLake-v1", make_args={"is_slippery": False}, actions=NAMES, invalid_penalty=0.5)
    env.reset(0)
    observation, reward, terminated, truncated, info = env.step(answer)
    assert (observation, reward, terminated, truncated) == ("0", -0.5, False, False)
    assert (info["steps"], info["invalid"]) == (1, 1)
    env.close()


def test_invalid_answers_count_as_steps_so_that_the_episode_ends(lake: Any) -> None:
    env = lake("FrozenLake-v1", max_steps=3)
    env.reset(0)
    assert [env.step("?")[3] for _ in range(3)] == [False, False, True]
    env.close()


def test_the_registered_limit_of_a_gymnasium_env_holds(lake: Any) -> None:
    env = lake("FrozenLake-v1", make_args={"is_slippery": False})
    env.reset(0)
    truncated = [env.step("0")[3] for _ in range(100)]
    assert truncated == [False] * 99 + [True]
    env.close()


def test_a_gymnasium_env_is_a_success_when_its_rewards_reach_its_threshold(lake: Any) -> None:
    env = lake("CartPole-v1", actions=["left", "right"])
    env.reset(0)
    while True:
        _, reward, terminated, _, info = env.step("left")
        assert reward == 1.0
        if terminated:
            break
    assert info["success"] is False
    env.close()


def test_a_gymnasium_env_with_other_actions_wants_a_parser(lake: Any) -> None:
    with pytest.raises(ValueError, match=r"'Pendulum-v1' has the action space Box.*; give a function `parse`"):
        lake("Pendulum-v1")


def test_the_names_of_actions_must_be_as_many_as_the_actions(lake: Any) -> None:
    with pytest.raises(ValueError, match="actions must name all 4 actions of 'FrozenLake-v1', got"):
        lake("FrozenLake-v1", actions=["go"])


def test_the_same_seed_resets_a_gymnasium_env_to_the_same_start(lake: Any) -> None:
    env = lake("CartPole-v1")
    assert env.reset(5) == env.reset(5) != env.reset(6)
    env.close()


@pytest.mark.parametrize("map", ["4x4", "8x8"])
@given(moves=st.lists(st.sampled_from("LDRU"), min_size=1, max_size=60))
def test_the_built_in_lake_and_that_of_gymnasium_agree_on_every_walk(map: str, moves: list[str]) -> None:
    pytest.importorskip("gymnasium")
    theirs = envs.find_factory("gymnasium")(
        "FrozenLake-v1", make_args={"is_slippery": False, "map_name": map}, actions="LDRU"
    )
    ours = FrozenLake(map=map, max_steps=200)

    async def main() -> None:
        await ours.reset(0)
        theirs.reset(0)
        for move in moves:
            board, *outcome, info = await ours.step(move)
            cell, *expected, theirs_info = theirs.step(move)
            assert outcome == expected
            assert info["success"] == theirs_info["success"]
            row, column = divmod(int(cell), int(map[0]))
            assert board.splitlines()[row][column] in "PX*"
            if outcome[1]:
                break

    asyncio.run(main())
    theirs.close()


def way(request: Request) -> str:
    """The n-th answer of a conversation is the n-th step of the way."""
    return WAY[len(request.chunks) // 2]


def test_gymnasium_episodes_run_off_a_real_loop_and_their_envs_are_closed(lake: Any) -> None:
    closed: list[Any] = []

    class Watched(lake):  # type: ignore[misc]
        def close(self) -> None:
            super().close()
            closed.append(self)

    async def main() -> None:
        options = {"env": Watched, "env_args": LAKE, "tasks": 4}
        async with playing([FakeReplica(way)], group_size=2, batch_size=8, slots=8, **options) as scheduler:
            batch = await got(scheduler, 8)
        assert column(batch, "episode_scores") == [1.0] * 8
        assert [bytes(response).decode() for response in responses(batch)] == ["".join(WAY)] * 8

    asyncio.run(main())
    assert len(closed) == 8


def test_gymnasium_episodes_run_under_virtual_time_too(lake: Any) -> None:
    async def main() -> None:
        async with playing([FakeReplica(way)], env="gymnasium", env_args=LAKE) as scheduler:
            assert column(await got(scheduler, 4), "episode_scores") == [1.0] * 4

    simulate(main)


# -- textarena ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Any:
    pytest.importorskip("textarena")
    return envs.find_factory("textarena")


def guesses(env: Any, seed: int) -> tuple[list[Any], str]:
    """Play GuessTheNumber by halving; all outcomes, and the first observation."""
    first = env.reset(seed)
    low, high, outcomes = 1, 20, []
    while True:
        guess = (low + high) // 2
        outcomes.append(env.step(f"I say [{guess}]"))
        observation, _, terminated, _, _ = outcomes[-1]
        if terminated:
            return outcomes, first
        if "higher" in observation:
            low = guess + 1
        else:
            high = guess - 1


def test_a_textarena_game_is_played_to_its_reward(arena: Any) -> None:
    outcomes, first = guesses(arena("GuessTheNumber-v0"), seed=7)
    assert "guess the number between 1 and 20" in first
    assert [reward for _, reward, *_ in outcomes[:-1]] == [0.0] * (len(outcomes) - 1)
    _, reward, terminated, truncated, info = outcomes[-1]
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["steps"] == len(outcomes)


def test_a_textarena_observation_is_what_is_new_or_the_whole(arena: Any) -> None:
    for observe, repeated in [("new", False), ("whole", True)]:
        env = arena("GuessTheNumber-v0", observe=observe)
        env.reset(1)
        observation = env.step("[10]")[0]
        assert ("Guess The Number" in observation) is repeated
        assert "The target number is" in observation


def test_an_invalid_textarena_answer_is_told_and_a_second_one_ends_the_game(arena: Any) -> None:
    env = arena("GuessTheNumber-v0")
    env.reset(1)
    observation, _, terminated, _, _ = env.step("no idea")
    assert "invalid move" in observation
    assert not terminated
    _, reward, terminated, _, info = env.step("no idea")
    assert terminated
    assert reward < 1
    assert (info["invalid_move"], info["success"]) == (True, False)


def test_a_textarena_seed_means_one_game_and_leaves_the_global_generators_alone(arena: Any) -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    boards = {arena("FrozenLake-v0").reset(3) for _ in range(3)}
    assert len(boards) == 1
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_textarena_games_side_by_side_do_not_disturb_each_other(arena: Any) -> None:
    """2048 draws a tile after every move: from the state of its own game."""

    def play(seed: int) -> list[str]:
        env = arena("2048-v0")
        return [env.reset(seed), *[env.step(move)[0] for move in ["[left]", "[down]", "[right]", "[up]"] * 3]]

    alone = [play(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(play, [seed % 4 for seed in range(32)]))
    assert together == [alone[seed % 4] for seed in range(32)]


def test_a_textarena_game_for_two_is_refused(arena: Any) -> None:
    with pytest.raises(EnvError, match=r"'TicTacToe-v0' cannot be played by one player: .* has to be 2"):
        arena("TicTacToe-v0").reset(0)


def test_a_textarena_observation_of_another_kind_is_refused(arena: Any) -> None:
    with pytest.raises(ValueError, match="observe must be 'new' or 'whole', got 'all'"):
        arena("GuessTheNumber-v0", observe="all")


def test_textarena_episodes_run_off_a_real_loop(arena: Any) -> None:
    async def main() -> None:
        options = {"env": "textarena", "env_args": {"id": "GuessTheNumber-v0"}, "tasks": 4}
        replica = FakeReplica(lambda request: f"[{len(request.chunks) // 2 + 1}]")
        async with playing([replica], group_size=2, batch_size=8, slots=8, **options) as scheduler:
            batch = await got(scheduler, 8)
        scores, turns = column(batch, "episode_scores"), [len(response) for response in responses(batch)]
        assert scores[::2] == scores[1::2]
        assert turns[::2] == turns[1::2]
        assert max(scores) == 1.0

    asyncio.run(main())
