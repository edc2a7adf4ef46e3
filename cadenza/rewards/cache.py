"""Values of rewards that were computed before."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from cadenza.rewards.sample import Sample, Scored


class RewardCache:
    """The newest `size` values, by what a reward may read: prompt, response, messages, row, finish reason, length. Not
    by the trajectory: a reward that reads it must not be cached."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[bytes, Scored] = OrderedDict()

    def get(self, key: bytes) -> Scored | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: bytes, value: Scored) -> None:
        self._values[key] = value
        if len(self._values) > self._size:
            self._values.popitem(last=False)


def cache_key(sample: Sample) -> bytes:
    """A digest of what a reward may read."""
    tokens = None if sample.response_tokens is None else len(sample.response_tokens)
    read = (sample.prompt, sample.response, sample.finish, tokens, sample.messages, dict(sample.row))
    text = json.dumps(read, sort_keys=True, default=_pickled)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _pickled(value: Any) -> str:
    return pickle.dumps(value).hex()
