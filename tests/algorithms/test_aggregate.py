"""From token losses to one number, and metrics that are measured in parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from algorithm_cases import Case, cases, close, given, tensor
from hypothesis import strategies as st

from cadenza.algorithms import denominator, loss_sum, merge_metrics, token_metrics, token_weights
from cadenza.algorithms.aggregate import Aggregation

MODES: list[Aggregation] = ["token_mean", "sequence_mean", "sequence_sum"]
each_mode = pytest.mark.parametrize("by", MODES)


def length(by: Aggregation) -> int | None:
    return 16 if by == "sequence_sum" else None


def aggregated(case: Case, by: Aggregation) -> float:
    total = loss_sum(case.rewards, token_weights(case.mask, by))
    return float(total) / denominator(case.mask, by, constant_length=length(by))


def aggregated_slowly(case: Case, by: Aggregation) -> float:
    sequences = [row[mask].tolist() for row, mask in zip(case.rewards, case.mask, strict=True) if mask.any()]
    if not sequences:
        return 0.0
    if by == "token_mean":
        return statistics.fmean(token for tokens in sequences for token in tokens)
    if by == "sequence_mean":
        return statistics.fmean(statistics.fmean(tokens) for tokens in sequences)
    return statistics.fmean(sum(tokens) / 16 for tokens in sequences)


@each_mode
@given(case=cases())
def test_aggregation_equals_a_slow_loop(by: Aggregation, case: Case) -> None:
    assert aggregated(case, by) == pytest.approx(aggregated_slowly(case, by), abs=1e-7)


@each_mode
@given(case=cases(), seed=st.integers(0, 9), count=st.integers(0, 3))
def test_masked_tokens_and_rows_change_neither_sum_nor_denominator(
    by: Aggregation, case: Case, seed: int, count: int
) -> None:
    changed = case.with_garbage(seed).with_padding_rows(count)
    assert aggregated(changed, by) == pytest.approx(aggregated(case, by))
    assert denominator(changed.mask, by, constant_length=length(by)) == denominator(
        case.mask, by, constant_length=length(by)
    )


def test_a_filter_on_tokens_has_an_effect_on_the_mean() -> None:
    """The mean over what is kept, not over what there was."""
    loss, mask = tensor([[1.0, 5.0, 3.0]]), torch.tensor([[True, False, True]])
    assert loss_sum(loss, token_weights(mask, "token_mean")) / denominator(mask, "token_mean") == 2.0


@each_mode
@given(case=cases())
def test_packed_rows_have_the_loss_of_padded_ones(by: Aggregation, case: Case) -> None:
    weights = token_weights(case.mask, by)
    packed = case.mask | (case.advantages > 0)
    close(loss_sum(case.rewards[packed][None], weights[packed][None]), loss_sum(case.rewards, weights))


@each_mode
@given(case=cases(), data=st.data())
def test_a_trajectory_of_several_rows_is_one_sequence(by: Aggregation, case: Case, data: st.DataObject) -> None:
    """Each row cut in two at some column: the halves keep their masks and share their id."""
    cut = data.draw(st.integers(0, case.mask.shape[1]))
    left = torch.arange(case.mask.shape[1]) < cut
    ids = torch.arange(len(case.mask)).repeat(2)
    mask, loss = torch.cat([case.mask & left, case.mask & ~left]), case.rewards.repeat(2, 1)
    total = float(loss_sum(loss, token_weights(mask, by, traj_ids=ids)))
    count = denominator(mask, by, constant_length=length(by), traj_ids=ids)
    assert total / count == pytest.approx(aggregated(case, by), abs=1e-7)


@each_mode
def test_an_empty_batch_has_a_loss_of_zero(by: Aggregation) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = loss_sum(loss, token_weights(mask, by)) / denominator(mask, by, constant_length=length(by))
    total.backward()
    assert total.item() == 0
    assert loss.grad is not None
    assert not loss.grad.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float32])
@each_mode
def test_a_mask_may_have_any_dtype_of_a_batch(by: Aggregation, dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=dtype)
    close(token_weights(mask, by), token_weights(mask.bool(), by))
    assert denominator(mask, by, constant_length=length(by)) == denominator(mask.bool(), by, constant_length=length(by))


@given(cases())
def test_token_metrics_equal_a_slow_loop(case: Case) -> None:
    garbage = case.with_garbage(1)
    counted = case.rewards[case.mask].tolist()
    metrics = token_metrics(case.mask, reward=garbage.rewards, reward_max=garbage.rewards)
    assert metrics["reward"] == pytest.approx(statistics.fmean(counted) if counted else 0.0)
    assert metrics["reward_max"] == pytest.approx(max(counted, default=0.0))


def test_merged_metrics_weigh_parts_by_their_tokens() -> None:
    parts: list[tuple[dict[str, float], float]] = [
        ({"kl": 1.0, "ratio_max": 2.0}, 3),
        ({"kl": 5.0, "ratio_max": 1.5}, 1),
        ({"kl": 99.0, "ratio_max": 99.0}, 0),
    ]
    assert merge_metrics(parts) == {"kl": 2.0, "ratio_max": 2.0}
    assert merge_metrics([]) == {}


def test_a_metric_that_not_every_part_has_is_averaged_over_those_that_do() -> None:
    assert merge_metrics([({"a": 1.0}, 1), ({"a": 3.0, "b": 7.0}, 1)]) == {"a": 2.0, "b": 7.0}


def test_metrics_of_no_tokens_at_all_are_zero() -> None:
    nothing = torch.zeros(0, 4)
    assert token_metrics(nothing, kl=nothing, ratio_max=nothing) == {"kl": 0.0, "ratio_max": 0.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: token_weights(m, "mean"), "by must be one of token_mean, sequence_mean, sequence_sum, got 'mean'"),
        (
            lambda m: denominator(m, "sequence_sum"),
            "constant_length goes with 'sequence_sum' and nothing else, got None",
        ),
        (lambda m: denominator(m, "token_mean", constant_length=8), "got 8 with 'token_mean'"),
        (lambda m: denominator(m, "sequence_sum", constant_length=0), "constant_length must be above 0, got 0"),
        (lambda m: loss_sum(m, m[:1]), r"loss must have the shape of weights \[1, 3\], got \[2, 3\]"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3))
