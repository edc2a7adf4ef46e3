"""Between rows, turns and tokens."""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import close, given, random_turns, tensor
from hypothesis import strategies as st
from torch import Tensor

from cadenza.algorithms import (
    anchor_ids,
    reconcile_step_scores,
    rewards_to_written_turns,
    rows_to_tokens,
    turn_rewards_to_tokens,
    turns_in_row,
    turns_to_tokens,
)
from cadenza.algorithms.tokens import TrajectoryTokens

NAN = float("nan")
seeds = st.integers(0, 10**6)


def mask_of(*rows: str) -> Tensor:
    return torch.tensor([[token != "." for token in row] for row in rows])


@given(seeds, st.integers(1, 4), st.integers(1, 4))
def test_turn_values_reach_exactly_the_tokens_of_their_turn(seed: int, rows: int, count: int) -> None:
    _, turns = random_turns(seed, rows, count)
    values = torch.arange(1.0, rows * count + 1).reshape(rows, count)
    spread, paid, present = (
        turns_to_tokens(values, turns),
        turn_rewards_to_tokens(values, turns),
        turns_in_row(turns, count),
    )
    for row, numbers in enumerate(turns.tolist()):
        assert present[row].tolist() == [turn in numbers for turn in range(count)]
        for column, turn in enumerate(numbers):
            assert spread[row, column] == (values[row, turn] if turn >= 0 else 0)
            is_last = turn >= 0 and turn not in numbers[column + 1 :]
            assert paid[row, column] == (values[row, turn] if is_last else 0)


def test_a_turn_with_a_token_taken_out_is_paid_once() -> None:
    turns = torch.tensor([[0, -1, 0, -1, 1, -1]])
    assert turn_rewards_to_tokens(tensor([[3.0, 5.0]]), turns).tolist() == [[0, 0, 3, 0, 5, 0]]


def test_turns_that_are_in_other_rows_are_not_paid_here() -> None:
    turns = torch.tensor([[-1, 1, 1, -1]])
    assert turn_rewards_to_tokens(tensor([[3.0, 5.0, 7.0]]), turns).tolist() == [[0, 0, 5, 0]]


def test_a_nan_of_turns_without_tokens_reaches_no_token() -> None:
    turns = torch.tensor([[-1, 0, -1], [-1, -1, -1]])
    values = tensor([[2.0, NAN], [NAN, NAN]])
    assert turns_to_tokens(values, turns).tolist() == [[0, 2, 0], [0, 0, 0]]
    assert turn_rewards_to_tokens(values, turns).tolist() == [[0, 2, 0], [0, 0, 0]]


def test_a_row_value_is_on_its_masked_tokens_only() -> None:
    assert rows_to_tokens(tensor(3.0, NAN), mask_of(".a.b", "....")).tolist() == [[0, 3, 0, 3], [0, 0, 0, 0]]


def test_what_a_turn_without_tokens_is_paid_goes_to_the_one_before_or_else_after() -> None:
    steps = tensor([[1.0, 2.0, 4.0, 8.0, 0.0]])
    assert rewards_to_written_turns(steps, torch.tensor([[-1, 1, 1, 3]])).tolist() == [[0, 7, 0, 8, 0]]
    close(rewards_to_written_turns(steps, torch.tensor([[0, 1, 2, 3]])), steps)


def test_a_turn_with_tokens_in_another_row_of_the_trajectory_keeps_its_pay() -> None:
    steps, turns = tensor([[1.0, 2.0, 4.0]] * 2), torch.tensor([[0, -1], [2, -1]])
    assert rewards_to_written_turns(steps, turns, traj_ids=torch.tensor([5, 5])).tolist() == [[3, 0, 4]] * 2
    assert rewards_to_written_turns(steps, turns).tolist() == [[7, 0, 0], [0, 0, 7]]


