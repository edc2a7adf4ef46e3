"""The forward pass, over the rows of a KV cache.

Invariant: the weights of a decoder are its own. What a trainer does to the module is seen at the next `load`, whole,
and not before: training and generation may overlap, and no token is written by half of an update. Weights that were
packed are never written to again, so decoders of one process may share them.

    prefill(segments)   prompt tokens -> keys and values into the rows; no logits, and of the last layer nothing else
    decode(ids)         one token per row -> its keys and values into the row -> logits of the next token

Two decoders. `PackedDecoder` reads the weights of a Llama-like module (Llama, Qwen2, Qwen3, Mistral, SmolLM, ...) into
a form with few and large operations, because at the size of a small model an operation costs more than its arithmetic:
q, k and v are one product, gate and up another; the weights of the norms and the scale of the scores are multiplied
into the matrices behind them; the rotary halves are interleaved, so that the rotation is one complex product; LoRA is
merged. `ModuleDecoder` runs the forward of transformers on the same cache, for every other architecture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.inference.kv_cache import Index, KVCache, KVShape, RowBlock
from cadenza.inference.replica import Tokens

_FP32_TOLERANCE, _BF16_TOLERANCE = 1e-3, 0.1
"""How far packed logits may be from those of the module, relative to the largest: in float32, where both agree to 1e-6,
and in shorter formats, where either is some percent from the truth. A multiplier that is forgotten is far above."""


class PrefillSegment(NamedTuple):
    """Tokens of a prompt that are not in the cache yet."""

    row: int
    start: int
    """Position of the first one."""
    tokens: Tokens


class Decoder(Protocol):
    """A causal language model over a KV cache."""

    shape: KVShape
    vocab: int
    max_positions: int

    def pack(self, module: nn.Module) -> object:
        """The weights of this module as `load` takes them: a copy, which nobody changes. It may run beside steps."""
        ...

    def load(self, packed: object) -> None:
        """Use what `pack` made, here or in a decoder of the same model. It costs nothing."""
        ...

    def clone(self) -> Decoder:
        """Another decoder with the same weights and memory of its own."""
        ...

    def prefill(self, segments: Sequence[PrefillSegment], cache: KVCache) -> None:
        """Put the keys and values of these tokens into their rows."""
        ...

    def decode(
        self, ids: Tensor, positions: Tensor, cache_indices: Tensor, row_blocks: Sequence[RowBlock], cache: KVCache
    ) -> Tensor:
        """Logits [n, V], float32, after token `ids[r]` at `positions[r]` of row r, at `cache_indices` of the cache."""
        ...


class UnsupportedModel(Exception):
    """The architecture of the module is none that `PackedDecoder` knows."""


def decoder_for(module: nn.Module) -> Decoder:
    """The fastest decoder that gives the logits of this module."""
    try:
        return PackedDecoder(module)
    except UnsupportedModel:
        return ModuleDecoder(module)


def copy_weights_into(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a state dict, or the tensors of it that changed, into a module: all of it or, on an error, nothing."""
    if hasattr(module, "peft_config") and not any(name in weights for name, _ in module.named_parameters()):
        peft: Any = import_module("peft")
        _check_names(peft.get_peft_model_state_dict(module, save_embedding_layers=False), weights)
        peft.set_peft_model_state_dict(module, dict(weights))
    else:
        _check_names(module.state_dict(), weights)
        module.load_state_dict(dict(weights), strict=False)


