"""The order of the rows: a permutation for each epoch, from the seed, the key and the number of the epoch alone."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_KEPT = 2
"""Permutations in memory: around the end of an epoch, tasks of two of them are asked for."""


def keyed_seed(*words: object, bits: int = 32) -> int:
    """A number that depends on the words alone, on every machine."""
    digest = blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


class EpochOrder:
    """Which of `rows` stands at a position. Positions go on through the epochs: epoch e has [e * rows, (e + 1) * rows).

    `RandomState` makes the permutations: numpy keeps its numbers the same in all versions, so a resumed run meets
    the same order.
    """

    def __init__(self, rows: int, *, seed: int, key: str, shuffle: bool) -> None:
        self._rows, self._seed, self._key, self._shuffle = rows, seed, key, shuffle
        self._permutations: dict[int, NDArray[np.int32]] = {}

    def at(self, position: int) -> tuple[int, int]:
        """(row, epoch) at a position."""
        epoch, place = divmod(position, self._rows)
        return (int(self._permutation(epoch)[place]) if self._shuffle else place), epoch

    def _permutation(self, epoch: int) -> NDArray[np.int32]:
        known = self._permutations.get(epoch)
        if known is None:
            known = np.arange(self._rows, dtype=np.int32)
            np.random.RandomState(keyed_seed("order", self._seed, self._key, epoch)).shuffle(known)
            self._permutations = {**dict(list(self._permutations.items())[1 - _KEPT :]), epoch: known}
        return known
