"""Groups by id, and normalisation by group, by batch and by what was seen so far."""

from __future__ import annotations

import math
import pickle
import statistics

import pytest
import torch
from algorithm_cases import Case, cases, close, given, tensor
from hypothesis import strategies as st

from cadenza.algorithms import Groups, Moments, normalise, normalise_by_group, row_weights
from cadenza.algorithms.normalise import EPS


def members(case: Case, row: int) -> list[float]:
    return [
        score
        for score, group, valid in zip(case.scores, case.group_ids, case.valid, strict=True)
        if valid and group == case.group_ids[row]
    ]


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@given(cases())
def test_group_statistics_equal_a_slow_loop(case: Case) -> None:
    groups = Groups.of(case.group_ids)
    for row in range(len(case.scores)):
        same = [float(score) for score in members(case, row)]
        assert groups.size[row] == len(same)
        assert groups.sum(case.scores)[row] == pytest.approx(sum(same))
        assert groups.mean(case.scores)[row] == pytest.approx(statistics.fmean(same))
        assert groups.std(case.scores)[row] == pytest.approx(deviation(same))
    assert groups.count == len(set(case.group_ids.tolist()))


def test_several_ids_make_a_group_only_together() -> None:
    first, second = torch.tensor([5, 5, -1, -1, 5]), torch.tensor([0, 7, 0, 7, 7])
    assert Groups.of(first, second).sum(tensor(1, 2, 4, 8, 16)).tolist() == [1, 18, 4, 8, 18]


def test_no_rows_are_no_groups() -> None:
    groups = Groups.of(torch.zeros(0, dtype=torch.int64))
    assert groups.count == 0
    assert groups.std(torch.zeros(0)).shape == (0,)


def test_a_trajectory_counts_once_however_many_rows_it_is() -> None:
    weights = row_weights(torch.zeros(6), traj_ids=torch.tensor([3, 8, 3, 3, 8, 1]))
    close(weights, tensor(1 / 3, 1 / 2, 1 / 3, 1 / 3, 1 / 2, 1))


def test_rows_that_are_not_valid_have_no_weight_and_take_none() -> None:
    valid = torch.tensor([True, True, False, False])
    assert row_weights(torch.zeros(4), valid=valid, traj_ids=torch.tensor([3, 3, 3, 9])).tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("rows", range(1, 60))
def test_one_trajectory_in_many_rows_is_a_group_of_one(rows: int) -> None:
    ids = torch.zeros(rows, dtype=torch.int64)
    groups = Groups.of(ids, weight=row_weights(ids, traj_ids=ids))
    assert groups.size.tolist() == [1] * rows
    assert groups.std(torch.full((rows,), 0.3)).tolist() == [0] * rows


@given(cases(), st.booleans())
def test_normalising_by_group_equals_a_slow_loop(case: Case, divide: bool) -> None:
    result = normalise_by_group(case.scores, case.group_ids, divide_by_std=divide)
    for row, score in enumerate(case.scores.tolist()):
        same = [float(value) for value in members(case, row)]
        unit = deviation(same) + EPS if divide else 1.0
        assert result[row] == pytest.approx((score - statistics.fmean(same)) / unit, abs=1e-9)


@pytest.mark.parametrize("size", [2, 7, 8, 1000])
@pytest.mark.parametrize("score", [0.1, 0.7, 1e6 + 0.1])
def test_equal_float32_scores_have_an_advantage_of_exactly_zero(size: int, score: float) -> None:
    scores = torch.full((size,), score)
    assert not normalise_by_group(scores, torch.zeros(size, dtype=torch.int64)).any()
    assert not normalise(scores).any()


@given(cases())
def test_normalising_by_batch_equals_a_slow_loop_over_what_counts(case: Case) -> None:
    counted = case.rewards[case.mask].tolist()
    result = normalise(case.rewards, case.mask)
    mean = statistics.fmean(counted) if counted else 0.0
    unit = deviation(counted) + EPS if len(counted) > 1 else 1.0
    close(result, torch.where(case.mask, (case.rewards - mean) / unit, 0.0))


