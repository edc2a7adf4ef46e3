"""What micro-batches and ranks say of an update, together."""

from __future__ import annotations

import pytest
import torch

from cadenza.training.update_metrics import UpdateMetrics


@pytest.mark.parametrize(
    ("weights", "share"),
    [([0.7] * 6, 1.0), ([9.0, 0, 0, 0, 0, 0], 1 / 6), ([0.0] * 6, 0.0), ([1.0, 1, 1, 0, 0, 0], 0.5)],
)
@pytest.mark.parametrize("end", [1, 3, 5])
def test_the_effective_sample_size_is_that_of_all_ranks_and_micro_batches(
    weights: list[float], share: float, end: int
) -> None:
    ranks = [UpdateMetrics(), UpdateMetrics()]
    for rank, samples in zip((ranks[0], ranks[0], ranks[1]), (weights[:1], weights[1:end], weights[end:]), strict=True):
        rank.add({"entropy": 1.0}, len(samples), 2.0, torch.tensor(samples))
        rank.count = 4.0
    merged = UpdateMetrics.merge(ranks)
    assert merged["ess"] == pytest.approx(share)
    assert merged["pg_loss"] == pytest.approx(3 * 2.0 / 4)
