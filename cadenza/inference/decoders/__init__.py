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

from torch import nn

from cadenza.inference.decoders.generic import ModuleDecoder
from cadenza.inference.decoders.packed import PackedDecoder
from cadenza.inference.decoders.protocol import Decoder, PrefillSegment
from cadenza.inference.decoders.weights import UnsupportedModel, copy_weights_into

__all__ = ["Decoder", "ModuleDecoder", "PackedDecoder", "PrefillSegment", "copy_weights_into", "decoder_for"]


def decoder_for(module: nn.Module) -> Decoder:
    """The fastest decoder that gives the logits of this module."""
    try:
        return PackedDecoder(module)
    except UnsupportedModel:
        return ModuleDecoder(module)
