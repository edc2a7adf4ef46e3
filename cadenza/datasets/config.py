"""Where rows come from, and how a row becomes a prompt."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from pydantic import Field, field_validator, model_validator

from cadenza.config import Config

PROCEDURAL = "reasoning_gym:"
"""What the path of a procedural source begins with."""


class CurriculumConfig(Config):
    """Tasks get harder when they are solved, and easier when they are not. The success of an answer is what its reward
    or its env says; where neither says it, the score, cut to 0..1."""

    level: int = Field(default=0, ge=0)
    """Where it begins; 0 is the easiest."""
    max_level: int | None = Field(default=None, ge=0)
    """Where it ends; None is the hardest that the source has."""
    window: int = Field(default=32, gt=0)
    """Results of the present level that decide; then the next ones are counted from zero."""
    raise_at: float = Field(default=0.8, gt=0, le=1)
    """Mean success from which on the level goes up."""
    lower_at: float = Field(default=0.2, ge=0, lt=1)
    """Mean success below which the level goes down."""

    @model_validator(mode="after")
    def _possible(self) -> CurriculumConfig:
        if self.lower_at >= self.raise_at:
            raise ValueError(f"lower_at must be below raise_at {self.raise_at}, got {self.lower_at}")
        if self.max_level is not None and self.level > self.max_level:
            raise ValueError(f"level must be at most max_level {self.max_level}, got {self.level}")
        return self


class WorkedExample(Config):
    """A question with its answer."""

    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class DataConfig(Config):
    """A source of rows. A path alone is short for `{path: ...}`."""

    path: str | tuple[str, ...]
    """JSONL, CSV or Parquet files (patterns as `data/*.jsonl` too), a directory or a name on the hub for Hugging Face
    `datasets`, or `reasoning_gym:NAME`."""
    subset: str | None = None
    """The configuration of a dataset of the hub that has several."""
    split: str | None = None
    """Of a dataset with several; 'train' unless given. Every source takes a part: `train[:90%]`, `[-200:]`."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Our names for theirs: `prompt`, `answer`, `messages` or any other. `a.b` and `a.0` reach into a value. Each row
    must have them."""
    template: str | None = None
    """Makes the user's prompt of the row's fields, as in 'What is {a} + {b}?'. Braces that stay are doubled."""
    system: str | None = None
    """The first message of each row that has no system message."""
    few_shot: tuple[WorkedExample, ...] = ()
    """Worked examples that the model sees before every prompt, as earlier turns of the chat."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Leave out rows whose rendered prompt is shorter."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Leave out rows whose rendered prompt is longer."""
    unique: bool = False
    """Leave out rows whose prompt an earlier row of the source has, also one before the part that `split` takes: then
    two parts of a source have no prompt in common."""
    limit: int | None = Field(default=None, gt=0)
    """Read the first rows only; the filters come after."""
    shuffle: bool = True
    """Each epoch in an order of its own; otherwise in the order of the source."""
    epochs: int | None = Field(default=None, gt=0)
    """Passes over the rows; None never ends."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Of a procedural source, as `{max_digits: 2}`; a `seed` here gives the same rows in every run."""
    size: int | None = Field(default=None, gt=0)
    """Rows of a procedural source; None makes a new one every time."""
    curriculum: CurriculumConfig | None = None
    """Of a procedural source without `size`."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, values: Any) -> Any:
        if isinstance(values, dict) and "path" not in values:  # an override of one key replaces a short form
            raise ValueError("has no path; where the path stands alone in the file, write it as {path: ...}")
        return {"path": values} if isinstance(values, (str, list, tuple)) else values

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def procedural(self) -> str | None:
        """The name of the procedural source, if it is one."""
        first = self.paths[0]
        return first.removeprefix(PROCEDURAL) if first.startswith(PROCEDURAL) else None

    @property
    def is_endless(self) -> bool:
        """Whether one pass over the rows never ends."""
        return self.procedural is not None and self.size is None and self.limit is None

    @property
    def filters_lengths(self) -> bool:
        return self.min_tokens is not None or self.max_tokens is not None

    def first_rows(self, count: int) -> DataConfig:
        """At most so many of the rows."""
        return self.model_copy(update={"limit": count if self.limit is None else min(count, self.limit)})

    def one_pass(self) -> DataConfig:
        """All rows once, in the order of the source."""
        return self.model_copy(update={"epochs": 1, "shuffle": False})

    @field_validator("path")
    @classmethod
    def _has_a_path(cls, path: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not path or not all((path,) if isinstance(path, str) else path):
            raise ValueError("names no source; give a file, a directory, a name on the hub, or reasoning_gym:NAME")
        return path

    @field_validator("template")
    @classmethod
    def _template_names_fields(cls, template: str | None) -> str | None:
        if template is None:
            return None
        try:
            names = template_fields(template)
        except ValueError as error:
            raise ValueError(f"is no template: {error}; braces that stay are doubled: {{{{ and }}}}") from error
        if not names or "" in names or any(name.isdigit() for name in names):
            raise ValueError("must name the fields that it shows, as in 'What is {a} + {b}?'")
        return template

    @field_validator("split")
    @classmethod
    def _split_is_readable(cls, split: str | None) -> str | None:
        if split is not None:
            Split.parse(split)
        return split

    @model_validator(mode="after")
    def _settings_have_effect(self) -> DataConfig:
        if self.procedural is None:
            for name in ("args", "size", "curriculum"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for procedural sources; the path must be reasoning_gym:NAME")
            return self
        if len(self.paths) > 1:
            raise ValueError("a procedural source stands alone: make a domain of each")
        if self.curriculum is not None and (self.size or self.limit or self.split):
            raise ValueError("a curriculum makes new rows all the time: leave out size, limit and split")
        if (self.filters_lengths or self.unique) and self.is_endless:
            raise ValueError("filters read all rows before a run: give the procedural source a size")
        if self.subset is not None:
            raise ValueError("subset is for datasets of the hub")
        return self


class Split(Config):
    """'train[10%:50%]': a split, and the rows of it."""

    name: str | None
    start: str
    stop: str

    @classmethod
    def parse(cls, text: str) -> Split:
        found = re.fullmatch(r"([\w.-]*)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", text)
        if found is None or not text:
            raise ValueError("is no split; write it as train, train[:90%], [90%:] or [-200:]")
        return cls(name=found[1] or None, start=found[2] or "", stop=found[3] or "")

    def rows(self, count: int) -> range:
        """Which of so many."""

        def place(text: str) -> int | None:
            if not text.endswith("%"):
                return int(text) if text else None
            share = int(text[:-1])
            return count * share // 100 if share >= 0 else count + count * share // 100

        return range(count)[place(self.start) : place(self.stop)]


def template_fields(template: str) -> list[str]:
    """The fields that a template shows."""
    return [re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name is not None]
