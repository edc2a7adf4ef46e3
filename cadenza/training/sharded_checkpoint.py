"""Checkpoints of sharded modules: every rank writes its shards, and the first one the whole model besides.

    training/sharded/    torch.distributed.checkpoint: weights and optimizer, for any number of ranks to go on from
    model.safetensors    the export, which transformers and `load_model` read

Writing is asynchronous: when a `ShardedSave` exists it has taken copies, training may go on, and `wait` says that
all is there.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.training.checkpoint import Checkpointable, CheckpointError, TrainingState
from cadenza.training.models import save_model

if TYPE_CHECKING:
    from cadenza.training.fsdp import Fsdp2

dcp: Any = import_module("torch.distributed.checkpoint")  # as Any: it does not say what it exports
SHARDS = Path("training") / "sharded"


class ShardedSave:
    """The directory of one role in a checkpoint, while all ranks together write it."""

    def __init__(self, directory: Path, role: Checkpointable, strategy: Fsdp2) -> None:
        (directory / "training").mkdir(parents=True, exist_ok=True)
        state = role.state()
        tensors = {f"weights/{name}": tensor for name, tensor in role.module.state_dict().items()}
        tensors |= {f"training/{name}": tensor for name, tensor in state.tensors.items()}
        self._written = dcp.async_save(
            tensors, checkpoint_id=directory / SHARDS, process_group=strategy.checkpoint_group
        )
        whole = strategy.gather_full(role.module.state_dict(keep_vars=True))
        if strategy.is_first:
            save_model(directory, role.module, whole)
            (directory / "training" / "state.json").write_text(json.dumps(state.values), encoding="utf-8")

    def wait(self) -> None:
        """Until this rank's shards are on the disk."""
        self._written.result()


def load_shards(directory: Path, role: Checkpointable, strategy: Fsdp2) -> None:
    """Go on from what ranks of any number saved."""
    if not (directory / SHARDS).is_dir():
        raise CheckpointError(
            f"the checkpoint {directory} is not sharded: it was written by another strategy than 'fsdp2'"
        )
    wanted: dict[str, Tensor] = {f"weights/{name}": tensor for name, tensor in role.module.state_dict().items()}
    parameters = dict(role.module.named_parameters())
    for key, kind in dcp.FileSystemReader(directory / SHARDS).read_metadata().state_dict_metadata.items():
        if key.startswith("training/"):
            owner = parameters.get(key.removeprefix("training/optimizer/").rpartition("/")[0])
            if owner is not None and owner.shape == kind.size:
                wanted[key] = torch.zeros_like(owner)
            else:
                wanted[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
    try:
        dcp.load(wanted, checkpoint_id=directory / SHARDS, process_group=strategy.checkpoint_group)
    except (ValueError, RuntimeError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"the weights of the checkpoint {directory} do not fit this model: {error}") from error
    values = json.loads((directory / "training" / "state.json").read_text(encoding="utf-8"))
    prefix = "training/"
    tensors = {key.removeprefix(prefix): tensor for key, tensor in wanted.items() if key.startswith(prefix)}
    role.load_state(TrainingState(tensors, values))
