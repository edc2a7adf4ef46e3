"""The tokens that a simulated replica writes, and a codec that treats observations as tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cadenza.inference.replica import Logprobs, Tokens

_TABLE_BITS = 20


def seeded_tokens(seed: int, offset: int, count: int, vocab: int) -> tuple[Tokens, Logprobs]:
    """Return the tokens `offset` to `offset + count` of a turn, and their logprobs: read-only views of a table.

    They depend on seed and position only: a turn that continues on another replica has the tokens of one that was never
    interrupted.
    """
    tokens, logprobs = _table(vocab)
    start = ((seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> (64 - _TABLE_BITS)) + offset
    if start + count > len(tokens):
        positions = np.arange(start, start + count) & ((1 << _TABLE_BITS) - 1)
        return tokens[positions], logprobs[positions]
    return tokens[start : start + count], logprobs[start : start + count]


@lru_cache(maxsize=4)
def _table(vocab: int) -> tuple[Tokens, Logprobs]:
    """Return a cycle of hashed tokens, with a tail long enough that nearly every response is one slice."""
    x = np.arange((1 << _TABLE_BITS) + (1 << 16), dtype=np.uint64) & np.uint64((1 << _TABLE_BITS) - 1)
    for shift, factor in ((30, 0x9E3779B97F4A7C15), (27, 0xBF58476D1CE4E5B9), (31, 0x94D049BB133111EB)):
        x = (x + np.uint64(1)) * np.uint64(factor)
        x ^= x >> np.uint64(shift)
    tokens = (x % np.uint64(vocab)).astype(np.int32)
    logprobs = -((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22))
    tokens.setflags(write=False)
    logprobs.setflags(write=False)
    return tokens, logprobs


class LengthCodec:
    """A codec for observations that are tokens already; a response decodes to as many letters as it has tokens."""

    def encode(self, observation: object, *, first: bool, last: int | None = None) -> Tokens:
        raise TypeError(f"simulated envs observe tokens, got {observation!r}")

    def encode_text(self, text: str) -> Tokens:
        raise TypeError(f"simulated rollouts speak in tokens, got {text!r}")

    def decode(self, tokens: Tokens) -> str:
        return "x" * len(tokens)
