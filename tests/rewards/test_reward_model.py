from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from classifier_cases import classifier, logits, torch
from tokenizer_cases import CHATML, byte_tokenizer

from cadenza.errors import RewardError
from cadenza.rewards import RewardHost, Sample, make_reward
from cadenza.rewards.reward_model import RewardModel

SAMPLES = [Sample(response=text, prompt="Say something.") for text in ("Yes", "No, I would rather not.", "", "Right!")]


def scores(model: str, **settings: Any) -> list[float]:
    async def main() -> list[float]:
        async with make_reward({"name": "reward_model", "model": model, **settings}, "talk") as reward:
            return [scored.value for scored in await asyncio.gather(*map(reward, SAMPLES))]

    return asyncio.run(main())


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


@pytest.mark.parametrize(
    ("settings", "has_device", "has_cuda", "device"),
    [
        ({}, True, True, "cuda"),
        ({}, True, False, "cpu"),
        ({}, False, True, "cpu"),
        ({"device": "mps"}, True, True, "mps"),
    ],
)
def test_it_computes_on_the_device_of_its_process_unless_it_names_one(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], has_device: bool, has_cuda: bool, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    reward = RewardModel(model="none", **settings)
    reward.use_host(RewardHost(has_device=has_device))
    assert reward._device() == device


def test_weights_are_on_that_device(tmp_path: Path) -> None:
    reward = RewardModel(model=classifier(tmp_path), device="meta")
    asyncio.run(reward.open())
    assert {parameter.device.type for parameter in reward._model.parameters()} == {"meta"}


def test_a_label_that_does_not_fit_the_classifier_is_an_error(tmp_path: Path) -> None:
    model = classifier(tmp_path, labels=3)
    for settings, message in (({}, "has 3 outputs and label is None"), ({"label": 3}, "label must be below 3")):
        with pytest.raises(RewardError, match=message):
            scores(model, **settings)
