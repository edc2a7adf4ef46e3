"""Weights against mismatched and stale tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from algorithm_cases import Case, cases, close, given, tensor
from hypothesis import strategies as st

from cadenza.algorithms import Correction, truncated_weights
from cadenza.algorithms.corrections import Level

seeds = st.integers(0, 10**6)
CAP = 1.2
LEVELS: list[Level] = ["token", "sequence"]
each_level = pytest.mark.parametrize("level", LEVELS)


def truncated(case: Case, level: Level) -> Correction:
    return truncated_weights(case.logprobs, case.old_logprobs, case.mask, level=level, cap=CAP)


def ratios(case: Case, level: Level) -> dict[tuple[int, int], float]:
    gaps = {
        (row, column): float(case.logprobs[row, column]) - float(case.old_logprobs[row, column])
        for row, column in case.mask.nonzero().tolist()
    }
    if level == "token":
        return {place: math.exp(gap) for place, gap in gaps.items()}
    return {place: math.exp(sum(gap for (row, _), gap in gaps.items() if row == place[0])) for place in gaps}


@each_level
@given(case=cases())
def test_truncated_weights_equal_a_slow_loop(level: Level, case: Case) -> None:
    result, expected = truncated(case, level), ratios(case, level)
    for place, ratio in expected.items():
        assert result.weights[place] == pytest.approx(min(ratio, CAP))
    assert not result.weights[~case.mask].any()
    n = max(len(expected), 1)
    assert result.metrics["weight_changed_fraction"] == pytest.approx(sum(r > CAP for r in expected.values()) / n)
    assert result.metrics["weight_mean"] == pytest.approx(sum(min(r, CAP) for r in expected.values()) / n)


@given(cases())
def test_the_mismatch_is_measured_as_kl_and_as_a_gap(case: Case) -> None:
    gaps = (case.logprobs - case.old_logprobs)[case.mask].tolist()
    metrics = truncated(case, "token").metrics
    n = max(len(gaps), 1)
    assert metrics["mismatch_kl"] == pytest.approx(-sum(gaps) / n)
    assert metrics["logprob_gap_mean"] == pytest.approx(sum(map(abs, gaps)) / n)
    assert metrics["logprob_gap_max"] == pytest.approx(max(map(abs, gaps), default=0.0))


@each_level
@given(case=cases(), seed=seeds, count=st.integers(0, 3))
def test_masked_tokens_and_rows_change_no_weight_and_no_metric(level: Level, case: Case, seed: int, count: int) -> None:
    whole = truncated(case, level)
    result = truncated(case.with_garbage(seed).with_padding_rows(count), level)
    close(result.weights[: len(case.mask)], whole.weights)
    assert not result.weights[len(case.mask) :].any()
    assert result.metrics == pytest.approx(whole.metrics)


@each_level
@given(case=cases(), data=st.data())
def test_permuting_rows_permutes_the_weights_and_a_part_has_the_weights_of_the_whole(
    level: Level, case: Case, data: st.DataObject
) -> None:
    whole = truncated(case, level).weights
    order = torch.tensor(data.draw(st.permutations(range(len(case.mask)))))
    close(truncated(case.take(order), level).weights, whole[order])
    close(truncated(case.take(order[:1]), level).weights, whole[order[:1]])


@each_level
def test_sampler_and_trainer_that_agree_need_no_correction(level: Level) -> None:
    case = Case.random(1, 3, 5)
    same = Case(**{**vars(case), "old_logprobs": case.logprobs})
    result = truncated(same, level)
    close(result.weights, case.mask.double())
    assert result.metrics["weight_mean"] == pytest.approx(1.0)
    assert result.metrics["mismatch_kl"] == result.metrics["weight_changed_fraction"] == 0


def test_truncated_weights_undo_the_sampler_on_average() -> None:
    """A mean over the sampler's tokens, weighted, is the mean over the trainer's: where no ratio meets the cap."""
    trainer, sampler = torch.randn(2, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).log_softmax(1)
    outcome = torch.arange(6.0, dtype=torch.float64)
    weights = truncated_weights(trainer[None], sampler[None], torch.ones(1, 6), cap=1e6).weights[0]
    close((sampler.exp() * weights * outcome).sum(), (trainer.exp() * outcome).sum())


@each_level
def test_absurd_gaps_give_finite_weights_and_metrics(level: Level) -> None:
    case = Case.random(1, 3, 5)
    for gap in (1e4, -1e4, float("inf")):
        wild = Case(**{**vars(case), "logprobs": case.logprobs.float() + gap})
        result = truncated(wild, level)
        assert result.weights.isfinite().all()
        assert math.isfinite(result.metrics["weight_mean"])


def test_weights_carry_no_gradient() -> None:
    x = torch.zeros(1, 2, requires_grad=True)
    assert not truncated_weights(x, torch.zeros(1, 2), torch.ones(1, 2)).weights.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: truncated_weights(x, x, x, cap=0), "cap must be above 0, got 0"),
        (lambda x: truncated_weights(x, x, x, level="row"), "level must be 'token' or 'sequence', got 'row'"),
        (lambda x: truncated_weights(x, x[:1], x), r"sampler_logprobs must have the shape of mask \[2, 2\]"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 2))


def test_a_cap_below_every_ratio_is_the_weight_of_all() -> None:
    result = truncated_weights(tensor([[0.0, 1.0]]), tensor([[-1.0, -1.0]]), torch.ones(1, 2), cap=0.5)
    assert result.weights.tolist() == [[0.5, 0.5]]
