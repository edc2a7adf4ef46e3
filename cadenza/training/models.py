"""A causal language model to train: a tiny one built here, or any checkpoint that transformers can load.

The same config and seed give the same weights, and making them leaves the global random state as it was.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from torch import Tensor, nn

from cadenza.config import Config
from cadenza.cpu import limit_onednn
from cadenza.training.settings import refuse_unused

ADAPTER = "adapter_config.json"
"""The file of peft that makes a directory an adapter."""


class LoraConfig(Config):
    """Train low-rank additions to some matrices, and leave the model itself as it is."""

    r: int = Field(default=16, gt=0)
    """Rank of the additions."""
    alpha: float = Field(default=32.0, gt=0)
    """They are scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of supervised steps, as a cold start. Policy gradients compare the policy with its own past, without dropout."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the matrices, as `q_proj`; or all but the head."""


class ModelConfig(Config):
    """Which model, in what form."""

    path: str | None = None
    """A directory written by `save_pretrained`, or a name on the hub. An adapter becomes part of the model that it was
    trained on; with `lora` a new one is trained on top. None builds a tiny policy of the size below."""
    layers: int = Field(default=4, gt=0)
    hidden: int = Field(default=64, gt=0)
    heads: int = Field(default=4, gt=0)
    intermediate: int | None = Field(default=None, gt=0)
    """Width of the MLP; None is four times `hidden`."""
    max_positions: int = Field(default=4096, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the parameters. For bfloat16 products on float32 parameters see `precision` of the actor."""
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    """Compute the layers again in the backward pass instead of keeping their states."""

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        if self.path is None and self.lora is not None:
            raise ValueError("lora needs a path: an adapter to a model that is not stored could not be loaded again")
        if self.path is not None:
            sizes = ("layers", "hidden", "heads", "intermediate", "max_positions")
            refuse_unused(self, sizes, f"with the path {self.path!r}, which has its own")
        if self.path is None and (self.hidden % self.heads or self.hidden // self.heads % 2):
            raise ValueError(f"hidden must be heads times an even number, got {self.hidden} for {self.heads} heads")
        return self


class ModelNotFound(FileNotFoundError):
    """The configured model cannot be loaded."""


def load_model(
    config: ModelConfig, vocab_size: int, seed: int, *, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> nn.Module:
    """The model, ready to train. Its vocabulary has `vocab_size` tokens, or at least so many if it is loaded. With
    `pad_token_id` it is a classifier with one label: it scores a text at its last token that does not pad."""
    limit_onednn()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        if config.path is None:
            model = _tiny(config, vocab_size, eos_token_id, pad_token_id)
        else:
            model = _pretrained(config, pad_token_id)
        if model.config.vocab_size < vocab_size:
            raise ValueError(
                f"the model {config.path} knows {model.config.vocab_size} tokens, the tokenizer {vocab_size}: "
                "take the tokenizer that belongs to the model"
            )
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.lora is not None:
            task_type = "CAUSAL_LM" if pad_token_id is None else "SEQ_CLS"
            model = _with_adapter(model, config.lora, task_type, base_name(str(config.path)))
    trained: nn.Module = model.train()
    return trained


def base_model(module: nn.Module) -> nn.Module:
    """The model under the adapter, if there is one."""
    model: Any = module
    base: nn.Module = model.get_base_model() if is_adapted(module) else model
    return base


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a model with a LoRA adapter."""
    return hasattr(module, "peft_config")


def adapter_weights(module: nn.Module) -> dict[str, Tensor] | None:
    """The parameters of the adapter under peft's names; None without one."""
    if not is_adapted(module):
        return None
    import peft

    weights = peft.get_peft_model_state_dict(module, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in weights.items()}


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter, and not a whole model."""
    return (Path(path) / ADAPTER).is_file()


def base_name(path: str) -> str:
    """What an adapter that is trained on the model at `path` says of it: the directory by a name that means the same
    everywhere on this machine, or the name on the hub. If the base is an adapter itself, its file is named:
    `load_model` follows it; transformers and peft, which would leave that adapter out, fail."""
    directory = Path(path).resolve()
    if not directory.is_dir():
        return path
    return str(directory / ADAPTER if is_adapter(directory) else directory)


def stored_base(adapter: Path) -> str:
    """The `model.path` of the model that the adapter in a directory was trained on."""
    named = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return str(named).removesuffix(f"/{ADAPTER}")


def merge_adapter(model: Any, adapter: Path) -> Any:
    """The model with the adapter of a directory in its weights."""
    import peft

    settings = peft.PeftConfig.from_pretrained(str(adapter))
    is_classifier, is_scorer = hasattr(model, "score"), settings.task_type == "SEQ_CLS"
    if is_scorer and not is_classifier:
        raise ValueError(f"{adapter} is the adapter of a reward model, which writes no text")
    settings.task_type = None  # the adapter of a language model fits under the head of a classifier too
    merged = peft.PeftModel.from_pretrained(model, str(adapter), config=settings).merge_and_unload()
    return merged.requires_grad_()  # peft froze it


def save_model(directory: Path, module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write it as `load_model` and transformers read it. `weights` are its whole ones, where it has shards of them."""
    model: Any = module
    options: dict[str, Any] = {"save_embedding_layers": False} if is_adapted(module) else {"max_shard_size": "1000GB"}
    with without_progress_bars():
        model.save_pretrained(directory, **options, **({} if weights is None else {"state_dict": dict(weights)}))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws none: they would run through the display of a run at every checkpoint."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers says errors only."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _tiny(config: ModelConfig, vocab_size: int, eos_token_id: int | None, pad_token_id: int | None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    settings = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate or 4 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        # The usual 0.02 is made for wide models. At width 64 it costs twice the updates to learn a look-up, and at
        # larger learning rates the look-up is not learned at all.
        initializer_range=0.5 / math.sqrt(config.hidden),
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        dtype=config.dtype,
    )
    kind: Any = LlamaForCausalLM
    if pad_token_id is not None:
        settings.num_labels, kind = 1, LlamaForSequenceClassification
    model: Any = kind(settings)
    for parameter in model.parameters():  # buffers stay as they are: `from_pretrained` has rotary angles in float32
        parameter.data = parameter.data.to(getattr(torch, config.dtype))
    return model


def _pretrained(config: ModelConfig, pad_token_id: int | None) -> Any:
    path = str(config.path)
    way_out = "give a directory written by save_pretrained, or no path for a tiny policy built here"
    # 'runs/best' looks like a name on the hub, but not where there is a directory runs.
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) and Path(path).parts[0] not in os.listdir()
    if not Path(path).is_dir() and not is_hub_name:
        raise ModelNotFound(f"model.path {path} does not exist: {way_out}")
    try:
        with without_progress_bars():
            base, adapters = _base_and_adapters(path)
            model = _whole_model(base, getattr(torch, config.dtype), pad_token_id)
            for adapter in adapters:
                model = merge_adapter(model, adapter)
            return model
    except ModelNotFound:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelNotFound(f"model.path {path} cannot be loaded: {way_out}. transformers says: {error}") from error


def _base_and_adapters(path: str) -> tuple[str, list[Path]]:
    """The whole model that a path leads to, and the adapters on it, in the order in which they were trained."""
    adapters: list[Path] = []
    while is_adapter(path):
        adapter = Path(path)
        path = stored_base(adapter)
        if adapter in adapters or (Path(path).is_absolute() and not Path(path).is_dir()):
            raise ModelNotFound(
                f"{adapter} is an adapter to {path}, which is not a model here: set base_model_name_or_path in "
                f"{adapter / ADAPTER} to where that model is now"
            )
        adapters.insert(0, adapter)
    return path, adapters


def _whole_model(path: str, dtype: torch.dtype, pad_token_id: int | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if pad_token_id is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    else:
        with _without_warnings():  # that the score of a language model is new
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)
        model.config.get_text_config().pad_token_id = pad_token_id
    if is_adapted(model):
        raise ValueError(f"{path} on the hub is an adapter: download it, and name its directory")
    return model


def _with_adapter(model: Any, config: LoraConfig, task_type: str, base: str) -> Any:
    import peft

    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    adapter = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type=task_type,
    )
    adapted: Any = peft.get_peft_model(model, adapter)
    adapter.base_model_name_or_path = base
    return adapted
