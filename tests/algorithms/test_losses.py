"""Token losses, KL and entropy: values against a slow loop, gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from algorithm_cases import Case, cases, close, given, tensor
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from cadenza.algorithms import (
    LOSSES,
    TokenLoss,
    denominator,
    entropy,
    entropy_bonus,
    explained_variance,
    kl,
    kl_loss,
    loss_sum,
    merge_metrics,
    penalised_rewards,
    penalised_scores,
    penalised_steps,
    policy_gradient,
    ppo_clip,
    token_weights,
    value_clip,
)
from cadenza.algorithms.aggregate import Aggregation

seeds = st.integers(0, 10**6)
LOW, HIGH, DUAL, CLIP = 0.1, 0.3, 1.5, 0.4
ON = torch.tensor([[True]])

# Each takes what is trained [N, L] (by the name of its column) and the rest of the batch.
LOSS: dict[str, tuple[str, Callable[[Tensor, Case], TokenLoss]]] = {
    "ppo_clip": (
        "logprobs",
        lambda x, c: ppo_clip(x, c.old_logprobs, c.advantages, c.mask, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL),
    ),
    "policy_gradient": ("logprobs", lambda x, c: policy_gradient(x, c.old_logprobs, c.advantages, c.mask)),
    "value_clip": ("values", lambda x, c: value_clip(x, c.old_values, c.returns, c.mask, clip=CLIP)),
    "value": ("values", lambda x, c: value_clip(x, c.old_values, c.returns, c.mask)),
    "kl_loss k2": ("logprobs", lambda x, c: kl_loss(x, c.reference, c.mask, coefficient=0.1, estimator="k2")),
    "kl_loss k3": ("logprobs", lambda x, c: kl_loss(x, c.reference, c.mask, coefficient=0.1)),
    "entropy_bonus": ("entropies", lambda x, c: entropy_bonus(x, c.mask, coefficient=0.1)),
}
each_loss = pytest.mark.parametrize(("column", "function"), LOSS.values(), ids=LOSS)
Function = Callable[[Tensor, Case], TokenLoss]


def run(column: str, function: Function, case: Case) -> tuple[TokenLoss, Tensor]:
    """The loss and the gradient of its sum."""
    x = getattr(case, column).clone().requires_grad_()
    loss = function(x, case)
    loss.values.sum().backward()
    assert x.grad is not None
    return loss, x.grad


def same_metrics(a: dict[str, float], b: dict[str, float]) -> None:
    assert a == pytest.approx(b, rel=1e-6, abs=1e-9)


@each_loss
@given(case=cases(), seed=seeds, count=st.integers(0, 3))
def test_masked_tokens_and_rows_change_neither_value_nor_gradient_nor_metric(
    column: str, function: Function, case: Case, seed: int, count: int
) -> None:
    loss, gradient = run(column, function, case)
    assert not loss.values[~case.mask].any()
    assert not gradient[~case.mask].any()
    other, other_gradient = run(column, function, case.with_garbage(seed).with_padding_rows(count))
    close(other.values[: len(case.mask)], loss.values)
    close(other_gradient[: len(case.mask)], gradient)
    assert not other.values[len(case.mask) :].any()
    assert not other_gradient[len(case.mask) :].any()
    same_metrics(other.metrics, loss.metrics)
    assert other.tokens == loss.tokens == int(case.mask.sum())


@each_loss
@given(case=cases(), data=st.data())
def test_permuting_rows_permutes_the_loss(column: str, function: Function, case: Case, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(case.mask)))))
    (loss, gradient), (other, other_gradient) = run(column, function, case), run(column, function, case.take(order))
    close(other.values, loss.values[order])
    close(other_gradient, gradient[order])
    same_metrics(other.metrics, loss.metrics)


@each_loss
@pytest.mark.parametrize("by", ["token_mean", "sequence_mean", "sequence_sum"])
@given(case=cases(), data=st.data())
def test_micro_batches_add_up_to_the_whole_in_value_gradient_and_metrics(
    column: str, function: Function, by: Aggregation, case: Case, data: st.DataObject
) -> None:
    count = denominator(case.mask, by, constant_length=16 if by == "sequence_sum" else None)
    order = data.draw(st.permutations(range(len(case.mask))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True) if a < b]

    def trained(splits: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
        x = getattr(case, column).clone().requires_grad_()
        total, metrics = 0.0, []
        for rows in splits:
            part = case.take(torch.tensor(rows))
            loss = function(x[rows], part)
            mean = loss_sum(loss.values, token_weights(part.mask, by)) / count
            mean.backward()
            total += mean.item()
            metrics.append((loss.metrics, loss.tokens))
        assert x.grad is not None
        return total, x.grad, merge_metrics(metrics)

    whole, gradient, metrics = trained([list(range(len(case.mask)))])
    total, parts_gradient, parts_metrics = trained(parts)
    assert total == pytest.approx(whole)
    close(parts_gradient, gradient)
    same_metrics(parts_metrics, metrics)


@each_loss
@given(case=cases())
def test_gradients_equal_finite_differences(column: str, function: Function, case: Case) -> None:
    # A kink within the step of the finite difference is no fault of the gradient.
    ratio = (case.logprobs - case.old_logprobs).exp()
    for kink in (1 - LOW, 1 + HIGH, DUAL):
        assume(((ratio - kink).abs() > 1e-4).all())
    assume((((case.values - case.old_values).abs() - CLIP).abs() > 1e-4).all())
    clipped = case.old_values + (case.values - case.old_values).clamp(-CLIP, CLIP)
    difference = (case.values - case.returns).abs() - (clipped - case.returns).abs()
    assume(((difference.abs() > 1e-4) | (clipped == case.values)).all())
    x = getattr(case, column).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, case).values, (x,), eps=1e-6, atol=1e-5)


@given(cases())
def test_ppo_clip_equals_a_slow_loop(case: Case) -> None:
    loss = ppo_clip(
        case.logprobs, case.old_logprobs, case.advantages, case.mask, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
    )
    low = high = dual = 0
    ratios = []
    for row in range(len(case.mask)):
        for column in range(case.mask.shape[1]):
            if not case.mask[row, column]:
                continue
            advantage = float(case.advantages[row, column])
            ratio = math.exp(float(case.logprobs[row, column]) - float(case.old_logprobs[row, column]))
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            objective = min(ratio * advantage, clipped * advantage)
            if advantage < 0:
                objective = max(objective, DUAL * advantage)
            assert loss.values[row, column] == pytest.approx(-objective)
            ratios.append(ratio)
            low += advantage < 0 and ratio < 1 - LOW
            high += advantage > 0 and ratio > 1 + HIGH
            dual += advantage < 0 and ratio > DUAL
    n = max(len(ratios), 1)
    expected = {
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios) / n,
        "ratio_mean": sum(ratios) / n,
        "ratio_max": max(ratios, default=0.0),
        "clip_fraction_low": low / n,
        "clip_fraction_high": high / n,
        "clip_fraction_dual": dual / n,
    }
    same_metrics(loss.metrics, expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.8, 0.0),
        (0.95, -2.0, 1.9, 1.9),
        (2.0, -2.0, 4.0, 4.0),
        (4.0, -2.0, 6.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """clip_low 0.1, clip_high 0.3, dual clip 3; the slope is that of the logprob."""
    x = tensor([[math.log(ratio)]]).requires_grad_()
    result = ppo_clip(x, tensor([[0.0]]), tensor([[advantage]]), ON, clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    result.values.sum().backward()
    assert result.values.item() == pytest.approx(loss)
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("name", LOSSES)
@given(case=cases())
def test_a_named_loss_has_no_gradient_without_advantages(name: str, case: Case) -> None:
    x = case.logprobs.clone().requires_grad_()
    LOSSES[name].function(x, case.old_logprobs, torch.zeros_like(case.advantages), case.mask).values.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


@given(cases())
def test_on_policy_ppo_and_policy_gradient_have_the_same_gradient(case: Case) -> None:
    gradients = []
    for loss in LOSSES.values():
        x = case.logprobs.clone().requires_grad_()
        loss.function(x, case.logprobs, case.advantages, case.mask).values.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    close(gradients[0], gradients[1])
    close(gradients[0], torch.where(case.mask, -case.advantages, 0.0))


@pytest.mark.parametrize("gap", [50.0, 1e4, float("inf"), -50.0, -float("inf")])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_absurd_ratios_give_finite_losses_and_gradients(gap: float, advantage: float, dual_clip: float | None) -> None:
    x = tensor([[gap]]).float().requires_grad_()
    loss = ppo_clip(x, torch.zeros(1, 1), torch.full((1, 1), advantage), ON, dual_clip=dual_clip)
    loss.values.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert loss.values.isfinite().all()


def test_no_gradient_goes_into_constants() -> None:
    constants = [torch.zeros(1, 1, requires_grad=True) for _ in range(2)]
    x = torch.ones(1, 1, requires_grad=True)
    for loss in (
        ppo_clip(x, *constants, ON),
        policy_gradient(x, *constants, ON),
        value_clip(x, *constants, ON, clip=0.1),
        kl_loss(x, constants[0], ON, coefficient=1.0),
    ):
        loss.values.sum().backward()
    assert [constant.grad for constant in constants] == [None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logprobs_have_float32_losses(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, dtype=dtype)
    assert ppo_clip(x, x, x, ON).values.dtype == torch.float32
    assert kl(x, x, ON).dtype == torch.float32


@given(cases())
def test_value_loss_equals_a_slow_loop(case: Case) -> None:
    clipped = value_clip(case.values, case.old_values, case.returns, case.mask, clip=CLIP)
    plain = value_clip(case.values, case.old_values, case.returns, case.mask)
    for row, column in case.mask.nonzero().tolist():
        value, old, target = (float(c[row, column]) for c in (case.values, case.old_values, case.returns))
        near = min(max(value, old - CLIP), old + CLIP)
        assert plain.values[row, column] == pytest.approx(0.5 * (value - target) ** 2)
        assert clipped.values[row, column] == pytest.approx(0.5 * max((value - target) ** 2, (near - target) ** 2))
    assert plain.metrics["value_clip_fraction"] == 0


def test_moving_a_value_beyond_the_clip_gains_nothing() -> None:
    x = tensor([[1.0]]).requires_grad_()
    loss = value_clip(x, tensor([[0.0]]), tensor([[2.0]]), ON, clip=0.5)
    loss.values.sum().backward()
    assert loss.values.item() == pytest.approx(0.5 * 1.5**2)
    assert x.grad is not None
    assert x.grad.item() == 0
    assert loss.metrics["value_clip_fraction"] == 1


@given(cases(), seeds)
def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant(case: Case, seed: int) -> None:
    case = case.with_garbage(seed)
    varied = int(case.mask.sum()) > 1
    constant = torch.full_like(case.returns, 3.0)
    assert explained_variance(case.returns, case.returns, case.mask) == pytest.approx(1.0 if varied else 0.0)
    assert explained_variance(constant, case.returns, case.mask) == pytest.approx(0.0)
    assert explained_variance(-case.returns, case.returns, case.mask) == pytest.approx(-3.0 if varied else 0.0)


@given(seeds, st.integers(1, 5))
def test_entropy_equals_a_slow_loop_also_with_impossible_tokens(seed: int, vocabulary: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, vocabulary, generator=g, dtype=torch.float64) * 3
    impossible = torch.rand(logits.shape, generator=g) < 0.3
    impossible[..., 0] = False
    logits = logits.masked_fill(impossible, -torch.inf)
    result = entropy(logits.log_softmax(-1))
    for row in range(2):
        for column in range(3):
            weights = [math.exp(value) for value in logits[row, column].tolist()]
            chances = [weight / sum(weights) for weight in weights if weight]
            expected = -sum(p * math.log(p) for p in chances)
            assert result[row, column] == pytest.approx(expected, abs=1e-12)
    x = logits.masked_fill(impossible, -30.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: entropy(logits.log_softmax(-1)), (x,))


def test_impossible_tokens_have_no_entropy_gradient() -> None:
    x = tensor([[[0.3, -torch.inf, 1.0]]]).requires_grad_()
    entropy(x.log_softmax(-1)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[0, 0, 1] == 0


def test_an_even_choice_has_the_entropy_of_its_logarithm() -> None:
    assert entropy(torch.full((1, 1, 8), -math.log(8))).item() == pytest.approx(math.log(8))


def test_the_entropy_bonus_lowers_the_loss() -> None:
    loss = entropy_bonus(tensor([[2.0]]), ON, coefficient=0.1)
    assert loss.values.item() == pytest.approx(-0.2)
    assert loss.metrics == {"entropy": 2.0}


@given(cases())
def test_kl_estimators_equal_a_slow_loop(case: Case) -> None:
    results = {name: kl(case.logprobs, case.reference, case.mask, estimator=name) for name in ("k1", "k2", "k3")}
    for row, column in case.mask.nonzero().tolist():
        d = float(case.logprobs[row, column]) - float(case.reference[row, column])
        assert results["k1"][row, column] == pytest.approx(d)
        assert results["k2"][row, column] == pytest.approx(d * d / 2)
        assert results["k3"][row, column] == pytest.approx(math.exp(-d) - 1 + d)
    for result in results.values():
        assert not result[~case.mask].any()


def policies(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a policy and logprobs of its reference over five tokens."""
    g = torch.Generator().manual_seed(seed)
    logits, reference = torch.randn(2, 5, generator=g, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(0)


def expectation(logits: Tensor, reference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Mean over the policy's own tokens of the estimate, and of the gradient of the estimate."""
    chances = logits.detach().softmax(0)
    estimates = kl(logits.log_softmax(0)[None], reference[None], torch.ones(1, 5), estimator=estimator)[0]  # type: ignore[arg-type]
    mean = (chances * estimates).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@given(seeds)
def test_k1_and_k3_are_the_divergence_on_average(seed: int) -> None:
    logits, reference = policies(seed)
    logprobs = logits.detach().log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    close(expectation(logits, reference, "k1")[0], divergence)
    close(expectation(logits, reference, "k3")[0], divergence)


@given(seeds)
def test_the_gradients_of_the_estimators_are_on_average_what_kl_says(seed: int) -> None:
    logits, reference = policies(seed)
    logprobs = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)
    close(expectation(logits, reference, "k1")[1], torch.zeros(5, dtype=torch.float64))
    close(expectation(logits, reference, "k2")[1], reverse)
    close(expectation(logits, reference, "k3")[1], forward)


@given(seeds)
def test_k1_in_the_reward_has_the_gradient_of_the_divergence(seed: int) -> None:
    logits, reference = policies(seed)
    logprobs = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    estimate = kl(logprobs[None], reference[None], mask, estimator="k1")
    rewards = penalised_rewards(torch.zeros(1, 5), estimate, coefficient=1.0)
    loss = policy_gradient(logprobs[None], logprobs[None], rewards, mask).values[0]
    (gradient,) = torch.autograd.grad((logprobs.detach().exp() * loss).sum(), logits)
    close(gradient, reverse)


def test_no_gradient_goes_through_a_penalty_in_the_reward() -> None:
    x, zeros = torch.ones(1, 1, requires_grad=True), torch.zeros(1, 1)
    assert not penalised_rewards(zeros, x, coefficient=1.0).requires_grad
    assert not penalised_scores(zeros[0], x, coefficient=1.0).requires_grad
    assert not penalised_steps(zeros, x, zeros.long(), coefficient=1.0).requires_grad


@pytest.mark.parametrize("gap", [60.0, -60.0, 1e4, -1e4])
def test_k3_stays_finite_and_never_pushes_the_wrong_way(gap: float) -> None:
    x = torch.tensor([[gap]], requires_grad=True)
    loss = kl(x, torch.zeros(1, 1), ON)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert x.grad is not None
    assert x.grad.item() * gap >= 0


@given(cases(), seeds, st.integers(0, 3))
def test_a_penalty_in_the_reward_equals_a_slow_loop_over_what_counts(case: Case, seed: int, count: int) -> None:
    padded = case.with_garbage(seed).with_padding_rows(count)
    rows = len(case.mask)
    estimate = kl(padded.logprobs, padded.reference, padded.mask, estimator="k1")
    ids = torch.cat([case.group_ids, case.group_ids[:1].repeat(count)])
    paid = torch.where(padded.mask, padded.rewards, 0.0)
    turns = torch.where(padded.mask, torch.arange(padded.mask.shape[1]) // 2, -1)
    rewards = penalised_rewards(paid, estimate, coefficient=0.1)
    scores = penalised_scores(padded.scores, estimate, coefficient=0.1)
    joined = penalised_scores(padded.scores, estimate, coefficient=0.1, traj_ids=ids)
    steps = penalised_steps(torch.zeros(len(ids), 4), estimate, turns, coefficient=0.1, traj_ids=ids)
    d = torch.where(case.mask, case.logprobs - case.reference, 0.0)
    close(rewards[:rows], torch.where(case.mask, case.rewards - 0.1 * d, 0.0))
    assert not rewards[rows:].any()
    for row in range(rows):
        for turn in range(4):
            of_turn = d[case.group_ids == case.group_ids[row], 2 * turn : 2 * turn + 2]
            assert steps[row, turn] == pytest.approx(-0.1 * float(of_turn.sum()), abs=1e-6)
        assert scores[row] == pytest.approx(float(case.scores[row]) - 0.1 * float(d[row].sum()))
        same = case.group_ids == case.group_ids[row]
        assert joined[row] == pytest.approx(float(case.scores[row]) - 0.1 * float(d[same].sum()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ppo_clip(x, x, x, x, clip_low=1.5), "clip_low must be from 0 to 1, got 1.5"),
        (lambda x: ppo_clip(x, x, x, x, clip_high=-1), "clip_high must be >= 0, got -1"),
        (lambda x: ppo_clip(x, x, x, x, dual_clip=1.0), "dual_clip must be above 1, got 1.0"),
        (lambda x: ppo_clip(x, x, x[:, 0], x), r"advantages must have the shape of mask \[2, 2\], got \[2\]"),
        (lambda x: policy_gradient(x, x[:1], x, x), r"old_logprobs must have the shape of mask \[2, 2\], got \[1, 2\]"),
        (lambda x: value_clip(x, x, x, x, clip=0.0), "clip must be above 0, got 0.0"),
        (lambda x: kl_loss(x, x, x, coefficient=1, estimator="k1"), "k1 has no gradient on average: take k2 or k3"),
        (lambda x: kl(x, x, x, estimator="k4"), "estimator must be 'k1', 'k2' or 'k3', got 'k4'"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 2))
