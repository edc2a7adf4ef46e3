"""Small models and random batches for the tests of `cadenza.training`, and a slow way to compute what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cadenza.data import DataProto, Ragged
from cadenza.training import LoraConfig, ModelConfig, load_model

VOCAB = 19
DROPOUT = 0.3
"""Of the models that drop."""


def tiny_model(seed: int = 0, *, double: bool = False, **sizes: Any) -> nn.Module:
    """A policy of two layers; in float64 if `double`, so that sums in another order differ by next to nothing."""
    config = ModelConfig(**{"layers": 2, "hidden": 16, "heads": 2, "intermediate": 24, **sizes})
    model = load_model(config, VOCAB, seed)
    return model.double() if double else model


def dropping_model(kind: str, directory: Path, *, gradient_checkpointing: bool = False) -> nn.Module:
    """A policy with dropout: between its layers, in its attention, or before its adapter."""
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    if kind == "lora":
        return adapted_model(directory, dropout=DROPOUT)
    ids: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    base: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "gpt2":
            sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT)
            base = GPT2LMHeadModel(GPT2Config(**ids, **sizes, **drops))
        else:
            sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "max_position_embeddings": 64}
            sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
            drops = dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), DROPOUT)
            base = OPTForCausalLM(OPTConfig(**ids, **sizes, **drops))
    base.save_pretrained(directory)
    return load_model(ModelConfig(path=str(directory), gradient_checkpointing=gradient_checkpointing), VOCAB, 0)


def adapted_model(directory: Path, seed: int = 0, **lora: Any) -> nn.Module:
    """The same policy with a LoRA adapter whose additions are not zero."""
    base: Any = tiny_model(seed)
    base.save_pretrained(directory)
    model = load_model(ModelConfig(path=str(directory), lora=LoraConfig(**{"r": 2, **lora})), VOCAB, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def segments_batch(rows: Sequence[Sequence[tuple[bool, Sequence[int]]]], **columns: Any) -> DataProto:
    """A batch from rows of (is response, tokens)."""
    ids = [np.array([t for _, tokens in row for t in tokens], np.int32) for row in rows]
    masks = [np.array([answered for answered, tokens in row for _ in tokens], bool) for row in rows]
    batch = {"input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(masks), **columns}
    return DataProto({"traj_id": np.arange(len(rows)), **batch})


def random_batch(seed: int = 0, *, groups: int = 3, size: int = 3, turns: int = 2, vocab: int = VOCAB) -> DataProto:
    """Groups with a common prompt, rows of different lengths with env tokens between and after the responses,
    and the columns that the actor and the critic read."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, vocab, rng.integers(low, high)).tolist()

    rows = []
    for _ in range(groups):
        prompt = tokens(2, 9)
        for _ in range(size):
            row = [(False, prompt), (True, tokens(1, 5))]
            for _ in range(rng.integers(0, turns)):
                row += [(False, tokens(1, 4)), (True, tokens(1, 5))]
            if rng.random() < 0.3:
                row.append((False, tokens(1, 3)))
            rows.append(row)
    batch = segments_batch(rows)
    lengths = batch.batch.ragged("input_ids").lengths

    def column(scale: float, shift: float) -> Ragged:
        return Ragged.from_rows([(rng.normal(size=n) * scale + shift).astype(np.float32) for n in lengths])

    batch.batch["advantages"] = column(1.0, 0.0)
    for name in ("infer_logprobs", "ref_logprobs", "old_logprobs"):
        batch.batch[name] = column(0.3, -np.log(vocab))
    batch.batch["returns"], batch.batch["values"] = column(1.0, 0.0), column(1.0, 0.0)
    return batch


def without(batch: DataProto, *names: str) -> DataProto:
    return batch.select(batch_keys=[name for name in batch.batch if name not in names])


def row_by_row(module: Any, batch: DataProto, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Logprobs and entropies of the response tokens of each row, each row alone through the module itself."""
    logprobs, entropies = [], []
    for ids, mask in zip(batch.batch.ragged("input_ids"), batch.batch.ragged("response_mask"), strict=True):
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        distribution = torch.distributions.Categorical(logits=logits / temperature)
        answered = torch.from_numpy(mask[1:])
        logprobs.append(distribution.log_prob(tokens[1:])[answered])
        entropies.append(distribution.entropy()[answered])
    return logprobs, entropies


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same_parameters(a: dict[str, Tensor], b: dict[str, Tensor], *, atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
