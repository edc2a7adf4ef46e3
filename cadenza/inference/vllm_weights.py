"""New weights in a vLLM engine, through vLLM's own weight transfer: the receiving end, in each of its worker processes.

    replica: start_weight_update -> update_weights(path), for each bucket (buckets.py) -> finish_weight_update
             reload_weights(path) -> start_weight_update -> finish_weight_update

The second line is vLLM's own way, from disk; the update without buckets after it is for what vLLM leaves out. It makes
those layers ready that were sent weights. An output layer with the weights of the input embeddings is sent none, and on
a CPU it computes with a packed copy: without `_pack_tied` it would keep the old ones.

vLLM calls `register` in each process that it starts: it is an entry point of this package (`vllm.general_plugins`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from cadenza.inference.buckets import BACKEND


def register() -> None:
    """Make the engine known to vLLM."""
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: the two ends of the transfer agree on nothing beforehand."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file of the next bucket of weights."""

    path: str


class BucketTransferEngine(WeightTransferEngine[NoInitInfo, BucketInfo]):  # type: ignore[misc]
    """Takes the weights of a bucket under the names of the checkpoint; the model packs and shards them."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """No connection is made."""

    _is_begun = False

    def start_weight_update(self) -> None:
        self._is_begun = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._is_begun:
            initialize_layerwise_reload(self.model)
            self._is_begun = True
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # before the file is gone
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        if self._is_begun:
            finalize_layerwise_reload(self.model, self.model_config)
        _pack_tied(self.model)

    def shutdown(self) -> None:
        """No connection is kept."""


def _pack_tied(model: nn.Module) -> None:
    """Have layers whose weight is that of a layer before them make what they compute with from it."""
    seen: set[int] = set()
    for layer in model.modules():
        method, weight = getattr(layer, "quant_method", None), layer._parameters.get("weight")
        if weight is None or not isinstance(method, UnquantizedEmbeddingMethod):
            continue
        if id(weight) in seen:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))
