"""The actor: the same update however the batch is cut, and only from what trains."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_cases import (
    VOCAB,
    assert_same_parameters,
    dropping_model,
    parameters,
    random_batch,
    row_by_row,
    segments_batch,
    tiny_model,
    without,
)

from cadenza.algorithms import TokenLoss, policy_gradient
from cadenza.data import DataProto, Ragged
from cadenza.training import Actor, ActorConfig, NonFiniteLoss
from cadenza.training.learner import Learner, LearnerConfig
from cadenza.training.token_rows import TokenRows

PLAIN = {"optimizer": "SGD", "lr": 1.0, "max_grad_norm": None}
"""A step of this is the gradient itself."""


def trained(batch: DataProto, *, seed: int = 0, double: bool = True, **config: Any) -> tuple[Actor, dict[str, float]]:
    actor = Actor(tiny_model(double=double), ActorConfig(**{**PLAIN, **config}), seed)
    return actor, actor.train(batch)


def assert_same_training(batch: DataProto, other: DataProto, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Two ways to train, to the same weights and metrics."""
    (a, metrics_a), (b, metrics_b) = trained(batch, **one), trained(other, **two)
    assert_same_parameters(parameters(a.module), parameters(b.module), atol=1e-9)
    assert metrics_a == pytest.approx(metrics_b, abs=1e-6)


EVERYTHING = [
    {},
    {"aggregation": "sequence_mean", "entropy_coef": 0.01, "kl_coef": 0.1, "dual_clip": 1.5},
    {"aggregation": "sequence_sum", "constant_length": 7, "correction": "token", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"correction": "sequence", "temperature": 0.7, "loss": "policy_gradient"},
    {"old_logprobs": "infer", "clip_low": 0.1, "clip_high": 0.3},
    {"epochs": 2, "mini_batches": 3, "entropy_coef": 0.01},
]


@pytest.mark.parametrize("config", EVERYTHING)
@pytest.mark.parametrize("cut", [{"token_budget": 1}, {"token_budget": 25}, {"packing": "padded", "token_budget": 40}])
def test_an_update_is_the_same_however_it_is_cut(config: dict[str, Any], cut: dict[str, Any]) -> None:
    batch = random_batch(11)
    assert_same_training(batch, batch, config, {**config, **cut})


@pytest.mark.parametrize("config", EVERYTHING[:5])
def test_the_order_of_rows_changes_nothing_in_one_update(config: dict[str, Any]) -> None:
    batch = random_batch(11)
    assert_same_training(batch, batch.reorder(np.arange(len(batch))[::-1].copy()), config, config)


@pytest.mark.parametrize("config", EVERYTHING)
def test_padding_rows_change_nothing(config: dict[str, Any]) -> None:
    batch = random_batch(11)
    padded, added = batch.pad_to_multiple(5)
    assert added
    assert_same_training(batch, padded, config, config)


@pytest.mark.parametrize("config", EVERYTHING[:5])
def test_rows_without_trained_tokens_change_nothing(config: dict[str, Any]) -> None:
    batch = random_batch(11)
    silent = random_batch(12)
    lengths = silent.batch.ragged("input_ids").lengths
    silent.batch["response_mask"] = Ragged.from_rows([np.zeros(n, bool) for n in lengths])
    silent.batch["advantages"] = Ragged.from_rows([np.full(n, np.nan, np.float32) for n in lengths])
    silent.batch["traj_id"] = np.arange(len(silent)) + 1000
    assert_same_training(batch, DataProto.concat([silent, batch]), config, config)


@pytest.mark.parametrize("config", EVERYTHING)
def test_what_stands_outside_responses_changes_nothing(config: dict[str, Any]) -> None:
    batch = random_batch(11)
    spoiled = batch.select()
    for name in ("advantages", "infer_logprobs", "old_logprobs", "ref_logprobs"):
        values = batch.batch.ragged(name).values.copy()
        values[~batch.batch.ragged("response_mask").values] = np.nan
        spoiled.batch[name] = Ragged(values, batch.batch.ragged(name).offsets)
    assert_same_training(batch, spoiled, config, config)


