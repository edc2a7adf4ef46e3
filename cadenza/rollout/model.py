"""What a rollout talks to.

Every call is recorded token-exactly as a turn: what the engine produced is what is trained. An interruption (a
suspension, a move, a replica that leaves or dies) is not seen by the rollout: the turn goes on from the tokens it has.

    chat() -> render to tokens -> generate(): grant -> replica -> Generation
                                      ^                    | abort: keep the tokens, ask again
                                      +--------------------+ replica lost: ask again
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from cadenza.errors import InfrastructureError, is_cancelled_from_outside
from cadenza.inference.replica import (
    ContextTooLong,
    Finish,
    Generation,
    ReplicaError,
    ReplicaLost,
    Request,
    RequestRefused,
    Sampling,
    Span,
    StaleEpoch,
    Tokens,
)
from cadenza.observe.events import Event, EventSink
from cadenza.rollout.branches import Branch
from cadenza.rollout.leases import LeaseDeadlines
from cadenza.rollout.ledger import Attempt
from cadenza.rollout.records import Trajectory, Turn
from cadenza.rollout.router import ReplicaEntry, RouteRequest
from cadenza.rollout.sampler import GrantRequest, GrantSource, RequestOutcome

Observation = str | Sequence[dict[str, str]] | Tokens
"""Text, chat messages, or tokens as they are."""

MAX_REROUTES = 16
"""Replicas that may fail one turn, one after the other, before its attempt is given up."""
GOLDEN, MASK64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Weyl steps keep the seeds of turns apart."""
RETURNED = "the rollout has returned: await every call of the model before it does"


class Codec(Protocol):
    """Between text and tokens."""

    def encode(
        self, observation: str | Sequence[dict[str, str]], *, first: bool, last: int | None = None
    ) -> Sequence[int] | Tokens:
        """Tokens to append to the context before the model speaks; `first` when the context is empty. `last` is the
        last token of the context: an answer that was cut off has not ended itself."""
        ...

    def encode_text(self, text: str) -> Sequence[int] | Tokens:
        """The tokens of a text as it is."""
        ...

    def decode(self, tokens: Tokens) -> str: ...


def prompt_tokens(codec: Codec) -> Callable[[Any], int]:
    """The function that counts the tokens of chat messages as the first prompt of a conversation."""
    return lambda messages: len(codec.encode(messages, first=True))


class TokenCounter(Protocol):
    """Where tokens are booked: the ledger, or what stands for it in another process."""

    @property
    def events(self) -> EventSink | None: ...

    def add_tokens(self, attempt: Attempt, count: int) -> None: ...


class ContextFull(Exception):
    """No token more fits into the context, or no turn is left: the episode ends here, truncated."""


class Reply:
    """What the model said."""

    __slots__ = ("_codec", "turn")

    def __init__(self, turn: Turn, codec: Codec) -> None:
        self.turn = turn
        self._codec = codec

    @property
    def text(self) -> str:
        return self._codec.decode(self.turn.response)

    @property
    def tokens(self) -> Tokens:
        return self.turn.response

    @property
    def finish(self) -> Finish:
        return self.turn.finish


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """What all attempts of a domain share, as `shared` in this package: services and limits. The context of a model
    call is another thing: the tokens before its answer."""

    sampler: GrantSource
    codec: Codec
    sampling: Sampling
    max_context: int
    max_turns: int
    leases: LeaseDeadlines
    token_counter: TokenCounter
    namespace: int
    """Where this scheduler's range of session and group ids begins."""
    is_training: bool
    """Whether the turns are trained, at the temperature that is configured."""
    slice_tokens: int
    """Tokens after which a long answer may be interrupted for turns that wait; 0 where no answer is so long."""


