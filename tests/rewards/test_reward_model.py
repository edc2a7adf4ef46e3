from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizer_cases import CHATML, byte_tokenizer

from cadenza.errors import RewardError
from cadenza.rewards import Sample, make_reward

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


SAMPLES = [Sample(response=text, prompt="Say something.") for text in ("Yes", "No, I would rather not.", "", "Right!")]


def scores(model: str, **settings: Any) -> list[float]:
    async def main() -> list[float]:
        async with make_reward({"name": "reward_model", "model": model, **settings}, "talk") as reward:
            return [scored.value for scored in await asyncio.gather(*map(reward, SAMPLES))]

    return asyncio.run(main())


def logits(model: str, text: str) -> Any:
    """What the classifier says of one text, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.inference_mode():
        return loaded(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits[0]


def test_a_batch_of_conversations_gets_the_logit_that_each_gets_alone(tmp_path: Path) -> None:
    model = classifier(tmp_path)
    tokenizer = byte_tokenizer(CHATML)
    texts = [tokenizer.apply_chat_template(list(sample.messages), tokenize=False) for sample in SAMPLES]
    alone = [logits(model, text).item() for text in texts]
    assert scores(model, batch_size=4) == pytest.approx(alone, abs=1e-5)
    assert scores(model, batch_size=1) == pytest.approx(alone, abs=1e-5)


def test_without_a_chat_template_prompt_and_response_are_one_text(tmp_path: Path) -> None:
    model = classifier(tmp_path, template=None)
    alone = [logits(model, sample.prompt + sample.response).item() for sample in SAMPLES]
    assert scores(model) == pytest.approx(alone, abs=1e-5)


def test_of_several_classes_the_value_is_the_probability_of_one(tmp_path: Path) -> None:
    model = classifier(tmp_path, labels=3, template=None)
    alone = [logits(model, sample.prompt + sample.response).softmax(-1)[2].item() for sample in SAMPLES]
    assert scores(model, label=2) == pytest.approx(alone, abs=1e-5)


def test_a_label_that_does_not_fit_the_classifier_is_an_error(tmp_path: Path) -> None:
    model = classifier(tmp_path, labels=3)
    for settings, message in (({}, "has 3 outputs and label is None"), ({"label": 3}, "label must be below 3")):
        with pytest.raises(RewardError, match=message):
            scores(model, **settings)
