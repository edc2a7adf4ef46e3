"""What a run on the rows of a dataset is told besides what every run is told."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from cadenza.config import Config
from cadenza.datasets import DataConfig
from cadenza.run.config import RunConfig
from cadenza.training import SupervisedConfig


class HeldOutConfig(Config):
    """What is measured during training, on rows that are not trained."""

    data: DataConfig
    """All its rows are used, in the order of the source."""
    every: int = Field(default=20, gt=0)
    """Steps between two validations. One is made before the first step and one after the last."""

    @field_validator("data")
    @classmethod
    def _ends(cls, data: DataConfig) -> DataConfig:
        if data.procedural is not None and data.size is None and data.limit is None:
            raise ValueError(f"{data.path} never ends: give it a size")
        return data.model_copy(update={"shuffle": False, "epochs": 1})


class ExampleConfig(RunConfig):
    """A run on the rows of a dataset."""

    data: DataConfig
    """What is trained."""
    actor: SupervisedConfig = SupervisedConfig()
    validation: HeldOutConfig | None = None

    @model_validator(mode="after")
    def _target_is_measured(self) -> ExampleConfig:
        if self.target is not None and self.validation is None:
            raise ValueError(f"target {self.target} is a success in validation: add validation, or remove target")
        return self