def test_the_loss_is_the_one_computed_by_hand() -> None:
    batch = without(random_batch(5), "old_logprobs")
    batch.batch["advantages"] = np.random.default_rng(0).normal(size=len(batch)).astype(np.float32)
    config = {"entropy_coef": 0.02, "kl_coef": 0.1, "correction": "token", "correction_cap": 1.1}
    with torch.no_grad():
        logprobs, entropies = row_by_row(tiny_model(double=True), batch)
    total, tokens = 0.0, 0
    for row, (p, h) in enumerate(zip(logprobs, entropies, strict=True)):
        mask = batch.batch.ragged("response_mask")[row]
        infer, reference = (
            torch.from_numpy(batch.batch.ragged(n)[row][mask]) for n in ("infer_logprobs", "ref_logprobs")
        )
        weight = (p - infer).exp().clamp(max=1.1)
        k3 = (reference - p).exp() - 1 - (reference - p)
        total += float((weight * (-batch.batch["advantages"][row] + 0.1 * k3) - 0.02 * h).sum())
        tokens += len(p)
    _, metrics = trained(batch, **config)
    assert metrics["loss"] == pytest.approx(total / tokens, abs=1e-6)
    assert metrics["tokens"] == tokens
    assert metrics["ratio_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("config", EVERYTHING[:5])
def test_the_gradient_is_that_of_finite_differences(config: dict[str, Any]) -> None:
    batch = random_batch(7, groups=1, size=2)

    def loss_at(name: str, change: Tensor) -> float:
        actor = Actor(tiny_model(double=True), ActorConfig(**{**PLAIN, **config, "lr": 0.0}), 0)
        with torch.no_grad():
            actor.module.get_parameter(name).add_(change)
        return actor.train(batch)["loss"]

    before = parameters(tiny_model(double=True))
    after = parameters(trained(batch, **config)[0].module)
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"):
        direction = torch.randn(before[name].shape, generator=generator, dtype=torch.float64)
        slope = (loss_at(name, 1e-5 * direction) - loss_at(name, -1e-5 * direction)) / 2e-5
        assert slope == pytest.approx(float(((before[name] - after[name]) * direction).sum()), abs=1e-6)


def test_tokens_with_a_good_outcome_become_more_likely() -> None:
    prompts = [[1, 2, 3], [4, 5]]
    good, bad = [6, 7], [8, 9]
    batch = segments_batch([[(False, p), (True, answer)] for p in prompts for answer in (good, bad)])
    batch.batch["advantages"] = np.array([1, -1, 1, -1], np.float32)
    actor = Actor(tiny_model(), ActorConfig(lr=3e-3, epochs=2), 0)
    before = actor.logprobs(batch).batch["old_logprobs"].sum(1)
    for _ in range(10):
        actor.train(batch)
    gain = actor.logprobs(batch).batch["old_logprobs"].sum(1) - before
    assert (gain[[0, 2]] > 1).all()
    assert (gain[[1, 3]] < 0).all()


# The past


def test_a_single_update_needs_no_pass_for_its_old_logprobs() -> None:
    batch = without(random_batch(3), "old_logprobs")
    recorded = trained(batch)[0].logprobs(batch)
    assert "old_logprobs" in recorded.batch
    actor = Actor(tiny_model(double=True), ActorConfig(**PLAIN), 0)
    explicit = actor.logprobs(batch)
    assert_same_training(batch, explicit, {}, {})


@pytest.mark.parametrize("config", [{"epochs": 3}, {"mini_batches": 3}, {"epochs": 2, "mini_batches": 2}])
def test_later_updates_move_away_from_the_weights_at_the_beginning(config: dict[str, Any]) -> None:
    batch = without(random_batch(3), "old_logprobs")
    explicit = Actor(tiny_model(double=True), ActorConfig(**PLAIN), 0).logprobs(batch)
    config = {**config, "lr": 0.5, "clip_high": 0.05}
    (a, metrics), (b, _) = trained(batch, **config), trained(explicit, **config)
    # Logprobs are stored in float32, so the two pasts differ by its rounding.
    assert_same_parameters(parameters(a.module), parameters(b.module), atol=1e-5)
    assert metrics["updates"] == config.get("epochs", 1) * config.get("mini_batches", 1)
    assert metrics["ratio_max"] > 1.001


def test_logprobs_are_those_of_each_row_alone() -> None:
    batch = random_batch(3)
    found = Actor(tiny_model(double=True), ActorConfig(temperature=0.8), 0).logprobs(batch)
    expected = torch.cat(row_by_row(tiny_model(double=True), batch, 0.8)[0])
    mask = batch.batch["response_mask"]
    torch.testing.assert_close(found.batch["old_logprobs"][mask], expected.float(), atol=1e-6, rtol=0)


def test_the_effective_sample_size_falls_as_the_sampler_is_further_away() -> None:
    batch = without(random_batch(3), "old_logprobs")
    actor = Actor(tiny_model(), ActorConfig(**PLAIN), 0)
    same = actor.logprobs(batch).batch.ragged("old_logprobs")
    sizes = []
    for distance in (0.0, 0.5, 2.0):
        noise = np.random.default_rng(0).normal(size=len(same.values)).astype(np.float32)
        batch.batch["infer_logprobs"] = Ragged(same.values + distance * noise, same.offsets)
        sizes.append(trained(batch, correction_cap=1e6, double=False)[1]["ess"])
    assert sizes[0] == pytest.approx(1.0)
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    ("kind", "again"), [("gpt2", False), ("gpt2", True), ("opt", False), ("opt", True), ("lora", False)]
)
def test_a_policy_with_dropout_is_compared_with_its_past_without_it(tmp_path: Path, kind: str, again: bool) -> None:
    actor = Actor(
        dropping_model(kind, tmp_path, gradient_checkpointing=again),
        ActorConfig(lr=0.0, mini_batches=2, correction="token"),
        0,
    )
    batch = without(random_batch(3), "old_logprobs")
    batch.batch["infer_logprobs"] = actor.logprobs(batch).batch.ragged("old_logprobs")
    for _ in range(2):
        metrics = actor.train(batch)
        for name in ("ratio_max", "ratio_mean", "weight_mean", "ess"):
            assert metrics[name] == pytest.approx(1.0, abs=1e-4), name
        assert metrics["clip_fraction"] == 0


