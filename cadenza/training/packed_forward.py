"""The forward pass of Llama-type models over slots: what the module's own forward gives, computed once per slot.

The parameters are the module's; nothing is copied, so gradients arrive where the optimizer looks. Against the module's
forward it saves three things: padding and shared prefixes (packing.py), the queries, output projection and MLP of the
last layer wherever nothing is predicted, and the bookkeeping around every layer, which costs tiny models most.
`PackedForward.of` gives None for a module that it does not know; the caller then uses the module itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cadenza.training.attention_blocks import AttentionLayout, attention_layout
from cadenza.training.packing import PackedRows

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Models with this block: RMS norms before attention and gated MLP, rotary positions by halves, full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The modules of one decoder layer."""

    input_norm: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    output: nn.Module
    mlp_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    activation: nn.Module
    head_dim: int
    scaling: float


@dataclass(frozen=True, slots=True)
class PackedForward:
    """The forward pass of a decoder over packed rows, from the modules of its layers."""

    embedding: nn.Module
    rotary: nn.Module
    layers: tuple[DecoderLayer, ...]
    norm: nn.Module
    decoder: nn.Module

    @classmethod
    def of(cls, decoder: nn.Module) -> PackedForward | None:
        """For the decoder of a transformers model (without its head), if it is of a known kind."""
        config: Any = getattr(decoder, "config", None)
        if getattr(config, "model_type", None) not in MODEL_TYPES or config.attention_dropout > 0:
            return None
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            return None
        if config.model_type == "mistral" and config.sliding_window is not None:
            return None
        found: Any = decoder
        layers = tuple(_layer(layer) for layer in found.layers)
        return cls(found.embed_tokens, found.rotary_emb, layers, found.norm, decoder)

    def hidden(self, packed: PackedRows) -> Tensor:
        """[P, D]: the last hidden states at `packed.reads`."""
        x: Tensor = self.embedding(packed.tokens)
        angles = self.rotary(x, packed.positions[None])
        # Both halves of a head rotate by the same angles.
        cos, sin = (angle[0, :, None, : angle.shape[-1] // 2] for angle in angles)
        recompute = torch.is_grad_enabled() and bool(getattr(self.decoder, "gradient_checkpointing", False))

        def apply(layer: DecoderLayer, x: Tensor, layout: AttentionLayout, reads: Tensor | None) -> Tensor:
            if not recompute:
                return _apply(layer, x, cos, sin, layout, reads)
            again: Tensor = checkpoint(_apply, layer, x, cos, sin, layout, reads, use_reentrant=False)
            return again

        *layers, last = self.layers
        if layers:
            everywhere = attention_layout(packed)
            for layer in layers:
                x = apply(layer, x, everywhere, None)
        x = apply(last, x, attention_layout(packed, packed.reads), torch.from_numpy(packed.reads).to(x.device))
        return _rms_norm(self.norm, x)


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        input_norm=layer.input_layernorm,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        activation=mlp.act_fn,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
    )


def _apply(
    layer: DecoderLayer, x: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, reads: Tensor | None
) -> Tensor:
    """x [U, D] after one layer; only at `reads` if they are given."""
    h = _rms_norm(layer.input_norm, x)
    k = _heads(layer.k(h), layer.head_dim, layer.k_norm, cos, sin)
    v = layer.v(h).view(k.shape)
    if reads is not None:
        x, h, cos, sin = (t.index_select(0, reads) for t in (x, h, cos, sin))
    q = _heads(layer.q(h), layer.head_dim, layer.q_norm, cos, sin)
    x = x + layer.output(_attention(layout, q, k, v, layer.scaling))
    h = _rms_norm(layer.mlp_norm, x)
    return torch.add(x, layer.down(layer.activation(layer.gate(h)) * layer.up(h)))


def _attention(layout: AttentionLayout, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """[Q, H * d] from queries [Q, H, d] and keys and values [U, G, d]."""
    if layout.queries is not None:
        q = q.index_select(0, layout.queries)
    if layout.keys is not None:
        k, v = k.index_select(0, layout.keys), v.index_select(0, layout.keys)
    results = []
    query = key = 0
    for block in layout.blocks:
        queries, keys = block.rows * block.queries, block.rows * block.keys
        result = F.scaled_dot_product_attention(
            q[query : query + queries].view(block.rows, block.queries, *q.shape[1:]).transpose(1, 2),
            k[key : key + keys].view(block.rows, block.keys, *k.shape[1:]).transpose(1, 2),
            v[key : key + keys].view(block.rows, block.keys, *v.shape[1:]).transpose(1, 2),
            attn_mask=None if block.mask is None else block.mask.to(q.dtype),
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        results.append(result.transpose(1, 2).reshape(queries, -1))
        query, key = query + queries, key + keys
    flat = results[0] if len(results) == 1 else torch.cat(results)
    return flat if layout.results is None else flat.index_select(0, layout.results)


def _heads(flat: Tensor, head_dim: int, norm: nn.Module | None, cos: Tensor, sin: Tensor) -> Tensor:
    """[U, H, d]: the heads, rotated to their positions."""
    heads = flat.view(len(flat), -1, head_dim)
    if norm is not None:
        heads = _rms_norm(norm, heads)
    rotated: Tensor = Rotary.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    normed: Tensor = RMSNorm.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside. Torch's own is half as fast on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = wide * scale
        ctx.save_for_backward(unit, weight, scale)
        ctx.dtype = x.dtype
        return torch.mul(unit.to(x.dtype), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        unit, weight, scale = ctx.saved_tensors
        grad = grads[0]
        by_weight = by_x = None
        if ctx.needs_input_grad[1]:
            by_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            by_unit = (grad * weight).to(unit.dtype)
            along = (by_unit * unit).mean(-1, keepdim=True)
            by_x = by_unit.addcmul_(unit, along, value=-1).mul_(scale).to(ctx.dtype)
        return by_x, by_weight, None


class Rotary(torch.autograd.Function):
    """The two halves of each head, rotated by an angle per position. Backwards it rotates back, so nothing is kept."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    rotated = torch.empty(heads.shape, dtype=torch.promote_types(heads.dtype, cos.dtype), device=heads.device)
    torch.mul(left, cos, out=rotated[..., :half]).addcmul_(right, sin, value=-direction)
    torch.mul(right, cos, out=rotated[..., half:]).addcmul_(left, sin, value=direction)
    return rotated.to(heads.dtype)
