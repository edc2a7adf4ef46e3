"""Advantages, each against a slow loop or numbers worked out by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algorithm_cases import Case, cases, close, given, random_turns, tensor
from hypothesis import strategies as st
from torch import Tensor

from cadenza.algorithms import (
    discounted_returns,
    gae,
    gigpo,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    rows_to_tokens,
    step_advantages,
    turn_returns,
    turn_rewards_to_tokens,
)
from cadenza.algorithms.normalise import EPS

seeds = st.integers(0, 10**6)
factors = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def test_grpo_gives_the_numbers_of_a_small_group() -> None:
    result = grpo(tensor(1, 0, 0, 1, 5), torch.tensor([7, 7, 7, 7, 3]), eps=0.0)[:4]
    close(result, tensor(1, -1, -1, 1) * 0.5 / math.sqrt(1 / 3))


def test_dr_grpo_only_centres() -> None:
    result = grpo(tensor(1, 0, 0, 1, 5), torch.tensor([7, 7, 7, 7, 3]), divide_by_std=False)
    assert result.tolist() == [0.5, -0.5, -0.5, 0.5, 0]


@pytest.mark.parametrize("score", [0.0, 0.3, -1e6])
def test_a_group_of_one_has_no_advantage(score: float) -> None:
    scores, ids = torch.tensor([score, 1.0, 0.0]), torch.tensor([1, 2, 2])
    for result in (grpo(scores, ids), grpo(scores, ids, divide_by_std=False), rloo(scores, ids)):
        assert result[0] == 0


@given(cases())
def test_rloo_compares_with_the_mean_of_the_others(case: Case) -> None:
    result = rloo(case.scores, case.group_ids)
    for row, score in enumerate(case.scores.tolist()):
        others = [
            float(case.scores[other])
            for other in range(len(case.scores))
            if other != row and case.group_ids[other] == case.group_ids[row]
        ]
        assert result[row] == pytest.approx(score - statistics.fmean(others) if others else 0.0)


ROWWISE: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": lambda *args, **kwargs: grpo(*args, divide_by_std=False, **kwargs),
    "rloo": rloo,
}


@pytest.mark.parametrize("function", ROWWISE.values(), ids=ROWWISE)
@given(case=cases(), data=st.data())
def test_a_trajectory_of_several_rows_is_one_member_of_its_group(
    function: Callable[..., Tensor], case: Case, data: st.DataObject
) -> None:
    copies = torch.tensor(data.draw(st.lists(st.integers(1, 3), min_size=len(case.mask), max_size=len(case.mask))))
    rows = torch.arange(len(copies)).repeat_interleave(copies)
    once = function(case.scores, case.group_ids)
    close(function(case.scores[rows], case.group_ids[rows], traj_ids=rows), once[rows])


@pytest.mark.parametrize("function", ROWWISE.values(), ids=ROWWISE)
@given(case=cases(), count=st.integers(0, 4), traj=st.booleans())
def test_padding_rows_change_no_advantage_and_get_none(
    function: Callable[..., Tensor], case: Case, count: int, traj: bool
) -> None:
    padded = case.with_padding_rows(count)
    ids = torch.arange(len(padded.mask)) % len(case.mask) if traj else None
    result = function(padded.scores, padded.group_ids, valid=padded.valid, traj_ids=ids)
    close(result[: len(case.mask)], function(case.scores, case.group_ids))
    assert not result[len(case.mask) :].any()


TOKENWISE: dict[str, Callable[[Case], Tensor]] = {
    "reinforce_plus_plus": lambda c: reinforce_plus_plus(c.rewards, c.mask, gamma=0.9),
    "reinforce_plus_plus_baseline": lambda c: reinforce_plus_plus_baseline(
        c.scores, c.group_ids, c.mask, valid=c.valid
    ),
    "discounted_returns": lambda c: discounted_returns(c.rewards, c.mask, gamma=0.9),
    "gae advantages": lambda c: gae(c.rewards, c.values, c.mask, gamma=0.9, lam=0.8).advantages,
    "gae returns": lambda c: gae(c.rewards, c.values, c.mask, gamma=0.9, lam=0.8).returns,
}


@pytest.mark.parametrize("function", TOKENWISE.values(), ids=TOKENWISE)
@given(case=cases(), seed=seeds, count=st.integers(0, 3))
def test_masked_tokens_and_padding_rows_change_no_token(
    function: Callable[[Case], Tensor], case: Case, seed: int, count: int
) -> None:
    whole = function(case)
    assert not whole[~case.mask].any()
    result = function(case.with_garbage(seed).with_padding_rows(count))
    close(result[: len(case.mask)], whole)
    assert not result[len(case.mask) :].any()


@pytest.mark.parametrize("function", TOKENWISE.values(), ids=TOKENWISE)
@given(case=cases(), data=st.data())
def test_permuting_rows_permutes_the_advantages(
    function: Callable[[Case], Tensor], case: Case, data: st.DataObject
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(case.mask)))))
    close(function(case.take(order)), function(case)[order])


@given(cases(), factors)
def test_discounted_returns_equal_a_slow_loop(case: Case, gamma: float) -> None:
    result = discounted_returns(case.rewards, case.mask, gamma=gamma)
    for row in range(len(case.mask)):
        columns = [c for c in range(case.mask.shape[1]) if case.mask[row, c]]
        for i, column in enumerate(columns):
            expected = sum(gamma**k * float(case.rewards[row, later]) for k, later in enumerate(columns[i:]))
            assert result[row, column] == pytest.approx(expected)


@given(cases(), factors)
def test_reinforce_plus_plus_normalises_the_returns_over_all_tokens(case: Case, gamma: float) -> None:
    returns = discounted_returns(case.rewards, case.mask, gamma=gamma)
    counted = returns[case.mask].tolist()
    result = reinforce_plus_plus(case.rewards, case.mask, gamma=gamma)
    if len(counted) > 1:
        close(result[case.mask], (tensor(counted) - statistics.fmean(counted)) / (deviation(counted) + EPS))
    else:
        assert not result.any()


@given(cases())
def test_reinforce_plus_plus_with_baseline_centres_by_group_and_scales_by_batch(case: Case) -> None:
    result = reinforce_plus_plus_baseline(case.scores, case.group_ids, case.mask)
    centred = []
    for row, group in enumerate(case.group_ids):
        same = case.scores[case.group_ids == group].tolist()
        centred.append(float(case.scores[row]) - statistics.fmean(same))
    tokens = [centred[row] for row in range(len(centred)) for _ in range(int(case.mask[row].sum()))]
    for row, value in enumerate(centred):
        if len(tokens) > 1 and deviation(tokens) > 0 and case.mask[row].any():
            expected = (value - statistics.fmean(tokens)) / (deviation(tokens) + EPS)
            assert result[row][case.mask[row]].tolist() == pytest.approx([expected] * int(case.mask[row].sum()))


@given(cases())
def test_rows_that_are_not_valid_count_in_no_normalisation_whatever_their_mask_says(case: Case) -> None:
    padded = case.with_padding_rows(2)
    mask = torch.cat([case.mask, torch.ones_like(padded.mask[-2:])])
    result = reinforce_plus_plus_baseline(padded.scores, padded.group_ids, mask, valid=padded.valid)
    close(result[:-2], reinforce_plus_plus_baseline(case.scores, case.group_ids, case.mask))
    assert not result[-2:].any()


def gae_slowly(case: Case, gamma: float, lam: float) -> Tensor:
    """The definition: a sum over all later deltas, on the tokens of the policy alone."""
    result = torch.zeros_like(case.values)
    for row in range(len(case.mask)):
        columns = [c for c in range(case.mask.shape[1]) if case.mask[row, c]]
        values = [float(case.values[row, c]) for c in columns] + [0.0]
        deltas = [float(case.rewards[row, c]) + gamma * values[i + 1] - values[i] for i, c in enumerate(columns)]
        for i, column in enumerate(columns):
            result[row, column] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return result


@given(cases(), factors, factors)
def test_gae_equals_the_sum_of_later_deltas(case: Case, gamma: float, lam: float) -> None:
    estimate = gae(case.rewards, case.values, case.mask, gamma=gamma, lam=lam)
    expected = gae_slowly(case, gamma, lam)
    close(estimate.advantages, expected)
    close(estimate.returns, torch.where(case.mask, expected + case.values, 0.0))


def test_env_tokens_between_turns_are_no_steps_of_time() -> None:
    rewards, values = tensor([[0.0, 1.0, 0.0, 2.0]]), tensor([[0.5, 0.4, 0.3, 0.2]])
    alone = gae(rewards, values, torch.ones(1, 4, dtype=torch.bool), gamma=0.9, lam=0.8)
    #        prompt   turn      env       turn
    columns = torch.tensor([2, 3, 7, 8])
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, columns] = True
    spread_rewards, spread_values = torch.full((1, 10), 77.0), torch.full((1, 10), -55.0)
    spread_rewards[0, columns], spread_values[0, columns] = rewards[0].float(), values[0].float()
    between = gae(spread_rewards, spread_values, mask, gamma=0.9, lam=0.8)
    close(between.advantages[0, columns], alone.advantages[0].float())
    close(between.returns[0, columns], alone.returns[0].float())


@given(cases())
def test_with_lambda_one_a_return_is_what_was_paid(case: Case) -> None:
    estimate = gae(case.rewards, case.values, case.mask, gamma=0.9, lam=1.0)
    close(estimate.returns, discounted_returns(case.rewards, case.mask, gamma=0.9))


@given(cases())
def test_a_critic_that_is_right_leaves_no_advantage(case: Case) -> None:
    values = discounted_returns(case.rewards, case.mask, gamma=0.9)
    close(gae(case.rewards, values, case.mask, gamma=0.9, lam=0.5).advantages, torch.zeros_like(values))


@given(seeds, st.integers(1, 4), st.data())
def test_a_trajectory_cut_into_rows_has_the_advantages_of_the_whole(seed: int, count: int, data: st.DataObject) -> None:
    mask, turns = random_turns(seed, count, 4)
    case = replace(Case.random(seed, *mask.shape), mask=mask)
    whole = gae(case.rewards, case.values, mask, gamma=0.9, lam=0.8).advantages
    rows = [(row, turn) for row in range(count) for turn in range(int(turns[row].max()) + 1)]
    rows = data.draw(st.permutations(rows))
    source = torch.tensor([row for row, _ in rows])
    cut_mask = turns[source] == torch.tensor([turn for _, turn in rows])[:, None]
    first = torch.tensor([turn for _, turn in rows])
    cut = gae(
        case.rewards[source],
        case.values[source],
        cut_mask,
        gamma=0.9,
        lam=0.8,
        traj_ids=source + 100,
        turns=torch.where(cut_mask, first[:, None], -1),
    ).advantages
    for row in range(count):
        close(cut[source == row].sum(0), whole[row])


def test_no_gradient_goes_into_an_advantage() -> None:
    values = torch.ones(1, 3, requires_grad=True)
    estimate = gae(torch.ones(1, 3), values, torch.ones(1, 3, dtype=torch.bool))
    assert not estimate.advantages.requires_grad
    assert not estimate.returns.requires_grad


def test_inputs_are_left_as_they_are() -> None:
    case = Case.random(1, 1, 4)
    before = case.rewards.clone(), case.values.clone()
    gae(case.rewards, case.values, case.mask)
    turn_returns(case.rewards)
    close(case.rewards, before[0])
    close(case.values, before[1])


def test_turn_returns_are_rewards_to_go() -> None:
    steps = tensor([[1.0, 0.0, 4.0], [2.0, 6.0, 0.0], [0.0, 0.0, 0.0]])
    close(turn_returns(steps, gamma=0.5), tensor([[2.0, 2.0, 4.0], [5.0, 6.0, 0.0], [0.0, 0.0, 0.0]]))
    close(turn_returns(steps), tensor([[5.0, 4.0, 4.0], [8.0, 6.0, 0.0], [0.0, 0.0, 0.0]]))


@given(seeds, st.integers(1, 5), factors)
def test_with_single_turns_the_turn_return_is_the_step_score(seed: int, rows: int, gamma: float) -> None:
    steps = Case.random(seed, rows, 1).rewards
    close(turn_returns(steps, gamma=gamma), steps)


def episodes(seed: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turns [N, L], step scores [N, T], group ids [N] and anchors [N, T] of random episodes."""
    _, turns = random_turns(seed, rows, 4)
    g = torch.Generator().manual_seed(seed + 1)
    steps = torch.randint(-1, 3, (rows, 4), generator=g).double()
    steps = steps.masked_fill(torch.arange(4) > turns.max(1).values[:, None], 0.0)
    return turns, steps, torch.randint(0, 2, (rows,), generator=g), torch.randint(0, 3, (rows, 4), generator=g)


