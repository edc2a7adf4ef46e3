"""What a run is told of the supervised phase that it begins with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cadenza.config import Config
from cadenza.training import SupervisedConfig


class ColdStartConfig(Config):
    """A supervised phase before reinforcement learning."""

    source: Literal["format", "demonstrations"] = "format"
    """Random well-formed answers (`actions` of the env): only the format is learned. Or the env's own `solution`."""
    episodes: int = Field(default=64, gt=0)
    passes: int = Field(default=1, gt=0)
    """Times that the examples are gone through."""
    first_seed: int = Field(default=2_000_000_000, ge=0)
    """Episodes come from seeds of their own."""
    trainer: SupervisedConfig = SupervisedConfig()

    @model_validator(mode="after")
    def _trains_as_the_actor(self) -> ColdStartConfig:
        if self.trainer.strategy != type(self.trainer).model_fields["strategy"].default:
            raise ValueError("trainer.strategy does nothing: a cold start trains with actor.strategy: remove it")
        return self
