"""From a config to a dataset: which kind of source a path means, and the checks before a run."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cadenza.datasets.config import DataConfig, Split
from cadenza.datasets.dataset import ENDLESS, CountTokens, Dataset, check_rows, part_of
from cadenza.datasets.errors import DataError, RowError
from cadenza.datasets.jsonl import open_jsonl
from cadenza.datasets.order import EpochOrder
from cadenza.datasets.rows import RowCheck, RowReader, require_if_present
from cadenza.datasets.source import Source

_LINES = (".jsonl", ".ndjson")
_TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".json": "json", ".arrow": "arrow"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")


def open_dataset(
    config: DataConfig,
    *,
    key: str,
    seed: int,
    count_tokens: CountTokens | None = None,
    required: Sequence[str] = (),
    answered: bool = False,
    check_row: RowCheck | None = None,
    examine: bool = False,
    as_of: str = "",
) -> Dataset:
    """The rows that a config names, ready to be drawn; raises `DataError` for what can be known to be wrong.

    `key` and `seed` choose the order: datasets of the same rows under other keys have other orders. `required` are
    fields that each row must have, besides those of the config; `answer` is one if the first row has it. With
    `answered` each row must have one that a response can be compared with: text, a number or a list of them;
    `check_row` says what else is wrong with one. With `examine`, all rows are read, and bad ones are counted in
    `refused` instead of raised. `as_of` is the `source` of the dataset that a run began with: of a file of JSON lines
    that has grown since, the rows of then are read.
    """
    source = _open_source(config, key, seed, as_of)
    try:
        reader = RowReader(config, required, answered=answered, check=check_row)
        return _dataset(config, source, key, seed, count_tokens, reader, examine)
    except BaseException:
        source.close()
        raise


def _dataset(
    config: DataConfig,
    source: Source,
    key: str,
    seed: int,
    count_tokens: CountTokens | None,
    reader: RowReader,
    examine: bool,
) -> Dataset:
    part = part_of(config, len(source))
    if not part:
        which = f" in its part {config.split}" if len(source) else ""
        raise DataError(f"{', '.join(config.paths)} has no rows{which}")
    with suppress(RowError):  # check_rows says it
        require_if_present(reader, source[part[0]], "answer")
    used = check_rows(config, source, reader, part, count_tokens, examine)
    if not len(used) and not examine:
        counts = ", ".join(f"{count} are {reason}" for reason, count in used.refusals.counts.items())
        raise DataError(f"{', '.join(config.paths)}: the filters leave none of {len(part)} rows: {counts}")
    endless = len(source) == ENDLESS and len(used) == ENDLESS
    order = EpochOrder(max(len(used), 1), seed=seed, key=key, shuffle=config.shuffle and not endless)
    how = f"shuffled by seed {seed} and '{key}'" if config.shuffle and not endless else "in order"
    part_words = "" if len(used) == len(source) else f", {len(used)} of them used"
    return Dataset(config, source, reader, used, order, f"{source.words}{part_words}, {how}")


def _open_source(config: DataConfig, key: str, seed: int, as_of: str) -> Source:
    if config.procedural is not None:
        from cadenza.datasets.procedural import open_procedural

        return open_procedural(config, key, seed)
    files = [file for path in config.paths for file in _files(path)]
    kinds = {_kind(file) for file in files}
    if not files or None in kinds:
        from cadenza.datasets.tables import open_hub

        if len(config.paths) > 1:
            raise DataError(f"{', '.join(config.paths)}: several paths must be files of one kind")
        return open_hub(_hub_name_or_directory(config.paths[0]), config)
    if len(kinds) > 1:
        raise DataError(
            f"{', '.join(config.paths)}: several paths must be files of one kind, got {sorted(map(str, kinds))}"
        )
    if config.subset is not None:
        raise DataError(f"subset '{config.subset}' is for a dataset of the hub, not for {', '.join(config.paths)}")
    if config.split is not None and Split.parse(config.split).name not in (None, "train"):
        raise DataError(f"split '{config.split}': a file has no splits; take a part of it, as [:90%]")
    (kind,) = kinds
    if kind == "lines":
        return open_jsonl(files, as_of)
    from cadenza.datasets.tables import open_tables

    return open_tables(str(kind), files, config)


def _files(path: str) -> list[Path]:
    """The files that a path means; none for a directory or a name on the hub."""
    if Path(path).is_file():
        return [Path(path)]
    if glob.has_magic(path):
        if found := sorted(glob.glob(path)):
            return [Path(name) for name in found]
        raise DataError(f"no file matches {path} (in {Path.cwd()})")
    if not Path(path).exists() and _kind(Path(path)) is not None:
        raise DataError(f"there is no file {path} (in {Path.cwd()})")
    return []


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes
    packed = bool(suffixes) and suffixes[-1] in _PACKED
    last = suffixes[-2:-1] if packed else suffixes[-1:]
    if not last or path.is_dir():
        return None
    if last[0] in _LINES:
        return "json" if packed else "lines"
    return _TABLES.get(last[0])


def _hub_name_or_directory(path: str) -> str:
    if Path(path).is_file():
        kinds = ", ".join((*_LINES, *_TABLES))
        raise DataError(f"{path} is of no kind that is known; a file ends with one of {kinds}")
    # 'data/sums' looks like a name on the hub, but not where there is a directory data.
    is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) and ("/" not in path or not Path(path).parent.is_dir())
    if not Path(path).is_dir() and not is_hub_name:
        raise DataError(f"there is no file or directory {path} (in {Path.cwd()})")
    return path
