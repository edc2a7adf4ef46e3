"""The datasets in a config, of whatever pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from cadenza.datasets import DataConfig
from cadenza.rewards.config import RowCheck
from cadenza.rollout.config import DomainConfig


@dataclass(frozen=True, slots=True)
class DataSource:
    """A dataset that a config names."""

    path: str
    """Of its key in the config, as 'domains.math.data'."""
    config: DataConfig
    weight: float | None
    """Of the domain that it belongs to."""
    answered: bool = False
    """Whether a reward of that domain compares with the field `answer` of each row."""
    check_row: RowCheck | None = None
    """Says why the rewards of that domain cannot score a row."""

    @property
    def key(self) -> str:
        """What a run gives to `open_dataset`: 'train/math' for the rows of the domain math, 'val/math' for those that
        measure it, and the path of other datasets. It chooses the order, and the rows of a procedural source."""
        found = re.fullmatch(r"(.*\.)?domains\.([^.]+)\.(data|validation)", self.path)
        if found is None:
            return self.path
        held_out = found[3] == "validation" or "validation." in (found[1] or "")
        return f"{'val' if held_out else 'train'}/{found[2]}"

    @property
    def group(self) -> str:
        """The same for datasets that are mixed by weight."""
        *above, _, last = ["", *self.path.split(".")]
        return ".".join([*above, "*", last])


def find_data(config: BaseModel) -> list[DataSource]:
    """Every dataset in a config, in the order of its keys."""
    return list(_walk(config, "", None))


def _walk(value: Any, path: str, owner: Any) -> Iterator[DataSource]:
    if isinstance(value, DataConfig):
        source = DataSource(path, value, getattr(owner, "weight", None))
        if isinstance(owner, DomainConfig):
            source = replace(source, answered=owner.needs_answers, check_row=owner.row_check())
        if (passes := getattr(owner, "passes", None)) is not None:  # of a cold start, whatever its `epochs` say
            source = replace(source, config=value.model_copy(update={"epochs": passes}))
        yield _as_validated(source) if path.endswith(".validation") else source
        return
    if isinstance(value, BaseModel):
        below: Mapping[Any, Any] = {name: getattr(value, name) for name in type(value).model_fields}
    elif isinstance(value, Mapping):
        below = value
    elif isinstance(value, (list, tuple)):
        below = dict(enumerate(value))
    else:
        return
    for name, item in below.items():
        yield from _walk(item, f"{path}.{name}" if path else str(name), value)


def _as_validated(source: DataSource) -> DataSource:
    """Rows under `validation` of a domain are all taken once, in their order, whatever the weight of the domain."""
    return replace(source, config=source.config.model_copy(update={"epochs": 1, "shuffle": False}), weight=None)
