"""The datasets in a config, of whatever pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from cadenza.datasets import DataConfig


@dataclass(frozen=True, slots=True)
class DataSource:
    """A dataset that a config names."""

    path: str
    """Of its key in the config, as 'domains.math.data'."""
    config: DataConfig
    weight: float | None
    """Of the domain that it belongs to."""

    @property
    def key(self) -> str:
        """What `open_dataset` is given: 'math' for domains.math.data, 'validation.math' for that of the validation. So
        the rows of a procedural source in validation are not those of training."""
        return ".".join(name for name in self.path.split(".") if name not in ("domains", "data")) or "data"

    @property
    def group(self) -> str:
        """What it is mixed with: 'domains' or 'validation.domains', for a domain."""
        return self.path.rsplit(".", 2)[0] if self.path.endswith(".data") else self.path


def find_data(config: BaseModel) -> list[DataSource]:
    """Every dataset in a config, in the order of its keys."""
    return list(_walk(config, "", None))


def _walk(value: Any, path: str, owner: Any) -> Iterator[DataSource]:
    if isinstance(value, DataConfig):
        yield DataSource(path, value, getattr(owner, "weight", None))
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
