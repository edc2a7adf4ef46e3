"""The contexts that a simulated replica keeps after the requests that computed them have left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from cadenza.inference.replica import Request


class PrefixCache:
    """Idle contexts, least recently used first; the engine evicts them when the KV cache is full.

    A context is kept under its session. The prompt that the members of a group share is kept under the group, and is
    idle only while no member runs: a running member holds it for the others.
    """

    __slots__ = ("_lengths", "_running_members", "tokens")

    def __init__(self) -> None:
        self._lengths: OrderedDict[int, int] = OrderedDict()  # contexts under 2 * session, prompts under 2 * group + 1
        self._running_members: dict[int, int] = {}  # by group
        self.tokens = 0

    def reuse(self, request: Request, context: int) -> int:
        """Take what is cached of the context of a request that begins to run; returns its tokens.

        The last token of a context is always computed, because the next token is sampled from it.
        """
        cached = self._take(2 * request.session)
        if prompt := _prompt(request):
            members = self._running_members.get(request.group, 0)
            self._running_members[request.group] = members + 1
            shared = prompt if members else self._take(2 * request.group + 1)
            cached = max(cached, min(shared, prompt))
        return min(cached, max(0, context - 1))

    def release(self, request: Request, computed: int) -> None:
        """Keep the `computed` tokens of a request that stops running.

        The last member that runs leaves the prompt of its group to the cache.
        """
        if prompt := _prompt(request):
            members = self._running_members.pop(request.group) - 1
            if members:
                self._running_members[request.group] = members
            else:
                self._put(2 * request.group + 1, min(prompt, computed))
        self._put(2 * request.session, computed)

    def shrink(self, tokens: int) -> None:
        """Keep at most `tokens`."""
        while self.tokens > tokens and self._lengths:
            self.tokens -= self._lengths.popitem(last=False)[1]

    def clear(self) -> None:
        """Drop every idle context."""
        self._lengths.clear()
        self.tokens = 0

    def check(self, running: Iterable[Request]) -> None:
        """Assert that the sums match, and that the members counted are those of the `running` requests."""
        assert self.tokens == sum(self._lengths.values())
        assert all(length > 0 for length in self._lengths.values())
        assert sum(self._running_members.values()) == sum(1 for request in running if _prompt(request))

    def _put(self, key: int, length: int) -> None:
        if length > 0:
            self.tokens += length - self._lengths.pop(key, 0)
            self._lengths[key] = length

    def _take(self, key: int) -> int:
        length = self._lengths.pop(key, 0)
        self.tokens -= length
        return length


def _prompt(request: Request) -> int:
    """Tokens of the prompt that the request shares with its group."""
    return len(request.chunks[0]) if request.chunks else 0
