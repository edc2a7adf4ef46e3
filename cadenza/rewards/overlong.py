"""`overlong`: a soft penalty for responses near the length limit, as DAPO shapes it."""

from __future__ import annotations

from pydantic import Field, model_validator

from cadenza.errors import RewardError
from cadenza.rewards.base import ConfiguredReward
from cadenza.rewards.sample import Sample


class Overlong(ConfiguredReward):
    """0 up to `max_tokens - buffer` tokens, from there linearly down to `-penalty` at `max_tokens`, and no further.

    Add it to another reward: `rewards: {right: math, length: {name: overlong, max_tokens: 1024, buffer: 256}}`.
    """

    max_tokens: int = Field(gt=0)
    """The length limit of a response."""
    buffer: int = Field(gt=0)
    """The last tokens before it, in which the penalty grows."""
    penalty: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _buffer_fits(self) -> Overlong:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer must be at most max_tokens {self.max_tokens}, got {self.buffer}")
        return self

    def __call__(self, sample: Sample) -> float:
        if sample.response_tokens is None:
            raise RewardError(f"overlong of domain '{sample.domain}' counts response_tokens, and the sample has none")
        into_buffer = len(sample.response_tokens) - (self.max_tokens - self.buffer)
        return 0.0 - self.penalty * min(max(into_buffer / self.buffer, 0.0), 1.0)
