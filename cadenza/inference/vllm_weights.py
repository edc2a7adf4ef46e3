"""New weights in a vLLM engine, through vLLM's own weight transfer: the receiving end, in each of its worker processes.

    replica: start_weight_update -> update_weights(path), for each bucket (buckets.py) -> finish_weight_update

vLLM calls `register` in each process that it starts: it is an entry point of this package (`vllm.general_plugins`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from cadenza.inference.buckets import BACKEND


def register() -> None:
    """Make the engine known to vLLM."""
    WeightTransferEngineFactory.register_engine(BACKEND, BucketEngine)


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree on beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the next weights are."""

    path: str


class BucketEngine(WeightTransferEngine[Nothing, Bucket]):  # type: ignore[misc]
    """Takes the weights of a bucket under the names of the checkpoint; the model packs and shards them."""

    init_info_cls = Nothing
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """No connection is made."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # before the file is gone
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No connection is kept."""
