"""What the sampler asks of an inference engine, and nothing more.

Invariant: the replica owns the state of what is in flight. A request whose epoch is older than the replica's
fence is refused (`StaleEpoch`), so nothing slips between the sampler's gate and the engine; a client that dies
leaks nothing, because `abort`, `pause` and `kill` need no help from it.

    client --generate(request)--> replica --future--> Generation (stop | length | abort, with partial tokens)
    sampler --pause/resume/load_weights/sleep/wake/stats--> replica
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cadenza.config import Config
from cadenza.inference.meter import StepCosts

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """Interrupted: the tokens so far are valid and the turn can be continued from them."""


class PauseMode(StrEnum):
    """What a pause does with the requests that run."""

    ABORT = "abort"
    """Return every request with its partial tokens."""
    DRAIN = "drain"
    """Let every request finish first."""
    KEEP = "keep"
    """Freeze them in place; `resume` continues them, with whatever weights are loaded by then."""


class Span(NamedTuple):
    """`length` consecutive tokens written by policy `version`."""

    version: int
    length: int


class Sampling(Config):
    """How tokens are drawn."""

    max_tokens: int = Field(default=1024, gt=0)
    """Longest response of one turn."""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means no limit."""
    stop: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end token."""


S = TypeVar("S", "Sampling", "SamplingChanges")


class SamplingChanges(Config):
    """Keys of `Sampling` that are to differ; None leaves one as it is."""

    max_tokens: int | None = Field(default=None, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: tuple[int, ...] | None = None

    def applied_to(self, sampling: S) -> S:
        """With these keys changed, of a sampling or of other changes."""
        return sampling.model_copy(update=self.model_dump(exclude_none=True))


@dataclass(slots=True)
class Request:
    """One call of the model: continue `chunks` by at most `max_tokens`."""

    id: int
    """Unique among the requests of a sampler."""
    chunks: tuple[Tokens, ...]
    """The context as consecutive pieces; never copied on the way to the engine."""
    context: int
    """Tokens in `chunks`, together."""
    max_tokens: int
    sampling: Sampling
    seed: int
    """Key of (run seed, task, member, attempt, turn). Token i is drawn with key (seed, offset + i). Turns are
    a constant apart: an engine hashes the key, or its turns are correlated."""
    offset: int
    """Tokens of this turn that are already at the end of `chunks`, from before an interruption."""
    session: int
    """The trajectory: its turns share a growing prefix."""
    group: int
    """The group: its members share the first prompt."""
    epoch: int
    """Gate epoch of the grant."""


@dataclass(slots=True)
class Generation:
    """What a replica wrote for one request."""

    tokens: Tokens
    """[R]"""
    logprobs: Logprobs
    """[R], under the distribution each token was drawn from."""
    spans: tuple[Span, ...]
    """Versions in order; the lengths add up to R."""
    finish: Finish


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """What a replica says about itself."""

    version: int
    running: int
    waiting: int
    progress: int
    """Grows whenever any request moves on; a replica with work whose progress stands still hangs."""
    paused: bool
    kv_tokens: int
    kv_capacity: int
    generated: int
    """Tokens written since the start."""
    prefilled: int
    """Prompt tokens computed since the start, cached ones not counted."""
    discarded: dict[str, int] = field(default_factory=dict)
    """Tokens that were written and never reached a caller, by cause."""
    costs: StepCosts | None = None
    """What its steps take, if it measures them and there were enough."""


class RequestProgress(NamedTuple):
    """How far a request in flight has come."""

    id: int
    context: int
    """Tokens of context now, those written included."""
    written: int
    """Tokens of its turn so far, those from before an interruption included."""
    computed: int
    """Tokens of context in the KV cache; 0 while it waits."""
    fresh: int
    """Those of `written` that were written since the request came here."""


class ReplicaError(Exception):
    """The replica could not serve this request; another may."""


class ReplicaLost(ReplicaError):
    """The replica is gone, with everything in flight on it."""


class RequestRefused(ReplicaError):
    """The request itself cannot be served, here or anywhere: it is too long, say. Not the replica's fault."""


class ContextTooLong(RequestRefused):
    """The context leaves no room for a token in what the model or the server takes."""


class NotSupported(ReplicaError):
    """This engine cannot do this, on this platform or with this server; asking again does not help."""


class StaleEpoch(ReplicaError):
    """The grant is older than the replica's fence; ask the router again."""


class Replica(Protocol):
    """An inference engine on its own devices."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[int, ...]: ...

    @property
    def kv_capacity(self) -> int:
        """Tokens of context that fit at once."""
        ...

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        """Start a request. A future and not a coroutine: a hundred thousand in flight cost one object each.

        Fails with one of the errors above, through the future.
        """
        ...

    def abort(self, request_id: int, cause: str) -> None:
        """End a request: its future resolves with the partial tokens (`Finish.ABORT`). When no caller waits for the
        future any more, the tokens count as discarded for `cause`. Unknown ids are ignored."""
        ...

    def requests_in_flight(self) -> Sequence[RequestProgress]:
        """Every request in flight, as far as it is known here and now. An engine that cannot tell gives none, and
        keeps the requests it has."""
        ...

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        """Raise the fence to `epoch` and return when no token is being generated."""
        ...

    async def resume(self) -> None:
        """Generate again."""
        ...

    async def load_weights(self, version: int, weights: object) -> None:
        """Use these weights from the next step on. What was cached under older weights may be used on only where the
        engine says so (`keep_kv`)."""
        ...

    async def sleep(self) -> None:
        """Give the devices' memory back. Called when paused and empty."""
        ...

    async def wake(self) -> None:
        """Take the memory again, and take requests; the weights may have to be loaded."""
        ...

    async def stats(self) -> ReplicaStats: ...

    def kill(self, cause: str) -> None:
        """Make sure that it is dead: every call in flight fails with `ReplicaLost`."""
        ...