# Mini-batches


def test_mini_batches_are_shuffled_by_seed_and_version() -> None:
    batch = random_batch(3)
    config = {"mini_batches": 3, "optimizer": "AdamW", "lr": 1e-2}
    (a, _), (b, _), (c, _) = (trained(batch, seed=seed, **config) for seed in (0, 0, 1))
    assert_same_parameters(parameters(a.module), parameters(b.module), atol=0)
    different = [not torch.equal(x, y) for x, y in zip(a.module.parameters(), c.module.parameters(), strict=True)]
    assert any(different)


def test_every_epoch_and_every_version_has_mini_batches_of_its_own() -> None:
    batch = random_batch(3)
    learner = Learner(tiny_model(), LearnerConfig(epochs=2, mini_batches=3), 0)
    rows = TokenRows.of(batch)
    first = [part.tolist() for part in learner.updates(batch, rows)]
    assert [part.tolist() for part in learner.updates(batch, rows)] == first
    learner.version += 1
    second = [part.tolist() for part in learner.updates(batch, rows)]
    epochs = [first[:3], first[3:], second[:3], second[3:]]
    assert all(sorted(row for part in epoch for row in part) == list(range(9)) for epoch in epochs)
    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])


def test_rows_of_a_trajectory_can_count_as_one_sequence() -> None:
    batch = random_batch(3)
    batch.batch["traj_id"] = np.arange(len(batch)) // 2
    config = {"aggregation": "sequence_mean", "sequence": "trajectory"}
    assert_same_training(batch, batch, config, {**config, "token_budget": 20})
    rows, trajectories = trained(batch, aggregation="sequence_mean")[0], trained(batch, **config)[0]
    assert not torch.allclose(next(rows.module.parameters()), next(trajectories.module.parameters()), atol=1e-6)


