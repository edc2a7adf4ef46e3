"""The forward pass, over the rows of a KV cache.

Invariant: the weights of a decoder are its own. What a trainer does to the module is seen at the next `load`, whole,
and not before: training and generation may overlap, and no token is written by half of an update. Weights that were
packed are never written to again, so decoders of one process may share them.

    fill(segments)  prompt tokens -> keys and values into the rows; no logits, and of the last layer nothing else
    step(ids)       one token per row -> its keys and values into the row -> logits of the next token

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

from cadenza.inference.kv_cache import Index, KVRows, KVShape, Panel
from cadenza.inference.replica import Tokens

_EXACT, _ROUNDED = 1e-3, 0.1
"""How far packed logits may be from those of the module, relative to the largest: in float32, where both agree to 1e-6,
and in shorter formats, where either is some percent from the truth. A multiplier that is forgotten is far above."""


class Segment(NamedTuple):
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

    def twin(self) -> Decoder:
        """Another decoder with the same weights and memory of its own."""
        ...

    def fill(self, segments: Sequence[Segment], rows: KVRows) -> None:
        """Put the keys and values of these tokens into their rows."""
        ...

    def step(self, ids: Tensor, positions: Tensor, places: Tensor, panels: Sequence[Panel], rows: KVRows) -> Tensor:
        """Logits [n, V], float32, after token `ids[r]` at `positions[r]` of row r, which `rows` calls `places`."""
        ...


class Unlike(Exception):
    """The module is not of the kind that this decoder knows."""


def decoder_for(module: nn.Module) -> Decoder:
    """The fastest decoder that gives the logits of this module."""
    try:
        return PackedDecoder(module)
    except Unlike:
        return ModuleDecoder(module)


def absorb(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a state dict, or the part of it that changed, into a module: all of it or, on an error, nothing."""
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


class _Layer(NamedTuple):
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


