"""Advantages: how much better than expected a token, a turn or an episode was.

Episode-level estimators give [N], spread over the tokens by `tokens.rows_to_tokens`; the others give [N, L].
`valid` [N] is False for rows that do not exist (`~is_padding`); they change no statistic and get 0. `traj_ids` [N]
tells which rows are one trajectory: it then counts once, and time runs on from one of its rows to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cadenza.algorithms.groups import Groups, row_weights
from cadenza.algorithms.normalise import EPS, normalise, normalise_by_group
from cadenza.algorithms.shapes import at_least_float32, check_rows, check_shapes
from cadenza.algorithms.tokens import TrajectoryTokens, rows_to_tokens, turns_in_row, turns_to_tokens


def grpo(
    scores: Tensor,
    group_ids: Tensor,
    *,
    divide_by_std: bool = True,
    valid: Tensor | None = None,
    traj_ids: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """[N]: the score against the mean of its group, in standard deviations of the group.

    Without `divide_by_std` this is Dr. GRPO: dividing gives groups that are nearly all right or all wrong a larger
    say. A group of one has no comparison and gets 0.
    """
    weight = row_weights(scores, valid=valid, traj_ids=traj_ids)
    return normalise_by_group(scores, group_ids, weight=weight, divide_by_std=divide_by_std, eps=eps)


def rloo(scores: Tensor, group_ids: Tensor, *, valid: Tensor | None = None, traj_ids: Tensor | None = None) -> Tensor:
    """[N]: the score against the mean of the others of its group (leave one out); 0 in a group of one."""
    check_shapes(scores=scores, group_ids=group_ids)
    groups = Groups.of(group_ids, weight=row_weights(scores, valid=valid, traj_ids=traj_ids))
    size = groups.size
    # The mean m of all, oneself included, does as well: x - (n m - x) / (n - 1) = (x - m) n / (n - 1).
    result = (scores.double() - groups.mean(scores)) * size / torch.where(size > 1, size - 1, 1.0)
    return torch.where(groups.weight > 0, result, 0.0).to(at_least_float32(scores).dtype)


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    traj_ids: Tensor | None = None,
    turns: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """[N, L]: the return from each token on, normalised over all tokens of the batch.

    `rewards` [N, L] are token rewards: what a turn is paid on its last token (`tokens.turn_rewards_to_tokens`), usually
    less a KL penalty (`kl.penalised_rewards`).
    """
    returns = discounted_returns(rewards, mask, gamma=gamma, traj_ids=traj_ids, turns=turns)
    return normalise(returns, mask.bool(), eps=eps)


def reinforce_plus_plus_baseline(
    scores: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    valid: Tensor | None = None,
    traj_ids: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """[N, L]: the score against the mean of its group, normalised over all tokens of the batch.

    The one deviation of the whole batch replaces GRPO's one per group.
    """
    centred = grpo(scores, group_ids, divide_by_std=False, valid=valid, traj_ids=traj_ids)
    counted = mask.bool() if valid is None else mask.bool() & valid.bool()[:, None]
    return normalise(rows_to_tokens(centred, counted), counted, eps=eps)


@dataclass(frozen=True, slots=True)
class GaeResult:
    """What a critic's values make of the rewards."""

    advantages: Tensor
    """[N, L], 0 outside the mask"""
    returns: Tensor
    """[N, L] what the critic should have said"""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    traj_ids: Tensor | None = None,
    turns: Tensor | None = None,
) -> GaeResult:
    """Generalised advantage estimation over the tokens that the policy wrote.

    Token columns [N, L]; `values` at a token is the critic's opinion before that token was written, shifted like its
    logprob. `gamma` and `lam` are per token. Prompt and env tokens are not steps of the policy: neither their values
    nor their number enter, and the last token of a turn is followed by the first token of the next. After the last
    token nothing more is expected.
    """
    check_shapes(mask=mask, rewards=rewards, values=values)
    by_trajectory = TrajectoryTokens.of(mask, traj_ids=traj_ids, turns=turns)
    value = by_trajectory.gather(at_least_float32(values.detach()))
    reward = by_trajectory.gather(at_least_float32(rewards.detach())).to(value.dtype)
    after = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    advantages = _discounted_sums(reward + gamma * after - value, gamma * lam)
    return GaeResult(by_trajectory.scatter(advantages), by_trajectory.scatter(advantages + value))


