"""Rows as micro-batches and slots: nothing lost, nothing twice, nothing seen that is not one's own."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import VOCAB, random_batch, row_by_row, segments_batch, tiny_model, without

from cadenza.data import DataProto, Ragged
from cadenza.training.attention_blocks import attention_layout
from cadenza.training.batching import micro_batches, mini_batches
from cadenza.training.forward import Forward, TokenScores
from cadenza.training.packing import Packing, pack
from cadenza.training.token_rows import TokenRows

PACKINGS: tuple[Packing, ...] = get_args(Packing)
batches = st.builds(
    random_batch, st.integers(0, 10_000), groups=st.integers(1, 4), size=st.integers(1, 4), turns=st.integers(1, 4)
)


def scores_by_row(
    forward: Forward, batch: DataProto, packing: Packing, budget: int = 10_000, **options: Any
) -> list[TokenScores]:
    """The scores of each row of the batch, in its order."""
    rows = TokenRows.of(batch)
    found: dict[int, TokenScores] = {}
    for part in micro_batches(rows, rows.active, budget, packing):
        scores = forward.scores(pack(rows, part, packing), **options)
        counts = rows.counts[part].tolist()
        logprobs = scores.logprobs.split(counts)
        entropies = [None] * len(part) if scores.entropy is None else scores.entropy.split(counts)
        found |= {int(row): TokenScores(*pair) for row, *pair in zip(part, logprobs, entropies, strict=True)}
    return [found[row] for row in range(len(rows))]


# transformers takes norms in float32 also where the rest is float64: hence tolerances above 1e-9 against it.
def assert_as_row_by_row(module: Any, batch: DataProto, packing: Packing, atol: float, **options: Any) -> None:
    forward = Forward(module)
    expected = row_by_row(module, batch, options.get("temperature", 1.0))
    for found, logprobs, entropies in zip(
        scores_by_row(forward, batch, packing, entropy="gradient", **options), *expected, strict=True
    ):
        assert found.entropy is not None
        torch.testing.assert_close(found.logprobs, logprobs, atol=atol, rtol=0)
        torch.testing.assert_close(found.entropy, entropies, atol=atol, rtol=0)


# Rows


def test_a_row_is_computed_up_to_its_last_trained_token() -> None:
    row = [(False, [1, 2]), (True, [3, 4]), (False, [5]), (True, [6]), (False, [7, 8])]
    rows = TokenRows.of(segments_batch([row, [(False, [1])]]))
    assert rows.lengths.tolist() == [5, 0]
    assert rows.trained.tolist() == [2, 3, 5]
    assert rows.counts.tolist() == [3, 0]
    assert rows.active.tolist() == [0]


def test_padding_rows_have_no_trained_tokens() -> None:
    batch, added = random_batch().pad_to_multiple(8)
    assert added
    assert TokenRows.of(batch).counts[-added:].tolist() == [0] * added


def test_a_column_can_be_ragged_or_dense_or_one_value_per_row() -> None:
    batch = random_batch()
    rows = TokenRows.of(batch)
    per_row = np.arange(len(batch), dtype=np.float32)
    lengths = batch.batch.ragged("input_ids").lengths
    forms = {
        "per_row": per_row,
        "ragged": Ragged.from_rows([np.full(n, v, np.float32) for n, v in zip(lengths, per_row, strict=True)]),
        "dense": np.repeat(per_row[:, None], lengths.max(), axis=1),
    }
    for name, column in forms.items():
        batch.batch[name] = column
    read = [rows.read(batch, name) for name in forms]
    np.testing.assert_array_equal(read[0], read[1])
    np.testing.assert_array_equal(read[0], read[2])


def test_a_column_of_another_shape_is_refused() -> None:
    batch = random_batch()
    batch.batch["advantages"] = np.zeros((len(batch), 2), np.float32)
    with pytest.raises(ValueError, match=r"'advantages' is \[9, 2\]"):
        TokenRows.of(batch).read(batch, "advantages")


def test_results_are_written_where_their_tokens_are() -> None:
    batch = random_batch()
    rows = TokenRows.of(batch)
    written = rows.write(batch, "numbers", np.arange(len(rows.trained)) + 1)
    mask = batch.batch["response_mask"]
    assert written.batch["numbers"][mask].tolist() == list(range(1, len(rows.trained) + 1))
    assert not written.batch["numbers"][~mask].any()
    assert "numbers" not in batch.batch


def test_a_response_without_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 begins with a response token"):
        TokenRows.of(segments_batch([[(False, [1]), (True, [2])], [(True, [1, 2])]]))


# Micro-batches and mini-batches


@given(batches, st.sampled_from(PACKINGS), st.integers(1, 80))
def test_micro_batches_hold_every_training_row_once_within_the_budget(
    batch: DataProto, packing: Packing, budget: int
) -> None:
    rows = TokenRows.of(batch)
    parts = micro_batches(rows, rows.active, budget, packing)
    assert sorted(np.concatenate(parts).tolist()) == rows.active.tolist()
    for part in parts:
        assert len(part) == 1 or len(pack(rows, part, packing).tokens) <= budget
    again = micro_batches(rows, rows.active, budget, packing)
    assert [part.tolist() for part in parts] == [part.tolist() for part in again]


def test_rows_of_a_padded_micro_batch_are_of_similar_length() -> None:
    batch = segments_batch([[(False, [1] * n), (True, [2])] for n in (9, 2, 8, 1, 10, 3)])
    rows = TokenRows.of(batch)
    assert [rows.lengths[part].tolist() for part in micro_batches(rows, rows.active, 30, "padded")] == [
        [10, 9, 8],
        [3, 2, 1],
    ]


@given(st.lists(st.integers(0, 5), min_size=6, max_size=30), st.integers(1, 3), st.integers(0, 9))
def test_mini_batches_hold_every_row_once_and_trajectories_whole(ids: list[int], count: int, seed: int) -> None:
    ids = [*ids, 0, 1, 2]
    parts = mini_batches(np.array(ids), count, np.random.default_rng(seed))
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    homes = [{ids[row] for row in part} for part in parts]
    assert sum(map(len, homes)) == len(set(ids))
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


# Packing


def test_a_prompt_that_rows_share_is_computed_once() -> None:
    prompt = list(range(10))
    rows = TokenRows.of(segments_batch([[(False, prompt), (True, [n, n, n])] for n in range(4)]))
    [part] = micro_batches(rows, rows.active, 1000, "shared")
    # The last response token of a row predicts nothing, so it is no input.
    assert len(pack(rows, part, "shared").tokens) == 10 + 4 * 2
    assert len(pack(rows, part, "packed").tokens) == 4 * 12


def test_equal_rows_are_one_row_of_slots_with_a_target_each() -> None:
    rows = TokenRows.of(segments_batch([[(False, [1, 2]), (True, [3, 4])]] * 3))
    packed = pack(rows, rows.active, "shared")
    assert packed.tokens.tolist() == [1, 2, 3]
    assert packed.targets.tolist() == [3, 4] * 3


@given(batches, st.sampled_from(PACKINGS), st.booleans(), st.sampled_from([0, 60, 10**6]))
def test_a_plan_asks_every_query_once_and_shows_it_its_own_past(
    batch: DataProto, packing: Packing, only_reads: bool, block_cost: int
) -> None:
    rows = TokenRows.of(batch)
    [part] = micro_batches(rows, rows.active, 10**6, packing)
    packed = pack(rows, part, packing)
    queries = packed.reads if only_reads else np.arange(len(packed.tokens))
    made = attention_layout(packed, packed.reads if only_reads else None, block_cost=block_cost)
    seen = _seen(made, len(packed.tokens), len(queries))
    for slot_of, length in zip(packed.grid, packed.lengths, strict=True):
        for position in range(length):
            if slot_of[position] in queries:
                number = int(np.searchsorted(queries, slot_of[position]))
                assert seen[number] == sorted(slot_of[: position + 1].tolist())


def test_members_of_a_group_are_a_block_of_few_queries() -> None:
    prompt = list(range(VOCAB)) * 4
    batch = segments_batch([[(False, prompt), (True, [n % VOCAB, n % 7, 1])] for n in range(12)])
    rows = TokenRows.of(batch)
    [part] = micro_batches(rows, rows.active, 10**6, "shared")
    whole, members = attention_layout(pack(rows, part, "shared")).blocks
    assert (whole.rows, whole.queries, whole.mask) == (1, len(prompt) + 2, None)
    assert (members.rows, members.queries, members.keys) == (11, 2, len(prompt) + 2)
    assert_as_row_by_row(DOUBLE, batch, "shared", 1e-6)
    alone = gradients(DOUBLE, batch, "padded", 1)
    for a, b in zip(gradients(DOUBLE, batch, "shared", 10**6), alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def _seen(made: Any, slots: int, queries: int) -> list[list[int]]:
    """The slots that each query sees, read off the blocks."""
    query_at = np.arange(queries) if made.queries is None else made.queries.numpy()
    key_at = np.arange(slots) if made.keys is None else made.keys.numpy()
    place_of = np.arange(queries) if made.results is None else made.results.numpy()
    by_place: list[list[int]] = []
    key = 0
    for block in made.blocks:
        grid = key_at[key : key + block.rows * block.keys].reshape(block.rows, block.keys)
        key += grid.size
        for row in range(block.rows):
            for q in range(block.queries):
                visible = np.arange(block.keys) <= q if block.mask is None else block.mask[row, 0, q].numpy() == 0
                by_place.append(sorted(grid[row][visible].tolist()))
    assert [int(query_at[place]) for place in place_of] == list(range(queries))
    return [by_place[place] for place in place_of]


@settings(max_examples=25)
@given(batches, st.sampled_from(PACKINGS))
def test_any_packing_gives_what_each_row_alone_gives(batch: DataProto, packing: Packing) -> None:
    assert_as_row_by_row(DOUBLE, batch, packing, 1e-6)


def gradients(module: Any, batch: DataProto, packing: Packing, budget: int) -> tuple[torch.Tensor, ...]:
    scores = scores_by_row(Forward(module), batch, packing, budget, entropy="gradient")
    loss = _any_loss([s.logprobs for s in scores], [s.entropy for s in scores if s.entropy is not None])
    return torch.autograd.grad(loss, list(module.parameters()))


def test_gradients_are_those_of_each_row_alone() -> None:
    batch = random_batch(3)
    expected = torch.autograd.grad(_any_loss(*row_by_row(DOUBLE, batch)), list(DOUBLE.parameters()))
    for a, b in zip(gradients(DOUBLE, batch, "shared", 10_000), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@settings(max_examples=15)
@given(batches, st.sampled_from(PACKINGS), st.integers(1, 80))
def test_gradients_do_not_depend_on_packing_or_budget(batch: DataProto, packing: Packing, budget: int) -> None:
    alone = gradients(DOUBLE, batch, "padded", 1)
    for a, b in zip(gradients(DOUBLE, batch, packing, budget), alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def _any_loss(logprobs: list[torch.Tensor], entropies: list[torch.Tensor]) -> torch.Tensor:
    terms = [(i + 1) * p.sin().sum() + (2 * h).sum() for i, (p, h) in enumerate(zip(logprobs, entropies, strict=True))]
    return torch.stack(terms).sum()


DOUBLE = tiny_model(double=True)


# The forward pass


def other_model(kind: str, **settings: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


COMPACT = {
    "Llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
}


@pytest.mark.parametrize("kind", COMPACT)
def test_the_compact_pass_agrees_with_transformers(kind: str) -> None:
    module = other_model(kind, **COMPACT[kind])
    assert Forward(module).packing == "shared"
    assert_as_row_by_row(module, random_batch(1), "shared", 1e-5)


@pytest.mark.parametrize("packing", PACKINGS)
def test_other_models_go_through_their_own_forward(packing: Packing) -> None:
    # GPT-2 has learned positions, Gemma 2 bends its logits after the head.
    import transformers

    gpt2: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ).eval()
    gemma = other_model("Gemma2", final_logit_softcapping=0.5, layer_types=["full_attention"] * 2)
    for module in (gpt2, gemma):
        assert Forward(module).packing == "padded"
        assert_as_row_by_row(module, random_batch(1), packing, 1e-5)


def test_a_model_with_a_sliding_window_is_only_padded() -> None:
    module = other_model("Mistral", sliding_window=3)
    forward = Forward(module)
    assert forward.resolve("auto") == "padded"
    assert_as_row_by_row(module, random_batch(1), "padded", 1e-5)
    with pytest.raises(ValueError, match="packing must not be 'packed' for mistral models"):
        forward.resolve("packed")


OWN_PLACES: dict[str, tuple[dict[str, Any], set[Packing]]] = {
    # ALiBi as a function of the slot, which is right only where the slots of a row are neighbours.
    "Mpt": ({"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 128}, {"padded", "packed"}),
    # A window over slots; at 256 it is wider than any example.
    "GPTNeo": ({"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}, {"padded"}),
    # They take no mask of two dimensions.
    "Bloom": ({"n_layer": 2, "n_head": 2}, {"padded"}),
    "Falcon": ({"num_attention_heads": 2, "alibi": True}, {"padded"}),
    "GPTNeoX": ({}, {"padded", "packed", "shared"}),
}


@pytest.mark.parametrize("kind", OWN_PLACES)
def test_a_layout_that_the_model_gets_wrong_is_refused(kind: str) -> None:
    import transformers

    settings, right = OWN_PLACES[kind]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "Mpt":
        sizes = {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": VOCAB, **sizes, **settings})
    forward = Forward(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    for packing in PACKINGS:
        if packing in right:
            assert forward.resolve(packing) == packing
            assert_as_row_by_row(forward.module, random_batch(1), packing, 1e-5)
        else:
            with pytest.raises(ValueError, match=f"packing must not be '{packing}' for {config.model_type} models"):
                forward.resolve(packing)
    assert forward.resolve("auto") == "padded"


def test_a_module_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not a language model or classifier"):
        Forward(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_of_the_distribution_at_the_temperature(temperature: float) -> None:
    assert_as_row_by_row(DOUBLE, random_batch(2), "shared", 1e-6, temperature=temperature)


def test_greedy_sampling_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        scores_by_row(Forward(DOUBLE), random_batch(), "shared", temperature=0.0)


@pytest.mark.parametrize("limit", [1, VOCAB, 5 * VOCAB + 3])
def test_logits_in_chunks_give_the_same_values_and_gradients(limit: int) -> None:
    batch = random_batch(4)
    results = []
    for forward in (Forward(DOUBLE), Forward(DOUBLE, logits_limit=limit)):
        scores = scores_by_row(forward, batch, "shared", entropy="gradient")
        loss = _any_loss([s.logprobs for s in scores], [s.entropy for s in scores if s.entropy is not None])
        results.append([loss.detach(), *torch.autograd.grad(loss, list(DOUBLE.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_logits_in_chunks_also_without_gradients_and_entropies() -> None:
    batch = random_batch(4)
    rows = TokenRows.of(batch)
    whole, chunked = (
        Forward(DOUBLE, logits_limit=limit).logprobs(rows, rows.active, budget=100, packing="shared")
        for limit in (1 << 24, 40)
    )
    np.testing.assert_allclose(whole, chunked, atol=1e-6)


def test_entropy_has_a_gradient_only_when_asked() -> None:
    batch = random_batch()
    for need, has_gradient in (("value", False), ("gradient", True)):
        [*_, scores] = scores_by_row(Forward(DOUBLE), batch, "shared", entropy=need)
        assert scores.entropy is not None
        assert scores.entropy.requires_grad == has_gradient


def test_bf16_products_give_nearly_the_same_in_float32() -> None:
    module = tiny_model()
    batch = random_batch()
    exact = scores_by_row(Forward(module), batch, "shared")
    rough = scores_by_row(Forward(module, precision="bf16"), batch, "shared")
    assert rough[0].logprobs.dtype == torch.float32
    for a, b in zip(exact, rough, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=0.05, rtol=0)
    torch.cat([s.logprobs for s in rough]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_a_model_in_bfloat16_runs() -> None:
    module = tiny_model(dtype="bfloat16")
    forward = Forward(module)
    assert forward.packing == "shared"
    scores = scores_by_row(forward, random_batch(), "shared")
    torch.cat([s.logprobs for s in scores]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_gradient_checkpointing_changes_no_gradient(kind: str) -> None:
    batch = random_batch(5)
    module = other_model(kind).double().train()
    gradients = []
    for again in (False, True):
        if again:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scores = scores_by_row(Forward(module), batch, Forward(module).packing)
        loss = torch.cat([s.logprobs for s in scores]).sum()
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_the_probe_leaves_mode_and_random_state_alone() -> None:
    module = tiny_model().train()
    before = torch.get_rng_state()
    Forward(module)
    assert module.training
    assert torch.equal(before, torch.get_rng_state())


def test_columns_that_nothing_reads_are_not_needed() -> None:
    bare = without(random_batch(), "advantages", "infer_logprobs", "ref_logprobs", "old_logprobs", "returns", "values")
    assert len(scores_by_row(Forward(DOUBLE), bare, "shared")) == len(bare)
