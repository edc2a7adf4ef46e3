"""Distillation: its config, its worker and its roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from cadenza.config import Config
from cadenza.run.example_config import ExampleConfig
from cadenza.run.example_roles import ExampleRoles, ExampleWorker
from cadenza.run.role_names import ACTOR
from cadenza.run.tokenizer import check_vocabulary
from cadenza.run.workers import ModelSpec
from cadenza.training import ModelConfig, ModelNotFound, load_model
from cadenza.training.distiller import DistillConfig, Distiller
from cadenza.training.strategy import ParallelStrategy


class TeacherConfig(Config):
    """The model to learn from. A path alone is short for `{path: ...}`."""

    path: str
    """A directory written by `save_pretrained`, or a name on the hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, values: Any) -> Any:
        return {"path": values} if isinstance(values, str) else values

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(path=self.path, dtype=self.dtype)


class DistillRunConfig(ExampleConfig):
    """A run that learns what a teacher says of the rows. Every rank of the actor holds the teacher too."""

    teacher: TeacherConfig
    actor: DistillConfig = DistillConfig()


class DistillWorker(ExampleWorker):
    """The student, and the teacher in the same process."""

    learner: Distiller
    _config: DistillConfig

    def __init__(
        self, model_spec: ModelSpec, config: DistillConfig, teacher: TeacherConfig, failures: Path | None
    ) -> None:
        super().__init__(model_spec, config, failures)
        self._teacher = teacher

    def make(self, strategy: ParallelStrategy) -> Distiller:
        spec = self._model_spec
        student = spec.build()
        try:
            teacher = load_model(self._teacher.model, spec.vocab_size, spec.seed)
        except ModelNotFound as error:
            raise ModelNotFound(f"teacher: {error}") from error
        return Distiller(student, teacher, self._config, spec.seed, failures=self._failures, strategy=strategy)


class DistillRoles(ExampleRoles):
    """The student, with its teacher."""

    config: DistillRunConfig

    def __init__(self, config: DistillRunConfig, *, failures: Path | None = None) -> None:
        super().__init__(config, failures=failures)
        check_vocabulary("teacher.path", config.teacher.path, self.codec)

    async def start(self) -> None:
        config = self.config
        self.actor = await self.start_trainers(
            ACTOR, DistillWorker, config=config.actor, teacher=config.teacher, failures=self.failures
        )