def discounted_returns(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    traj_ids: Tensor | None = None,
    turns: Tensor | None = None,
) -> Tensor:
    """[N, L]: the discounted sum of the rewards [N, L] from each token of the policy on."""
    check_shapes(mask=mask, rewards=rewards)
    by_trajectory = TrajectoryTokens.of(mask, traj_ids=traj_ids, turns=turns)
    return by_trajectory.scatter(_discounted_sums(by_trajectory.gather(at_least_float32(rewards.detach())), gamma))


def turn_returns(step_scores: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[N, T]: the discounted sum of the step scores [N, T] from each turn on; 0 behind the last turn, as they are."""
    return _discounted_sums(at_least_float32(step_scores), gamma)


def step_advantages(
    step_scores: Tensor,
    group_ids: Tensor,
    turns: Tensor,
    *,
    gamma: float = 1.0,
    over: Literal["group", "batch", "nothing"] = "group",
    divide_by_std: bool = True,
    valid: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """[N, L]: the return from each turn on (`step_scores` [N, T]), on every token of that turn (`turns` [N, L]).

    Normalised over all turns of the group or of the batch, each turn counting once, or left as it is.
    """
    check_rows(turns, group_ids=group_ids, valid=valid)
    returns = turn_returns(step_scores, gamma=gamma)
    present = _present(turns, returns.shape[1], valid)
    if over == "group":
        ids = group_ids[:, None].expand(returns.shape)
        returns = normalise_by_group(returns, ids, weight=present, divide_by_std=divide_by_std, eps=eps)
    elif over == "batch":
        returns = normalise(returns, present, divide_by_std=divide_by_std, eps=eps)
    elif over != "nothing":
        raise ValueError(f"over must be 'group', 'batch' or 'nothing', got {over!r}")
    return turns_to_tokens(returns.masked_fill(~present, 0.0), turns)


def gigpo(
    scores: Tensor,
    step_scores: Tensor,
    anchors: Tensor,
    group_ids: Tensor,
    turns: Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    divide_by_std: bool = True,
    valid: Tensor | None = None,
    traj_ids: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """[N, L]: group in group (GiGPO), an episode advantage plus `step_weight` times a step advantage.

    The episode term compares the score [N] with its group, like `grpo`. The step term compares the return from a
    turn on with those of all turns of the group that began in the same state: equal `anchors` [N, T]
    (`tokens.anchor_ids`).
    A state that was seen once gives no step advantage.
    """
    check_shapes(step_scores=step_scores, anchors=anchors)
    check_rows(turns, scores=scores, group_ids=group_ids)
    episode = grpo(scores, group_ids, divide_by_std=divide_by_std, valid=valid, traj_ids=traj_ids, eps=eps)
    returns = turn_returns(step_scores, gamma=gamma)
    present = _present(turns, returns.shape[1], valid)
    ids = group_ids[:, None].expand(returns.shape)
    step = normalise_by_group(returns, ids, anchors, weight=present, divide_by_std=divide_by_std, eps=eps)
    return turns_to_tokens((episode[:, None] + step_weight * step).masked_fill(~present, 0.0), turns)


def _present(turns: Tensor, count: int, valid: Tensor | None) -> Tensor:
    """[N, T]: turns that have tokens in a row that exists. Only there is a turn of a trajectory counted."""
    present = turns_in_row(turns, count)
    return present if valid is None else present & valid.bool()[:, None]


def _discounted_sums(values: Tensor, factor: float) -> Tensor:
    """[M, P]: the sum from each position on, each further value worth `factor` times the one before; by doubling: after
    each pass a sum reaches twice as far."""
    sums, reach = values.clone(), 1
    while reach < values.shape[1] and (weight := factor**reach):
        sums = torch.cat((torch.add(sums[:, :-reach], sums[:, reach:], alpha=weight), sums[:, -reach:]), 1)
        reach *= 2
    return sums
