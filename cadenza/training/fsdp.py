"""FSDP2: every rank holds a shard of the weights, of their gradients and of what the optimizer remembers.

Invariant: ranks stay in step. Each pass through the module gathers the weights of one layer after the other and gives
them back, so all ranks make the same number of passes, also those with fewer micro-batches (`pass_count`). Gradients
are summed over the ranks, micro-batch by micro-batch, into the shards: what a loss is divided by is its own affair.
```
ranks = data x tensor        data: other rows, shards of the same matrices
                             tensor: the same rows, other heads and other columns of the MLP
```
The module is called as a whole, because the gathering hangs on its own forward: packed_forward.py is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from cadenza.training.checkpoint import Checkpointable
from cadenza.training.models import base_model, is_adapted
from cadenza.training.packed_forward import MODEL_TYPES
from cadenza.training.process_group import ProcessGroup
from cadenza.training.sharded_checkpoint import ShardedSave, load_shards
from cadenza.training.strategy import ParallelStrategy, Precision

COLUMN_PARALLEL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
"""The matrices of a layer that tensor-parallel ranks share: by outputs, and by inputs. Embeddings, norms and the head
are with each of them."""
PER_HEAD = ("q_norm.weight", "k_norm.weight")
"""Weights that all heads use: each rank has the gradient of its own heads."""


class Fsdp2(ParallelStrategy):
    """Every rank holds a shard, and the module is called as a whole."""

    needs_processes: ClassVar[bool] = True
    tensor_parallel: ClassVar[bool] = True
    lockstep: ClassVar[bool] = True
    own_precision: ClassVar[bool] = True

    def __init__(self, ranks: ProcessGroup, *, precision: Precision = "fp32") -> None:
        """With bf16, products are computed in bfloat16 from float32 shards, and gradients are summed in float32."""
        super().__init__(ranks, precision=precision)
        self._ranks = ranks
        rounds = precision == "bf16"
        self._policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if rounds else MixedPrecisionPolicy()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, (ranks.data_size, ranks.tensor_ranks), mesh_dim_names=("data", "tensor"))
        self._data: DeviceMesh = mesh["data"]
        self._tensor: DeviceMesh = mesh["tensor"]
        self.checkpoint_group = ranks.new_gloo_group()
        """A group of its own for checkpoints, which are written while training goes on."""

    def wrap(self, module: nn.Module) -> None:
        base: Any = base_model(module)
        if isinstance(base, FSDPModule):
            return
        super().wrap(module)
        if self._ranks.tensor_ranks > 1:
            if is_adapted(module):
                raise ValueError("tensor_parallel above 1 does not go with model.lora: leave out one of them")
            self._split_over_tensor_ranks(base)
        for submodule in (*base.get_decoder().layers, base):
            fully_shard(submodule, mesh=self._data, reshard_after_forward=True, mp_policy=self._policy)
        for submodule in _sharded_submodules(base):
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)
        # The logits are a view, which is not changed in place here.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    def pass_count(self, passes: int) -> int:
        return max(self.ranks.all_gather(passes))

    def gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[int, Tensor | None] = {}
        """By the tensor: tied weights are gathered once, and are one again."""
        for tensor in tensors.values():
            if id(tensor) not in gathered:
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                gathered[id(tensor)] = whole.detach().cpu() if self.is_first else None
        found = {name: gathered[id(tensor)] for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def reshard(self, module: nn.Module) -> None:
        for submodule in _sharded_submodules(base_model(module)):
            submodule.reshard()

    def save(self, directory: Path, role: Checkpointable) -> None:
        ShardedSave(directory, role, self).wait()

    def load(self, directory: Path, role: Checkpointable) -> None:
        load_shards(directory, role, self)

    def _all_reduce_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Gradients of shards are sums already."""
        super()._all_reduce_gradients({name: p for name, p in named.items() if not isinstance(p, DTensor)})
        if self._ranks.tensor_ranks > 1:
            of_heads = [p.grad for name, p in named.items() if name.endswith(PER_HEAD)]
            self._ranks.all_reduce_tensor_ranks([grad.to_local() for grad in of_heads if isinstance(grad, DTensor)])

    def _split_over_tensor_ranks(self, base: Any) -> None:
        config, count = base.config.get_text_config(), self._ranks.tensor_ranks
        if config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"tensor_parallel above 1 is for models of the type {', '.join(MODEL_TYPES)}, got {config.model_type}"
            )
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(config, name) % count:
                raise ValueError(
                    f"tensor_parallel {count} does not divide the {name} of the model, {getattr(config, name)}"
                )
        styles: dict[str, ParallelStyle] = dict.fromkeys(COLUMN_PARALLEL, ColwiseParallel())
        styles |= dict.fromkeys(ROW_PARALLEL, RowwiseParallel())
        for layer in base.get_decoder().layers:
            parallelize_module(layer, self._tensor, styles)


def _sharded_submodules(base: nn.Module) -> Sequence[FSDPModule]:
    return [submodule for submodule in base.modules() if isinstance(submodule, FSDPModule)]
