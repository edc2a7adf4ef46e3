"""The decoder of Llama-like models, with few and large operations."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.inference.decoders.protocol import PrefillSegment
from cadenza.inference.decoders.weights import (
    UnsupportedModel,
    copy_of,
    matrix,
    norm_weight,
    sliding_window,
    submodule,
    without_peft,
)
from cadenza.inference.kv_cache import Index, KVCache, KVShape, RowBlock

_FP32_TOLERANCE, _BF16_TOLERANCE = 1e-3, 0.1
"""How far packed logits may be from those of the module, relative to the largest: in float32, where both agree to 1e-6,
and in shorter formats, where either is some percent from the truth. A multiplier that is forgotten is far above."""


class _PackedLayer(NamedTuple):
    """One layer, packed."""

    qkv: Tensor
    """[kv heads * (G query heads, key, value) * D, H]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[G + 1, D], Qwen3"""
    out: Tensor
    """[heads * D, H]"""
    out_bias: Tensor | None
    up: Tensor
    """[(gate, up) * I, H]"""
    up_bias: Tensor | None
    down: Tensor
    """[I, H]"""
    down_bias: Tensor | None


class _PackedModel(NamedTuple):
    """A model, packed."""

    embedding: Tensor
    layers: list[_PackedLayer]
    head: Tensor
    head_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _PrefillBlock:
    """Segments of similar length, padded to one attention."""

    rows: Tensor
    """[b]"""
    queries: int
    width: int
    gather: Tensor | None
    """[b * queries] where the queries are among the packed tokens; None when they stand there like this already."""
    valid: Tensor | None
    """[tokens] which of the [b * queries] are tokens."""
    slice: slice
    """The packed tokens of this block."""
    mask: Tensor
    """[b, 1, G * queries, width]"""


class PackedDecoder:
    """Llama-like models in few operations."""

    def __init__(self, module: nn.Module) -> None:
        module = without_peft(module)
        config = submodule(module, "config")
        attention = submodule(module, "model.layers.0.self_attn")
        self.max_positions = int(config.max_position_embeddings)
        self.vocab = int(config.vocab_size)
        self._heads = int(config.num_key_value_heads)
        self._queries_per_kv_head = int(config.num_attention_heads) // self._heads
        self._dim = int(submodule(attention, "head_dim"))
        self._hidden = int(config.hidden_size)
        self._inner = int(config.intermediate_size)
        self._norm_eps = float(config.rms_norm_eps)
        self._check_architecture(config, module)
        first = next(module.parameters())
        self.shape = KVShape(
            int(config.num_hidden_layers), self._heads, self._dim, self._dim, first.dtype, first.device
        )
        self._is_float32 = first.dtype == torch.float32
        self._rotations = self._rotary_table(module)
        self._epsilon = torch.tensor(math.sqrt(self._norm_eps * self._hidden), device=first.device)
        self._head_epsilon = torch.tensor(math.sqrt(self._norm_eps * self._dim), device=first.device)
        # [row * head, G queries and key and value, D/2]: what each is multiplied with; values with 1.
        self._factors = torch.empty(
            0, self._queries_per_kv_head + 2, self._dim // 2, dtype=torch.complex64, device=first.device
        )
        self._weights = self.pack(module)
        with torch.inference_mode():
            self._check_logits(module)

    def pack(self, module: nn.Module) -> _PackedModel:
        module = without_peft(module)
        with torch.no_grad():
            return self._packed(module)

    def load(self, packed: object) -> None:
        assert isinstance(packed, _PackedModel)
        self._weights = packed

    def clone(self) -> PackedDecoder:
        clone = copy.copy(self)
        clone._factors = self._factors.new_empty(0, *self._factors.shape[1:])
        return clone

    def decode(
        self, ids: Tensor, positions: Tensor, cache_indices: Tensor, row_blocks: Sequence[RowBlock], cache: KVCache
    ) -> Tensor:
        count, heads = len(ids), self._heads
        weights = self._weights
        factors = self._rotary_factors(positions)
        cache.mask.view(-1).index_fill_(0, cache_indices, 0.0)
        views = [(block.first * heads, block.last * heads, cache.block_view(block)) for block in row_blocks]
        x = weights.embedding.index_select(0, ids)
        for index, layer in enumerate(weights.layers):
            packed = self._project(x, layer, factors, cache.flat[index], cache_indices)
            queries = packed.narrow(1, 0, self._queries_per_kv_head)
            results = []
            for first, last, view in views:
                of_block = queries if len(views) == 1 else queries[first:last]
                scores = torch.baddbmm(view.mask, of_block, view.keys[index])
                results.append(torch.bmm(torch.softmax(scores, -1), view.values[index]))
            attended = results[0] if len(results) == 1 else torch.cat(results)
            x = self._output_and_mlp(x, attended.view(count, -1), layer)
        return F.linear(self._normalised(x), weights.head, weights.head_bias).float()

    def prefill(self, segments: Sequence[PrefillSegment], cache: KVCache) -> None:
        segments = sorted(segments, key=lambda segment: -len(segment.tokens))
        device = self.shape.device
        ids = torch.from_numpy(np.concatenate([segment.tokens for segment in segments]).astype(np.int64)).to(device)
        at = np.concatenate([np.arange(len(s.tokens), dtype=np.int64) + s.start for s in segments])
        owner = np.repeat([segment.row for segment in segments], [len(segment.tokens) for segment in segments])
        cache_indices = cache.indices(owner, at)
        factors = self._rotary_factors(torch.from_numpy(at).to(device))
        blocks = self._blocks(segments)
        weights = self._weights
        x = weights.embedding.index_select(0, ids)
        for index, layer in enumerate(weights.layers):
            packed = self._project(x, layer, factors, cache.flat[index], cache_indices)
            if index + 1 < len(weights.layers):
                attended = [self._attend(packed.view(len(ids), -1), index, block, cache) for block in blocks]
                x = self._output_and_mlp(x, attended[0] if len(attended) == 1 else torch.cat(attended), layer)

    # What both have in common.

    def _project(
        self, x: Tensor, layer: _PackedLayer, factors: Tensor, layer_cache: Tensor, cache_indices: Tensor
    ) -> Tensor:
        """Queries, key and value of every token and kv head, [n * heads, G + 2, D]; key and value go to the cache."""
        group, dim = self._queries_per_kv_head, self._dim
        packed = F.linear(self._normalised(x), layer.qkv, layer.qkv_bias).view(-1, group + 2, dim)
        if layer.qk_norm is not None:
            rotated = packed[:, : group + 1]
            size = torch.hypot(torch.linalg.vector_norm(rotated, dim=-1, keepdim=True), self._head_epsilon)
            rotated.div_(size).mul_(layer.qk_norm)
        if self._is_float32:
            packed.view(torch.complex64).mul_(factors)
        else:
            packed = packed.float().view(torch.complex64).mul_(factors).view(torch.float32).to(packed.dtype)
        layer_cache.index_copy_(1, cache_indices, packed.narrow(1, group, 2).transpose(0, 1))
        return packed

    def _output_and_mlp(self, x: Tensor, attended: Tensor, layer: _PackedLayer) -> Tensor:
        """The output projection and the MLP."""
        x = torch.addmm(x, attended, layer.out)
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        inner = F.linear(self._normalised(x), layer.up, layer.up_bias)
        gate, up = inner.chunk(2, -1)
        x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return x if layer.down_bias is None else x.add_(layer.down_bias)

    def _normalised(self, x: Tensor) -> Tensor:
        """x / |x|; the weight of the norm and the root of the dimension are in the matrix that follows."""
        wide = x if self._is_float32 else x.float()
        normed = wide / torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self._epsilon)
        return normed if self._is_float32 else normed.to(x.dtype)

    def _rotary_factors(self, positions: Tensor) -> Tensor:
        """[n * heads, G + 2, D/2] for tokens at these positions."""
        count = len(positions)
        if len(self._factors) < count * self._heads:
            self._factors = self._factors.new_ones(2 * count * self._heads, *self._factors.shape[1:])
        factors = self._factors[: count * self._heads]
        rotations = self._rotations.index_select(0, positions)[:, None, None]
        factors.view(count, self._heads, *factors.shape[1:])[:, :, : self._queries_per_kv_head + 1] = rotations
        return factors

    # Prompts.

    def _blocks(self, segments: list[PrefillSegment]) -> list[_PrefillBlock]:
        """Segments, longest first, in blocks that waste at most a quarter, or are short anyway."""
        blocks: list[_PrefillBlock] = []
        members: list[PrefillSegment] = []
        start = 0
        for segment in segments:
            if members and len(segment.tokens) < min(0.75 * len(members[0].tokens), len(members[0].tokens) - 16):
                blocks.append(self._block(members, start))
                start = blocks[-1].slice.stop
                members = []
            members.append(segment)
        return [*blocks, self._block(members, start)]

    def _block(self, segments: list[PrefillSegment], start: int) -> _PrefillBlock:
        device = self.shape.device
        lengths = np.array([len(segment.tokens) for segment in segments])
        starts = np.array([segment.start for segment in segments])
        queries, width, total = int(lengths[0]), int((starts + lengths).max()), int(lengths.sum())
        seen = starts[:, None] + np.arange(queries)  # [b, queries] the last position that each query sees
        hidden = np.arange(width) > np.tile(seen, (1, self._queries_per_kv_head))[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype)
        mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        gather = valid = None
        if total < len(segments) * queries:
            real = np.arange(queries) < lengths[:, None]
            firsts = start + np.concatenate([[0], lengths.cumsum()[:-1]])
            gather = torch.from_numpy(np.where(real, firsts[:, None] + np.arange(queries), start).reshape(-1))
            valid = torch.from_numpy(np.flatnonzero(real))
        return _PrefillBlock(
            rows=torch.tensor([segment.row for segment in segments], device=device),
            queries=queries,
            width=width,
            gather=None if gather is None else gather.to(device),
            valid=None if valid is None else valid.to(device),
            slice=slice(start, start + total),
            mask=mask.to(device),
        )

    def _attend(self, packed: Tensor, index: int, block: _PrefillBlock, cache: KVCache) -> Tensor:
        """[tokens of the block, heads * D]"""
        heads, group, dim, size = self._heads, self._queries_per_kv_head, self._dim, len(block.rows)
        tokens = packed[block.slice] if block.gather is None else packed.index_select(0, block.gather)
        queries = tokens.view(size, block.queries, heads, group + 2, dim)[:, :, :, :group]
        queries = queries.permute(0, 2, 3, 1, 4).reshape(size, heads, group * block.queries, dim)
        keys = cache.keys[index, :, :, : block.width].index_select(0, block.rows)
        values = cache.values[index, :, :, : block.width].index_select(0, block.rows)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=block.mask, scale=1.0)
        attended = attended.view(size, heads, group, block.queries, dim).permute(0, 3, 1, 2, 4)
        attended = attended.reshape(size * block.queries, heads * group * dim)
        return attended if block.valid is None else attended.index_select(0, block.valid)

    # Weights.

    def _packed(self, module: nn.Module) -> _PackedModel:
        shape = self.shape

        def fold(matrix: Tensor, norm: Tensor) -> Tensor:
            factor = norm.float() * math.sqrt(self._hidden)
            return (matrix.float() * factor).to(device=shape.device, dtype=shape.dtype).contiguous()

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else copy_of(tensor, shape)

        base = submodule(module, "model")
        if len(base.layers) != shape.layers:
            raise UnsupportedModel(f"{len(base.layers)} layers instead of {shape.layers}")
        norm = norm_weight(base, "norm", self._hidden)
        embedding = matrix(base, "embed_tokens", (self.vocab, self._hidden))[0]
        head, head_bias = matrix(module, "lm_head", (self.vocab, self._hidden))
        layers = []
        for layer in base.layers:
            qkv, qkv_bias, qk_norm = self._packed_attention(layer.self_attn)
            out, out_bias = matrix(
                layer, "self_attn.o_proj", (self._hidden, self._heads * self._queries_per_kv_head * self._dim)
            )
            gate, gate_bias = matrix(layer, "mlp.gate_proj", (self._inner, self._hidden))
            up, up_bias = matrix(layer, "mlp.up_proj", (self._inner, self._hidden))
            down, down_bias = matrix(layer, "mlp.down_proj", (self._hidden, self._inner))
            before = norm_weight(layer, "input_layernorm", self._hidden)
            between = norm_weight(layer, "post_attention_layernorm", self._hidden)
            layers.append(
                _PackedLayer(
                    qkv=fold(qkv, before),
                    qkv_bias=own(qkv_bias),
                    qk_norm=own(qk_norm),
                    out=copy_of(out, shape).t(),
                    out_bias=own(out_bias),
                    up=fold(torch.cat((gate, up)), between),
                    up_bias=None if gate_bias is None or up_bias is None else own(torch.cat((gate_bias, up_bias))),
                    down=copy_of(down, shape).t(),
                    down_bias=own(down_bias),
                )
            )
        return _PackedModel(copy_of(embedding, shape), layers, fold(head, norm), own(head_bias))

    def _packed_attention(self, attention: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q, k and v by kv head, the rotary halves of q and k interleaved, the scale of the scores in q."""
        heads, group, dim = self._heads, self._queries_per_kv_head, self._dim
        interleaved = torch.arange(dim).view(2, dim // 2).t().reshape(-1)
        scale = float(submodule(attention, "scaling"))
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = [norm_weight(attention, "q_norm", dim) * scale] * group + [norm_weight(attention, "k_norm", dim)]
            qk_norm = torch.stack(norms)[:, interleaved] * math.sqrt(dim)
            scale = 1.0
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name, count in (("q_proj", group), ("k_proj", 1), ("v_proj", 1)):
            weight, bias = matrix(attention, name, (heads * count * dim, self._hidden))
            both = weight.view(heads, count, dim, -1), None if bias is None else bias.view(heads, count, dim, 1)
            for tensor, packed in zip(both, (weights, biases), strict=True):
                if tensor is not None:
                    tensor = tensor if name == "v_proj" else tensor[:, :, interleaved]
                    packed.append(tensor * scale if name == "q_proj" else tensor)
        bias = torch.cat(biases, 1).reshape(-1) if biases else None
        return torch.cat(weights, 1).reshape(-1, self._hidden), bias, qk_norm

    def _rotary_table(self, module: nn.Module) -> Tensor:
        """[positions, D/2] the complex numbers that rotate."""
        rotary = submodule(module, "model.rotary_emb")
        frequencies = submodule(rotary, "inv_freq").float()
        if getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
            raise UnsupportedModel(f"rotary embedding of type {rotary.rope_type}")
        if len(frequencies) * 2 != self._dim:
            raise UnsupportedModel("a rotary embedding of a part of the head")
        angles = torch.outer(torch.arange(self.max_positions, device=frequencies.device).float(), frequencies)
        return torch.polar(torch.full_like(angles, float(getattr(rotary, "attention_scaling", 1.0))), angles)

    def _check_architecture(self, config: Any, module: nn.Module) -> None:
        """Refuse what a look at a few logits does not show."""
        if getattr(config, "hidden_act", None) not in ("silu", "swish"):
            raise UnsupportedModel("another activation than silu")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or (not hasattr(config, "layer_types") and sliding_window(config)):
            raise UnsupportedModel("layers that do not attend to everything")
        if self._dim % 2 or config.num_attention_heads % self._heads:
            raise UnsupportedModel("an odd head dimension, or query heads that do not divide among the kv heads")

    def _check_logits(self, module: nn.Module) -> None:
        """Both must give the same logits for a few tokens; a multiplier that the packing does not know shows here."""
        modes = {submodule: submodule.training for submodule in module.modules()}
        try:
            module.eval()
            ids = torch.arange(6, device=self.shape.device) * 7 % self.vocab
            want = module(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        finally:
            for submodule, training in modes.items():
                submodule.training = training
        cache = KVCache(self.shape)
        cache.reserve(1, len(ids), len(ids))
        self.prefill([PrefillSegment(0, 0, ids[:-1].cpu().numpy().astype(np.int32))], cache)
        position: Index = np.array([len(ids) - 1])
        cache.set_visible_lengths(position)
        positions = torch.from_numpy(position).to(ids.device)
        row_blocks = [RowBlock(0, 1, len(ids))]
        got = self.decode(ids[-1:], positions, cache.indices(np.array([0]), position), row_blocks, cache)[0]
        worst = float((got - want).abs().max())
        if not worst <= (_FP32_TOLERANCE if self._is_float32 else _BF16_TOLERANCE) * float(want.abs().max()) + 1e-6:
            raise UnsupportedModel(f"logits that differ by {worst:.2g}")
