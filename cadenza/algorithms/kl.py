"""The divergence KL(policy || reference), estimated from the tokens that the policy sampled.

With d = log(policy / reference) of a sampled token:

    estimator   value           expectation       gradient of the value      its expectation
    k1          d               KL, exact         grad log policy            0
    k2          d^2 / 2         near KL           d grad log policy          gradient of KL(policy || reference)
    k3          e^-d - 1 + d    KL, exact, >= 0   (1 - e^-d) grad log policy gradient of KL(reference || policy)

So as a loss, k1 does nothing on average (it is refused), k2 has the right gradient, and k3 pulls towards the
reference by the other divergence: nearly the same near it, weaker where the policy has lost the reference's tokens.
In the reward no gradient goes through the estimate; there k1 is right, without bias. All of this holds for tokens
of the current policy; for older ones, multiply by the weights of corrections.py.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from cadenza.algorithms.groups import sum_by_id
from cadenza.algorithms.losses import LOG_RATIO_LIMIT, TokenLoss
from cadenza.algorithms.metrics import token_metrics
from cadenza.algorithms.shapes import at_least_float32, check_rows, check_shapes, zero_outside

KlEstimator = Literal["k1", "k2", "k3"]


def kl(logprobs: Tensor, reference: Tensor, mask: Tensor, *, estimator: KlEstimator = "k3") -> Tensor:
    """[N, L]: the estimate at each token, 0 outside the mask. No gradient goes into the reference."""
    check_shapes(mask=mask, logprobs=logprobs, reference=reference)
    d = zero_outside(logprobs, mask) - zero_outside(reference.detach(), mask)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d**2
    if estimator == "k3":
        d = d.clamp(min=-LOG_RATIO_LIMIT)
        return (-d).exp() - 1 + d
    raise ValueError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def kl_loss(
    logprobs: Tensor, reference: Tensor, mask: Tensor, *, coefficient: float, estimator: KlEstimator = "k3"
) -> TokenLoss:
    """KL as a term of the loss."""
    if estimator == "k1":
        raise ValueError("k1 has no gradient on average: take k2 or k3 in the loss, or put k1 into the reward")
    estimate = kl(logprobs, reference, mask, estimator=estimator)
    return TokenLoss(coefficient * estimate, token_metrics(mask, kl=estimate), int(mask.bool().sum()))


def penalised_rewards(rewards: Tensor, estimate: Tensor, *, coefficient: float) -> Tensor:
    """[N, L]: token rewards [N, L] less the KL at each token (`estimate` [N, L], of `kl`): for GAE and REINFORCE++."""
    check_shapes(rewards=rewards, estimate=estimate)
    return at_least_float32(rewards) - coefficient * estimate.detach()


def penalised_scores(scores: Tensor, estimate: Tensor, *, coefficient: float, traj_ids: Tensor | None = None) -> Tensor:
    """[N]: the score [N] of a trajectory less the KL of all its tokens (`estimate` [N, L]): for GRPO and its like.

    The rows of one trajectory (`traj_ids` [N]) keep one score: the penalty is that of all of them.
    """
    check_rows(estimate, scores=scores, traj_ids=traj_ids)
    return at_least_float32(scores) - coefficient * sum_by_id(estimate.detach().sum(1), traj_ids)


def penalised_steps(
    step_scores: Tensor, estimate: Tensor, turns: Tensor, *, coefficient: float, traj_ids: Tensor | None = None
) -> Tensor:
    """[N, T]: what each turn is paid [N, T] less the KL of its tokens, in whatever row of the trajectory they are."""
    check_shapes(turns=turns, estimate=estimate)
    check_rows(step_scores, traj_ids=traj_ids)
    sums = estimate.new_zeros(len(turns), step_scores.shape[1] + 1).scatter_add(1, turns + 1, estimate.detach())[:, 1:]
    return at_least_float32(step_scores) - coefficient * sum_by_id(sums, traj_ids)