def test_there_are_no_more_mini_batches_than_trajectories() -> None:
    assert trained(random_batch(), mini_batches=10)[1]["updates"] == 9


# Rows without advantages


@pytest.mark.parametrize("config", [{}, {"aggregation": "sequence_mean"}, {"epochs": 2, "mini_batches": 2}])
def test_leaving_out_rows_without_advantages_changes_no_weight(config: dict[str, Any]) -> None:
    batch = random_batch(3)
    advantages = np.zeros(len(batch), np.float32)
    advantages[::3] = [1.0, -1.0, 2.0]
    batch.batch["advantages"] = advantages
    (a, metrics), (b, all_metrics) = trained(batch, **config), trained(batch, skip_idle=False, **config)
    assert_same_parameters(parameters(a.module), parameters(b.module), atol=1e-9)
    assert metrics["loss"] == pytest.approx(all_metrics["loss"], abs=1e-9)
    assert metrics["skipped_rows"] > 0
    assert all_metrics["skipped_rows"] == 0


def without_signal(batch: DataProto) -> DataProto:
    quiet = batch.select()
    quiet.batch["advantages"] = np.zeros(len(batch), np.float32)
    return quiet


@pytest.mark.parametrize(
    "config",
    [{}, {"skip_idle": False}, {"loss": policy_gradient}, {"correction": "token"}],
    ids=["defaults", "skip_idle", "loss", "correction"],
)
def test_after_one_success_twenty_batches_without_signal_change_nothing(config: dict[str, Any]) -> None:
    """Adam would go on by its momentum, and weights would decay."""
    batch = random_batch(3)
    actor = Actor(tiny_model(), ActorConfig(lr=1e-2, weight_decay=0.1, **config), 0)
    assert actor.train(batch)["updates_skipped"] == 0
    before, remembered = parameters(actor.module), actor.state()
    for _ in range(20):
        metrics = actor.train(without_signal(batch))
        assert (metrics["updates_skipped"], metrics["loss"], metrics["grad_norm"]) == (1.0, 0.0, 0.0)
        assert metrics["entropy"] > 0
    assert_same_parameters(parameters(actor.module), before, atol=0)
    assert_same_parameters(dict(actor.state().tensors), dict(remembered.tensors), atol=0)
    assert actor.version == 21
    actor.train(batch)
    assert any(not torch.equal(before[name], now) for name, now in parameters(actor.module).items())


def test_an_update_without_signal_is_no_step_of_the_schedule() -> None:
    batch = random_batch(3)
    config = ActorConfig(lr=1e-2, schedule="linear", total_steps=4)
    one, two = (Actor(tiny_model(double=True), config, 0) for _ in range(2))
    for _ in range(3):
        metrics = one.train(batch)
        two.train(without_signal(batch))
        assert two.train(batch)["lr"] == metrics["lr"]
    assert_same_parameters(parameters(one.module), parameters(two.module), atol=0)


def test_mini_batches_without_signal_are_left_out_one_by_one() -> None:
    batch = random_batch(3)
    advantages = np.zeros(len(batch), np.float32)
    advantages[0] = 1.0
    batch.batch["advantages"] = advantages
    metrics = Actor(tiny_model(), ActorConfig(lr=1e-2, mini_batches=3), 0).train(batch)
    assert (metrics["updates"], metrics["updates_skipped"]) == (3, 2)


@pytest.mark.parametrize("config", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}], ids=str)
def test_kl_and_entropy_are_signal(config: dict[str, Any]) -> None:
    batch = without_signal(random_batch(3))
    actor = Actor(tiny_model(), ActorConfig(lr=1e-2, **config), 0)
    before = parameters(actor.module)
    assert actor.train(batch)["updates_skipped"] == 0
    assert any(not torch.equal(before[name], now) for name, now in parameters(actor.module).items())


