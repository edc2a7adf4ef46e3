"""A checkpoint for others: what transformers loads, and nothing of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from cadenza.run.config import ConfigError, RunConfig
from cadenza.training import ModelConfig
from cadenza.training.checkpoint import CheckpointError
from cadenza.training.models import load_model, save_model

ADAPTER = "adapter_config.json"


def export_checkpoint(config: RunConfig, checkpoint: Path, to: Path, *, merged: bool) -> None:
    """Write model and tokenizer of a checkpoint to a directory, which must not hold anything. With `merged` an adapter
    becomes part of the model that it was trained on, and the directory is a whole model."""
    if to.is_dir() and any(to.iterdir()):
        raise ConfigError(f"--to {to} is not empty: give a directory that is not there yet")
    is_adapter = (checkpoint / ADAPTER).is_file()
    if merged and not is_adapter:
        raise ConfigError(f"{checkpoint} has no adapter to merge: it is a whole model, leave --merged out")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for path in checkpoint.iterdir():  # directories are of the run: optimizer, rollouts, other roles
            if path.is_file() and not (merged and path.name.startswith("adapter_")):
                shutil.copyfile(path, to / path.name)
        if merged:
            save_model(to, _merged_model(config.model, checkpoint))
    except OSError as error:
        shutil.rmtree(to, ignore_errors=True)
        raise CheckpointError(f"{checkpoint} could not be exported to {to}: {error}") from error


def _merged_model(model: ModelConfig, checkpoint: Path) -> Any:
    """The base model with the adapter of a checkpoint in its weights."""
    import peft

    kind = json.loads((checkpoint / ADAPTER).read_text(encoding="utf-8"))["task_type"]
    tokenizer = _pad_token_id(checkpoint) if kind == "SEQ_CLS" else None
    base: Any = load_model(model.model_copy(update={"lora": None}), 0, 0, pad_token_id=tokenizer)
    return peft.PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()


def _pad_token_id(checkpoint: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint))
    pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad
