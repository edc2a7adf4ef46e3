"""Models, adapters, and the workers around the actor: reference, critic, supervised steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import (
    VOCAB,
    adapted_model,
    assert_same_parameters,
    dropping_model,
    parameters,
    random_batch,
    row_by_row,
    segments_batch,
    tiny_model,
    without,
)

from cadenza.data import DataProto
from cadenza.training import (
    Actor,
    ActorConfig,
    Critic,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    ModelNotFound,
    NonFiniteLoss,
    Reference,
    ReferenceConfig,
    Supervised,
    SupervisedConfig,
    examples,
    load_model,
)
from cadenza.training.forward import Forward


def responses(batch: DataProto, name: str) -> torch.Tensor:
    return batch.batch[name][batch.batch["response_mask"]]


# Models


def test_the_same_seed_builds_the_same_policy_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    assert_same_parameters(parameters(tiny_model(3)), parameters(tiny_model(3)), atol=0)
    assert not torch.equal(next(tiny_model(3).parameters()), next(tiny_model(4).parameters()))
    assert torch.equal(before, torch.get_rng_state())


def test_the_default_policy_is_tiny_with_tied_embeddings() -> None:
    model: Any = load_model(ModelConfig(), 100, 0, eos_token_id=7)
    assert 1e5 < sum(p.numel() for p in model.parameters()) < 1e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.eos_token_id == 7
    assert model.training


def test_a_saved_policy_can_be_loaded_by_its_path(tmp_path: Path) -> None:
    model: Any = tiny_model(3)
    model.save_pretrained(tmp_path)
    assert_same_parameters(parameters(load_model(ModelConfig(path=str(tmp_path)), VOCAB, 0)), parameters(model), atol=0)


def test_a_missing_model_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (str(tmp_path / "nowhere"), str(tmp_path), "./best", "runs/best"):
        with pytest.raises(ModelNotFound, match="give a directory written by save_pretrained") as caught:
            load_model(ModelConfig(path=path), VOCAB, 0)
        assert path in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    model: Any = tiny_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"knows {VOCAB} tokens, the tokenizer 500"):
        load_model(ModelConfig(path=str(tmp_path)), 500, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_is_loaded_again_says_the_same(tmp_path: Path, dtype: str) -> None:
    model: Any = tiny_model(3, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path), dtype=dtype), VOCAB, 0)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    batch = random_batch()
    one, two = (responses(Actor(m, ActorConfig(), 0).logprobs(batch), "old_logprobs") for m in (model, loaded))
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_gradient_checkpointing_computes_layers_twice_and_trains_to_the_same_weights(tmp_path: Path, kind: str) -> None:
    results, calls = [], []
    for again in (False, True):
        if kind == "llama":
            module = tiny_model(double=True, gradient_checkpointing=again)
        else:
            module = dropping_model(kind, tmp_path, gradient_checkpointing=again).double()
        activation = next(part for name, part in module.named_modules() if name.endswith(("act_fn", "act", "fc1")))
        counted: list[Any] = []
        actor = Actor(module, ActorConfig(), 0)
        activation.register_forward_hook(lambda *call, counted=counted: counted.append(call))
        actor.train(random_batch())
        results.append(parameters(actor.module))
        calls.append(len(counted))
    assert calls == [1, 2]
    assert_same_parameters(*results, atol=1e-9)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora": LoraConfig()}, "lora needs a path"),
        ({"hidden": 12, "heads": 5}, "hidden must be heads times an even number"),
        ({"layer": 3}, "did you mean 'layers'"),
        ({"path": "x", "layers": 2}, "layers=2 does nothing with the path 'x', which has its own: remove it"),
        ({"path": "x", "hidden": 32}, "hidden=32 does nothing with the path"),
        ({"path": "x", "heads": 2}, "heads=2 does nothing with the path"),
        ({"path": "x", "intermediate": 32}, "intermediate=32 does nothing with the path"),
        ({"path": "x", "max_positions": 32}, "max_positions=32 does nothing with the path"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**config)


# LoRA


def test_with_lora_only_the_adapter_trains_and_is_published(tmp_path: Path) -> None:
    actor = Actor(adapted_model(tmp_path), ActorConfig(lr=1e-2), 0)
    before = parameters(actor.module)
    actor.train(random_batch())
    changed = {name for name, p in parameters(actor.module).items() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    weights = actor.weights()
    assert len(weights) == len(changed)
    assert all("lora_" in name for name in weights)


def test_lora_goes_through_the_compact_pass_and_agrees_with_its_own_forward(tmp_path: Path) -> None:
    module = adapted_model(tmp_path).eval()
    assert Forward(module).packing == "shared"
    batch = random_batch(2)
    found = responses(Actor(module, ActorConfig(), 0).logprobs(batch), "old_logprobs")
    torch.testing.assert_close(found, torch.cat(row_by_row(module, batch)[0]).detach(), atol=1e-5, rtol=0)


def test_the_reference_of_an_adapted_model_is_its_base_without_a_copy(tmp_path: Path) -> None:
    module = adapted_model(tmp_path)
    actor, reference = Actor(module, ActorConfig(lr=1e-2), 0), Reference(module)
    assert reference.module is module
    batch = random_batch(2)
    actor.train(batch)
    expected = torch.cat(row_by_row(tiny_model(), batch)[0]).detach()
    found = reference.logprobs(without(batch, "ref_logprobs"))
    torch.testing.assert_close(responses(found, "ref_logprobs"), expected, atol=1e-5, rtol=0)
    adapted = responses(actor.logprobs(batch), "old_logprobs")
    assert (adapted - expected).abs().max() > 1e-3


def test_dropout_is_off_where_logprobs_are_only_read(tmp_path: Path) -> None:
    actor = Actor(adapted_model(tmp_path, dropout=0.5), ActorConfig(), 0)
    batch = random_batch()
    Supervised(actor.module, SupervisedConfig(lr=0.0), 0).train(batch)
    one, two = (actor.logprobs(batch).batch["old_logprobs"] for _ in range(2))
    assert torch.equal(one, two)
    assert actor.module.training


@pytest.mark.parametrize("kind", ["gpt2", "opt", "lora"])
def test_supervised_steps_drop_and_those_of_a_critic_do_not(tmp_path: Path, kind: str) -> None:
    module, batch = dropping_model(kind, tmp_path), random_batch()
    critic = Critic(module, CriticConfig(lr=0.0, value_clip=None), 0)
    critic.head.weight.data.normal_()
    assert len({critic.train(batch)["value_loss"] for _ in range(3)}) == 1
    learner = Supervised(module, SupervisedConfig(lr=0.0), 0)
    assert len({learner.train(batch)["loss"] for _ in range(3)}) == 3


# Reference


def test_the_reference_stays_where_the_actor_began() -> None:
    actor = Actor(tiny_model(), ActorConfig(lr=1e-2, temperature=0.9), 0)
    reference = Reference(copy.deepcopy(actor.module), ReferenceConfig(temperature=0.9))
    batch = without(random_batch(2), "old_logprobs", "ref_logprobs")
    before = responses(actor.logprobs(batch), "old_logprobs")
    first = actor.train(reference.logprobs(batch))
    second = actor.train(reference.logprobs(batch))
    assert torch.equal(responses(reference.logprobs(batch), "ref_logprobs"), before)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-6
    assert not any(p.requires_grad for p in reference.module.parameters())
    assert all(p.requires_grad for p in actor.module.parameters())


# Critic


def test_an_untrained_critic_expects_nothing() -> None:
    critic = Critic(tiny_model(), CriticConfig(), 0)
    assert not critic.values(random_batch()).batch["values"].any()


def test_the_critic_learns_the_returns() -> None:
    batch = random_batch(2)
    tokens = batch.batch["input_ids"]
    batch.batch.assign_like("returns", (tokens % 3).float(), like="input_ids")
    critic = Critic(tiny_model(), CriticConfig(lr=1e-2, value_clip=None, epochs=3), 0)
    metrics = [critic.train(critic.values(without(batch, "values"))) for _ in range(50)]
    assert metrics[-1]["value_loss"] < 0.3 * metrics[0]["value_loss"]
    assert metrics[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["explained_variance"] > 0.5
    assert critic.version == 50


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_critic_s_update_is_the_same_however_it_is_cut(aggregation: str) -> None:
    batch, _ = random_batch(2).pad_to_multiple(4)
    results = []
    for budget in (1, 30, 10_000):
        config = CriticConfig(
            optimizer="SGD", lr=1.0, max_grad_norm=None, token_budget=budget, aggregation=aggregation
        )  # fmt: skip
        critic = Critic(tiny_model(double=True), config, 0)
        critic.head.double()
        metrics = [critic.train(batch) for _ in range(2)]
        results.append((parameters(critic.module) | parameters(critic.head), metrics))
    for found, metrics in results[1:]:
        assert_same_parameters(found, results[0][0], atol=1e-9)
        assert metrics[1] == pytest.approx(results[0][1][1], abs=1e-6)


def test_a_critic_s_value_at_a_token_does_not_see_that_token() -> None:
    critic = Critic(tiny_model(), CriticConfig(lr=1e-2), 0)
    critic.train(random_batch(2))
    one, two = (
        critic.values(segments_batch([[(False, [1, 2]), (True, [3, last])]])).batch["values"][0] for last in (4, 5)
    )
    torch.testing.assert_close(one, two)


def test_a_critic_s_loss_that_is_not_finite_stops_it(tmp_path: Path) -> None:
    batch = random_batch()
    batch.batch["returns"] = np.full(len(batch), np.inf, np.float32)
    with pytest.raises(NonFiniteLoss, match="the batch is in"):
        Critic(tiny_model(), CriticConfig(), 0, failures=tmp_path).train(batch)


# Supervised


def test_supervised_steps_learn_what_was_said() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, VOCAB, 5), [7, 3]) for _ in range(40)]
    learner = Supervised(tiny_model(), SupervisedConfig(lr=1e-2, batch_size=16), 0)
    losses = [metrics["loss"] for metrics in learner.fit(examples(pairs), passes=20)]
    assert len(losses) == 60
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.5)
    assert losses[-1] < 0.3
    assert learner.version == 60


def test_a_supervised_loss_is_the_mean_of_the_response_tokens_cross_entropy() -> None:
    batch = random_batch(3)
    expected = -float(torch.cat(row_by_row(tiny_model(double=True), batch)[0]).mean().detach())
    for budget in (1, 10_000):
        learner = Supervised(tiny_model(double=True), SupervisedConfig(token_budget=budget), 0)
        assert learner.train(batch)["loss"] == pytest.approx(expected, abs=1e-6)


def test_a_short_last_batch_has_as_many_updates_as_it_has_examples() -> None:
    learner = Supervised(tiny_model(), SupervisedConfig(batch_size=4, mini_batches=2), 0)
    assert [metrics["tokens"] for metrics in learner.fit(examples([([1, 2], [3])] * 5))] == [4.0, 1.0]


@pytest.mark.parametrize("config", [CriticConfig, SupervisedConfig])
def test_a_length_that_is_missing_is_noticed_before_training(config: Any) -> None:
    with pytest.raises(ValueError, match="aggregation 'sequence_sum' needs constant_length"):
        config(aggregation="sequence_sum")
    with pytest.raises(ValueError, match="constant_length=7 does nothing with aggregation 'sequence_mean'"):
        config(aggregation="sequence_mean", constant_length=7)
    assert config(aggregation="sequence_sum", constant_length=7).constant_length == 7


def test_examples_train_their_responses() -> None:
    batch = examples([([1, 2], [3]), ([4], [5, 6, 7])])
    assert [row.tolist() for row in batch.batch.ragged("input_ids")] == [[1, 2, 3], [4, 5, 6, 7]]
    assert [row.tolist() for row in batch.batch.ragged("response_mask")] == [
        [False, False, True],
        [False, True, True, True],
    ]
