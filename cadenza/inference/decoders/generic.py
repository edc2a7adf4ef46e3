"""The decoder of every other architecture: the forward of transformers over our cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cadenza.inference.decoders.protocol import PrefillSegment
from cadenza.inference.decoders.weights import check_names, frozen_copy, sliding_window, submodule, without_peft
from cadenza.inference.kv_cache import KVCache, KVShape, RowBlock


class ModuleDecoder:
    """The forward of transformers, its keys and values in our rows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = frozen_copy(module)
        config = submodule(self._module, "config").get_text_config()
        self.vocab = int(config.vocab_size)
        self.max_positions = int(getattr(config, "max_position_embeddings", 1 << 20))
        if window := sliding_window(config):
            self.max_positions = min(self.max_positions, window)
        with torch.inference_mode():
            self.shape = self._probe()

    def pack(self, module: nn.Module) -> nn.Module:
        own, weights = self._module.state_dict(), without_peft(module).state_dict()
        check_names(own, weights)
        if missing := list(own.keys() - weights.keys()):
            raise ValueError(f"the module lacks {missing[:3]}")
        packed = frozen_copy(self._module)
        packed.load_state_dict(weights)
        return packed

    def load(self, packed: object) -> None:
        assert isinstance(packed, nn.Module)
        self._module = packed

    def clone(self) -> ModuleDecoder:
        return copy.copy(self)

    def decode(
        self, ids: Tensor, positions: Tensor, cache_indices: Tensor, row_blocks: Sequence[RowBlock], cache: KVCache
    ) -> Tensor:
        cache.mask.view(-1).index_fill_(0, cache_indices, 0.0)
        count, width = len(ids), max(block.width for block in row_blocks)
        mask = cache.mask.view(cache.rows, self.shape.heads, 1, cache.width)[:count, :1, :, :width]
        adapter = _TransformersCache(cache, slice(0, count), cache_indices, width)
        return self._forward(ids[:, None], positions[:, None], mask, adapter)[:, -1].float()

    def prefill(self, segments: Sequence[PrefillSegment], cache: KVCache) -> None:
        longest, device = max(len(segment.tokens) for segment in segments), self.shape.device
        # What is beyond the end of a segment goes to the spare row.
        owner = np.full((len(segments), longest), cache.rows - 1)
        ids, at = np.zeros((2, len(segments), longest), np.int64)
        for index, segment in enumerate(segments):
            length = len(segment.tokens)
            owner[index, :length] = segment.row
            ids[index, :length] = segment.tokens
            at[index] = np.minimum(np.arange(longest) + segment.start, cache.width - 1)
        width = max(segment.start + len(segment.tokens) for segment in segments)
        mask = torch.zeros(len(segments), 1, longest, width, dtype=self.shape.dtype, device=device)
        seen = torch.from_numpy(at).to(device)
        mask.masked_fill_(torch.arange(width, device=device) > seen[:, None, :, None], -torch.inf)
        cache_indices = cache.indices(owner.reshape(-1), at.reshape(-1))
        adapter = _TransformersCache(
            cache, torch.tensor([segment.row for segment in segments], device=device), cache_indices, width
        )
        self._forward(torch.from_numpy(ids).to(device), seen, mask, adapter)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        output = self._module(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        logits: Tensor = output.logits
        return logits

    def _probe(self) -> KVShape:
        """Run one token to see what it leaves behind."""
        device = next(self._module.parameters()).device
        cache: Any = import_module("transformers").DynamicCache()
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._module(input_ids=ids, past_key_values=cache, use_cache=True)
        sizes = {
            (layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1], layer.keys.dtype)
            for layer in cache.layers
            if isinstance(getattr(layer, "keys", None), Tensor)
        }
        if len(sizes) != 1:
            name = type(self._module).__name__
            raise ValueError(f"{name} does not keep the same keys and values in every layer; the engine needs that")
        heads, key_dim, value_dim, dtype = sizes.pop()
        return KVShape(len(cache.layers), heads, key_dim, value_dim, dtype, device)


class _TransformersCache:
    """What transformers takes for a cache: it writes to `cache_indices` of our cache and reads its `rows`."""

    is_compileable = False

    def __init__(self, cache: KVCache, rows: slice | Tensor, cache_indices: Tensor, width: int) -> None:
        self.cache = cache
        self.rows = rows
        self.cache_indices = cache_indices
        self.width = width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for new, flat in zip((key_states, value_states), self.cache.flat[layer_idx], strict=True):
            flat[:, : new.shape[-1]].index_copy_(0, self.cache_indices, new.transpose(1, 2).flatten(0, 2))
        keys = self.cache.keys[layer_idx, :, :, : self.width]
        values = self.cache.values[layer_idx, :, :, : self.width]
        if isinstance(self.rows, slice):
            return keys[self.rows], values[self.rows]
        return keys.index_select(0, self.rows), values.index_select(0, self.rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width
