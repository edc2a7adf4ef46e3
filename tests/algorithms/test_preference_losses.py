"""Losses of pairs and distances between distributions, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from cadenza.algorithms import bradley_terry, dpo, forward_kl, reverse_kl


def test_dpo_is_minus_the_log_of_the_probability_of_the_label() -> None:
    chosen, rejected, ref_chosen, ref_rejected = (torch.tensor([value, 0.0]) for value in (-1.0, -2.0, -1.5, -1.0))
    found = dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.5)
    margin = 0.5 * ((-1.0 + 1.5) - (-2.0 + 1.0))
    assert found.values.tolist() == pytest.approx([math.log(1 + math.exp(-margin)), math.log(2)])
    assert found.metrics == pytest.approx(
        {"accuracy": 0.75, "margin": margin / 2, "reward_chosen": 0.125, "reward_rejected": -0.25}
    ), "a tie counts half"


def test_smoothed_labels_hold_the_margin_back() -> None:
    values = [torch.tensor([value]) for value in (5.0, -5.0, 0.0, 0.0)]
    margin = 10.0
    smoothed = dpo(*values, beta=1.0, label_smoothing=0.1).values
    expected = 0.9 * math.log(1 + math.exp(-margin)) + 0.1 * math.log(1 + math.exp(margin))
    assert float(smoothed) == pytest.approx(expected)


def test_no_gradient_goes_into_the_reference() -> None:
    tensors = [torch.tensor([float(n)], requires_grad=True) for n in range(4)]
    dpo(*tensors).values.sum().backward()
    assert [tensor.grad is None for tensor in tensors] == [False, False, True, True]


def test_settings_that_mean_nothing_are_refused() -> None:
    values = [torch.zeros(1)] * 4
    with pytest.raises(ValueError, match="beta must be above 0, got 0"):
        dpo(*values, beta=0)
    with pytest.raises(ValueError, match=r"label_smoothing must be from 0 to below 0.5, got 0.5"):
        dpo(*values, label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"rejected must have the shape of chosen \[1\], got \[2\]"):
        bradley_terry(torch.zeros(1), torch.zeros(2))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_are_those_of_torch(temperature: float) -> None:
    student, teacher = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    s, t = (torch.distributions.Categorical(logits=logits / temperature) for logits in (student, teacher))
    kl = torch.distributions.kl_divergence
    torch.testing.assert_close(forward_kl(student, teacher, temperature=temperature), kl(t, s))
    torch.testing.assert_close(reverse_kl(student, teacher, temperature=temperature), kl(s, t))


def test_a_teacher_that_is_the_student_is_at_no_distance() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    for divergence in (forward_kl, reverse_kl):
        found = divergence(logits, logits.detach())
        found.sum().backward()
        torch.testing.assert_close(found, torch.zeros(4))
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-6, rtol=0)