def anchors_of(*rows: str, count: int) -> list[list[int]]:
    """Digits are tokens of the turns 0, 1 ...; letters are tokens of prompts, with '.' for the end token."""
    text = "".join(rows)
    tokens = torch.tensor([ord("." if token in "56789" else token) for token in text])
    turns = torch.tensor([int(token) % 5 if token.isdigit() else -1 for token in text])
    offsets = torch.tensor([0, *[len("".join(rows[: n + 1])) for n in range(len(rows))]])
    return anchor_ids(tokens, turns, offsets, count).tolist()


def test_equal_observations_share_an_anchor() -> None:
    assert anchors_of("ab0c1ab2", "c0", "ab3", "x", "", count=4) == [
        [0, 1, 0, -1],
        [1, -1, -1, -1],
        [-1, -1, -1, 0],
        [-1] * 4,
        [-1] * 4,
    ]
    assert anchor_ids(*(torch.zeros(n, dtype=torch.int64) for n in (0, 0, 1)), 2).shape == (0, 2)


def test_an_end_token_counts_as_the_answer_s_also_where_the_prompt_has_it() -> None:
    # 5 is the end token that turn 0 wrote itself; behind the answer 0 alone the prompt begins with it.
    assert anchors_of("a05b1", "a0.b1", "a00.c1", count=2) == [[0, 1], [0, 1], [0, 2]]


def test_a_trajectory_has_the_tokens_in_the_order_in_which_they_were_written() -> None:
    mask, ids = mask_of("..ef", ".x..", "ab.c", "...."), torch.tensor([7, 1, 7, 2])
    names = torch.tensor([[ord(token) for token in row] for row in ("..ef", ".x..", "ab.c", "....")])
    turns = torch.tensor([[-1, -1, 2, 2], [-1, 0, -1, -1], [0, 0, -1, 1], [-1, -1, -1, -1]])
    by_trajectory = TrajectoryTokens.of(mask, traj_ids=ids, turns=turns)
    lines = ["".join(chr(token) for token in row if token) for row in by_trajectory.gather(names).tolist()]
    assert sorted(line for line in lines if line) == ["abcef", "x"]
    assert by_trajectory.scatter(by_trajectory.gather(names)).tolist() == names.masked_fill(~mask, 0).tolist()


@given(seeds, st.integers(1, 5))
def test_what_is_ordered_by_trajectory_comes_back_where_it_was(seed: int, rows: int) -> None:
    mask, turns = random_turns(seed, rows, 3)
    values = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    for by_trajectory in (
        TrajectoryTokens.of(mask),
        TrajectoryTokens.of(mask, traj_ids=torch.arange(rows) % 2, turns=turns),
    ):
        close(by_trajectory.scatter(by_trajectory.gather(values)), values * mask)


def test_a_batch_without_trained_tokens_has_no_tokens_by_trajectory() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for empty in (mask, mask[:0]):
        by_trajectory = TrajectoryTokens.of(empty)
        assert by_trajectory.gather(torch.ones(empty.shape)).shape == (len(empty), 0)
        assert not by_trajectory.scatter(by_trajectory.gather(torch.ones(empty.shape))).any()


def test_settled_step_scores_add_up_to_the_score() -> None:
    steps = tensor([[0.5, 1.0, 0.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]])
    settled = reconcile_step_scores(steps, torch.tensor([2, 3, 0]), tensor(4.0, 0.25, 1.0))
    close(settled, tensor([[0.5, 3.5, 0.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]]))


def test_a_last_turn_that_the_env_paid_nothing_gets_the_whole_score() -> None:
    steps = tensor([[0.0, 0.0, 0.0]])
    assert reconcile_step_scores(steps, torch.tensor([2]), tensor([3.0])).tolist() == [[0.0, 3.0, 0.0]]


@pytest.mark.parametrize("function", [turns_to_tokens, turn_rewards_to_tokens])
def test_turns_that_do_not_fit_their_values_are_refused(function: object) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match="turns has turn 2, but the trajectories have 2 turns at most"):
        function(torch.zeros(1, 2), torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="turns has 1 rows, the values of the turns have 3"):
        function(torch.zeros(3, 2), torch.tensor([[0, 1]]))
