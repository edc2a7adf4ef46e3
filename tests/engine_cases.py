"""Tiny models, requests for them, and what transformers writes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from cadenza.inference.replica import Request, Sampling, Tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 97
GREEDY, WARM = Sampling(temperature=0.0), Sampling()
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TEXTS: WeakKeyDictionary[Any, dict[bytes, list[int]]] = WeakKeyDictionary()
"""What `greedy` has found out."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 256}),
    "gpt2": ("GPT2", {}),
}


def fresh(kind: str = "llama", seed: int = 0) -> Any:
    """A model that nobody else uses."""
    family, options = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # norms and biases that are not neutral
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


@lru_cache
def tiny(kind: str = "llama", seed: int = 0) -> Any:
    return fresh(kind, seed)


def prompt(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng((seed, length)).integers(1, VOCAB, length).astype(np.int32)


def ask(
    id: int = 1, tokens: Tokens | None = None, count: int = 20, sampling: Sampling = GREEDY, **fields: Any
) -> Request:
    tokens = prompt(10, id) if tokens is None else tokens
    chunks = fields.pop("chunks", (tokens,))
    values: dict[str, Any] = {
        "max_tokens": count, "sampling": sampling, "seed": 7 * id + 3, "offset": 0, "session": id, "group": id,
        "epoch": 0, "context": sum(len(chunk) for chunk in chunks),
    }  # fmt: skip
    return Request(id=id, chunks=chunks, **(values | fields))


def greedy(model: Any, tokens: Tokens, count: int) -> list[int]:
    """What transformers writes."""
    known = TEXTS.setdefault(model, {})
    text = known.get(tokens.tobytes(), [])
    if len(text) < count:
        ids = torch.from_numpy(tokens).long()[None]
        longest = max(count, min(60, SIZES["max_position_embeddings"] - len(tokens)))
        options = {"max_new_tokens": longest, "do_sample": False, "pad_token_id": 0}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(tokens) :].tolist()
        known[tokens.tobytes()] = text
    return text[:count]