def test_normalising_without_centring_keeps_the_sign() -> None:
    close(normalise(tensor(1.0, 3.0), centre=False, eps=0.0), tensor(1.0, 3.0) / math.sqrt(2))
    close(normalise(tensor(1.0, 3.0), divide_by_std=False), tensor(-1.0, 1.0))


@given(cases())
def test_masked_values_change_no_statistic(case: Case) -> None:
    garbage = case.with_garbage(3)
    close(normalise(garbage.rewards, case.mask), normalise(case.rewards, case.mask))
    ids = case.group_ids[:, None].expand(case.mask.shape)
    close(
        normalise_by_group(garbage.rewards, ids, weight=case.mask),
        normalise_by_group(case.rewards, ids, weight=case.mask),
    )


@given(cases(), st.integers(0, 6))
def test_running_moments_equal_the_moments_of_all_values_together(case: Case, cut: int) -> None:
    state = Moments()
    for rows in (slice(0, cut), slice(cut, None)):
        state = state.update(case.rewards[rows], case.mask[rows])
    counted = case.rewards[case.mask].tolist()
    assert state.count == len(counted)
    if counted:
        assert state.mean == pytest.approx(statistics.fmean(counted))
        assert state.std == pytest.approx(deviation(counted))


def test_with_decay_old_values_count_less() -> None:
    state = Moments.of(tensor(0.0, 0.0, 0.0, 0.0)).update(tensor(1.0, 1.0), decay=0.5)
    assert state == Moments(count=4, mean=0.5, squares=1.0)


def test_with_decay_zero_only_the_last_batch_counts() -> None:
    state = Moments.of(tensor(5.0, 9.0)).update(tensor(1.0, 3.0), decay=0)
    assert state == Moments.of(tensor(1.0, 3.0))


def test_running_normalisation_measures_by_what_was_seen_before() -> None:
    state = Moments.of(tensor(1.0, 3.0))
    close(state.normalise(tensor(4.0, 2.0), eps=0.0), tensor(2 / math.sqrt(2), 0.0))


def test_a_state_that_has_seen_no_spread_does_not_divide() -> None:
    assert Moments().normalise(tensor(1.0, -2.0)).tolist() == [1.0, -2.0]
    assert Moments.of(tensor(1.0, 1.0)).normalise(tensor(4.0)).tolist() == 3.0


def test_a_running_state_survives_a_checkpoint() -> None:
    state = Moments.of(tensor(0.1, 0.7, 3.0))
    assert pickle.loads(pickle.dumps(state)) == state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_results_are_at_least_float32(dtype: torch.dtype) -> None:
    expected = torch.promote_types(dtype, torch.float32)
    scores = torch.tensor([1, 2], dtype=dtype)
    assert normalise(scores).dtype == expected
    assert normalise_by_group(scores, torch.tensor([0, 0])).dtype == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Moments().update(tensor(1.0), decay=1.5), "decay must be from 0 to 1, got 1.5"),
        (
            lambda: normalise(torch.zeros(2, 3), torch.ones(2)),
            r"weight must have the shape of values \[2, 3\], got \[2\]",
        ),
        (lambda: normalise_by_group(torch.zeros(2), torch.zeros(3)), r"ids\[0\] must have the shape of values"),
        (lambda: row_weights(torch.zeros(2), valid=torch.ones(2, 1)), r"valid must be \[2\], one value per row"),
    ],
)
def test_what_does_not_fit_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


@given(cases(), st.data())
def test_permuting_rows_permutes_the_normalised_values(case: Case, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(case.scores)))))
    close(
        normalise_by_group(case.scores[order], case.group_ids[order]),
        normalise_by_group(case.scores, case.group_ids)[order],
    )
    close(normalise(case.rewards[order], case.mask[order]), normalise(case.rewards, case.mask)[order])
