"""DPO and reward models: an update is the one that plain torch makes, however the pairs are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_cases import VOCAB, assert_same_parameters, parameters, random_batch, row_by_row, tiny_model

from cadenza.data import DataProto
from cadenza.training import ModelConfig, load_model
from cadenza.training.dpo import Dpo, DpoConfig
from cadenza.training.pairs import PairConfig, PairLearner
from cadenza.training.reward_model import RewardModelLearner

PAD = 3
LR = 0.5
SGD: dict[str, Any] = {"optimizer": "SGD", "lr": LR, "max_grad_norm": None}


def classifier() -> Any:
    config = ModelConfig(layers=2, hidden=16, heads=2, intermediate=24)
    return load_model(config, VOCAB, 0, pad_token_id=PAD).double()


def pairs() -> DataProto:
    """Eight rows: four pairs of random texts, some of which end with the padding token."""
    batch = random_batch(1, groups=4, size=2).select(["input_ids", "response_mask", "infer_logprobs"])
    batch.batch["traj_id"] = np.repeat(np.arange(4), 2)
    tokens = [row.copy() for row in batch.batch.ragged("input_ids")]
    tokens[0][-1] = tokens[3][-1] = PAD
    batch.batch["input_ids"] = tokens
    return batch.rename({"infer_logprobs": "ref_logprobs"})


def plain_dpo(module: Any, batch: DataProto, beta: float, smoothing: float) -> Tensor:
    """[M], with nothing but the module and torch."""
    policy = torch.stack([logprobs.sum() for logprobs in row_by_row(module, batch)[0]])
    masks = batch.batch.ragged("response_mask")
    columns = zip(batch.batch.ragged("ref_logprobs"), masks, strict=True)
    reference = torch.tensor([float(values[mask.astype(bool)].sum()) for values, mask in columns])
    ratios = policy - reference
    logits = beta * (ratios[0::2] - ratios[1::2])
    return -(1 - smoothing) * torch.sigmoid(logits).log() - smoothing * torch.sigmoid(-logits).log()


def plain_bradley_terry(module: Any, batch: DataProto) -> Tensor:
    """[M], by the forward pass of transformers alone."""
    rows = [torch.from_numpy(row.astype(np.int64))[None] for row in batch.batch.ragged("input_ids")]
    scores = torch.stack([module(input_ids=row).logits[0, 0] for row in rows])
    return torch.log1p(torch.exp(scores[1::2] - scores[0::2]))


def plain_update(module: Any, losses: Tensor) -> float:
    loss = losses.mean()
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
    return float(loss.detach())


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("packing", ["padded", "shared"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_an_update_of_dpo_is_that_of_its_formula(budget: int, packing: Any, smoothing: float) -> None:
    plain: Any = tiny_model(double=True)
    expected = plain_update(plain, plain_dpo(plain, pairs(), 0.3, smoothing))
    config = DpoConfig(beta=0.3, label_smoothing=smoothing, token_budget=budget, packing=packing, **SGD)
    learner = Dpo(tiny_model(double=True), config, 0)
    metrics = learner.train(pairs())
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert_same_parameters(parameters(learner.module), parameters(plain), atol=1e-5)


@pytest.mark.parametrize("budget", [1, 60, 10_000])
@pytest.mark.parametrize("packing", ["padded", "shared"])
def test_an_update_of_a_reward_model_is_that_of_its_formula(budget: int, packing: Any) -> None:
    plain = classifier()
    expected = plain_update(plain, plain_bradley_terry(plain, pairs()))
    learner = RewardModelLearner(classifier(), PairConfig(token_budget=budget, packing=packing, **SGD), 0)
    metrics = learner.train(pairs())
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert_same_parameters(parameters(learner.module), parameters(plain), atol=1e-6)


def test_what_is_said_of_pairs_is_what_their_values_say() -> None:
    for learner in (
        Dpo(tiny_model(), DpoConfig(lr=0, beta=0.3), 0),
        RewardModelLearner(classifier(), PairConfig(lr=0), 0),
    ):
        found = learner.evaluate(pairs())
        values = found.batch["value"].view(-1, 2)
        margin = values - found.batch["reference"].view(-1, 2)
        scale = 0.3 if isinstance(learner, Dpo) else 1.0
        margin = scale * (margin[:, 0] - margin[:, 1])
        metrics = learner.train(pairs())
        assert metrics["margin"] == pytest.approx(float(margin.mean()), abs=1e-4)
        assert metrics["accuracy"] == pytest.approx(float((margin > 0).float().mean()))


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_mini_batches_part_no_pair(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner: PairLearner = (
        Dpo(tiny_model(), DpoConfig(mini_batches=3, epochs=2, lr=0), 0)
        if kind == "dpo"
        else RewardModelLearner(classifier(), PairConfig(mini_batches=3, epochs=2, lr=0), 0)
    )
    seen: list[list[int]] = []
    own_rows = learner._learner.own_rows

    def spy(rows: Any, updates: Any, *, rows_each: int) -> Any:
        seen.extend(update.tolist() for update in updates)
        return own_rows(rows, updates, rows_each=rows_each)

    monkeypatch.setattr(learner._learner, "own_rows", spy)
    learner.train(pairs())
    assert len(seen) == 6
    assert all(row % 2 or row + 1 in update for update in seen for row in update)
    assert sorted(row for update in seen[:3] for row in update) == list(range(8))


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="two rows with an answer for each, got 7 rows"):
        Dpo(tiny_model(), DpoConfig(), 0).train(pairs()[np.arange(7)])
    with pytest.raises(ValueError, match="aggregation='sequence_mean' does nothing with pairs"):
        DpoConfig(aggregation="sequence_mean")