def test_rows_without_advantages_count_where_entropy_or_kl_needs_them() -> None:
    assert ActorConfig().skips
    assert not ActorConfig(entropy_coef=0.1).skips
    assert not ActorConfig(kl_coef=0.1).skips
    assert not ActorConfig(loss=policy_gradient).skips


# Failure


def spoiled_batch() -> DataProto:
    batch = random_batch(3)
    advantages = np.ones(len(batch), np.float32)
    advantages[4] = np.nan
    batch.batch["advantages"] = advantages
    batch.meta_info["global_step"] = 17
    return batch


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_loss_that_is_not_finite_saves_the_batch_and_leaves_the_weights(tmp_path: Path, budget: int) -> None:
    batch = spoiled_batch()
    actor = Actor(tiny_model(), ActorConfig(token_budget=budget), 0, failures=tmp_path / "failures")
    actor.train(random_batch(1))
    before = parameters(actor.module)
    with pytest.raises(NonFiniteLoss, match="the loss is nan at update 1, rows") as caught:
        actor.train(batch)
    assert 4 in caught.value.rows
    assert caught.value.step == 1
    assert_same_parameters(before, parameters(actor.module), atol=0)
    assert all(p.grad is None for p in actor.module.parameters())
    assert DataProto.from_disk(tmp_path / "failures" / "update-1-0") == batch
    assert actor.version == 1
    with pytest.raises(NonFiniteLoss):
        actor.train(batch)
    assert (tmp_path / "failures" / "update-1-1").is_dir()


def test_a_gradient_that_is_not_finite_is_refused_too(tmp_path: Path) -> None:
    def steep(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return TokenLoss((logprobs - logprobs.detach()).abs().sqrt(), {}, int(mask.sum()))

    actor = Actor(tiny_model(), ActorConfig(loss=steep), 0, failures=tmp_path)
    before = parameters(actor.module)
    with pytest.raises(NonFiniteLoss, match="the gradient norm is nan at update 0") as caught:
        actor.train(random_batch())
    assert len(caught.value.rows) == 9
    assert_same_parameters(before, parameters(actor.module), atol=0)


def test_the_failure_is_told_also_when_the_batch_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    actor = Actor(tiny_model(), ActorConfig(), 0, failures=tmp_path / "file")
    with pytest.raises(NonFiniteLoss, match="the batch could not be saved"):
        actor.train(spoiled_batch())
    with pytest.raises(NonFiniteLoss, match="no directory was given"):
        Actor(tiny_model(), ActorConfig(), 0).train(spoiled_batch())


def test_what_json_cannot_hold_does_not_keep_a_batch_from_being_saved(tmp_path: Path) -> None:
    batch = spoiled_batch()
    batch.meta_info["object"] = object()
    with pytest.raises(NonFiniteLoss, match="the batch is in"):
        Actor(tiny_model(), ActorConfig(), 0, failures=tmp_path).train(batch)
    assert len(DataProto.from_disk(tmp_path / "update-0-0")) == len(batch)


def test_the_failure_crosses_processes() -> None:
    error = NonFiniteLoss("the loss is nan", 3, (1, 2), "saved")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.step, again.rows) == (str(error), 3, (1, 2))


def test_a_loss_that_raises_leaves_no_gradient_behind() -> None:
    calls = []

    def failing(*args: Tensor) -> TokenLoss:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("user code")
        return policy_gradient(*args)

    actor = Actor(tiny_model(), ActorConfig(loss=failing, token_budget=1), 0)
    with pytest.raises(RuntimeError, match="user code"):
        actor.train(random_batch())
    assert all(p.grad is None for p in actor.module.parameters())


# Config and columns


