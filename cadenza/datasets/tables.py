"""CSV, Parquet, directories and names on the hub: Hugging Face `datasets`, which maps Arrow files.

`datasets` writes its Arrow files into its cache (HF_HOME) the first time that it sees a source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cadenza.datasets.config import DataConfig, Split
from cadenza.datasets.curriculum import Curriculum
from cadenza.datasets.errors import DataError

_SAMPLED = 64
"""Rows that go into the digest of a source that is no file."""
_PIECE = 1 << 20


class Table:
    """A `datasets.Dataset` as a source."""

    checked_rows = 1_000
    curriculum: Curriculum | None = None

    def __init__(self, name: str, table: Any, words: str) -> None:
        self._name, self._table = name, table
        self.words = words

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table[number]
        return row

    def place(self, number: int) -> str:
        return f"{self._name} row {number + 1}"

    def close(self) -> None:
        """Arrow unmaps its files when the last row is gone."""


def open_tables(kind: str, paths: Sequence[Path], config: DataConfig) -> Table:
    """The rows of files of one kind. What stands in a CSV file is text, also where it looks like a number."""
    library = _library()
    options: dict[str, Any] = {}
    if kind == "csv":
        options = {"keep_default_na": False, "na_values": [""], "sep": "\t" if ".tsv" in paths[0].suffixes else ","}
        options["features"] = library.Features(dict.fromkeys(_columns(paths, options["sep"]), library.Value("string")))
    name = ", ".join(map(str, paths))
    files = [str(path.absolute()) for path in paths]
    table = _load(name, lambda: library.load_dataset(kind, data_files=files, split="train", **options))
    digest = blake2b(digest_size=8)
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    size = sum(path.stat().st_size for path in paths)
    return Table(name, table, f"{name} ({len(table)} rows, {size} bytes, digest {digest.hexdigest()})")


def open_hub(path: str, config: DataConfig) -> Table:
    """A directory, or a dataset of the hub."""
    library = _library()
    directory = Path(path)
    saved = any((directory / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if saved and config.subset is not None:
        raise DataError(f"{path} was written by save_to_disk and has no subsets: leave out subset '{config.subset}'")

    def load() -> Any:
        return library.load_from_disk(path) if saved else library.load_dataset(path, name=config.subset)

    found = _load(path, load)
    split = None if config.split is None else Split.parse(config.split).name
    if isinstance(found, library.DatasetDict):
        splits = list(found)
        split = split or (splits[0] if len(splits) == 1 else "train")
        if split not in found:
            raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}: set split")
        table = found[split]
    elif split not in (None, "train"):
        raise DataError(f"{path} has no splits: leave out split '{split}', or take a part of it, as [:90%]")
    else:
        table = found
    name = ":".join(part for part in (path, config.subset, split) if part)
    return Table(name, table, f"{name} ({len(table)} rows, digest {_digest(table)})")


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("CSV, Parquet and the hub need datasets: pip install 'cadenza[data]'") from error
    return datasets


def _columns(paths: Sequence[Path], separator: str) -> list[str]:
    import pandas

    columns: list[str] = list(pandas.read_csv(paths[0], sep=separator, nrows=0).columns)
    return columns


def _load(name: str, load: Callable[[], Any]) -> Any:
    """What `datasets` loads. Its errors are of many kinds, and one that a file is damaged may be any of them."""
    with _without_progress_bars():
        try:
            return load()
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            said = " ".join(f"{type(cause).__name__}: {cause}".split())
            raise DataError(f"{name} cannot be read by datasets. {said}{_advice(name, cause)}") from error


def _advice(name: str, cause: BaseException) -> str:
    """What to do where the hub cannot be reached."""
    if Path(name).exists() or not isinstance(cause, (OSError, ConnectionError)):
        return ""
    return ". Is there a network? Without one, give a directory or files"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from datasets.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _digest(table: Any) -> str:
    """Of rows spread over the table: to read all of them would take as long as training on them."""
    digest = blake2b(digest_size=8)
    step = max(1, len(table) // _SAMPLED)
    for number in range(0, len(table), step):
        digest.update(json.dumps(table[number], default=str, sort_keys=True).encode())
    return digest.hexdigest()