class _Weights(NamedTuple):
    """A model, packed."""

    embedding: Tensor
    layers: list[_Layer]
    head: Tensor
    head_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
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
        module = _unwrapped(module)
        config = _found(module, "config")
        attention = _found(module, "model.layers.0.self_attn")
        self.max_positions = int(config.max_position_embeddings)
        self.vocab = int(config.vocab_size)
        self._heads = int(config.num_key_value_heads)
        self._group = int(config.num_attention_heads) // self._heads
        self._dim = int(_found(attention, "head_dim"))
        self._hidden = int(config.hidden_size)
        self._inner = int(config.intermediate_size)
        self._norm_eps = float(config.rms_norm_eps)
        self._check_kind(config, module)
        first = next(module.parameters())
        self.shape = KVShape(
            int(config.num_hidden_layers), self._heads, self._dim, self._dim, first.dtype, first.device
        )
        self._single = first.dtype == torch.float32
        self._turns = self._rotation(module)
        self._epsilon = torch.tensor(math.sqrt(self._norm_eps * self._hidden), device=first.device)
        self._head_epsilon = torch.tensor(math.sqrt(self._norm_eps * self._dim), device=first.device)
        # [row * head, G queries and key and value, D/2]: what each is multiplied with; values with 1.
        self._factors = torch.empty(0, self._group + 2, self._dim // 2, dtype=torch.complex64, device=first.device)
        self._weights = self.pack(module)
        with torch.inference_mode():
            self._compare(module)

    def pack(self, module: nn.Module) -> _Weights:
        module = _unwrapped(module)
        with torch.no_grad():
            return self._packed(module)

    def load(self, packed: object) -> None:
        assert isinstance(packed, _Weights)
        self._weights = packed

    def twin(self) -> PackedDecoder:
        twin = copy.copy(self)
        twin._factors = self._factors.new_empty(0, *self._factors.shape[1:])
        return twin

    def step(self, ids: Tensor, positions: Tensor, places: Tensor, panels: Sequence[Panel], rows: KVRows) -> Tensor:
        count, heads = len(ids), self._heads
        weights = self._weights
        factors = self._rotating(positions)
        rows.mask.view(-1).index_fill_(0, places, 0.0)
        views = [(panel.first * heads, panel.last * heads, rows.panel(panel)) for panel in panels]
        x = weights.embedding.index_select(0, ids)
        for index, layer in enumerate(weights.layers):
            packed = self._project(x, layer, factors, rows.flat[index], places)
            queries = packed.narrow(1, 0, self._group)
            parts = []
            for first, last, view in views:
                part = queries if len(views) == 1 else queries[first:last]
                scores = torch.baddbmm(view.mask, part, view.keys[index])
                parts.append(torch.bmm(torch.softmax(scores, -1), view.values[index]))
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = self._rest(x, attended.view(count, -1), layer)
        return F.linear(self._normed(x), weights.head, weights.head_bias).float()

    def fill(self, segments: Sequence[Segment], rows: KVRows) -> None:
        segments = sorted(segments, key=lambda segment: -len(segment.tokens))
        device = self.shape.device
        ids = torch.from_numpy(np.concatenate([segment.tokens for segment in segments]).astype(np.int64)).to(device)
        at = np.concatenate([np.arange(len(s.tokens), dtype=np.int64) + s.start for s in segments])
        owner = np.repeat([segment.row for segment in segments], [len(segment.tokens) for segment in segments])
        places = rows.places(owner, at)
        factors = self._rotating(torch.from_numpy(at).to(device))
        blocks = self._blocks(segments)
        weights = self._weights
        x = weights.embedding.index_select(0, ids)
        for index, layer in enumerate(weights.layers):
            packed = self._project(x, layer, factors, rows.flat[index], places)
            if index + 1 < len(weights.layers):
                attended = [self._attend(packed.view(len(ids), -1), index, block, rows) for block in blocks]
                x = self._rest(x, attended[0] if len(attended) == 1 else torch.cat(attended), layer)

    # What both have in common.

    def _project(self, x: Tensor, layer: _Layer, factors: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        """Queries, key and value of every token and kv head, [n * heads, G + 2, D]; key and value go to the cache."""
        group, dim = self._group, self._dim
        packed = F.linear(self._normed(x), layer.qkv, layer.qkv_bias).view(-1, group + 2, dim)
        if layer.qk_norm is not None:
            turning = packed[:, : group + 1]
            size = torch.hypot(torch.linalg.vector_norm(turning, dim=-1, keepdim=True), self._head_epsilon)
            turning.div_(size).mul_(layer.qk_norm)
        if self._single:
            packed.view(torch.complex64).mul_(factors)
        else:
            packed = packed.float().view(torch.complex64).mul_(factors).view(torch.float32).to(packed.dtype)
        cache.index_copy_(1, places, packed.narrow(1, group, 2).transpose(0, 1))
        return packed

    def _rest(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        """The output projection and the MLP."""
        x = torch.addmm(x, attended, layer.out)
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        inner = F.linear(self._normed(x), layer.up, layer.up_bias)
        gate, up = inner.chunk(2, -1)
        x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return x if layer.down_bias is None else x.add_(layer.down_bias)

    def _normed(self, x: Tensor) -> Tensor:
        """x / |x|; the weight of the norm and the root of the dimension are in the matrix that follows."""
        wide = x if self._single else x.float()
        normed = wide / torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self._epsilon)
        return normed if self._single else normed.to(x.dtype)

    def _rotating(self, positions: Tensor) -> Tensor:
        """[n * heads, G + 2, D/2] for tokens at these positions."""
        count = len(positions)
        if len(self._factors) < count * self._heads:
            self._factors = self._factors.new_ones(2 * count * self._heads, *self._factors.shape[1:])
        factors = self._factors[: count * self._heads]
        turns = self._turns.index_select(0, positions)[:, None, None]
        factors.view(count, self._heads, *factors.shape[1:])[:, :, : self._group + 1] = turns
        return factors

    # Prompts.

    def _blocks(self, segments: list[Segment]) -> list[_Block]:
        """Segments, longest first, in blocks that waste at most a quarter, or are short anyway."""
        blocks: list[_Block] = []
        members: list[Segment] = []
        start = 0
        for segment in segments:
            if members and len(segment.tokens) < min(0.75 * len(members[0].tokens), len(members[0].tokens) - 16):
                blocks.append(self._block(members, start))
                start = blocks[-1].slice.stop
                members = []
            members.append(segment)
        return [*blocks, self._block(members, start)]

    def _block(self, segments: list[Segment], start: int) -> _Block:
        device = self.shape.device
        lengths = np.array([len(segment.tokens) for segment in segments])
        starts = np.array([segment.start for segment in segments])
        queries, width, total = int(lengths[0]), int((starts + lengths).max()), int(lengths.sum())
        seen = starts[:, None] + np.arange(queries)  # [b, queries] the last position that each query sees
        hidden = np.arange(width) > np.tile(seen, (1, self._group))[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.shape.dtype)
        mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)
        gather = valid = None
        if total < len(segments) * queries:
            real = np.arange(queries) < lengths[:, None]
            firsts = start + np.concatenate([[0], lengths.cumsum()[:-1]])
            gather = torch.from_numpy(np.where(real, firsts[:, None] + np.arange(queries), start).reshape(-1))
            valid = torch.from_numpy(np.flatnonzero(real))
        return _Block(
            rows=torch.tensor([segment.row for segment in segments], device=device),
            queries=queries,
            width=width,
            gather=None if gather is None else gather.to(device),
            valid=None if valid is None else valid.to(device),
            slice=slice(start, start + total),
            mask=mask.to(device),
        )

    def _attend(self, packed: Tensor, index: int, block: _Block, rows: KVRows) -> Tensor:
        """[tokens of the block, heads * D]"""
        heads, group, dim, size = self._heads, self._group, self._dim, len(block.rows)
        tokens = packed[block.slice] if block.gather is None else packed.index_select(0, block.gather)
        queries = tokens.view(size, block.queries, heads, group + 2, dim)[:, :, :, :group]
        queries = queries.permute(0, 2, 3, 1, 4).reshape(size, heads, group * block.queries, dim)
        keys = rows.keys[index, :, :, : block.width].index_select(0, block.rows)
        values = rows.values[index, :, :, : block.width].index_select(0, block.rows)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=block.mask, scale=1.0)
        attended = attended.view(size, heads, group, block.queries, dim).permute(0, 3, 1, 2, 4)
        attended = attended.reshape(size * block.queries, heads * group * dim)
        return attended if block.valid is None else attended.index_select(0, block.valid)

    # Weights.

    def _packed(self, module: nn.Module) -> _Weights:
        shape = self.shape

        def fold(matrix: Tensor, norm: Tensor) -> Tensor:
            factor = norm.float() * math.sqrt(self._hidden)
            return (matrix.float() * factor).to(device=shape.device, dtype=shape.dtype).contiguous()

        def own(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else _own(tensor, shape)

        base = _found(module, "model")
        if len(base.layers) != shape.layers:
            raise Unlike(f"{len(base.layers)} layers instead of {shape.layers}")
        norm = _norm_weight(base, "norm", self._hidden)
        embedding = _matrix(base, "embed_tokens", (self.vocab, self._hidden))[0]
        head, head_bias = _matrix(module, "lm_head", (self.vocab, self._hidden))
        layers = []
        for layer in base.layers:
            qkv, qkv_bias, qk_norm = self._packed_attention(layer.self_attn)
            out, out_bias = _matrix(layer, "self_attn.o_proj", (self._hidden, self._heads * self._group * self._dim))
            gate, gate_bias = _matrix(layer, "mlp.gate_proj", (self._inner, self._hidden))
            up, up_bias = _matrix(layer, "mlp.up_proj", (self._inner, self._hidden))
            down, down_bias = _matrix(layer, "mlp.down_proj", (self._hidden, self._inner))
            before = _norm_weight(layer, "input_layernorm", self._hidden)
            between = _norm_weight(layer, "post_attention_layernorm", self._hidden)
            layers.append(
                _Layer(
                    qkv=fold(qkv, before),
                    qkv_bias=own(qkv_bias),
                    qk_norm=own(qk_norm),
                    out=_own(out, shape).t(),
                    out_bias=own(out_bias),
                    up=fold(torch.cat((gate, up)), between),
                    up_bias=None if gate_bias is None or up_bias is None else own(torch.cat((gate_bias, up_bias))),
                    down=_own(down, shape).t(),
                    down_bias=own(down_bias),
                )
            )
        return _Weights(_own(embedding, shape), layers, fold(head, norm), own(head_bias))

    def _packed_attention(self, attention: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q, k and v by kv head, the rotary halves of q and k interleaved, the scale of the scores in q."""
        heads, group, dim = self._heads, self._group, self._dim
        interleaved = torch.arange(dim).view(2, dim // 2).t().reshape(-1)
        scale = float(_found(attention, "scaling"))
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = [_norm_weight(attention, "q_norm", dim) * scale] * group + [_norm_weight(attention, "k_norm", dim)]
            qk_norm = torch.stack(norms)[:, interleaved] * math.sqrt(dim)
            scale = 1.0
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name, count in (("q_proj", group), ("k_proj", 1), ("v_proj", 1)):
            weight, bias = _matrix(attention, name, (heads * count * dim, self._hidden))
            parts = weight.view(heads, count, dim, -1), None if bias is None else bias.view(heads, count, dim, 1)
            for part, packed in zip(parts, (weights, biases), strict=True):
                if part is not None:
                    part = part if name == "v_proj" else part[:, :, interleaved]
                    packed.append(part * scale if name == "q_proj" else part)
        bias = torch.cat(biases, 1).reshape(-1) if biases else None
        return torch.cat(weights, 1).reshape(-1, self._hidden), bias, qk_norm

    def _rotation(self, module: nn.Module) -> Tensor:
        """[positions, D/2] the complex numbers that rotate."""
        rotary = _found(module, "model.rotary_emb")
        frequencies = _found(rotary, "inv_freq").float()
        if getattr(rotary, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
            raise Unlike(f"rotary embedding of type {rotary.rope_type}")
        if len(frequencies) * 2 != self._dim:
            raise Unlike("a rotary embedding of a part of the head")
        angles = torch.outer(torch.arange(self.max_positions, device=frequencies.device).float(), frequencies)
        return torch.polar(torch.full_like(angles, float(getattr(rotary, "attention_scaling", 1.0))), angles)

    def _check_kind(self, config: Any, module: nn.Module) -> None:
        """Refuse what a look at a few logits does not show."""
        if getattr(config, "hidden_act", None) not in ("silu", "swish"):
            raise Unlike("another activation than silu")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or (not hasattr(config, "layer_types") and _window(config)):
            raise Unlike("layers that do not attend to everything")
        if self._dim % 2 or config.num_attention_heads % self._heads:
            raise Unlike("an odd head dimension, or query heads that do not divide among the kv heads")

    def _compare(self, module: nn.Module) -> None:
        """Both must give the same logits for a few tokens; a multiplier that the packing does not know shows here."""
        modes = {part: part.training for part in module.modules()}
        try:
            module.eval()
            ids = torch.arange(6, device=self.shape.device) * 7 % self.vocab
            want = module(input_ids=ids[None], use_cache=False).logits[0, -1].float()
        finally:
            for part, training in modes.items():
                part.training = training
        rows = KVRows(self.shape)
        rows.reserve(1, len(ids), len(ids))
        self.fill([Segment(0, 0, ids[:-1].cpu().numpy().astype(np.int32))], rows)
        place: Index = np.array([len(ids) - 1])
        rows.show(place)
        where = torch.from_numpy(place).to(ids.device)
        panels = [Panel(0, 1, len(ids))]
        got = self.step(ids[-1:], where, rows.places(np.array([0]), place), panels, rows)[0]
        worst = float((got - want).abs().max())
        if not worst <= (_EXACT if self._single else _ROUNDED) * float(want.abs().max()) + 1e-6:
            raise Unlike(f"logits that differ by {worst:.2g}")


# -- any module ------------------------------------------------------------------------------------------------------


class ModuleDecoder:
    """The forward of transformers, its keys and values in our rows."""

    def __init__(self, module: nn.Module) -> None:
        self._module = _frozen(module)
        config = _found(self._module, "config").get_text_config()
        self.vocab = int(config.vocab_size)
        self.max_positions = int(getattr(config, "max_position_embeddings", 1 << 20))
        if window := _window(config):
            self.max_positions = min(self.max_positions, window)
        with torch.inference_mode():
            self.shape = self._probe()

    def pack(self, module: nn.Module) -> nn.Module:
        own, weights = self._module.state_dict(), _unwrapped(module).state_dict()
        _check_names(own, weights)
        if missing := list(own.keys() - weights.keys()):
            raise ValueError(f"the module lacks {missing[:3]}")
        packed = _frozen(self._module)
        packed.load_state_dict(weights)
        return packed

    def load(self, packed: object) -> None:
        assert isinstance(packed, nn.Module)
        self._module = packed

    def twin(self) -> ModuleDecoder:
        return copy.copy(self)

    def step(self, ids: Tensor, positions: Tensor, places: Tensor, panels: Sequence[Panel], rows: KVRows) -> Tensor:
        rows.mask.view(-1).index_fill_(0, places, 0.0)
        count, width = len(ids), max(panel.width for panel in panels)
        mask = rows.mask.view(rows.rows, self.shape.heads, 1, rows.width)[:count, :1, :, :width]
        cache = _RowsCache(rows, slice(0, count), places, width)
        return self._forward(ids[:, None], positions[:, None], mask, cache)[:, -1].float()

    def fill(self, segments: Sequence[Segment], rows: KVRows) -> None:
        longest, device = max(len(segment.tokens) for segment in segments), self.shape.device
        # What is beyond the end of a segment goes to the spare row.
        owner = np.full((len(segments), longest), rows.rows - 1)
        ids, at = np.zeros((2, len(segments), longest), np.int64)
        for index, segment in enumerate(segments):
            length = len(segment.tokens)
            owner[index, :length] = segment.row
            ids[index, :length] = segment.tokens
            at[index] = np.minimum(np.arange(longest) + segment.start, rows.width - 1)
        width = max(segment.start + len(segment.tokens) for segment in segments)
        mask = torch.zeros(len(segments), 1, longest, width, dtype=self.shape.dtype, device=device)
        seen = torch.from_numpy(at).to(device)
        mask.masked_fill_(torch.arange(width, device=device) > seen[:, None, :, None], -torch.inf)
        places = rows.places(owner.reshape(-1), at.reshape(-1))
        cache = _RowsCache(rows, torch.tensor([segment.row for segment in segments], device=device), places, width)
        self._forward(torch.from_numpy(ids).to(device), seen, mask, cache)

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


class _RowsCache:
    """What transformers takes for a cache: it writes to `places` of our rows and reads the rows `which`."""

    is_compileable = False

    def __init__(self, rows: KVRows, which: slice | Tensor, places: Tensor, width: int) -> None:
        self.rows = rows
        self.which = which
        self.places = places
        self.width = width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for new, flat in zip((key_states, value_states), self.rows.flat[layer_idx], strict=True):
            flat[:, : new.shape[-1]].index_copy_(0, self.places, new.transpose(1, 2).flatten(0, 2))
        keys = self.rows.keys[layer_idx, :, :, : self.width]
        values = self.rows.values[layer_idx, :, :, : self.width]
        if isinstance(self.which, slice):
            return keys[self.which], values[self.which]
        return keys.index_select(0, self.which), values.index_select(0, self.which)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.width


# -- reading modules -------------------------------------------------------------------------------------------------


def _frozen(module: nn.Module) -> nn.Module:
    """A copy that is not trained."""
    return copy.deepcopy(_unwrapped(module)).eval().requires_grad_(False)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The transformers model inside of peft's; its layers keep their adapters."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    return inner if isinstance(inner, nn.Module) else module


def _found(module: object, path: str) -> Any:
    """What is at a dotted path."""
    found: Any = module
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name, None)
        if found is None:
            raise Unlike(f"no {path}")
    return found


def _matrix(module: nn.Module, path: str, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a linear or embedding layer, LoRA merged."""
    layer = _found(module, path)
    base = getattr(layer, "base_layer", layer)
    if not isinstance(base, nn.Linear | nn.Embedding) or tuple(base.weight.shape) != size:
        raise Unlike(f"{path} of another kind or size")
    weight = base.weight.detach()
    if base is not layer and not layer.merged and not layer.disable_adapters:
        if isinstance(base, nn.Embedding) or any(getattr(layer, "use_dora", {}).values()):
            raise Unlike(f"an adapter of {path} that is not a product of two matrices")
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    bias = getattr(base, "bias", None)
    return weight, None if bias is None else bias.detach()


def _norm_weight(module: nn.Module, path: str, size: int) -> Tensor:
    weight: Tensor = _found(module, f"{path}.weight").detach()
    if tuple(weight.shape) != (size,) or getattr(_found(module, path), "bias", None) is not None:
        raise Unlike(f"{path} of another kind or size")
    return weight


def _own(tensor: Tensor, shape: KVShape) -> Tensor:
    return tensor.detach().to(shape.device, shape.dtype, copy=True)


def _window(config: Any) -> int:
    """The sliding window, 0 when there is none."""
    return int(getattr(config, "sliding_window", None) or 0) if getattr(config, "use_sliding_window", True) else 0
