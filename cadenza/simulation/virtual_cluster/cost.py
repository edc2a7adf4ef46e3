"""What generation costs on which GPU, and which tokens a simulated replica writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cadenza.inference.replica import Logprobs, Tokens

_TABLE_BITS = 20


@dataclass(frozen=True, slots=True)
class CostModel:
    """A decode step of B sequences with C tokens of context takes `a + b*B + c*C` seconds."""

    a: float
    """Seconds per decode step."""
    b: float
    """Seconds per running sequence and step."""
    c: float
    """Seconds per context token and step."""
    p: float
    """Seconds per token of prefill."""
    kv_capacity: int
    """Tokens of context that fit at once."""
    max_running: int = 256
    """Sequences that decode together."""

    def __post_init__(self) -> None:
        if not self.a > 0 or min(self.b, self.c, self.p) < 0:
            raise ValueError(f"a must be > 0 and b, c, p must be >= 0, got {self}")
        if self.kv_capacity < 2 or self.max_running < 1:
            raise ValueError(f"kv_capacity must be >= 2 and max_running >= 1, got {self}")

    def decode(self, steps: int, running: int, context: int) -> float:
        """Seconds for `steps` steps of `running` sequences that hold `context` tokens before the first."""
        return steps * (self.a + self.b * running + self.c * (context + running * (steps - 1) * 0.5))

    def steps_within(self, seconds: float, running: int, context: int) -> int:
        """Whole steps that fit into `seconds`: the inverse of `decode`, rounded down."""
        growth = self.c * running
        first = self.a + self.b * running + self.c * context - growth / 2
        steps = int(2 * seconds / (first + math.sqrt(first * first + 2 * growth * seconds)))
        while steps and self.decode(steps, running, context) > seconds:
            steps -= 1
        while self.decode(steps + 1, running, context) <= seconds:
            steps += 1
        return steps


H100_QWEN25_7B = CostModel(a=7.22e-3, b=4.4e-6, c=33.3e-9, p=25.7e-6, kv_capacity=920_000)
H100_QWEN3_8B = CostModel(a=7.94e-3, b=4.4e-6, c=85.7e-9, p=27.6e-6, kv_capacity=350_000)
A100_QWEN25_7B = CostModel(a=11.2e-3, b=4.4e-6, c=54.8e-9, p=81e-6, kv_capacity=920_000)


def seeded_tokens(seed: int, offset: int, count: int, vocab: int) -> tuple[Tokens, Logprobs]:
    """Tokens `offset` to `offset + count` of a turn, and their logprobs: read-only views of a table, so they are free.

    They depend on seed and position only: a turn continued elsewhere reads like one that was never interrupted.
    """
    tokens, logprobs = _table(vocab)
    start = ((seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> (64 - _TABLE_BITS)) + offset
    if start + count > len(tokens):
        positions = np.arange(start, start + count) & ((1 << _TABLE_BITS) - 1)
        return tokens[positions], logprobs[positions]
    return tokens[start : start + count], logprobs[start : start + count]


@lru_cache(maxsize=4)
def _table(vocab: int) -> tuple[Tokens, Logprobs]:
    """A cycle of hashed tokens, with a tail long enough that nearly every response is one slice."""
    x = np.arange((1 << _TABLE_BITS) + (1 << 16), dtype=np.uint64) & np.uint64((1 << _TABLE_BITS) - 1)
    for shift, factor in ((30, 0x9E3779B97F4A7C15), (27, 0xBF58476D1CE4E5B9), (31, 0x94D049BB133111EB)):
        x = (x + np.uint64(1)) * np.uint64(factor)
        x ^= x >> np.uint64(shift)
    tokens = (x % np.uint64(vocab)).astype(np.int32)
    logprobs = -((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22))
    tokens.setflags(write=False)
    logprobs.setflags(write=False)
    return tokens, logprobs