@given(seeds, st.integers(1, 6), st.sampled_from(["group", "batch", "nothing"]), st.booleans())
def test_step_advantages_equal_a_slow_loop(seed: int, rows: int, over: str, divide: bool) -> None:
    turns, steps, groups, _ = episodes(seed, rows)
    result = step_advantages(steps, groups, turns, gamma=0.9, over=over, divide_by_std=divide)  # type: ignore[arg-type]
    returns = {
        (row, turn): sum(0.9**k * step for k, step in enumerate(steps[row, turn:].tolist()))
        for row in range(rows)
        for turn in range(int(turns[row].max()) + 1)
    }
    for (row, turn), value in returns.items():
        same = [v for (r, _), v in returns.items() if over == "batch" or groups[r] == groups[row]]
        if over != "nothing":
            value -= statistics.fmean(same)
            value /= deviation(same) + EPS if divide and deviation(same) else 1.0
        tokens = result[row][turns[row] == turn].tolist()
        assert tokens == pytest.approx([value] * len(tokens), abs=1e-9)
    assert not result[turns < 0].any()


def test_step_advantages_refuse_a_scope_that_they_do_not_know() -> None:
    turns, steps, groups, _ = episodes(1, 2)
    with pytest.raises(ValueError, match="over must be 'group', 'batch' or 'nothing', got 'task'"):
        step_advantages(steps, groups, turns, over="task")  # type: ignore[arg-type]


