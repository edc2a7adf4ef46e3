"""The estimator: every advantage against a slow computation from the trajectories themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field, ValidationError
from torch import Tensor
from training_cases import VOCAB, parameters, tiny_model

from cadenza.algorithms import explained_variance
from cadenza.data import TRAIN_BATCH, DataProto
from cadenza.inference.replica import Finish, Span
from cadenza.rollout.collate import collate
from cadenza.rollout.records import Task, Trajectory, Turn
from cadenza.training import Actor, ActorConfig, Critic, CriticConfig, Estimator, EstimatorConfig
from cadenza.training.advantage_inputs import AdvantageInputs
from cadenza.training.estimators import AdvantageEstimator, AdvantageResult
from cadenza.training.token_rows import TokenRows

EPS = 1e-6
CONTEXTS = ("one", "each", "some")
"""Where contexts start afresh: never, at every turn, at some."""


def turn(
    prompt: Sequence[int], response: Sequence[int], reward: float = 0.0, *, fresh: bool = False, logprob: float = -1.0
) -> Turn:
    tokens = np.array(response, np.int32)
    logprobs = np.linspace(logprob, 0.5 * logprob, len(response), dtype=np.float32)
    half = len(response) // 2
    spans = (Span(0, half), Span(1, len(response) - half))
    return Turn(np.array(prompt, np.int32), tokens, logprobs, spans, Finish.STOP, fresh, 0.0, 1.0, reward)


def episode(number: int, group: int, turns: Sequence[Turn], score: float | None = None) -> Trajectory:
    task = Task(f"toy/{group}", group)
    made = Trajectory(number, task, group, number, 0, 0, number, list(turns))
    made.score = made.episode_score if score is None else score
    return made


def episodes(seed: int = 0, contexts: str = "one", *, judged: bool = True) -> list[Trajectory]:
    """Groups of different sizes that meet few boards, with silent turns among the others; one group has equal scores,
    one has a single member. A judged episode has another score than what the env paid."""
    rng = np.random.default_rng(seed)
    boards = [[7, 1], [7, 2], [7, 2, 2], []]
    found = []
    for group, size in enumerate((4, 3, 1, 3)):
        for _ in range(size):
            turns = []
            for number in range(rng.integers(1, 5)):
                fresh = number == 0 or contexts == "each" or (contexts == "some" and rng.random() < 0.5)
                silent = rng.random() < 0.2
                response = rng.integers(0, VOCAB, 0 if silent else rng.integers(1, 5)).tolist()
                board = boards[0 if number == 0 else rng.integers(0, 3 if fresh else 4)]
                reward = 0.0 if group == 3 else float(rng.integers(-1, 3))
                turns.append(turn(board, response, reward, fresh=fresh, logprob=-float(rng.random())))
            if not any(len(t.response) for t in turns):
                turns[0] = replace(turn([7, 1], [3, 4], turns[0].reward, fresh=True))
            score = float(rng.integers(0, 4)) if judged and group != 3 else None
            found.append(episode(1000 - 7 * len(found), 50 - group, turns, score))
    return found


def reference(trajectories: Sequence[Trajectory], seed: int = 0) -> list[list[float]]:
    """Logprobs of each trajectory's tokens under another model."""
    rng = np.random.default_rng(seed)
    return [(-rng.random(t.response_tokens)).astype(np.float32).tolist() for t in trajectories]


def batch_of(trajectories: Sequence[Trajectory], **columns: Sequence[Sequence[float]]) -> DataProto:
    """Their batch, with token columns from lists of each trajectory's response tokens."""
    batch = collate(trajectories)
    TRAIN_BATCH.check(batch)
    for name, values in columns.items():
        batch = TokenRows.of(batch).write(batch, name, np.array([v for line in values for v in line], np.float32))
    return batch


def told(batch: DataProto, name: str = "advantages") -> list[float]:
    """A column at the trained tokens: trajectory by trajectory, in the order in which they were written."""
    values: list[float] = TokenRows.of(batch).read(batch, name).tolist()
    return values


def estimate(batch: DataProto, **config: Any) -> DataProto:
    return Estimator(EstimatorConfig(**config)).advantages(batch)[0]


# -- the slow way ------------------------------------------------------------------------------------------------------


def deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def standard(value: float, among: Sequence[float], divide: bool = True) -> float:
    centred = value - math.fsum(among) / len(among)
    return centred / (deviation(among) + EPS) if divide else centred


def whitened(values: Sequence[float]) -> list[float]:
    spread = deviation(values)
    mean = math.fsum(values) / len(values)
    return [(v - mean) / (spread + EPS) if spread else v - mean for v in values]