def _check_names(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a module with these does not have, or has in another shape."""
    unknown = [name for name in weights if name not in own]
    if unknown or not weights:
        raise ValueError(f"the weights have no names of this model; unknown are {unknown[:3]} of {len(weights)}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} must be {list(own[name].shape)}, got {list(tensor.shape)}")


# -- packed ----------------------------------------------------------------------------------------------------------


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
        module = _without_peft(module)
        config = _submodule(module, "config")
        attention = _submodule(module, "model.layers.0.self_attn")
        self.max_positions = int(config.max_position_embeddings)
        self.vocab = int(config.vocab_size)
        self._heads = int(config.num_key_value_heads)
        self._queries_per_kv_head = int(config.num_attention_heads) // self._heads
        self._dim = int(_submodule(attention, "head_dim"))
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
        module = _without_peft(module)
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
            return None if tensor is None else _copy_of(tensor, shape)

        base = _submodule(module, "model")
        if len(base.layers) != shape.layers:
            raise UnsupportedModel(f"{len(base.layers)} layers instead of {shape.layers}")
        norm = _norm_weight(base, "norm", self._hidden)
        embedding = _matrix(base, "embed_tokens", (self.vocab, self._hidden))[0]
        head, head_bias = _matrix(module, "lm_head", (self.vocab, self._hidden))
        layers = []
        for layer in base.layers:
            qkv, qkv_bias, qk_norm = self._packed_attention(layer.self_attn)
            out, out_bias = _matrix(
                layer, "self_attn.o_proj", (self._hidden, self._heads * self._queries_per_kv_head * self._dim)
            )
            gate, gate_bias = _matrix(layer, "mlp.gate_proj", (self._inner, self._hidden))
            up, up_bias = _matrix(layer, "mlp.up_proj", (self._inner, self._hidden))
            down, down_bias = _matrix(layer, "mlp.down_proj", (self._hidden, self._inner))
            before = _norm_weight(layer, "input_layernorm", self._hidden)
            between = _norm_weight(layer, "post_attention_layernorm", self._hidden)
            layers.append(
                _PackedLayer(
                    qkv=fold(qkv, before),
                    qkv_bias=own(qkv_bias),
                    qk_norm=own(qk_norm),
                    out=_copy_of(out, shape).t(),
                    out_bias=own(out_bias),
                    up=fold(torch.cat((gate, up)), between),
                    up_bias=None if gate_bias is None or up_bias is None else own(torch.cat((gate_bias, up_bias))),
                    down=_copy_of(down, shape).t(),
                    down_bias=own(down_bias),
                )
            )
        return _PackedModel(_copy_of(embedding, shape), layers, fold(head, norm), own(head_bias))

    def _packed_attention(self, attention: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q, k and v by kv head, the rotary halves of q and k interleaved, the scale of the scores in q."""
        heads, group, dim = self._heads, self._queries_per_kv_head, self._dim
        interleaved = torch.arange(dim).view(2, dim // 2).t().reshape(-1)
        scale = float(_submodule(attention, "scaling"))
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = [_norm_weight(attention, "q_norm", dim) * scale] * group + [_norm_weight(attention, "k_norm", dim)]
            qk_norm = torch.stack(norms)[:, interleaved] * math.sqrt(dim)
            scale = 1.0
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name, count in (("q_proj", group), ("k_proj", 1), ("v_proj", 1)):
            weight, bias = _matrix(attention, name, (heads * count * dim, self._hidden))
            both = weight.view(heads, count, dim, -1), None if bias is None else bias.view(heads, count, dim, 1)
            for tensor, packed in zip(both, (weights, biases), strict=True):
                if tensor is not None:
                    tensor = tensor if name == "v_proj" else tensor[:, :, interleaved]
                    packed.append(tensor * scale if name == "q_proj" else tensor)
        bias = torch.cat(biases, 1).reshape(-1) if biases else None
        return torch.cat(weights, 1).reshape(-1, self._hidden), bias, qk_norm

    def _rotary_table(self, module: nn.Module) -> Tensor:
        """[positions, D/2] the complex numbers that rotate."""
        rotary = _submodule(module, "model.rotary_emb")
        frequencies = _submodule(rotary, "inv_freq").float()
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
        if kinds != {"full_attention"} or (not hasattr(config, "layer_types") and _sliding_window(config)):
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


# -- any module ------------------------------------------------------------------------------------------------------


class ModuleDecoder:
    """The forward of transformers, its keys and values in our rows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _frozen_copy(module)
        config = _submodule(self._module, "config").get_text_config()
        self.vocab = int(config.vocab_size)
        self.max_positions = int(getattr(config, "max_position_embeddings", 1 << 20))
        if window := _sliding_window(config):
            self.max_positions = min(self.max_positions, window)
        with torch.inference_mode():
            self.shape = self._probe()

    def pack(self, module: nn.Module) -> nn.Module:
        own, weights = self._module.state_dict(), _without_peft(module).state_dict()
        _check_names(own, weights)
        if missing := list(own.keys() - weights.keys()):
            raise ValueError(f"the module lacks {missing[:3]}")
        packed = _frozen_copy(self._module)
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


# -- reading modules -------------------------------------------------------------------------------------------------


def _frozen_copy(module: nn.Module) -> nn.Module:
    """A copy that is not trained."""
    return copy.deepcopy(_without_peft(module)).eval().requires_grad_(False)


def _without_peft(module: nn.Module) -> nn.Module:
    """The transformers model inside of peft's; its layers keep their adapters."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    return inner if isinstance(inner, nn.Module) else module


def _submodule(module: object, path: str) -> Any:
    """What is at a dotted path."""
    found: Any = module
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name, None)
        if found is None:
            raise UnsupportedModel(f"no {path}")
    return found


def _matrix(module: nn.Module, path: str, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear or embedding layer, LoRA merged."""
    layer = _submodule(module, path)
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


def _norm_weight(module: nn.Module, path: str, size: int) -> Tensor:
    weight: Tensor = _submodule(module, f"{path}.weight").detach()
    if tuple(weight.shape) != (size,) or getattr(_submodule(module, path), "bias", None) is not None:
        raise UnsupportedModel(f"{path} of another kind or size")
    return weight


def _copy_of(tensor: Tensor, shape: KVShape) -> Tensor:
    return tensor.detach().to(shape.device, shape.dtype, copy=True)


def _sliding_window(config: Any) -> int:
    """The sliding window, 0 when there is none."""
    return int(getattr(config, "sliding_window", None) or 0) if getattr(config, "use_sliding_window", True) else 0
