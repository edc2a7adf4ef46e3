"""FSDP2: shards on several ranks learn what one rank learns with all weights, and their checkpoints fit any ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from test_actor import EVERYTHING, PLAIN
from torch import Tensor, nn
from training_cases import (
    VOCAB,
    assert_same_parameters,
    random_batch,
    segments_batch,
    tiny_model,
    without,
)

from cadenza.data import DataProto, Ragged
from cadenza.training import (
    Actor,
    ActorConfig,
    CheckpointError,
    Critic,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    NonFiniteLoss,
    Reference,
    Supervised,
    SupervisedConfig,
    load_model,
)
from cadenza.training.checkpoint import load_role
from cadenza.training.fsdp import Fsdp2
from cadenza.training.models import save_model
from cadenza.training.process_group import ProcessGroup, RankGroup
from cadenza.training.sharded_checkpoint import ShardedSave, load_shards
from cadenza.training.strategy import ParallelStrategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ADAM = {"lr": 1e-2, "max_grad_norm": 0.05, "weight_decay": 0.01}
Told = tuple[dict[str, Tensor], list[dict[str, float]]]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two shards."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Two shards of each of two halves."""
    with Ranks(4, tensor_ranks=2) as ranks:
        yield ranks


def strategy(group: RankGroup, **options: Any) -> ParallelStrategy:
    """For one rank, the one without shards."""
    if not isinstance(group, ProcessGroup):
        return ParallelStrategy(group)
    if (found := STRATEGIES.get(group, str(options))) is None:
        found = STRATEGIES[group, str(options)] = Fsdp2(group, **options)
    return found


class Strategies(dict[Any, Fsdp2]):
    """Process groups are made once."""

    def get(self, group: ProcessGroup, options: str) -> Fsdp2 | None:  # type: ignore[override]
        return super().get((group, options))


STRATEGIES = Strategies()


def whole(of: ParallelStrategy, module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in of.gather_full(dict(module.named_parameters())).items()}


def double(name: str) -> nn.Module:
    """A policy by name."""
    if name == "tiny":
        return tiny_model(double=True)
    return load_model(ModelConfig(path=name), VOCAB, 0).double()


def act(group: RankGroup, model: str, batches: list[DataProto], config: dict[str, Any]) -> Told:
    fsdp = strategy(group)
    actor = Actor(double(model), ActorConfig(**config), 0, strategy=fsdp)
    told = [actor.train(batch) for batch in batches]
    return whole(fsdp, actor.module), told


def act_in_parts(group: RankGroup, model: str, batches: list[DataProto], config: dict[str, Any]) -> Told:
    fsdp = strategy(group)
    actor = Actor(double(model), ActorConfig(**config), 0, strategy=fsdp)
    told = []
    for batch in batches:
        for part in (batch[:4], batch[4:]):
            actor.add(part)
        told.append(actor.finish())
    return whole(fsdp, actor.module), told


def criticise(group: RankGroup, model: str, batches: list[DataProto], config: dict[str, Any]) -> Told:
    fsdp = strategy(group)
    critic = Critic(double(model), CriticConfig(**config), 0, strategy=fsdp)
    for parameter in critic.head.parameters():
        parameter.data = parameter.data.double()
    told = []
    for batch in batches:
        before = critic.values(batch)
        told.append(critic.train(before))
    heads = {name: tensor.clone() for name, tensor in critic.state().tensors.items() if name.startswith("head/")}
    return whole(fsdp, critic.module) | (heads if fsdp.is_first else {}), told


def imitate(group: RankGroup, model: str, batches: list[DataProto], config: dict[str, Any]) -> Told:
    """A module that an actor has wrapped before."""
    fsdp = strategy(group)
    actor = Actor(double(model), ActorConfig(), 0, strategy=fsdp)
    trainer = Supervised(actor.module, SupervisedConfig(**config), 0, strategy=fsdp)
    told = [trainer.train(batch) for batch in batches]
    return whole(fsdp, actor.module), told