def lines_of(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Of each trajectory: the turn of each of its tokens."""
    return [[i for i, t in enumerate(trajectory.turns) for _ in t.response] for trajectory in trajectories]


def kl_of(trajectories: Sequence[Trajectory], ref: Sequence[Sequence[float]]) -> list[list[float]]:
    """k1 of each token."""
    written = [[float(p) for t in trajectory.turns for p in t.logprobs] for trajectory in trajectories]
    return [[a - b for a, b in zip(one, two, strict=True)] for one, two in zip(written, ref, strict=True)]


def pays(trajectory: Trajectory) -> list[float]:
    """Of each turn, the verdict included."""
    found = [t.reward for t in trajectory.turns]
    found[-1] += trajectory.score - sum(found)
    return found


def token_rewards(trajectory: Trajectory) -> list[float]:
    """Of each token; what a silent turn earned goes to the last token before it, or else to the end of the turn that
    comes first."""
    turns = [i for i, t in enumerate(trajectory.turns) for _ in t.response]
    rewards = [0.0] * len(turns)
    for number, pay in enumerate(pays(trajectory)):
        before = [place for place, t in enumerate(turns) if t <= number]
        place = before[-1] if before else max(p for p, t in enumerate(turns) if t == turns[0])
        rewards[place] += pay
    return rewards


def sums(values: Sequence[float], gamma: float) -> list[float]:
    found: list[float] = []
    for value in reversed(values):
        found.append(value + gamma * (found[-1] if found else 0.0))
    return found[::-1]


def spread_rows(per_trajectory: Sequence[float], trajectories: Sequence[Trajectory]) -> list[float]:
    return [value for value, t in zip(per_trajectory, trajectories, strict=True) for _ in range(t.response_tokens)]


def of_group(trajectories: Sequence[Trajectory], values: Sequence[float], group: int) -> list[float]:
    return [v for v, t in zip(values, trajectories, strict=True) if t.group == group]


def slow_grpo(ts: Sequence[Trajectory], scores: Sequence[float], divide: bool = True) -> list[float]:
    pairs = zip(scores, ts, strict=True)
    return spread_rows([standard(s, of_group(ts, scores, t.group), divide) for s, t in pairs], ts)


def slow_rloo(ts: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
    found = []
    for i, t in enumerate(ts):
        others = [scores[j] for j, other in enumerate(ts) if other.group == t.group and j != i]
        found.append(scores[i] - sum(others) / len(others) if others else 0.0)
    return spread_rows(found, ts)


def slow_reinforce(ts: Sequence[Trajectory], kls: Sequence[Sequence[float]], gamma: float) -> list[float]:
    lines = [[r - k for r, k in zip(token_rewards(t), kl, strict=True)] for t, kl in zip(ts, kls, strict=True)]
    return whitened([value for line in lines for value in sums(line, gamma)])


def slow_gae(
    ts: Sequence[Trajectory],
    kls: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    gamma: float,
    lam: float,
) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for t, kl, value in zip(ts, kls, values, strict=True):
        rewards = [r - k for r, k in zip(token_rewards(t), kl, strict=True)]
        after = [*value[1:], 0.0]
        errors = [r + gamma * b - a for r, a, b in zip(rewards, value, after, strict=True)]
        line = sums(errors, gamma * lam)
        advantages += line
        returns += [a + v for a, v in zip(line, value, strict=True)]
    return advantages, returns


def turn_returns(ts: Sequence[Trajectory], kls: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    found = []
    for t, kl, line in zip(ts, kls, lines_of(ts), strict=True):
        paid = [pay - sum(k for k, at in zip(kl, line, strict=True) if at == n) for n, pay in enumerate(pays(t))]
        found.append(sums(paid, gamma))
    return found


def spread_turns(ts: Sequence[Trajectory], value: Callable[[int, int], float]) -> list[float]:
    return [value(i, number) for i, line in enumerate(lines_of(ts)) for number in line]


def slow_step(
    ts: Sequence[Trajectory], kls: Sequence[Sequence[float]], gamma: float, over: str, divide: bool = True
) -> list[float]:
    returns = turn_returns(ts, kls, gamma)
    spoken = [(i, n) for i, t in enumerate(ts) for n, made in enumerate(t.turns) if len(made.response)]

    def value(i: int, number: int) -> float:
        if over == "nothing":
            return returns[i][number]
        peers = [returns[j][n] for j, n in spoken if over == "batch" or ts[j].group == ts[i].group]
        return standard(returns[i][number], peers, divide)

    return spread_turns(ts, value)


def slow_gigpo(
    ts: Sequence[Trajectory], kls: Sequence[Sequence[float]], gamma: float, weight: float, divide: bool = True
) -> list[float]:
    returns = turn_returns(ts, kls, gamma)
    scores = [t.score - sum(kl) for t, kl in zip(ts, kls, strict=True)]
    shown: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, t in enumerate(ts):
        unanswered: tuple[int, ...] = ()
        for n, made in enumerate(t.turns):
            unanswered = tuple(made.prompt.tolist()) if made.fresh else unanswered + tuple(made.prompt.tolist())
            if len(made.response):
                shown[i, n], unanswered = unanswered, ()

    def value(i: int, number: int) -> float:
        peers = [
            returns[j][n] for (j, n), board in shown.items() if ts[j].group == ts[i].group and board == shown[i, number]
        ]
        whole = standard(scores[i], of_group(ts, scores, ts[i].group), divide)
        return whole + weight * standard(returns[i][number], peers, divide)

    return spread_turns(ts, value)


# -- every estimator ---------------------------------------------------------------------------------------------------

COEF = 0.3
CASES: list[tuple[dict[str, Any], Callable[[Any, Any, Any], list[float]]]] = [
    ({"name": "grpo"}, lambda ts, s, k: slow_grpo(ts, s)),
    ({"name": "grpo", "divide_by_std": False}, lambda ts, s, k: slow_grpo(ts, s, False)),
    ({"name": "rloo"}, lambda ts, s, k: slow_rloo(ts, s)),
    ({"name": "reinforce++"}, lambda ts, s, k: slow_reinforce(ts, k, 1.0)),
    ({"name": "reinforce++", "gamma": 0.9}, lambda ts, s, k: slow_reinforce(ts, k, 0.9)),
    ({"name": "reinforce++-baseline"}, lambda ts, s, k: whitened(slow_grpo(ts, s, False))),
    ({"name": "gigpo"}, lambda ts, s, k: slow_gigpo(ts, k, 0.95, 1.0)),
    (
        {"name": "gigpo", "gamma": 0.5, "step_weight": 2.0, "divide_by_std": False},
        lambda ts, s, k: slow_gigpo(ts, k, 0.5, 2.0, False),
    ),
    ({"name": "step"}, lambda ts, s, k: slow_step(ts, k, 1.0, "group")),
    ({"name": "step", "gamma": 0.5, "over": "batch"}, lambda ts, s, k: slow_step(ts, k, 0.5, "batch")),
    (
        {"name": "step", "over": "batch", "divide_by_std": False},
        lambda ts, s, k: slow_step(ts, k, 1.0, "batch", False),
    ),
    ({"name": "step", "over": "nothing"}, lambda ts, s, k: slow_step(ts, k, 1.0, "nothing")),
]
NAMES = [*(config for config, _ in CASES), {"name": "gae", "whiten": False}, {"name": "gae"}]


@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("coef", [0.0, COEF])
@pytest.mark.parametrize(("config", "slow"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_advantages_are_those_of_the_trajectories(
    config: dict[str, Any], slow: Callable[..., list[float]], coef: float, contexts: str
) -> None:
    for seed in range(4):
        ts = episodes(seed, contexts)
        ref = reference(ts, seed)
        kls = [[coef * k for k in line] for line in kl_of(ts, ref)]
        scores = [t.score - sum(line) for t, line in zip(ts, kls, strict=True)]
        batch = estimate(batch_of(ts, ref_logprobs=ref), kl_coef=coef, **config)
        assert told(batch) == pytest.approx(slow(ts, scores, kls), abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("coef", [0.0, COEF])
def test_gae_runs_over_the_tokens_of_a_trajectory(coef: float, contexts: str) -> None:
    ts = episodes(3, contexts)
    ref, values = reference(ts), reference(ts, 1)
    kls = [[coef * k for k in line] for line in kl_of(ts, ref)]
    batch = batch_of(ts, ref_logprobs=ref, values=values)
    plain = estimate(batch, name="gae", gamma=0.9, lam=0.8, whiten=False, kl_coef=coef)
    advantages, returns = slow_gae(ts, kls, values, 0.9, 0.8)
    assert told(plain) == pytest.approx(advantages, abs=1e-5)
    assert told(plain, "returns") == pytest.approx(returns, abs=1e-5)
    usual = estimate(batch, name="gae", kl_coef=coef)
    advantages, returns = slow_gae(ts, kls, values, 1.0, 0.95)
    assert told(usual) == pytest.approx(whitened(advantages), abs=1e-5)
    assert told(usual, "returns") == pytest.approx(returns, abs=1e-5)


@pytest.mark.parametrize("contexts", ["one", "some"])
@pytest.mark.parametrize("config", NAMES, ids=str)
def test_rows_that_fill_up_a_batch_change_nothing(config: dict[str, Any], contexts: str) -> None:
    ts = episodes(5, contexts)
    batch = batch_of(ts, values=reference(ts, 1), ref_logprobs=reference(ts, 2))
    padded, count = batch.pad_to_multiple(len(batch) + 3)
    assert count == 3
    filling = padded.batch.numpy("is_padding")
    padded.batch["scores"] = np.where(filling, np.nan, padded.batch.numpy("scores")).astype(np.float32)
    padded.batch["traj_id"] = np.where(filling, -1, padded.batch.numpy("traj_id"))
    settings = {**config, "kl_coef": COEF, "score_norm": "batch"}
    one, metrics = Estimator(EstimatorConfig(**settings)).advantages(batch)
    two, padded_metrics = Estimator(EstimatorConfig(**settings)).advantages(padded)
    assert told(two) == pytest.approx(told(one), abs=1e-6)
    assert padded_metrics == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("config", NAMES, ids=str)
def test_the_order_of_the_rows_does_not_matter(config: dict[str, Any]) -> None:
    ts = episodes(6, "each")
    batch = batch_of(ts, values=reference(ts, 1))
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = estimate(batch.reorder(order), **config).reorder(np.argsort(order))
    assert told(shuffled) == pytest.approx(told(estimate(batch, **config)), abs=1e-5)


@pytest.mark.parametrize("config", NAMES, ids=str)
def test_the_columns_that_were_there_stay_as_they_are(config: dict[str, Any]) -> None:
    ts = episodes(7)
    batch = batch_of(ts, values=reference(ts, 1), ref_logprobs=reference(ts, 2))
    before = batch.select()
    result = estimate(batch, **config, kl_coef=COEF, score_norm="batch", score_clip=0.5)
    assert batch == before
    new = ["advantages", "returns"] if config["name"] == "gae" else ["advantages"]
    assert result.select([name for name in result.batch if name not in new]) == before


# -- what the score is -------------------------------------------------------------------------------------------------


def test_a_verdict_is_paid_with_the_last_turn() -> None:
    ts = [episode(0, 0, [turn([1], [2, 3], 1.0, fresh=True), turn([4], [5], 1.0)], score=10.0)]
    batch = batch_of(ts)
    assert told(estimate(batch, name="step", over="nothing")) == [10.0, 10.0, 9.0]
    ts = [episode(0, 0, ts[0].turns)]
    assert told(estimate(batch_of(ts), name="step", over="nothing")) == [2.0, 2.0, 1.0]


def test_what_a_silent_turn_earned_is_not_lost() -> None:
    turns = [turn([1], [], 2.0, fresh=True), turn([1], [2, 3], 1.0), turn([4], [], 5.0)]
    batch = batch_of([episode(0, 0, turns)], values=[[0.0, 0.0]])
    assert told(estimate(batch, name="gae", lam=1.0), "returns") == [8.0, 8.0]


@pytest.mark.parametrize("contexts", CONTEXTS)
def test_normalised_scores_are_those_of_the_trajectories(contexts: str) -> None:
    ts = episodes(8, contexts)
    spread = deviation([t.score for t in ts])
    for t, score in zip(ts, whitened([t.score for t in ts]), strict=True):
        t.turns = [replace(made, reward=made.reward / (spread + EPS)) for made in t.turns]
        t.score = score
    normalised = {"name": "step", "gamma": 0.5, "over": "nothing"}
    expected = slow_step(ts, [[0.0] * t.response_tokens for t in ts], 0.5, "nothing")
    assert told(estimate(batch_of(episodes(8, contexts)), **normalised, score_norm="batch")) == pytest.approx(
        expected, abs=1e-5
    )


def test_a_clipped_score_is_within_the_bound() -> None:
    ts = [episode(i, 0, [turn([1], [2], score, fresh=True)]) for i, score in enumerate((-9.0, 0.0, 0.5, 9.0))]
    found = told(estimate(batch_of(ts), name="step", over="nothing", score_clip=2.0))
    assert found == [-2.0, 0.0, 0.5, 2.0]


def test_running_normalisation_remembers_over_a_restart() -> None:
    config = EstimatorConfig(name="rloo", score_norm="running")
    batches = [batch_of(episodes(seed)) for seed in range(3)]
    whole, before, after = Estimator(config), Estimator(config), Estimator(config)
    for batch in batches[:2]:
        whole.advantages(batch)
        before.advantages(batch)
    after.load_state(json.loads(json.dumps(before.state())))
    assert told(after.advantages(batches[2])[0]) == told(whole.advantages(batches[2])[0])
    assert after.state() == whole.state()
    seen = [t.score for seed in range(3) for t in episodes(seed)]
    assert whole.state()["count"] == len(seen)
    ts = episodes(2)
    scores = [(t.score - sum(seen) / len(seen)) / (deviation(seen) + EPS) for t in ts]
    found = told(Estimator(config).advantages(batches[2])[0])
    assert told(after.advantages(batches[2])[0]) != found
    again = Estimator(config)
    again.load_state(before.state())
    assert told(again.advantages(batches[2])[0]) == pytest.approx(slow_rloo(ts, scores), abs=1e-5)


def test_a_batch_that_failed_is_not_remembered() -> None:
    estimator = Estimator(EstimatorConfig(name="gae", score_norm="running"))
    with pytest.raises(KeyError, match="'values'"):
        estimator.advantages(batch_of(episodes()))
    assert estimator.state() == Estimator().state()


def test_the_kl_may_be_that_of_the_trainer() -> None:
    ts = [episode(i, 0, [turn([1], [2, 3], float(i), fresh=True)]) for i in range(2)]
    old, ref = [[-1.0, -2.0], [-1.0, -1.0]], [[-1.5, -2.0], [-1.0, -3.0]]
    batch = batch_of(ts, old_logprobs=old, ref_logprobs=ref)
    config = EstimatorConfig(name="rloo", kl_coef=0.5, kl_logprobs="old")
    result, metrics = Estimator(config).advantages(batch)
    assert told(result) == pytest.approx([-0.25, -0.25, 0.25, 0.25])
    assert metrics["reward_kl"] == pytest.approx((0.5 + 2.0) / 4)
    k2 = EstimatorConfig(name="rloo", kl_coef=0.5, kl_logprobs="old", kl_estimator="k2")
    assert Estimator(k2).advantages(batch)[1]["reward_kl"] == pytest.approx((0.125 + 2.0) / 4)


def test_a_teacher_judges_each_token_that_the_student_wrote() -> None:
    ts = [episode(i, 0, [turn([1], [2, 3], float(i), fresh=True)]) for i in range(2)]
    written, taught = [[-1.0, -2.0], [-0.5, -1.0]], [[-1.5, -0.5], [-0.5, -3.0]]
    expected = [-0.5, 1.5, 0.0, -2.0]
    assert told(estimate(batch_of(ts, infer_logprobs=written, ref_logprobs=taught), name="distill")) == expected
    trainer = [[-2.0, -2.0], [-2.0, -2.0]]
    batch = batch_of(ts, infer_logprobs=written, old_logprobs=trainer, ref_logprobs=taught)
    assert told(estimate(batch, name="distill")) == [0.5, 1.5, 1.5, -1.0], "the trainer's own logprobs, where known"


# -- GiGPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
def test_turns_that_were_shown_the_same_board_are_compared(fresh: bool) -> None:
    a, b, c = [7, 1], [7, 2], [7, 2, 2]
    ts = [
        episode(0, 0, [turn(a, [3], fresh=True), turn(b, [4], 1.0, fresh=fresh)]),
        episode(1, 0, [turn(a, [5, 5], fresh=True), turn(c, [6], fresh=fresh), turn(b, [4], fresh=fresh)]),
        episode(2, 1, [turn(b, [4], 5.0, fresh=True)]),
    ]
    found = told(estimate(batch_of(ts), name="gigpo", gamma=1.0, divide_by_std=False))
    # The episode part is +-0.5. Board a: returns 1 and 0. Board b: 1 and 0, in group 0 only. Board c: seen once.
    assert found == pytest.approx([1.0, 1.0, -1.0, -1.0, -0.5, -1.0, 0.0])


@pytest.mark.parametrize("again", [False, True])
def test_a_board_is_the_same_after_an_answer_that_was_cut(again: bool) -> None:
    """The prompt behind it begins with the end token that other answers wrote themselves."""
    end, a, b = 0, [7, 1], [7, 2]
    told_last = ([5], [end, *b]) if again else ([5, end], b)
    ts = [
        episode(0, 0, [turn(a, [3, end], fresh=True), turn(b, [4, end], 1.0)]),
        episode(1, 0, [turn(a, [5], fresh=True), turn([end, *b], [6])]),
        episode(2, 0, [turn(a, told_last[0], fresh=True), turn(told_last[1], [end])]),
    ]
    found = told(estimate(batch_of(ts), name="gigpo", gamma=1.0, divide_by_std=False))
    assert found == pytest.approx([4 / 3] * 4 + [-2 / 3] * (len(found) - 4))


# -- one's own ---------------------------------------------------------------------------------------------------------


def by_row(batch: DataProto) -> Tensor:
    return 2 * batch.batch["scores"]


def by_token(batch: DataProto) -> Tensor:
    return batch.batch["turn_ids"] + 1.0


def gae(batch: DataProto) -> Tensor:
    """Not the one of that name."""
    return batch.batch["scores"]


def broken(batch: DataProto) -> Tensor:
    return torch.full((len(batch),), math.nan)


def test_an_estimator_may_be_written_by_the_user() -> None:
    ts = episodes(9, "some")
    batch = batch_of(ts)
    doubled = spread_rows([2 * t.score for t in ts], ts)
    assert told(estimate(batch, name=by_row)) == pytest.approx(doubled)
    assert told(estimate(batch, name=f"{__name__}:by_row")) == pytest.approx(doubled)
    numbered = estimate(batch, name=by_token)
    assert told(numbered) == [n + 1.0 for line in lines_of(ts) for n in line]
    assert told(numbered[:2]) == told(numbered)[: len(told(numbered[:2]))]
    assert told(estimate(batch, name=lambda batch: batch.batch.ragged("infer_logprobs"))) == told(
        batch, "infer_logprobs"
    )


class AboveBar(AdvantageEstimator):
    """Scores above a bar of one's own."""

    bar: float = Field(default=0.5, ge=0)

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        return AdvantageResult(inputs.scores - self.bar)


class Surprise(AdvantageEstimator):
    """Scores less what the critic said, on each token."""

    needs_critic: ClassVar[bool] = True
    forgets_returns: bool = False

    def estimate(self, inputs: AdvantageInputs) -> AdvantageResult:
        returns = inputs.scores[:, None].expand(inputs.values.shape)
        return AdvantageResult(returns - inputs.values, None if self.forgets_returns else returns)


def test_an_estimator_class_of_ones_own_has_settings_of_its_own() -> None:
    ts = episodes(9, "some")
    batch = batch_of(ts)
    for name in (AboveBar, f"{__name__}:AboveBar"):
        assert told(estimate(batch, name=name)) == pytest.approx(spread_rows([t.score - 0.5 for t in ts], ts))
        assert told(estimate(batch, name=name, bar=2, score_clip=1.0)) == pytest.approx(
            spread_rows([min(t.score, 1.0) - 2 for t in ts], ts)
        )
    assert EstimatorConfig(name=AboveBar).cross_group_setting == "name='AboveBar'"
    with pytest.raises(ValidationError, match="EstimatorConfig has no key 'baar'; did you mean 'bar'"):
        EstimatorConfig(name=AboveBar, baar=1)
    with pytest.raises(ValidationError, match=r"bar\n  Input should be greater than or equal to 0"):
        EstimatorConfig(name=AboveBar, bar=-1)
    with pytest.raises(ValidationError, match="lam does nothing for 'AboveBar', only for 'gae'"):
        EstimatorConfig(name=AboveBar, lam=1.0)
    with pytest.raises(ValidationError, match="is a class without advantages: derive it from AdvantageEstimator"):
        EstimatorConfig(name=f"{__name__}:DataProto")


def test_an_estimator_class_of_ones_own_may_need_a_critic() -> None:
    ts = episodes(9)
    batch = batch_of(ts, values=reference(ts, 1))
    assert EstimatorConfig(name=Surprise).needs_critic
    scores = spread_rows([t.score for t in ts], ts)
    assert told(estimate(batch, name=Surprise), "returns") == pytest.approx(scores)
    with pytest.raises(ValueError, match="Surprise needs a critic, so its result must have `returns`"):
        estimate(batch, name=Surprise, forgets_returns=True)


def test_ones_own_estimator_sees_the_shaped_scores() -> None:
    ts = episodes(9, "some")
    ref = reference(ts)
    kls = kl_of(ts, ref)
    clipped = [min(t.score, 1.0) - COEF * sum(line) for t, line in zip(ts, kls, strict=True)]
    seen: list[DataProto] = []

    def own(batch: DataProto) -> Tensor:
        seen.append(batch)
        return batch.batch["scores"]

    batch = batch_of(ts, ref_logprobs=ref)
    result = estimate(batch, name=own, kl_coef=COEF, score_clip=1.0)
    assert told(result) == pytest.approx(spread_rows(clipped, ts), abs=1e-5)
    sums_of_steps = seen[0].batch["step_scores"].sum(1)
    torch.testing.assert_close(sums_of_steps, seen[0].batch["scores"], atol=1e-5, rtol=0)
    assert np.array_equal(result.batch.numpy("scores"), batch.batch.numpy("scores"))


def test_a_score_that_is_no_number_is_refused_and_its_row_named() -> None:
    ts = [episode(i, 0, [turn([1], [2], float(i), fresh=True)]) for i in range(3)]
    ts[1].score = math.nan
    with pytest.raises(ValueError, match="row 1 has a score of nan"):
        estimate(batch_of(ts))


def test_what_is_no_advantage_is_refused() -> None:
    batch = batch_of(episodes(9))
    with pytest.raises(ValueError, match=r"row 0 has an advantage of nan; its score is \d"):
        estimate(batch, name=broken)
    with pytest.raises(ValueError, match="'advantages' has 2 rows"):
        estimate(batch, name=lambda batch: torch.zeros(2))
    with pytest.raises(ValueError, match="'advantages' is "):
        estimate(batch, name=lambda batch: torch.zeros(len(batch), 2))
    with pytest.raises(TypeError, match="got a NoneType"):
        estimate(batch, name=lambda batch: None)
    with pytest.raises(ValueError, match="is a int: an estimator is a function"):
        Estimator(EstimatorConfig(name=f"{__name__}:VOCAB"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        Estimator(EstimatorConfig(name=f"{__name__}:nobody"))


# -- the config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpro", "did you mean 'grpo'"),
        ("reinforce", "did you mean 'reinforce++'"),
        ("ppo", "did you mean 'gae'"),
        ("Dr-GRPO", "did you mean 'grpo' with divide_by_std=False"),
        ("q", "must be one of grpo, rloo"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValidationError, match=hint.replace("+", r"\+")):
        EstimatorConfig(name=name)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "grpo", "lam": 0.95}, "lam does nothing for 'grpo', only for 'gae'"),
        ({"name": "grpo", "gamma": 1.0}, "gamma does nothing for 'grpo'"),
        ({"name": "rloo", "divide_by_std": True}, "divide_by_std does nothing for 'rloo'"),
        ({"name": "gae", "step_weight": 1.0}, "step_weight does nothing for 'gae', only for 'gigpo'"),
        ({"name": "gae", "over": "batch"}, "over does nothing for 'gae', only for 'step'"),
        ({"name": "step", "whiten": True}, "whiten does nothing for 'step'"),
        ({"name": by_row, "gamma": 0.9}, "gamma does nothing for 'by_row'"),
        ({"name": gae, "lam": 0.9}, "lam does nothing for 'gae'"),
        ({"name": f"{__name__}:by_row", "lam": 0.9}, f"lam does nothing for '{__name__}:by_row'"),
        ({"name": "step", "over": "nothing", "divide_by_std": False}, "does nothing with over='nothing'"),
        ({"kl_estimator": "k3"}, "kl_estimator does nothing while kl_coef is 0"),
        ({"kl_logprobs": "old"}, "kl_logprobs does nothing while kl_coef is 0"),
        ({"name": "grpo", "score_norm": "batch"}, "score_norm='batch' does nothing for 'grpo'"),
        ({"name": "reinforce++-baseline", "score_norm": "running"}, "does nothing for 'reinforce"),
        ({"name": "reinforce++", "score_norm": "running"}, "score_norm='running' does nothing for 'reinforce"),
        ({"name": "step", "score_norm": "batch"}, "score_norm='batch' does nothing for 'step'"),
        ({"lamb": 0.9}, "did you mean 'lam'"),
        ({"name": "gae", "gamma": 1.1}, "less than or equal to 1"),
    ],
)
def test_a_setting_that_does_nothing_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EstimatorConfig(**settings)


