"""What the micro-batches of an update say of it, whichever chunk of it they are in and whichever rank computed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cadenza.algorithms import merge_metrics


class UpdateMetrics:
    """What micro-batches say of one update; those of several ranks merge to what one pass would have given."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[dict[str, float], float]] = []
        self._pg_loss = 0.0
        self._samples: list[tuple[float, float, float]] = []
        """Number, sum, and sum of squares of the importance weights."""
        self.count = 0.0
        """What the loss of the update is divided by; this and what follows are of all ranks."""
        self.tokens = 0
        self.skipped = 0
        """Rows that were not computed."""

    def add(self, metrics: dict[str, float], tokens: int, pg_loss: float, samples: Tensor) -> None:
        self._micro_batches.append((metrics, float(tokens)))
        self._pg_loss += pg_loss
        weights = samples.detach().double()
        total, squares = torch.stack([weights.sum(), (weights**2).sum()]).tolist()
        self._samples.append((float(len(weights)), total, squares))

    @staticmethod
    def merge(of_ranks: Sequence[UpdateMetrics]) -> dict[str, float]:
        merged = merge_metrics(measured for metrics in of_ranks for measured in metrics._micro_batches)
        merged["clip_fraction"] = sum(value for name, value in merged.items() if name.startswith("clip_fraction_"))
        count, total, squares = (
            sum(of) for of in zip(*(s for metrics in of_ranks for s in metrics._samples), strict=True)
        )
        merged["ess"] = total**2 / (squares * count) if squares else 0.0
        return merged | {"pg_loss": sum(metrics._pg_loss for metrics in of_ranks) / of_ranks[0].count}