def assert_as_one(
    ranks: Ranks, work: Callable[..., Told], batches: list[DataProto], config: dict[str, Any], model: str = "tiny"
) -> None:
    """The weights, losses and norms of one rank that holds everything."""
    weights, told = work(RankGroup(), model, batches, config)
    (first, metrics), *others = ranks.run(work, model, batches, config)
    assert_same_parameters(first, weights, atol=1e-5)
    for mine, alone in zip(metrics, told, strict=True):
        assert mine == pytest.approx(alone, abs=1e-5)
    for nothing, same in others:
        assert not nothing
        assert same == metrics


THREE = [without(random_batch(seed), "old_logprobs") for seed in (11, 12, 13)]
ONE_ROW = segments_batch([[(False, [1, 2]), (True, [3, 4])]])
ONE_ROW.batch["advantages"] = np.ones(1, np.float32)


@pytest.mark.parametrize("config", EVERYTHING)
@pytest.mark.parametrize("cut", [{"token_budget": 25}, {"packing": "packed", "token_budget": 40}])
def test_shards_learn_what_one_would(two: Ranks, config: dict[str, Any], cut: dict[str, Any]) -> None:
    assert_as_one(two, act, THREE, {**ADAM, **config, **cut})


def test_shards_learn_from_parts_what_one_would_from_the_whole(two: Ranks) -> None:
    config = {**ADAM, "aggregation": "sequence_mean", "token_budget": 25}
    weights, told = act(RankGroup(), "tiny", THREE, config)
    (first, metrics), (_, same) = two.run(act_in_parts, "tiny", THREE, config)
    assert_same_parameters(first, weights, atol=1e-5)
    assert same == metrics
    for mine, alone in zip(metrics, told, strict=True):
        assert mine == pytest.approx(alone, abs=1e-5)


def test_the_gradient_is_a_sum_and_not_a_mean(two: Ranks) -> None:
    assert_as_one(two, act, THREE, {**PLAIN, "token_budget": 1})


def test_a_rank_without_rows_makes_its_passes(two: Ranks) -> None:
    assert_as_one(two, act, [ONE_ROW, *THREE, ONE_ROW], {**ADAM, "token_budget": 1})


def test_a_rank_without_rows_takes_part_in_looking_back(two: Ranks) -> None:
    assert_as_one(two, act, [THREE[0][:2], THREE[1][3:5]], {**ADAM, "mini_batches": 2, "epochs": 2})


def test_shards_agree_that_there_is_nothing_to_learn(two: Ranks) -> None:
    idle = THREE[1].select()
    idle.batch["advantages"] = np.zeros(len(idle), np.float32)
    assert_as_one(two, act, [THREE[0], idle], ADAM)
    (weights, told), (_, same) = two.run(act, "tiny", [THREE[0], idle], ADAM)
    assert told == same
    assert [metrics["updates_skipped"] for metrics in told] == [0.0, 1.0]
    assert_same_parameters(weights, two.run(act, "tiny", THREE[:1], ADAM)[0][0], atol=0)


def test_critics_in_shards_learn_what_one_would(two: Ranks) -> None:
    config = {"lr": 1e-2, "value_clip": None, "mini_batches": 3, "token_budget": 25}
    assert_as_one(two, criticise, [random_batch(seed) for seed in (11, 12, 13)], config)


def test_a_cold_start_goes_on_with_the_shards_that_are_there(two: Ranks) -> None:
    assert_as_one(two, imitate, THREE, {**ADAM, "token_budget": 25})


# -- tensor parallel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With groups of heads; the kinds differ in biases and norms of heads."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": request.param != "llama"}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kinds: dict[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    settings, kind = kinds[request.param]
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    made = kind(settings(**sizes, **heads, **ids, initializer_range=0.3))
    for name, parameter in made.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            nn.init.normal_(parameter, 1.0, 0.3)
    made.save_pretrained(path)
    return str(path)


def test_halves_of_heads_and_shards_of_them_learn_what_one_would(four: Ranks, model: str) -> None:
    assert_as_one(four, act, THREE, {**ADAM, "token_budget": 25, "entropy_coef": 0.01, "mini_batches": 2}, model)


