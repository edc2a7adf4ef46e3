"""Tasks of reasoning-gym, made on demand: a row is a function of the name, the seed and its number.

Rows are made in blocks, each a small dataset of the library with a seed of its own, because some of its generators
prepare `size` tasks at once. The row has `question` (our `prompt`), `answer` and `metadata`. Score exact answers: the
library's own score gives credit for near misses, which a policy learns to collect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from threading import Lock
from typing import Any

import numpy as np

from cadenza.config import nearest_key
from cadenza.datasets.config import DataConfig
from cadenza.datasets.curriculum import Curriculum
from cadenza.datasets.dataset import ENDLESS
from cadenza.datasets.errors import DataError
from cadenza.datasets.order import keyed_seed

_BLOCK = 256
_KEPT = 8
"""Blocks in memory: attempts in flight come from a few of them."""
_REFUSALS = (AssertionError, TypeError, ValueError)
"""What the library raises for settings that it does not take."""
_globals = Lock()
"""Held while a generator may use the global random numbers."""


class ProceduralRows:
    """The rows of one generator. With a curriculum the level of a row is that of its position."""

    checked_rows = 1

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._library = _library()
        self._name = _known_name(self._library, str(config.procedural))
        self._args = {key: value for key, value in config.args.items() if key != "seed"}
        self._seed = seed
        self._size = config.size or ENDLESS
        self._blocks: dict[tuple[int, int | None], Any] = {}
        self.curriculum: Curriculum | None = None
        self._check_args()
        if config.curriculum is not None:
            self.curriculum = Curriculum(config.curriculum, self._levels(config.curriculum.level))

    @property
    def words(self) -> str:
        """The arguments and the curriculum too: other ones make other rows."""
        size = "endless" if self._size == ENDLESS else f"{self._size} rows"
        args = "".join(f", {key} {value}" for key, value in sorted(self._args.items()))
        levels = "" if self.curriculum is None else f", curriculum from level {self.curriculum.first_level}"
        return f"reasoning_gym:{self._name} ({size} from seed {self._seed}{args}{levels})"

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        level = None if self.curriculum is None else self.curriculum.level_at(number)
        block, place = divmod(number, _BLOCK)
        with _own_random(keyed_seed(self._name, self._seed, number)):
            made = dict(self._block(block, level)[place])
        row = {**made, "prompt": made.get("question")}
        return row if level is None else {**row, "level": level}

    def place(self, number: int) -> str:
        return f"reasoning_gym:{self._name} row {number}"

    def close(self) -> None:
        self._blocks.clear()

    def _block(self, block: int, level: int | None) -> Any:
        known = self._blocks.get((block, level))
        if known is None:
            known = self._make(level, keyed_seed(self._name, self._seed, block, bits=31))
            self._blocks = {**dict(list(self._blocks.items())[1 - _KEPT :]), (block, level): known}
        return known

    def _make(self, level: int | None, seed: int) -> Any:
        settings = {**self._args, "seed": seed, "size": _BLOCK}
        if level is not None:
            settings = {**self._settings(level), **settings}
        return self._library.create_dataset(self._name, **settings)

    def _settings(self, level: int) -> dict[str, Any]:
        """What the curriculum of the library sets at a level; raises for a level that the generator refuses."""
        curriculum = self._library.factory.create_curriculum(self._name)
        curriculum.set_global_level(level)
        made = curriculum.generate_configuration(self._args)
        if hasattr(made, "validate"):
            made.validate()
        return {field.name: getattr(made, field.name) for field in fields(made)}

    def _levels(self, first: int) -> range:
        """The levels around the first one that the generator takes: some curricula of the library go too far."""
        if not self._library.factory.has_curriculum(self._name):
            raise DataError(f"reasoning_gym:{self._name} has no curriculum: leave it out, and set args")
        attributes = self._library.factory.create_curriculum(self._name).attributes.values()
        names = {
            name
            for attribute in attributes
            for key in ("field_name", "lower_field_name", "upper_field_name")
            if (name := getattr(attribute, key, None))
        }
        if fixed := sorted(names & self._args.keys()):
            raise DataError(f"args: the curriculum of {self._name} sets {', '.join(fixed)} itself: leave it out")
        taken = [level for level in range(max(len(a.levels) for a in attributes)) if self._takes(level)]
        if first not in taken:
            raise DataError(f"curriculum.level {first} is none of reasoning_gym:{self._name}; it has {taken}")
        low = high = first
        while low - 1 in taken:
            low -= 1
        while high + 1 in taken:
            high += 1
        return range(low, high + 1)

    def _takes(self, level: int) -> bool:
        try:
            self._settings(level)
        except _REFUSALS:
            return False
        return True

    def _check_args(self) -> None:
        known = [field.name for field in fields(self._library.factory.DATASETS[self._name][1])]
        for key in self._args:
            if key not in known or key == "size":
                near = nearest_key(key, known)
                hint = f"did you mean '{near}'?" if near else f"it has {', '.join(known)}"
                raise DataError(f"args: reasoning_gym:{self._name} has no '{key}'; {hint}")
        try:
            with _own_random(self._seed):
                self._block(0, None)
        except _REFUSALS as error:
            raise DataError(f"args: reasoning_gym:{self._name} refuses {self._args}: {error}") from error


def open_procedural(config: DataConfig, key: str, seed: int) -> ProceduralRows:
    """The generator that a config names. Without `args.seed`, another key or seed is another set of rows: validation
    under a key of its own sees rows that were not trained."""
    given = config.args.get("seed")
    if given is not None and not isinstance(given, int):
        raise DataError(f"args.seed must be a number, got {given!r}")
    return ProceduralRows(config, keyed_seed("rows", seed, key, bits=31) if given is None else given)


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("procedural tasks need reasoning-gym: pip install 'cadenza[reasoning-gym]'") from error
    return reasoning_gym


def _known_name(library: Any, name: str) -> str:
    known = sorted(library.factory.DATASETS)
    if name in known:
        return name
    near = nearest_key(name, known)
    hint = f"did you mean '{near}'?" if near else f"it has {', '.join(known)}"
    raise DataError(f"reasoning_gym has no task '{name}'; {hint}")


@contextmanager
def _own_random(seed: int) -> Iterator[None]:
    """Some generators draw from the global random numbers, and one seeds them: they get those of the row."""
    with _globals:
        outside = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(outside[0])
            np.random.set_state(outside[1])
