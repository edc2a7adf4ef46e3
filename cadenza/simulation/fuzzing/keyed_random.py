"""Random numbers that depend on a key and nothing else: independent of the order in which they are drawn."""

from __future__ import annotations

import math

MASK64 = (1 << 64) - 1


def hash64(*values: int) -> int:
    """Return 64 random bits that depend on nothing but the values."""
    x = 0
    for value in values:
        x = ((x ^ value) + 0x9E3779B97F4A7C15) & MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        x ^= x >> 31
    return x


def exponential(mean: float, *key: int) -> float:
    """Return an exponentially distributed number, cut at five times its mean."""
    return min(-math.log(1.0 - (hash64(*key) >> 12) / (1 << 52)) * mean, 5 * mean)


def latency(seconds: float, grid: float, *key: int) -> float:
    """Return a random time with this mean: exponential, and rounded to the grid if there is one."""
    if not seconds:
        return 0.0
    drawn = exponential(seconds, *key)
    return round(drawn / grid) * grid if grid else drawn