def too_many(group: ProcessGroup) -> None:
    Actor(tiny_model(heads=1), ActorConfig(), 0, strategy=strategy(group))


def test_heads_that_do_not_divide_are_refused(four: Ranks) -> None:
    for error in four.errors(too_many):
        assert str(error) == "tensor_parallel 2 does not divide the num_attention_heads of the model, 1"


# -- precision, adapters -----------------------------------------------------------------------------------------------


def rounded(group: ProcessGroup) -> tuple[list[torch.dtype], list[float], list[float]]:
    fsdp = strategy(group, precision="bf16")
    actor = Actor(tiny_model(), ActorConfig(**ADAM), 0, strategy=fsdp)
    losses = [actor.train(batch)["grad_norm"] for batch in THREE]
    exact = Actor(tiny_model(), ActorConfig(**ADAM), 0)
    return [p.dtype for p in actor.module.parameters()], losses, [exact.train(batch)["grad_norm"] for batch in THREE]


def test_bf16_rounds_products_and_not_shards(two: Ranks) -> None:
    for dtypes, found, exact in two.run(rounded):
        assert set(dtypes) == {torch.float32}
        assert found == pytest.approx(exact, rel=0.05)
        assert found != pytest.approx(exact, rel=1e-5)


def adapt(group: RankGroup, directory: Path) -> tuple[dict[str, Tensor], list[float], DataProto]:
    fsdp = strategy(group)
    model = load_model(ModelConfig(path=str(directory), lora=LoraConfig(r=2)), VOCAB, 0)
    actor = Actor(model, ActorConfig(**ADAM), 0, strategy=fsdp)
    reference = Reference(actor.module, strategy=fsdp)
    losses = [actor.train(batch)["loss"] for batch in THREE]
    return actor.weights(), losses, reference.logprobs(THREE[0]).select(["ref_logprobs"])


def test_adapters_are_sharded_and_published_alone(two: Ranks, tmp_path: Path) -> None:
    save_model(tmp_path, tiny_model())
    weights, losses, under = adapt(RankGroup(), tmp_path)
    (found, mine, same), (nothing, _, _) = two.run(adapt, tmp_path)
    assert not nothing
    assert_same_parameters(found, {name: tensor.clone() for name, tensor in weights.items()}, atol=1e-5)
    assert mine == pytest.approx(losses, abs=1e-5)
    np.testing.assert_allclose(*(part.batch.ragged("ref_logprobs").values for part in (same, under)), atol=1e-5)


# -- checkpoints and offload -------------------------------------------------------------------------------------------


def save(group: ProcessGroup, directory: Path) -> Told:
    """The weights in the end, with a checkpoint after the first batch that is written while the second is trained."""
    fsdp = strategy(group)
    assert isinstance(fsdp, Fsdp2)
    actor = Actor(tiny_model(), ActorConfig(**ADAM), 0, strategy=fsdp)
    actor.train(THREE[0])
    exported = whole(fsdp, actor.module)
    saving = ShardedSave(directory, actor, fsdp)
    told = [actor.train(THREE[1])]
    saving.wait()
    return whole(fsdp, actor.module) | {f"then/{name}": tensor for name, tensor in exported.items()}, told


def go_on(group: ProcessGroup, directory: Path) -> Told:
    fsdp = strategy(group)
    assert isinstance(fsdp, Fsdp2)
    actor = Actor(tiny_model(5), ActorConfig(**ADAM), 0, strategy=fsdp)
    load_shards(directory, actor, fsdp)
    return whole(fsdp, actor.module), [actor.train(THREE[1])]


def go_on_to_the_end(group: ProcessGroup, directory: Path) -> dict[str, Tensor]:
    fsdp = strategy(group)
    assert isinstance(fsdp, Fsdp2)
    actor = Actor(tiny_model(5), ActorConfig(**ADAM), 0, strategy=fsdp)
    load_shards(directory, actor, fsdp)
    actor.train(THREE[1])
    return whole(fsdp, actor.module)