def test_a_loss_of_ones_own_sees_a_row_s_trained_tokens_side_by_side() -> None:
    seen: list[Tensor] = []

    def own(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        seen.append(mask)
        return policy_gradient(logprobs, old, advantages, mask)

    batch = random_batch(3)
    (a, _), (b, _) = trained(batch, loss=own), trained(batch, loss="policy_gradient")
    assert_same_parameters(parameters(a.module), parameters(b.module), atol=0)
    counts = batch.batch["response_mask"].sum(1)
    assert seen[0].shape == (len(batch), int(counts.max()))
    assert sorted(seen[0].sum(1).tolist()) == sorted(counts.tolist())


def test_missing_columns_are_named() -> None:
    with pytest.raises(KeyError, match="training needs the column 'advantages'"):
        trained(without(random_batch(), "advantages"))
    with pytest.raises(KeyError, match="'ref_logprobs'"):
        trained(without(random_batch(), "ref_logprobs"), kl_coef=0.1)
    with pytest.raises(KeyError, match="'infer_logprobs'"):
        trained(without(random_batch(), "infer_logprobs"), correction="token")


def test_a_batch_without_response_is_refused() -> None:
    with pytest.raises(ValueError, match="no trained token"):
        trained(segments_batch([[(False, [1, 2])]], advantages=np.ones(1, np.float32)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"correction": "token", "old_logprobs": "infer"}, "both divide by the sampler's probability"),
        ({"aggregation": "sequence_sum"}, "aggregation 'sequence_sum' needs constant_length"),
        ({"constant_length": 3}, "constant_length=3 does nothing with aggregation 'token_mean'"),
        ({"loss": "policy_gradient", "clip_low": 0.1}, "clip_low=0.1 does nothing with the loss 'policy_gradient'"),
        ({"loss": policy_gradient, "clip_high": 0.3}, "clip_high=0.3 does nothing with the loss 'policy_gradient'"),
        ({"loss": "a.module:own", "dual_clip": 3.0}, "dual_clip=3.0 does nothing with the loss 'a.module:own'"),
        ({"loss": "policy_gradient", "old_logprobs": "infer"}, "old_logprobs='infer' does nothing with the loss"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' does nothing while kl_coef is 0"),
        ({"sequence": "trajectory"}, "sequence='trajectory' does nothing with aggregation 'token_mean'"),
        ({"loss": "ppo"}, "loss must be one of ppo_clip"),
        ({"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"temperature": 0}, "temperature"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActorConfig(**config)


def test_without_an_adapter_the_whole_model_is_published() -> None:
    actor = Actor(tiny_model(), ActorConfig(), 0)
    weights = actor.weights()
    assert set(weights) == set(actor.module.state_dict())
    assert not any(tensor.requires_grad for tensor in weights.values())
    live = actor.module.get_parameter("model.norm.weight")
    assert weights["model.norm.weight"].data_ptr() == live.data_ptr()


def test_bf16_rounds_products_and_not_parameters() -> None:
    (exact, fine), (rough, coarse) = (
        trained(random_batch(), precision=precision, double=False, lr=1e-3) for precision in ("fp32", "bf16")
    )
    assert coarse["loss"] == pytest.approx(fine["loss"], rel=0.05)
    assert coarse["entropy"] != fine["entropy"]
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in rough.module.parameters())
    assert_same_parameters(parameters(rough.module), parameters(exact.module), atol=1e-3)
    changed = [not torch.equal(a, b) for a, b in zip(exact.module.parameters(), rough.module.parameters(), strict=True)]
    assert any(changed)


def test_every_version_is_one_batch() -> None:
    actor = Actor(tiny_model(), ActorConfig(epochs=2, mini_batches=2), 0)
    for version in (1, 2):
        metrics = actor.train(random_batch(version))
        assert actor.version == version
    wanted = "loss pg_loss entropy kl clip_fraction grad_norm lr ess tokens ratio_mean"
    assert set(wanted.split()) <= set(metrics)
    assert metrics["entropy"] == pytest.approx(np.log(VOCAB), abs=0.5)