class Model:
    """The model, as the rollout of one attempt sees it: a conversation that is recorded token by token.

        reply = await model.chat("What is 2 + 2?")     # turn 0: the prompt is encoded, the answer generated
        reply.text                                     # "4"; reply.tokens are the ids that the engine drew
        reply = await model.chat("And one more?")      # turn 1: the context goes on from the tokens of turn 0
        reply = await model.chat("New topic", fresh=True)  # turn 2 begins an empty context, a row of its own
        other = model.branch()                         # goes on from the same tokens, as a row of its own
        a, b = await asyncio.gather(model.chat("Shorter?"), other.chat("Longer?"))

    One call at a time for each branch. A suspension, a move or the death of a replica only makes a call take longer: it
    goes on from the tokens it has. `ContextFull` ends the episode as truncated.
    """

    __slots__ = (
        "_attempt", "_branch", "_busy", "_cached", "_chunks", "_entry", "_interrupted", "_length", "_shared", "_waiter",
        "trajectory",
    )  # fmt: skip

    def __init__(self, attempt: Attempt, trajectory: Trajectory, shared: RolloutContext) -> None:
        self._branch: Branch | None = None
        """None while the attempt has one conversation only."""
        self.trajectory = trajectory
        self._attempt = attempt
        self._shared = shared
        self._chunks: tuple[Tokens, ...] = ()
        """The context: prompts and answers in turn."""
        self._length = 0
        """Tokens of the context."""
        self._entry: ReplicaEntry | None = None
        self._cached = 0
        self._interrupted: int | None = None
        """Id of the request that came back before its turn was over."""
        self._busy = False
        self._waiter: asyncio.Future[None] | None = None
        """Resolves when the call that is under way is over."""

    @property
    def free_tokens(self) -> int:
        """Tokens that still fit into the context."""
        return self._shared.max_context - self._length

    def branch(self) -> Model:
        """Another conversation that goes on from the tokens of this one. Its turns are a row of their own, in which
        what was said before is prompt and trains nothing. Branches may be asked side by side."""
        self._check_turn()
        if self._branch is None:
            self._branch = Branch.first(self)
        model = Model(self._attempt, self.trajectory, self._shared)
        model._chunks, model._length = self._chunks, self._length
        model._branch = self._branch.add(model)
        return model

    def encode(self, text: str) -> Tokens:
        """The tokens of a text as it is, without a role or an end: for `generate`, to write on in the same answer."""
        return np.asarray(self._shared.codec.encode_text(text), np.int32)

    def chat(
        self, observation: Observation, *, fresh: bool = False, sampling: Mapping[str, Any] | None = None
    ) -> Awaitable[Reply]:
        """Say something to the model and await its answer. `fresh` forgets the conversation before; `sampling` changes
        keys of the configured sampling for this call, as {"max_tokens": 64}; in training not those that change the
        distribution."""
        if not isinstance(observation, np.ndarray):
            first = fresh or not self._chunks
            last = None if first else int(self._chunks[-1][-1])
            observation = np.asarray(self._shared.codec.encode(observation, first=first, last=last), np.int32)
        return self.generate(observation, fresh=fresh, sampling=sampling)

    async def generate(
        self, tokens: Sequence[int] | Tokens, *, fresh: bool = False, sampling: Mapping[str, Any] | None = None
    ) -> Reply:
        """`chat` in tokens: append them to the context, and await the model's answer."""
        attempt = self._attempt
        call_sampling = self._shared.sampling if sampling is None else self._changed_sampling(sampling)
        fresh = fresh or not self._chunks
        self._check_turn()
        if len(self.trajectory.turns) >= self._shared.max_turns:
            raise ContextFull(f"the episode had its max_turns {self._shared.max_turns}")
        if fresh:
            self._cached = 0
        chunks, length = ((), 0) if fresh else (self._chunks, self._length)
        prompt = np.ascontiguousarray(tokens, dtype=np.int32)
        if fresh and not len(prompt):
            raise ValueError("the first prompt of a context must hold at least one token, got none")
        chunks, length = ((*chunks, prompt), length + len(prompt)) if len(prompt) else (chunks, length)
        max_tokens = min(self._shared.max_context - length, call_sampling.max_tokens)
        if max_tokens <= 0:
            raise ContextFull(f"{length} tokens leave no room in max_context {self._shared.max_context}")
        asked = asyncio.get_running_loop().time()
        self._shared.leases.ask(attempt)  # from here to the answer the sampler keeps the deadlines
        self._busy = True
        try:
            generation = await self._generate_once(chunks, length, max_tokens, call_sampling, 0)
            if generation.finish is Finish.ABORT:
                generation = await self._continue(chunks, length, max_tokens, call_sampling, generation)
        finally:
            self._busy = False
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            if self._branch is None or not self.is_busy:
                self._shared.leases.renew(attempt)
        if attempt.fate is not None:
            raise RuntimeError(RETURNED)
        self._chunks = (*chunks, generation.tokens) if len(generation.tokens) else chunks
        self._length = length + len(generation.tokens)
        self._shared.sampler.observe_answer_length(len(generation.tokens))
        turn = Turn(
            prompt, generation.tokens, generation.logprobs, generation.spans, generation.finish,
            fresh, asked, asyncio.get_running_loop().time(),
        )  # fmt: skip
        if self._branch is None:
            attempt.last_turn = len(self.trajectory.turns)
            self.trajectory.turns.append(turn)
        else:
            attempt.last_turn = self._branch.record(turn, self.trajectory.turns, chunks)
        attempt.turns += 1
        return Reply(turn, self._shared.codec)

    def _changed_sampling(self, changes: Mapping[str, Any]) -> Sampling:
        """The sampling of one call. What is trained is drawn from the distribution that the actor computes."""
        configured = self._shared.sampling
        changed = _changed(configured, changes)
        for key in ("temperature", "top_p", "top_k") if self._shared.is_training else ():
            if (asked := getattr(changed, key)) != (trained := getattr(configured, key)):
                way_out = (
                    "set it for all calls in the config"
                    if key == "temperature"
                    else f"limit only what is measured with validation.sampling.{key}"
                )
                raise ValueError(
                    f"sampling['{key}'] of this call is {asked}, and the configured one {trained}, at which the turns "
                    f"are trained: leave {key} out, or {way_out}"
                )
        return changed

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, of this branch or of another one."""
        return self._busy if self._branch is None else any(model._busy for model in self._branch.models)

    async def end_calls(self) -> None:
        """The rollout has returned: refuse new calls, and wait for those that are under way. Their turns count, for
        their tokens are booked."""
        loop = asyncio.get_running_loop()
        self.trajectory.ended = loop.time()
        for model in (self,) if self._branch is None else self._branch.models:
            if model._busy:
                self._shared.leases.ask(self._attempt)
                model._waiter = loop.create_future()
                await model._waiter

    def end_session(self) -> None:
        """The rollout is over: whatever is cached of it may go."""
        for model in (self,) if self._branch is None else self._branch.models:
            if model._entry is not None:
                self._shared.sampler.end_session(model._entry, model._session)

    @property
    def _session(self) -> int:
        """What caches know the conversation by."""
        session, namespace = self._attempt.id, self._shared.namespace
        if namespace:  # else no new number, as in `_route_request`
            session += namespace
        return session if self._branch is None else session + self._branch.session_offset

    def _check_turn(self) -> None:
        """A conversation has one turn at a time, and none when it is over."""
        if self.trajectory.ended >= 0:
            raise RuntimeError(RETURNED)
        if self._busy:
            raise RuntimeError(
                "a call of the model is under way: await it before the next, a context has one order; `model.branch()` "
                "is a conversation beside it"
            )

    async def _continue(
        self, chunks: tuple[Tokens, ...], length: int, max_tokens: int, sampling: Sampling, generation: Generation
    ) -> Generation:
        """Go on from the tokens of an interrupted answer, over as many interruptions as come."""
        while generation.finish is Finish.ABORT:
            written = len(generation.tokens)
            if written >= max_tokens:
                return Generation(generation.tokens, generation.logprobs, generation.spans, Finish.LENGTH)
            so_far = (*chunks, generation.tokens) if written else chunks
            rest = await self._generate_once(so_far, length + written, max_tokens - written, sampling, written)
            generation = _concatenate(generation, rest)
        return generation

    async def _generate_once(
        self, chunks: tuple[Tokens, ...], length: int, max_tokens: int, sampling: Sampling, written: int
    ) -> Generation:
        """One answer of one replica: whole, or the beginning of it. What one replica fails the next one gets."""
        # A hundred thousand of these may wait at once: every local of it is kept so often.
        attempt, shared, seed = self._attempt, self._shared, self._turn_seed()
        route_request = self._route_request(length, written)
        for _ in range(MAX_REROUTES):
            if attempt.fate is not None:
                raise InfrastructureError("the attempt is over")
            grant = await shared.sampler.grant(
                GrantRequest(route_request, self._entry, self._cached, self._interrupted)
            )
            self._interrupted = None
            entry = grant.entry
            request = Request(  # by position: this is the hot path
                grant.request_id, chunks, length, max_tokens, sampling, seed, written,
                route_request.session, route_request.group, grant.epoch,
            )  # fmt: skip
            self._emit("ask", entry.replica.name)
            pending: asyncio.Future[Generation] | None = None
            outcome, replica_error, cached = RequestOutcome.UNSENT, None, 0
            try:
                pending = entry.replica.generate(request)
                generation = await pending
                if len(generation.logprobs) != len(generation.tokens) or sum(s.length for s in generation.spans) != len(
                    generation.tokens
                ):
                    raise ReplicaError("'generate' gave tokens, logprobs and spans of different lengths")
                outcome, self._cached = RequestOutcome.SERVED, length + len(generation.tokens)
                cached = self._cached if attempt.fate is None else 0
            except asyncio.CancelledError as error:
                if is_cancelled_from_outside(error):
                    self._give_up(entry, request, pending)
                    raise
                self._emit("answer", "error")
                outcome, replica_error = RequestOutcome.FAILED, ReplicaError("'generate' was cancelled")
                continue
            except Exception as error:  # an engine may raise whatever it likes; it is not the rollout's fault
                outcome, replica_error = self._outcome_of(error)
                if isinstance(error, ContextTooLong):
                    raise ContextFull(str(error)) from error
                if isinstance(error, RequestRefused):
                    raise
                continue
            finally:
                shared.sampler.release(grant, outcome, replica_error, cached)
            self._emit("answer", generation.finish.value, len(generation.tokens))
            self._entry = entry
            self._interrupted = request.id if generation.finish is Finish.ABORT else None
            shared.token_counter.add_tokens(attempt, len(generation.tokens))
            return generation
        raise InfrastructureError(f"{MAX_REROUTES} replicas failed this turn, one after the other")

    def _turn_seed(self) -> int:
        """Of this turn, the same whichever replica serves it."""
        branch = self._branch
        turns, key = (self._attempt.turns, 0) if branch is None else (branch.turns, branch.seed_key)
        return (self.trajectory.seed + GOLDEN * (turns + 1) + key) & MASK64

    def _route_request(self, length: int, written: int) -> RouteRequest:
        attempt, namespace, size = self._attempt, self._shared.namespace, self._shared.slice_tokens
        group = attempt.group.id
        if namespace:  # else no new number, of which a hundred thousand turns would each keep one
            group += namespace
        return RouteRequest(self._session, group, length, attempt.group.id, written // size if size else 0, size)

    def _give_up(self, entry: ReplicaEntry, request: Request, pending: asyncio.Future[Generation] | None) -> None:
        """The attempt was cancelled: end its request. An answer that came at the same moment is booked."""
        if pending is not None and pending.done() and not pending.cancelled() and pending.exception() is None:
            self._shared.token_counter.add_tokens(self._attempt, len(pending.result().tokens))
        else:
            entry.replica.abort(request.id, self._attempt.cause or "cancelled")

    def _outcome_of(self, error: Exception) -> tuple[RequestOutcome, ReplicaError | None]:
        """What the failure of a request says of its replica. A refusal says nothing."""
        if isinstance(error, (RequestRefused, StaleEpoch)):
            self._emit("answer", "refused")
            return RequestOutcome.REFUSED, None
        self._emit("answer", "error")
        if isinstance(error, ReplicaLost):
            return RequestOutcome.LOST, error
        if not isinstance(error, ReplicaError):
            error = ReplicaError(f"'generate' raised {type(error).__name__}: {error}")
        return RequestOutcome.FAILED, error

    def _emit(self, kind: str, detail: str, tokens: int | None = None) -> None:
        if (events := self._shared.token_counter.events) is not None:
            detail = detail if tokens is None else f"{detail} {tokens}"
            events(Event(asyncio.get_running_loop().time(), kind, self._attempt.key, detail))


@cache
def _with(sampling: Sampling, changes: frozenset[tuple[str, Any]]) -> Sampling:
    return Sampling.model_validate({**sampling.model_dump(), **dict(changes)})


def _changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """The sampling with some keys changed."""
    return _with(sampling, frozenset((key, tuple(v) if isinstance(v, list) else v) for key, v in changes.items()))


def _concatenate(first: Generation, then: Generation) -> Generation:
    """Two consecutive generations of one turn."""
    spans = list(first.spans)
    for span in then.spans:
        if spans and spans[-1].version == span.version:
            spans[-1] = Span(span.version, spans[-1].length + span.length)
        else:
            spans.append(span)
    tokens = np.concatenate((first.tokens, then.tokens))
    logprobs = np.concatenate((first.logprobs, then.logprobs))
    return Generation(tokens, logprobs, tuple(spans), then.finish)