@pytest.mark.parametrize("config", [*NAMES, {"name": "gigpo", "gamma": 1.0}, {"name": "step", "gamma": 0.5}], ids=str)
def test_scores_are_normalised_exactly_where_it_matters(config: dict[str, Any]) -> None:
    ts = episodes(8, "some")
    batch = batch_of(ts, values=reference(ts, 1))
    plain = EstimatorConfig(**config)
    normalised = plain.model_copy(update={"score_norm": "batch"})
    one, two = (told(Estimator(settings).advantages(batch)[0]) for settings in (plain, normalised))
    if one == pytest.approx(two, abs=1e-4):
        with pytest.raises(ValidationError, match="score_norm='batch' does nothing"):
            EstimatorConfig(**config, score_norm="batch")
    else:
        assert EstimatorConfig(**config, score_norm="batch") == normalised


def test_a_config_survives_being_written_and_read() -> None:
    for settings in (
        {},
        {"name": "gae", "lam": 0.9, "kl_coef": 0.1},
        {"name": "step", "over": "batch"},
        {"name": "step", "over": "nothing"},
        {"name": by_row, "score_clip": 1.0},
        {"name": AboveBar, "bar": 2.0},
    ):
        config = EstimatorConfig(**settings)
        assert EstimatorConfig(**config.model_dump()) == config
    assert list(EstimatorConfig(name="step", over="batch").model_dump())[:4] == [
        "name",
        "gamma",
        "over",
        "divide_by_std",
    ]


