"""Reward models small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import CHATML, byte_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def classifier(path: Path, labels: int = 1, template: str | None = CHATML) -> str:
    """A tiny sequence classifier with random weights, on disk."""
    tokenizer = byte_tokenizer(template)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_labels=labels, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def logits(model: str, text: str) -> Any:
    """What the classifier says of one text, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.inference_mode():
        return loaded(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits[0]
