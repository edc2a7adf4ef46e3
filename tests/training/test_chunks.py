"""A batch that is trained in parts: the update of the whole, or none."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_actor import EVERYTHING, PLAIN, spoiled_batch, trained
from torch import Tensor
from training_cases import (
    adapted_model,
    assert_same_parameters,
    parameters,
    random_batch,
    segments_batch,
    tiny_model,
    without,
)

from cadenza.algorithms import TokenLoss
from cadenza.data import DataProto
from cadenza.training import Actor, ActorConfig, NonFiniteLoss

ONE_UPDATE = [config for config in EVERYTHING if "epochs" not in config]
CUTS = [(0, 3, 9), (0, 1, 2, 3, 9), (0, 6, 7, 9)]
"""Where a batch of nine rows is cut."""


def cut(batch: DataProto, *ends: int) -> list[DataProto]:
    return [batch[start:end] for start, end in pairwise(ends)]


def in_parts(actor: Actor, parts: list[DataProto]) -> dict[str, float]:
    for part in parts:
        actor.add(part)
    return actor.finish()


@pytest.mark.parametrize("ends", CUTS)
@pytest.mark.parametrize("config", [*ONE_UPDATE, {"aggregation": "sequence_mean", "sequence": "trajectory"}])
def test_parts_are_the_update_of_the_whole(config: dict[str, Any], ends: tuple[int, ...]) -> None:
    batch = without(random_batch(11), "old_logprobs")
    if "sequence" in config:
        batch.batch["traj_id"] = np.array([0, 1, 2, 3, 3, 3, 4, 5, 5])
    whole, told = trained(batch, **config)
    actor = Actor(tiny_model(double=True), ActorConfig(**{**PLAIN, **config}), 0)
    metrics = in_parts(actor, cut(batch, *ends))
    assert_same_parameters(parameters(actor.module), parameters(whole.module), atol=1e-9)
    assert metrics == pytest.approx(told, abs=1e-6)
    assert actor.version == 1


def test_parts_of_several_steps_with_momentum_and_clipping_stay_with_the_whole() -> None:
    config = ActorConfig(lr=1e-2, max_grad_norm=0.05, aggregation="sequence_mean", token_budget=25)
    whole, parts = (Actor(tiny_model(double=True), config, 0) for _ in range(2))
    for seed in range(3):
        batch = random_batch(seed)
        told = whole.train(batch)
        metrics = in_parts(parts, cut(batch, 0, 2, 3, 9)[::-1])
        assert metrics == pytest.approx(told, abs=1e-6)
    assert_same_parameters(parameters(parts.module), parameters(whole.module), atol=1e-9)
    assert parts.state().values == whole.state().values


def test_parts_train_an_adapter_like_the_whole(tmp_path: Path) -> None:
    batch = without(random_batch(11), "old_logprobs")
    model = adapted_model(tmp_path)
    whole, parts = (Actor(module, ActorConfig(lr=1e-2), 0) for module in (model, copy.deepcopy(model)))
    told = whole.train(batch)
    assert in_parts(parts, cut(batch, 0, 4, 9)) == pytest.approx(told, abs=1e-5)
    assert_same_parameters(parameters(parts.module), parameters(whole.module), atol=1e-5)


def test_idle_rows_and_idle_parts_change_no_weight() -> None:
    batch = random_batch(3)
    advantages = np.zeros(len(batch), np.float32)
    advantages[[0, 7]] = 1.0, -2.0
    batch.batch["advantages"] = advantages
    whole, told = trained(batch)
    actor = Actor(tiny_model(double=True), ActorConfig(**PLAIN), 0)
    metrics = in_parts(actor, cut(batch, 0, 3, 6, 9))
    assert_same_parameters(parameters(actor.module), parameters(whole.module), atol=1e-9)
    assert metrics["loss"] == pytest.approx(told["loss"], abs=1e-9)
    assert metrics["tokens"] == told["tokens"]
    assert told["skipped_rows"] - metrics["skipped_rows"] == 1  # the idle part computes one row


def test_a_part_without_trained_tokens_adds_nothing_and_an_update_without_any_is_refused() -> None:
    silent = segments_batch([[(False, [1, 2, 3])]], advantages=np.ones(1, np.float32))
    batch = random_batch(3).select(["traj_id", "input_ids", "response_mask"])
    batch.batch["advantages"] = np.random.default_rng(0).normal(size=len(batch)).astype(np.float32)
    whole, told = trained(batch)
    actor = Actor(tiny_model(double=True), ActorConfig(**PLAIN), 0)
    assert in_parts(actor, [silent, batch, silent]) == pytest.approx(told, abs=1e-6)
    assert_same_parameters(parameters(actor.module), parameters(whole.module), atol=1e-9)
    with pytest.raises(ValueError, match="update of 2 rows has no trained token"):
        in_parts(actor, [silent, silent])
    assert actor.version == 1


# Failure


def test_a_part_that_fails_drops_the_parts_before_it(tmp_path: Path) -> None:
    first, second, spoiled = cut(spoiled_batch(), 0, 2, 3, 9)
    actor = Actor(tiny_model(), ActorConfig(token_budget=1), 0, failures=tmp_path)
    actor.train(random_batch(1))
    before = parameters(actor.module)
    actor.add(first)
    actor.add(second)
    with pytest.raises(NonFiniteLoss, match="the loss is nan at update 1, rows 1; the weights were not changed"):
        actor.add(spoiled)
    assert_same_parameters(before, parameters(actor.module), atol=0)
    assert all(p.grad is None for p in actor.module.parameters())
    assert DataProto.from_disk(tmp_path / "update-1-0") == spoiled
    with pytest.raises(RuntimeError, match="no update is under way"):
        actor.finish()
    assert actor.version == 1


@pytest.mark.parametrize("missing", ["advantages", "input_ids"])
def test_after_a_failure_the_next_update_is_as_if_nothing_had_been_added(missing: str) -> None:
    batch = random_batch(11)
    whole, told = trained(batch)
    actor = Actor(tiny_model(double=True), ActorConfig(**PLAIN), 0)
    actor.add(random_batch(12))
    with pytest.raises(KeyError, match=missing):
        actor.add(without(random_batch(13), missing))
    assert in_parts(actor, cut(batch, 0, 4, 9)) == pytest.approx(told, abs=1e-6)
    assert_same_parameters(parameters(actor.module), parameters(whole.module), atol=1e-9)


def test_a_gradient_that_is_not_finite_names_rows_of_all_parts(tmp_path: Path) -> None:
    def steep(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return TokenLoss((logprobs - logprobs.detach()).abs().sqrt(), {}, int(mask.sum()))

    batch = random_batch(3)
    actor = Actor(tiny_model(), ActorConfig(loss=steep), 0, failures=tmp_path)
    before = parameters(actor.module)
    with pytest.raises(NonFiniteLoss, match="the gradient norm is nan at update 0") as caught:
        in_parts(actor, cut(batch, 0, 4, 9))
    assert caught.value.rows == tuple(range(9))
    assert DataProto.from_disk(tmp_path / "update-0-0") == batch
    assert_same_parameters(before, parameters(actor.module), atol=0)
    assert actor.version == 0


def test_what_would_mix_with_parts_is_refused_until_they_are_finished_or_dropped() -> None:
    batch = random_batch(3)
    actor = Actor(tiny_model(), ActorConfig(), 0)
    actor.add(batch)
    for mixing in (lambda: actor.train(batch), actor.offload):
        with pytest.raises(RuntimeError, match="an update of 1 chunks so far is under way: finish or drop it first"):
            mixing()
    actor.drop()
    assert actor.train(batch)["tokens"] == random_tokens(batch)


def random_tokens(batch: DataProto) -> int:
    return int(batch.batch.ragged("response_mask").values.sum())


@pytest.mark.parametrize("config", [{"epochs": 2}, {"mini_batches": 2}])
def test_several_updates_cannot_come_in_parts(config: dict[str, Any]) -> None:
    actor = Actor(tiny_model(), ActorConfig(**config), 0)
    with pytest.raises(ValueError, match=r"one update, but epochs is . and mini_batches .: leave them at 1"):
        actor.add(random_batch(3))


def test_a_sequence_of_several_rows_cannot_be_cut() -> None:
    batch = random_batch(3)
    batch.batch["traj_id"] = np.arange(len(batch)) // 2
    actor = Actor(tiny_model(), ActorConfig(aggregation="sequence_mean", sequence="trajectory"), 0)
    first, second = cut(batch, 0, 3, 9)
    actor.add(first)
    with pytest.raises(ValueError, match="trajectory 1 has rows in two chunks of an update"):
        actor.add(second)


def test_a_restored_state_begins_without_parts() -> None:
    batch = random_batch(3)
    actor = Actor(tiny_model(), ActorConfig(), 0)
    state = actor.state()
    actor.add(batch)
    actor.load_state(state)
    whole = Actor(tiny_model(), ActorConfig(), 0)
    assert actor.train(batch) == whole.train(batch)
    assert torch.equal(next(actor.module.parameters()), next(whole.module.parameters()))
