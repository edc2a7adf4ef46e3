"""A checkpoint for others: what transformers loads, and nothing of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cadenza.run.config import ConfigError, RunConfig
from cadenza.training import ModelConfig
from cadenza.training.checkpoint import CheckpointError
from cadenza.training.models import ADAPTER, base_name, is_adapter, load_model, merge_adapter, save_model, stored_base

OF_AN_ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
"""What a whole model has not: the README.md is a form that peft writes for the adapter, with nothing filled in."""


def export_checkpoint(config: RunConfig, checkpoint: Path, to: Path, *, merged: bool) -> None:
    """Write model and tokenizer of a checkpoint to a directory, which must not hold anything. With `merged` an adapter
    becomes part of the model that it was trained on, and the directory is a whole model."""
    if to.is_dir() and any(to.iterdir()):
        raise ConfigError(f"--to {to} is not empty: give a directory that is not there yet")
    adapted = is_adapter(checkpoint)
    if merged and not adapted:
        raise ConfigError(f"{checkpoint} has no adapter to merge: it is a whole model, leave --merged out")
    base = _base(config.model, checkpoint) if adapted else ""
    if adapted and not merged and is_adapter(base):
        raise ConfigError(
            f"{checkpoint} is an adapter to {base}, which is an adapter too, and peft loads only one: add --merged"
        )
    try:
        to.mkdir(parents=True, exist_ok=True)
        for path in checkpoint.iterdir():  # directories are of the run: optimizer, rollouts, other roles
            if path.is_file() and not (merged and path.name in OF_AN_ADAPTER):
                shutil.copyfile(path, to / path.name)
        if merged:
            save_model(to, _merged_model(config.model.model_copy(update={"path": base, "lora": None}), checkpoint))
        elif adapted:
            _name_base(to / ADAPTER, base_name(base))
    except BaseException as error:
        shutil.rmtree(to, ignore_errors=True)
        if isinstance(error, (OSError, RuntimeError, SafetensorError)):
            raise CheckpointError(f"{checkpoint} could not be exported to {to}: {error}") from error
        raise


def _base(model: ModelConfig, checkpoint: Path) -> str:
    """The model that the adapter of a checkpoint was trained on. If it is no longer where it was, the config says."""
    stored = stored_base(checkpoint)
    return stored if Path(stored).is_dir() else str(model.path)


def _name_base(file: Path, base: str) -> None:
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, "base_model_name_or_path": base}, indent=2), encoding="utf-8")


def _merged_model(base: ModelConfig, checkpoint: Path) -> Any:
    """The base model with the adapter of a checkpoint in its weights."""
    kind = json.loads((checkpoint / ADAPTER).read_text(encoding="utf-8"))["task_type"]
    pad_token_id = _pad_token_id(checkpoint) if kind == "SEQ_CLS" else None
    return merge_adapter(load_model(base, 0, 0, pad_token_id=pad_token_id), checkpoint)


def _pad_token_id(checkpoint: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint))
    pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad
