"""`reward_model`: a sequence classifier of transformers scores batches of conversations on its own device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from cadenza.cpu import limit_onednn
from cadenza.errors import RewardError
from cadenza.off_loop import COMPUTE_POOL, as_async
from cadenza.rewards.base import ConfiguredReward
from cadenza.rewards.host import RewardHost
from cadenza.rewards.sample import Sample


class RewardModel(ConfiguredReward):
    """The logit of the classifier for the conversation, or the probability of a class.

    The conversation goes through the chat template of the model's tokenizer; without one, prompt and response are
    joined. A conversation that is too long loses its beginning.
    """

    model: str
    """A directory written by `save_pretrained`, or a name on the hub."""
    device: str | None = None
    """As torch names it. None is the device that placement gave the process (`devices.reward`), else the CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = Field(default=16, gt=0)
    """Conversations in one forward pass."""
    max_length: int = Field(default=4096, gt=0)
    """Tokens of a conversation."""
    label: int | None = Field(default=None, ge=0)
    """The class whose probability is the value, for a classifier with several. One with a single output needs none."""

    _model: Any = PrivateAttr(default=None)
    _tokenizer: Any = PrivateAttr(default=None)
    _host: RewardHost = PrivateAttr(default=RewardHost())

    def use_host(self, host: RewardHost) -> None:
        self._host = host

    async def open(self) -> None:
        """Load the model, off the loop, for it takes long."""
        await as_async(self._load, COMPUTE_POOL)()

    def _load(self) -> None:
        if self._model is not None:
            return
        limit_onednn()
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("reward models need transformers: pip install 'cadenza[models]'") from error
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.truncation_side = "left"
        model = AutoModelForSequenceClassification.from_pretrained(self.model, dtype=getattr(torch, self.dtype))
        model.config.pad_token_id = tokenizer.pad_token_id
        if (model.config.num_labels == 1) != (self.label is None):
            raise RewardError(
                f"{self.model} has {model.config.num_labels} outputs and label is {self.label}: set label for a "
                "classifier with several outputs, and leave it out for one with a single output"
            )
        if self.label is not None and self.label >= model.config.num_labels:
            raise RewardError(f"label must be below {model.config.num_labels}, the outputs of {self.model}")
        self._model, self._tokenizer = model.to(self._device()).eval(), tokenizer

    def close(self) -> None:
        self._model = self._tokenizer = None

    def _device(self) -> str:
        """On Ray a process with a device sees no other one."""
        import torch

        return self.device or ("cuda" if self._host.has_device and torch.cuda.is_available() else "cpu")

    async def __call__(self, sample: Sample) -> float:
        return (await self.score_batch([sample]))[0]

    async def score_batch(self, samples: Sequence[Sample]) -> list[float]:
        scores: list[float] = await as_async(self._score, COMPUTE_POOL)(samples)
        return scores

    def _score(self, samples: Sequence[Sample]) -> list[float]:
        import torch

        self._load()
        texts = [self._text(sample) for sample in samples]
        inputs = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            add_special_tokens=not self._tokenizer.chat_template,  # a template has written them
            return_tensors="pt",
        ).to(self._model.device)
        with torch.inference_mode():
            logits = self._model(**inputs).logits.float()
        values = logits[:, 0] if self.label is None else logits.softmax(-1)[:, self.label]
        scores: list[float] = values.tolist()
        return scores

    def _text(self, sample: Sample) -> str:
        if not self._tokenizer.chat_template:
            return f"{sample.prompt}{sample.response}"
        text: str = self._tokenizer.apply_chat_template(list(sample.messages), tokenize=False)
        return text
