"""Numbers about masked tokens, for people to look at: measured in chunks, merged to what the whole would give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cadenza.algorithms.shapes import at_least_float32, zero_outside

MAX = "_max"
"""The end of a metric's name that is a largest value; all others are means over tokens."""


def token_metrics(mask: Tensor, **values: Tensor) -> dict[str, float]:
    """The mean of each [N, L] over the masked tokens, the largest for names that end in `_max`; 0 if none."""
    count = mask.bool().sum().clamp(min=1)
    stats = [
        _largest(value, mask) if name.endswith(MAX) else zero_outside(value, mask).sum() / count
        for name, value in values.items()
    ]
    # One transfer for all of them: each would stall the device.
    return dict(zip(values, torch.stack([stat.detach().double() for stat in stats]).tolist(), strict=True))


def merge_metrics(chunks: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """The metrics of the whole from (metrics, tokens) of each chunk; chunks without tokens do not count."""
    counted = [(metrics, tokens) for metrics, tokens in chunks if tokens > 0]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in counted for name in metrics):
        values = [(metrics[name], tokens) for metrics, tokens in counted if name in metrics]
        if name.endswith(MAX):
            merged[name] = max(value for value, _ in values)
        else:
            merged[name] = sum(value * tokens for value, tokens in values) / sum(tokens for _, tokens in values)
    return merged


def _largest(value: Tensor, mask: Tensor) -> Tensor:
    if not value.numel():
        return torch.zeros((), device=value.device)
    largest = at_least_float32(value).masked_fill(~mask.bool(), -torch.inf).max()
    return torch.where(largest > -torch.inf, largest, 0.0)
