"""A shape that does not fit is an error, before broadcasting makes a wrong number of it."""

from __future__ import annotations

import torch
from torch import Tensor


def check_shapes(**tensors: Tensor) -> None:
    """All the tensors must have the shape of the first one."""
    (leader, lead), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != lead.shape:
            raise ValueError(f"{name} must have the shape of {leader} {list(lead.shape)}, got {list(tensor.shape)}")


def check_rows(leader: Tensor, **tensors: Tensor | None) -> None:
    """The tensors that are there must be [N], with N the rows of the leader."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != leader.shape[:1]:
            raise ValueError(f"{name} must be [{leader.shape[0]}], one value per row, got {list(tensor.shape)}")


def at_least_float32(values: Tensor) -> Tensor:
    """At least float32: half precision is for matrices, not for sums of logprobs or rewards."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is set and 0 elsewhere, whatever was there, NaN and infinity included."""
    return at_least_float32(values).masked_fill(~mask.bool(), 0.0)
