"""Reading weights out of transformers modules, and writing them in."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from cadenza.inference.kv_cache import KVShape


class UnsupportedModel(Exception):
    """The architecture of the module is none that `PackedDecoder` knows."""


def copy_weights_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a state dict, or the tensors of it that changed, into a module: all of it or, on an error, nothing."""
    if hasattr(module, "peft_config") and not any(name in weights for name, _ in module.named_parameters()):
        peft: Any = import_module("peft")
        check_names(peft.get_peft_model_state_dict(module, save_embedding_layers=False), weights)
        peft.set_peft_model_state_dict(module, dict(weights))
    else:
        check_names(module.state_dict(), weights)
        module.load_state_dict(dict(weights), strict=False)


def check_names(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a module with these does not have, or has in another shape."""
    unknown = [name for name in weights if name not in own]
    if unknown or not weights:
        raise ValueError(f"the weights have no names of this model; unknown are {unknown[:3]} of {len(weights)}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} must be {list(own[name].shape)}, got {list(tensor.shape)}")


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that is not trained."""
    return copy.deepcopy(without_peft(module)).eval().requires_grad_(False)


def without_peft(module: nn.Module) -> nn.Module:
    """The transformers model inside of peft's; its layers keep their adapters."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    return inner if isinstance(inner, nn.Module) else module


def submodule(module: object, path: str) -> Any:
    """What is at a dotted path."""
    found: Any = module
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name, None)
        if found is None:
            raise UnsupportedModel(f"no {path}")
    return found


def matrix(module: nn.Module, path: str, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear or embedding layer, LoRA merged."""
    layer = submodule(module, path)
    base = getattr(layer, "base_layer", layer)
    if not isinstance(base, nn.Linear | nn.Embedding) or tuple(base.weight.shape) != size:
        raise UnsupportedModel(f"{path} of another kind or size")
    weight = base.weight.detach()
    if base is not layer and not layer.merged and not layer.disable_adapters:
        if isinstance(base, nn.Embedding) or any(getattr(layer, "use_dora", {}).values()):
            raise UnsupportedModel(f"an adapter of {path} that is not a product of two matrices")
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    bias = getattr(base, "bias", None)
    return weight, None if bias is None else bias.detach()


def norm_weight(module: nn.Module, path: str, size: int) -> Tensor:
    weight: Tensor = submodule(module, f"{path}.weight").detach()
    if tuple(weight.shape) != (size,) or getattr(submodule(module, path), "bias", None) is not None:
        raise UnsupportedModel(f"{path} of another kind or size")
    return weight


def copy_of(tensor: Tensor, shape: KVShape) -> Tensor:
    return tensor.detach().to(shape.device, shape.dtype, copy=True)


def sliding_window(config: Any) -> int:
    """The sliding window, 0 when there is none."""
    return int(getattr(config, "sliding_window", None) or 0) if getattr(config, "use_sliding_window", True) else 0