def test_a_setting_that_is_none_has_its_default() -> None:
    """Configs that name every setting of every estimator can be read."""
    assert EstimatorConfig(name="grpo", gamma=None, lam=None, divide_by_std=None) == EstimatorConfig(name="grpo")


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, (False, False, False)),
        ({"name": "gae"}, (True, False, False)),
        ({"kl_coef": 0.1}, (False, True, False)),
        ({"name": "gae", "kl_coef": 0.1, "kl_logprobs": "old"}, (True, True, True)),
    ],
)
def test_the_estimator_says_what_it_needs(settings: dict[str, Any], needs: tuple[bool, ...]) -> None:
    config = EstimatorConfig(**settings)
    assert (config.needs_critic, config.needs_reference, config.needs_old_logprobs) == needs
    estimator = Estimator(config)
    names = [name for name, need in zip(("values", "ref_logprobs", "old_logprobs"), needs, strict=True) if need]
    there = {name: reference(episodes()) for name in names}
    estimator.advantages(batch_of(episodes(), **there))
    for name in names:
        with pytest.raises(KeyError, match=f"training needs the column '{name}'"):
            estimator.advantages(batch_of(episodes(), **{other: there[other] for other in names if other != name}))


# -- the whole of it ---------------------------------------------------------------------------------------------------


