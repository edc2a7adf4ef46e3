"""The workers of a run: columns are the same however many ranks compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import VOCAB, random_batch, tiny_model

from cadenza import DataProto, ResourceManager
from cadenza.cluster.dispatch import DispatchCall, dispatch_spec_of
from cadenza.run.workers import ActorWorker, CriticWorker, ModelSpec, ReferenceWorker
from cadenza.training import ActorConfig, CriticConfig, ModelConfig, ReferenceConfig
from cadenza.training.models import save_model

MODEL_SPEC = ModelSpec(ModelConfig(layers=1, hidden=16, heads=2), VOCAB, None, 0, 1)
ROLES: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "actor": (ActorWorker, "logprobs", {"config": ActorConfig(), "reference": ReferenceConfig(), "failures": None}),
    "critic": (CriticWorker, "values", {"config": CriticConfig(), "failures": None}),
    "reference": (ReferenceWorker, "logprobs", {"config": ReferenceConfig()}),
}


def column(role: str, ranks: int, batch: DataProto, directory: Path) -> DataProto:
    """What ranks with the same weights answer, one after the other."""
    kind, method, init = ROLES[role]
    worker = kind(model_spec=MODEL_SPEC, **init)
    if role == "reference":
        worker.load(directory)
    else:
        worker.build(None, [])
    if role == "critic":
        torch.nn.init.ones_(worker.learner.head.weight)
    spec = dispatch_spec_of(getattr(kind, method))
    assert spec is not None
    dispatched = DispatchCall(spec, ResourceManager(ranks).place({role: list(range(ranks))})[role].places, (batch,), {})
    found: DataProto = dispatched.gather({call.rank: getattr(worker, method)(*call.args) for call in dispatched.calls})
    return found


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("ranks", [2, 4, 11])
def test_a_column_does_not_depend_on_how_many_ranks_compute_it(role: str, ranks: int, tmp_path: Path) -> None:
    save_model(tmp_path, tiny_model(3))
    batch = random_batch(3)
    one, several = (column(role, n, batch, tmp_path) for n in (1, ranks))
    (name,) = one.batch
    assert len(several) == len(batch) == 9
    assert list(several.batch) == [name]
    np.testing.assert_allclose(several.batch.ragged(name).values, one.batch.ragged(name).values, atol=1e-5)
    np.testing.assert_array_equal(several.batch.ragged(name).offsets, batch.batch.ragged("input_ids").offsets)
