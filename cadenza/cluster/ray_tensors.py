"""Torch tensors travel through Ray as arrays: their bytes are not pickled, and shared memory carries them.

They arrive as copies on the CPU, which may be written to; the type (also those that numpy does not have) and the shape
are kept.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Say so to Ray, if this process has torch: importing it is not for us to do. Saying it again costs
    nothing, and holds for the connection to Ray that there is now."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):  # it may be half imported by another thread
        return
    from ray.util import register_serializer

    register_serializer(torch.Tensor, serializer=_pack, deserializer=_unpack)


def _pack(tensor: torch.Tensor) -> tuple[Any, str, tuple[int, ...], bool]:
    import torch

    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} does not travel: make it dense first")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad


def _unpack(packed: tuple[Any, str, tuple[int, ...], bool]) -> torch.Tensor:
    import torch

    data, dtype, shape, requires_grad = packed
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return torch.from_numpy(data.copy()).view(kind).reshape(shape).requires_grad_(requires_grad)
