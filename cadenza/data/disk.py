"""Columns in a directory: `tensors.safetensors` for numbers, `data.json` for everything else.

Nothing is pickled, so a directory from a stranger runs no code, and any language can read it. A directory
appears whole or not at all: it is written beside its final path under another name, then renamed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cadenza.data.columns import StoredColumn
from cadenza.data.ragged import Array, Ragged

_FORMAT = 1


class SavedColumns(NamedTuple):
    """What a directory holds."""

    tensors: Mapping[str, StoredColumn]
    objects: Mapping[str, Any]
    meta_info: Mapping[str, Any]


def write(path: Path, stored: SavedColumns) -> None:
    """Refuses, before it writes anything, a path that is taken and values that JSON would change or lose."""
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it or choose another directory")
    _check_json("meta_info", stored.meta_info)
    for name, values in stored.objects.items():
        for row, value in enumerate(values):
            _check_json(f"column {name!r}, row {row}", value)
    safetensors = _safetensors()
    tensors: dict[str, Array] = {}
    for name, column in stored.tensors.items():
        tensors |= {
            f"{component}/{name}": np.ascontiguousarray(array) for component, array in _arrays_of(column).items()
        }
    document = {
        "format": _FORMAT,
        "tensors": {name: "ragged" if isinstance(c, Ragged) else "dense" for name, c in stored.tensors.items()},
        "objects": {name: list(values) for name, values in stored.objects.items()},
        "meta_info": stored.meta_info,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        complete = Path(scratch, path.name)
        complete.mkdir()
        safetensors.save_file(tensors, complete / "tensors.safetensors")
        (complete / "data.json").write_text(json.dumps(document), encoding="utf-8")
        complete.rename(path)


def read(path: Path) -> SavedColumns:
    document = json.loads((path / "data.json").read_text(encoding="utf-8"))
    if document["format"] != _FORMAT:
        raise ValueError(f"{path} has format {document['format']}, this version of cadenza reads {_FORMAT}")
    arrays: dict[str, Array] = _safetensors().load_file(path / "tensors.safetensors")
    tensors: dict[str, StoredColumn] = {}
    for name, kind in document["tensors"].items():
        if kind == "ragged":
            values, offsets, pad = (arrays[f"{component}/{name}"] for component in ("values", "offsets", "pad"))
            tensors[name] = Ragged(values, offsets, pad=pad[0])
        else:
            tensors[name] = arrays[f"dense/{name}"]
    return SavedColumns(tensors, document["objects"], document["meta_info"])


def _arrays_of(column: StoredColumn) -> dict[str, Array]:
    if isinstance(column, Ragged):
        # The pad is stored as a tensor because JSON has no NaN.
        return {"values": column.values, "offsets": column.offsets, "pad": np.array([column.pad])}
    return {"dense": column}


def _check_json(where: str, value: object) -> None:
    """Only what reads back equal: a tuple would come back as a list, an int key as a string."""
    if value is None or isinstance(value, str | int | float):
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_json(f"{where}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: JSON keys are strings, got the {type(key).__name__} {key!r}")
            _check_json(f"{where}[{key!r}]", item)
    else:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{where}: a {kind} cannot be saved as JSON: convert or drop it first")


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("saving to disk needs safetensors: pip install 'cadenza[torch]'") from error
    return safetensors.numpy
