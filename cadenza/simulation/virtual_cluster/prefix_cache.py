"""The contexts that a simulated replica still has and nobody uses."""

from __future__ import annotations

from collections import OrderedDict


class PrefixCache:
    """Contexts that nobody uses now, least recently used first. They are evicted when the KV cache is full."""

    __slots__ = ("_lengths", "tokens")

    def __init__(self) -> None:
        self._lengths: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0

    def put(self, key: int, length: int) -> None:
        if length > 0:
            self.tokens += length - self._lengths.pop(key, 0)
            self._lengths[key] = length

    def take(self, key: int) -> int:
        length = self._lengths.pop(key, 0)
        self.tokens -= length
        return length

    def shrink(self, tokens: int) -> None:
        """Keep at most `tokens`."""
        while self.tokens > tokens and self._lengths:
            self.tokens -= self._lengths.popitem(last=False)[1]

    def clear(self) -> None:
        self._lengths.clear()
        self.tokens = 0

    def check(self) -> None:
        assert self.tokens == sum(self._lengths.values())
        assert all(length > 0 for length in self._lengths.values())