def test_the_metrics_are_about_trajectories_and_tokens() -> None:
    ts = episodes(10, "some")
    batch, metrics = Estimator(EstimatorConfig(name="rloo")).advantages(batch_of(ts))
    scores = [t.score for t in ts]
    advantages = told(batch)
    flat = [len(set(of_group(ts, scores, group))) == 1 for group in {t.group for t in ts}]
    assert metrics == pytest.approx(
        {
            "score_mean": np.mean(scores),
            "score_std": deviation(scores),
            "groups_without_variance": np.mean(flat),
            "advantage_mean": np.mean(advantages),
            "advantage_std": np.std(advantages),
            "advantage_abs_mean": np.mean(np.abs(advantages)),
        },
        abs=1e-6,
    )
    assert 0 < metrics["groups_without_variance"] < 1


def test_a_critic_and_an_actor_learn_from_what_it_gives() -> None:
    """One step of PPO; a new critic expects nothing, so the first returns are those of the rewards."""
    ts = episodes(11, "some")
    actor = Actor(tiny_model(0), ActorConfig(lr=1e-2), 0)
    critic = Critic(tiny_model(1), CriticConfig(lr=1e-2, value_clip=None), 0)
    estimator = Estimator(EstimatorConfig(name="gae", gamma=0.9))
    batch, metrics = estimator.advantages(critic.values(batch_of(ts)))
    rewards = [value for t in ts for value in sums(token_rewards(t), 0.9 * 0.95)]
    assert told(batch, "returns") == pytest.approx(rewards, abs=1e-5)
    assert metrics["return_mean"] == pytest.approx(np.mean(rewards), abs=1e-5)
    before = parameters(actor.module)
    actor.train(batch)
    assert any(not torch.equal(before[name], now) for name, now in parameters(actor.module).items())
    for _ in range(20):
        critic.train(critic.values(batch))
    rows = TokenRows.of(batch)
    mask = torch.ones(1, len(rows.trained), dtype=torch.bool)
    values = torch.tensor([told(critic.values(batch), "values")])
    assert explained_variance(values, torch.tensor([told(batch, "returns")]), mask) > 0.2
    estimator.advantages(critic.values(batch))
