"""Weights on their way to the processes of an engine, as files in shared memory.

A bucket is a safetensors file, so its reader must be on the node of its writer. It is gone before the
next one is written: an update takes the memory of one bucket beside that of the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

BACKEND = "cadenza"
"""What vLLM calls this way of transfer: `--weight-transfer-config '{"backend": "cadenza"}'`."""
BUCKET_BYTES = 1 << 28
_MEMORY = Path("/dev/shm")


def shared_memory_directory() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory in shared memory, for what other processes of this node read."""
    return tempfile.TemporaryDirectory(prefix="cadenza-", dir=_MEMORY if _MEMORY.is_dir() else None)


def buckets(weights: Mapping[str, Tensor], size: int = BUCKET_BYTES) -> Iterator[Path]:
    """Files with all weights in their order, each there until the next one is asked for.

    Of tied weights, the first name is written, as in a checkpoint.
    """
    bucket: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    held = 0
    with shared_memory_directory() as directory:
        for index, (name, tensor) in enumerate(weights.items()):
            if tensor.numel() and (key := (tensor.data_ptr(), tensor.shape)) not in seen:
                seen.add(key)
                bucket[name] = tensor.detach().cpu().contiguous()
                held += tensor.nbytes
            if bucket and (held >= size or index == len(weights) - 1):
                path = Path(directory) / f"{index}.safetensors"
                save_file(bucket, path)
                yield path
                path.unlink()
                bucket, held = {}, 0