def test_a_checkpoint_is_of_its_moment_and_fits_other_ranks(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    (weights, told), _ = two.run(save, tmp_path)
    then = {name.removeprefix("then/"): tensor for name, tensor in weights.items() if name.startswith("then/")}
    end = {name: tensor for name, tensor in weights.items() if not name.startswith("then/")}
    exported = load_model(ModelConfig(path=str(tmp_path)), VOCAB, 0)
    assert_same_parameters({name: p.detach() for name, p in exported.named_parameters()}, then, atol=0)
    for ranks, atol in ((two, 0.0), (four, 1e-5)):
        restored, metrics = ranks.run(go_on, tmp_path)[0]
        assert_same_parameters(restored, then, atol=0)
        assert metrics[0] == pytest.approx(told[0], abs=1e-5)
        assert_same_parameters(ranks.run(go_on_to_the_end, tmp_path)[0], end, atol=atol)
    with pytest.raises(CheckpointError, match="is sharded: go on with the strategy 'fsdp2'"):
        load_role(tmp_path, Actor(tiny_model(), ActorConfig(), 0))


def go_on_from_another(group: ProcessGroup, directory: Path) -> None:
    fsdp = strategy(group)
    assert isinstance(fsdp, Fsdp2)
    load_shards(directory, Actor(tiny_model(), ActorConfig(), 0, strategy=fsdp), fsdp)


def test_a_checkpoint_of_another_strategy_is_refused(two: Ranks, tmp_path: Path) -> None:
    for error in two.errors(go_on_from_another, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "was written by another strategy than 'fsdp2'" in str(error)


def rest(group: RankGroup, away: bool) -> tuple[Told, int, int, str]:
    fsdp = strategy(group)
    actor = Actor(tiny_model(), ActorConfig(**ADAM), 0, strategy=fsdp)
    told = [actor.train(THREE[0])]
    freed, said, left = 0, "", 0
    if away:
        freed = actor.offload()
        left = sum(_bytes(parameter) for parameter in actor.module.parameters())
        try:
            actor.logprobs(THREE[1])
        except RuntimeError as error:
            said = str(error)
        actor.reload()
    told.append(actor.train(THREE[1]))
    return (whole(fsdp, actor.module), told), freed, left, said


def _bytes(parameter: Any) -> int:
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.untyped_storage().nbytes()


def test_what_was_offloaded_and_reloaded_goes_on_as_if_nothing_had_happened(two: Ranks) -> None:
    stayed, went = two.run(rest, False), two.run(rest, True)
    for ((weights, told), *_), ((same, metrics), freed, left, said) in zip(stayed, went, strict=True):
        assert_same_parameters(same, weights, atol=0)
        assert metrics == told
        shards = sum(p.numel() for p in tiny_model().parameters()) * 4 // 2
        assert freed >= 3 * shards  # weights, and two moments of Adam
        assert left == 0
        assert said == "the weights are offloaded: reload() them before anything is computed"


def test_one_rank_can_offload_too() -> None:
    (weights, told), *_ = rest(RankGroup(), False)
    (same, metrics), freed, left, _ = rest(RankGroup(), True)
    assert_same_parameters(same, weights, atol=0)
    assert (metrics, left) == (told, 0)
    assert freed > 0


def fail(group: ProcessGroup, batch: DataProto) -> None:
    fsdp = strategy(group)
    actor = Actor(tiny_model(), ActorConfig(**ADAM, token_budget=1), 0, strategy=fsdp)
    before = whole(fsdp, actor.module)
    try:
        actor.train(batch)
    finally:
        assert_same_parameters(whole(fsdp, actor.module), before, atol=0)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all(two: Ranks) -> None:
    batch = random_batch(11)
    values, offsets = batch.batch.ragged("advantages").values.copy(), batch.batch.ragged("advantages").offsets
    values[: offsets[1]] = np.nan
    batch.batch["advantages"] = Ragged(values, offsets)
    for error in two.errors(fail, batch):
        assert isinstance(error, NonFiniteLoss)
        assert error.rows == (0,)
