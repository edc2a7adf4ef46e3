"""What a run is told of the supervised phase that it begins with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cadenza.config import Config, Seed
from cadenza.datasets import DataConfig
from cadenza.training import SupervisedConfig
from cadenza.training.settings import refuse_unused


class ColdStartConfig(Config):
    """A supervised phase before reinforcement learning: on rows, as those of the pipeline 'sft', or on episodes that
    are played without a model."""

    data: DataConfig | None = None
    """Rows with `prompt` and `response`, or with `messages`."""
    source: Literal["format", "demonstrations"] | None = None
    """Without `data`: random well-formed answers (`actions` of the env), from which only the format is learned, or the
    env's own `solution`. 'format' unless given."""
    episodes: int = Field(default=64, gt=0)
    """Of a `source`."""
    first_seed: Seed = 2_000_000_000
    """Episodes come from seeds of their own."""
    passes: int = Field(default=1, gt=0)
    """Times that the examples are gone through, each time in another order."""
    trainer: SupervisedConfig = SupervisedConfig()

    @model_validator(mode="after")
    def _one_source(self) -> ColdStartConfig:
        if self.data is None:
            return self
        refuse_unused(self, ("source", "episodes", "first_seed"), "with data, whose rows are the examples")
        if self.data.epochs is not None:
            raise ValueError(f"data.epochs {self.data.epochs} does nothing in a cold start: set passes")
        if self.data.procedural is not None and self.data.size is None and self.data.limit is None:
            raise ValueError(f"data: {self.data.path} never ends: give it a size")
        return self

    @model_validator(mode="after")
    def _trains_as_the_actor(self) -> ColdStartConfig:
        if self.trainer.strategy != type(self.trainer).model_fields["strategy"].default:
            raise ValueError("trainer.strategy does nothing: a cold start trains with actor.strategy: remove it")
        return self