@given(seeds, st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo_equals_a_slow_loop(seed: int, rows: int, divide: bool, weight: float) -> None:
    turns, steps, groups, anchors = episodes(seed, rows)
    scores = steps.sum(1)
    result = gigpo(scores, steps, anchors, groups, turns, gamma=0.9, step_weight=weight, divide_by_std=divide)
    returns: dict[tuple[int, int], float] = {}
    for row in range(rows):
        for turn in range(int(turns[row].max()) + 1):
            later = steps[row, turn : int(turns[row].max()) + 1].tolist()
            returns[row, turn] = sum(0.9**k * step for k, step in enumerate(later))

    def against(value: float, same: list[float]) -> float:
        return (value - statistics.fmean(same)) / (deviation(same) + EPS if divide else 1.0)

    for (row, turn), value in returns.items():
        episode = against(float(scores[row]), scores[groups == groups[row]].tolist())
        visits = [
            v for (r, t), v in returns.items() if groups[r] == groups[row] and anchors[r, t] == anchors[row, turn]
        ]
        tokens = result[row][turns[row] == turn].tolist()
        assert tokens == pytest.approx([episode + weight * against(value, visits)] * len(tokens), abs=1e-8)
    assert not result[turns < 0].any()


def test_gigpo_tells_a_good_step_from_a_bad_one_in_the_same_state() -> None:
    """Both start in state 0; one goes on to the goal at once, the other takes a detour and arrives too."""
    steps = tensor([[1.0, 0.0], [0.0, 1.0]])
    anchors = torch.tensor([[0, -1], [0, 1]])
    turns = torch.tensor([[0, 0, -1, -1], [0, -1, 1, 1]])
    result = gigpo(tensor(1, 1), steps, anchors, torch.tensor([0, 0]), turns, gamma=0.5, divide_by_std=False)
    assert result.tolist() == [[0.25, 0.25, 0, 0], [-0.25, 0, 0, 0]]


STEPWISE: dict[str, Callable[..., Tensor]] = {
    "group": lambda turns, steps, groups, anchors, **kw: step_advantages(steps, groups, turns, gamma=0.9, **kw),
    "batch": lambda turns, steps, groups, anchors, **kw: step_advantages(
        steps, groups, turns, gamma=0.9, over="batch", **kw
    ),
    "gigpo": lambda turns, steps, groups, anchors, **kw: gigpo(steps.sum(1), steps, anchors, groups, turns, **kw),
}


@pytest.mark.parametrize("function", STEPWISE.values(), ids=STEPWISE)
@given(seed=seeds, rows=st.integers(1, 5), count=st.integers(0, 3))
def test_padding_rows_change_no_step_advantage(
    function: Callable[..., Tensor], seed: int, rows: int, count: int
) -> None:
    columns = episodes(seed, rows)
    extra = torch.cat([torch.arange(rows), torch.arange(count) % rows])
    valid = torch.arange(rows + count) < rows
    padded = [column[extra] for column in columns]
    padded[1] = torch.where(valid[:, None], padded[1], 1e9)
    result = function(*padded, valid=valid)
    close(result[:rows], function(*columns))
    assert not result[rows:].any()


@pytest.mark.parametrize("function", STEPWISE.values(), ids=STEPWISE)
@given(seed=seeds, rows=st.integers(1, 5), data=st.data())
def test_permuting_rows_permutes_the_step_advantages(
    function: Callable[..., Tensor], seed: int, rows: int, data: st.DataObject
) -> None:
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    columns = episodes(seed, rows)
    close(function(*[column[order] for column in columns]), function(*columns)[order])


@pytest.mark.parametrize("function", STEPWISE.values(), ids=STEPWISE)
@given(seed=seeds, rows=st.integers(1, 4))
def test_steps_as_rows_have_the_advantages_of_the_whole_episode(
    function: Callable[..., Tensor], seed: int, rows: int
) -> None:
    """Each row of a cut trajectory carries the step scores of all of it, but counts its own turns only."""
    turns, *others = episodes(seed, rows)
    whole = function(turns, *others)
    pairs = [(row, turn) for row in range(rows) for turn in range(int(turns[row].max()) + 1)]
    source, first = (torch.tensor(column) for column in zip(*pairs, strict=True))
    cut_turns = torch.where(turns[source] == first[:, None], turns[source], -1)
    kwargs = {"traj_ids": source} if function is STEPWISE["gigpo"] else {}
    cut = function(cut_turns, *[column[source] for column in others], **kwargs)
    for row in range(rows):
        close(cut[source == row].sum(0), whole[row])


def test_a_whole_recipe_on_a_train_batch_of_two_turns() -> None:
    """REINFORCE++ from the columns of a batch whose last row fills it up."""
    turns = torch.tensor([[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1], [-1, -1, -1, -1, -1]])
    mask = turns >= 0
    rewards = turn_rewards_to_tokens(tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]), turns)
    result = reinforce_plus_plus(rewards, mask, eps=0.0)
    close(result, rows_to_tokens(tensor(0.5, -1.5, 0.0), mask))


@pytest.mark.parametrize("function", [grpo, rloo])
def test_scores_and_ids_of_different_lengths_are_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="must have the shape of"):
        function(torch.zeros(3), torch.zeros(2))


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"values must have the shape of mask \[2, 3\], got \[2, 1\]"):
        gae(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3))
