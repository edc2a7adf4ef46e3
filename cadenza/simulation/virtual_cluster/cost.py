"""The cost model of generation, and its constants for some GPUs and models."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
