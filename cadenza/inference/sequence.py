"""One request in the embedded engine, and the tokens that it has so far."""

from __future__ import annotations

import numpy as np

from cadenza.inference.replica import Finish, Generation, Request, Span, Tokens
from cadenza.inference.sampling import rng_counter


class EngineSequence:
    """A request in the engine, waiting or running, with the tokens it has so far."""

    __slots__ = (
        "arrival", "computed", "context", "finish", "last_token", "length", "logprobs", "max_new_tokens", "request",
        "rng_counter", "row", "spanned_tokens", "spans", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: Request, context: Tokens, stop_ids: frozenset[int], max_new_tokens: int, arrival: int
    ) -> None:
        self.request = request
        self.context = context
        """The chunks of the request in one piece."""
        self.stop_ids = stop_ids
        self.max_new_tokens = max_new_tokens
        """Tokens to write, at most."""
        self.arrival = arrival
        self.tokens: list[int] = []
        """Written so far; those of the current batch are added when it is flushed."""
        self.logprobs: list[float] = []
        self.length = len(self.context)
        """Tokens that are known, those of the context included."""
        self.last_token = int(self.context[-1])
        """The last of them, input of the next step."""
        self.rng_counter = rng_counter(request.seed, request.offset)
        """Where it stands in its stream of random numbers."""
        self.computed = 0
        """Positions of the row that hold the keys and values of this sequence."""
        self.row = -1
        self.spans: list[Span] = []
        self.spanned_tokens = 0
        """Tokens that `spans` covers; the rest is of the present version."""
        self.finish: Finish | None = None

    def all_tokens(self) -> Tokens:
        return np.concatenate((self.context, np.array(self.tokens, np.int32))) if self.tokens else self.context

    def assign_version(self, version: int) -> None:
        """All tokens that have no version yet were written by this one."""
        if (new := len(self.tokens) - self.spanned_tokens) > 0:
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = Span(version, self.spans[-1].length + new)
            else:
                self.spans.append(Span(version, new))
            self.spanned_tokens = len(self.tokens)

    def generation(self) -> Generation:
        """What was written, after the end."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Generation(tokens, logprobs, tuple(self.spans), self.finish or Finish.ABORT)
