"""Continuous batching: which sequences the next step computes, and what becomes of the tokens.

Invariant: a sequence is waiting, seated or gone, and everything changes between two steps. The rows 0..n-1 hold the
seated sequences that are ready (keys and values of all their tokens but the last are computed), the rows behind them
those that are still being filled; the last token of a ready sequence is the input of the next step.

    add -> waiting --admit--> seated: filling --> ready --advance--> gone (stop | length | abort)
              ^                  ^                  |
              +---- preempted ---+-- new weights ---+       (recompute; the tokens are kept)

    prepare   admit, copy what is known of a context, fill the rest up to a budget, arrange the rows
    compute   one forward pass of the ready rows, one token drawn for each
    advance   book the tokens; whoever is done leaves, and its context goes to the shelf

A prompt is computed without its last token, for that one is the input of a step like any other. So members of a group
need nothing but a copy of what the first of them computed; they wait until it has.

Not thread-safe: whoever drives it, `TorchReplica` for one, does so from one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cadenza.inference.decoder import Decoder, Segment
from cadenza.inference.kv_cache import Context, Index, KVRows, Panel, Shelf, joined, shared
from cadenza.inference.replica import Finish, Generation, Request, Span, Tokens
from cadenza.inference.sampling import GOLDEN, Law, counters, draw, law_of, uniforms

UNIT = 8
"""Rows whose lengths are kept close together."""
GRAIN = 32
"""Panels are a multiple of it wide, so that the shapes of a step stay the same for a while."""
SPLIT = 1 << 14
"""Cached numbers that a panel of its own must spare per layer to be worth its three operations."""
WORTH_WAITING = 4
"""Tokens of a prompt that make it worth waiting for the member of the group that computes them."""


class Sequence:
    """A request in the engine."""

    __slots__ = (
        "arrival", "computed", "context", "finish", "logprobs", "marked", "request", "row", "spans", "stops", "target",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, stops: frozenset[int], target: int, arrival: int) -> None:
        self.request = request
        self.stops = stops
        self.target = target
        """Tokens to write, at most."""
        self.arrival = arrival
        self.context: Tokens = joined(request.chunks)
        self.tokens: list[int] = []
        """Written so far."""
        self.logprobs: list[float] = []
        self.spans: list[Span] = []
        self.marked = 0
        """Tokens that `spans` covers; the rest is of the present version."""
        self.row = -1
        self.computed = 0
        """Positions of the row that hold the keys and values of this sequence."""
        self.finish: Finish | None = None

    @property
    def length(self) -> int:
        """Tokens that are known."""
        return len(self.context) + len(self.tokens)

    @property
    def ready(self) -> bool:
        return self.computed == self.length - 1

    def known(self) -> Tokens:
        return np.concatenate((self.context, np.array(self.tokens, np.int32))) if self.tokens else self.context

    def last(self) -> int:
        """The input of its next step."""
        return self.tokens[-1] if self.tokens else int(self.context[-1])

    def mark(self, version: int) -> None:
        """All tokens that have no version yet were written by this one."""
        if (new := len(self.tokens) - self.marked) > 0:
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = Span(version, self.spans[-1].length + new)
            else:
                self.spans.append(Span(version, new))
            self.marked = len(self.tokens)

    def answer(self) -> Generation:
        """What was written, after the end."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Generation(tokens, logprobs, tuple(self.spans), self.finish or Finish.ABORT)


Source = Sequence | Context | None
"""Where keys and values can be copied from."""


class NotNumbers(Exception):
    """The model gives logits from which nothing can be drawn."""


class Drawn(NamedTuple):
    """What a step computed; it counts when it is booked."""

    tokens: list[int]
    logprobs: list[float]


class Engine:
    """A model that writes many sequences at once."""

    def __init__(
        self, decoder: Decoder, *, max_running: int, kv_tokens: int, prefill_tokens: int, keep_kv: bool, version: int
    ) -> None:
        self.decoder = decoder
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.prefill_tokens = prefill_tokens
        self.keep_kv = keep_kv
        self.version = version
        self.generated = 0
        self.prefilled = 0
        self.kv = 0
        """Tokens of the seated sequences."""
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.seated: dict[int, Sequence] = {}
        """In the order in which they sat down."""
        self._groups: dict[int, dict[int, Sequence]] = {}
        self._rows = KVRows(decoder.shape)
        self._shelf = Shelf()
        self._plan: _Plan | None = None

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.request.id] = sequence

    def abort(self, request_id: int) -> Sequence | None:
        """Take a sequence out, with the tokens it has."""
        sequence = self.seated.get(request_id) or self.waiting.get(request_id)
        if sequence is not None:
            self._leave(sequence, Finish.ABORT)
        return sequence

    def abort_all(self) -> list[Sequence]:
        """Take everything out."""
        sequences = [*self.seated.values(), *self.waiting.values()]
        for sequence in sequences:
            self._leave(sequence, Finish.ABORT)
        return sequences

    def load(self, version: int, module: nn.Module) -> None:
        """New weights from the next step on. Without `keep_kv`, nothing that the old ones computed is used again."""
        self.decoder.load(module)
        for sequence in (*self.seated.values(), *self.waiting.values()):
            sequence.mark(self.version)
            if not self.keep_kv:
                sequence.computed = 0
        if not self.keep_kv:
            self._shelf.clear()
        self.version = version
        self._plan = None

    def drop_all(self) -> list[Sequence]:
        """Take everything out, and trust nothing that was computed."""
        for sequence in self.seated.values():
            sequence.computed = 0
        self._shelf.clear()
        return self.abort_all()

    def release(self) -> None:
        """Free the memory of the cache; nothing is in flight."""
        assert not self.seated
        self._shelf.clear()
        self._rows.free()
        self._plan = None

    # -- one step --------------------------------------------------------------------------------------------------

    def prepare(self, until: int) -> bool:
        """Seat who waits, if it arrived no later than `until`, and fill; False when there is nothing to compute."""
        self._make_room()
        budget = self.prefill_tokens
        while True:
            seated = self._admit(until)
            segments = self._allot(budget)
            if seated or segments:
                self._plan = None
            if self._plan is None:
                self._arrange()
            for sequence, source, length in seated:
                self._reuse(sequence, source, length)
            budget -= self._fill(segments)
            if not seated or budget <= 0:  # else members may follow whose prompt has just been computed
                break
        if self._plan is None:
            self._plan = self._planned()
        return bool(self._plan.ready)

    def compute(self) -> Drawn:
        """One token for every ready row."""
        plan = self._plan
        assert plan is not None
        if plan.steps_left == 0:
            plan = self._plan = self._extended(plan)
        logits = self.decoder.step(plan.ids, plan.positions, plan.places, plan.panels, self._rows)
        tokens, logprobs = draw(logits, plan.law, uniforms(plan.counters))
        plan.ids = tokens
        plan.positions.add_(1)
        plan.places.add_(1)
        plan.counters += np.uint64(GOLDEN)
        plan.steps_left -= 1
        drawn = Drawn(tokens.tolist(), logprobs.tolist())
        if not math.isfinite(sum(drawn.logprobs)):
            raise NotNumbers(f"version {self.version} gives logits that are not finite")
        return drawn

    def advance(self, drawn: Drawn) -> list[Sequence]:
        """Book a step; the sequences that it ended."""
        plan = self._plan
        assert plan is not None
        done = []
        for sequence, token, logprob in zip(plan.ready, drawn.tokens, drawn.logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.computed += 1
            if token in sequence.stops:
                sequence.finish = Finish.STOP
                done.append(sequence)
            elif len(sequence.tokens) == sequence.target:
                sequence.finish = Finish.LENGTH
                done.append(sequence)
        self.generated += len(plan.ready)
        self.kv += len(plan.ready)
        for sequence in done:
            self._leave(sequence, sequence.finish)
        return done

    def check(self) -> None:
        """Assert what must hold between two steps."""
        assert self.kv == sum(sequence.length for sequence in self.seated.values())
        assert self.kv + self._shelf.tokens <= self.kv_tokens
        assert len(self.seated) <= self.max_running
        assert not self.seated.keys() & self.waiting.keys()
        rows = [sequence.row for sequence in self.seated.values()]
        assert len(set(rows)) == len(rows)
        assert all(sequence.row < 0 and sequence.computed == 0 for sequence in self.waiting.values())
        assert all(0 <= sequence.computed < sequence.length for sequence in self.seated.values())
        members = {id for group in self._groups.values() for id in group}
        assert members == self.seated.keys()
        self._shelf.check()
        if self._plan is not None:
            assert [sequence.row for sequence in self._plan.ready] == list(range(len(self._plan.ready)))
            assert all(sequence.ready for sequence in self._plan.ready)

    # -- who sits --------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """The next step writes a token per sequence: the shelf gives way first, then whoever sat down last."""
        while self.kv + len(self.seated) > self.kv_tokens:
            sequence = self.seated[next(reversed(self.seated))]
            self._stand_up(sequence)
            self.waiting[sequence.request.id] = sequence
            self.waiting.move_to_end(sequence.request.id, last=False)
        self._shelf.shrink(self.kv_tokens - self.kv - len(self.seated))

    def _admit(self, until: int) -> list[tuple[Sequence, Source, int]]:
        """First come, first served, while the context and one more token of everybody fit. With each, where the
        beginning of its context is known from, and how much of it."""
        seated: list[tuple[Sequence, Source, int]] = []
        for sequence in self.waiting.values():
            if len(self.seated) >= self.max_running or sequence.arrival > until:
                break
            if self.kv + sequence.length + len(self.seated) + 1 > self.kv_tokens:
                break
            source, length = self._source(sequence)
            if source is None and length:
                continue  # a member of its group is computing the prompt
            self._sit_down(sequence, length)
            seated.append((sequence, source, length))
        for sequence, _, _ in seated:
            del self.waiting[sequence.request.id]
        if seated:
            self._shelf.shrink(self.kv_tokens - self.kv - len(self.seated))
        return seated

    def _source(self, sequence: Sequence) -> tuple[Source, int]:
        """Where most of a context is known from: the session or the group on the shelf, or a member that is seated.
        No source but a length: a member is about to compute so much of it."""
        request = sequence.request
        known = sequence.known()
        best: Source = None
        length = 0
        for context in self._shelf.candidates(request.session, request.group):
            if (common := min(shared(known, context.tokens), len(known) - 1)) > length:
                best, length = context, common
        if mates := self._groups.get(request.group):
            mate = next(iter(mates.values()))
            common = min(shared(known, mate.context), len(known) - 1)
            if min(common, mate.length - 1) - max(mate.computed, length) >= WORTH_WAITING:
                return None, common
            if min(common, mate.computed) > length:
                best, length = mate, min(common, mate.computed)
        return best, length

    def _sit_down(self, sequence: Sequence, computed: int) -> None:
        request = sequence.request
        self._shelf.take(request.session)
        self.seated[request.id] = sequence
        self._groups.setdefault(request.group, {})[request.id] = sequence
        sequence.computed = computed
        self.kv += sequence.length

    def _stand_up(self, sequence: Sequence) -> None:
        request = sequence.request
        del self.seated[request.id]
        members = self._groups[request.group]
        del members[request.id]
        if not members:
            del self._groups[request.group]
        self.kv -= sequence.length
        sequence.row = -1
        sequence.computed = 0
        self._plan = None

    def _leave(self, sequence: Sequence, finish: Finish | None) -> None:
        """The end of a sequence; what was computed for it stays on the shelf while there is room."""
        request = sequence.request
        sequence.finish = finish
        sequence.mark(self.version)
        if request.id in self.seated:
            row, computed = sequence.row, sequence.computed
            self._stand_up(sequence)
            if computed and self.kv + len(self.seated) + computed <= self.kv_tokens:
                keys, values = self._rows.save(row, computed)
                self._shelf.put(request.session, Context(sequence.known()[:computed], keys, values, request.group))
                self._shelf.shrink(self.kv_tokens - self.kv - len(self.seated))
        else:
            self.waiting.pop(request.id, None)

    # -- rows ------------------------------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Have rows for all, and width for their next steps; True when the rows are new ones."""
        longest = max((sequence.length for sequence in self.seated.values()), default=0)
        return self._rows.reserve(len(self.seated), _wide(longest))

    def _arrange(self) -> None:
        """Give every seated sequence its row: the ready ones first, the longest of them in front, and as few moves as
        that allows. A sequence stays where it is while it is in the right unit of rows."""
        self._reserve()
        seated = self.seated.values()
        ready = sorted((s for s in seated if s.ready), key=lambda s: (-(s.length // GRAIN), s.row))
        moves: list[tuple[Sequence, int]] = []
        for first in range(0, len(ready), UNIT):
            unit = ready[first : first + UNIT]
            moves += _moves(unit, range(first, first + len(unit)))
        moves += _moves([sequence for sequence in seated if not sequence.ready], range(len(ready), len(seated)))
        self._move(moves)

    def _move(self, moves: list[tuple[Sequence, int]]) -> None:
        """Bring sequences to their rows. Who goes to a row that is not vacated yet goes later; a circle is broken by
        way of the spare row."""
        taken = {sequence.row for sequence, _ in moves if sequence.row >= 0}
        while moves:
            blocked = []
            for sequence, row in moves:
                if row in taken:
                    blocked.append((sequence, row))
                else:
                    taken.discard(sequence.row)
                    self._put(sequence, row)
            if len(blocked) == len(moves):
                first, _ = blocked[0]
                taken.discard(first.row)
                self._put(first, self._rows.rows - 1)
            moves = blocked

    def _put(self, sequence: Sequence, row: int) -> None:
        if sequence.row >= 0 and sequence.computed:
            self._rows.copy(sequence.row, row, sequence.computed)
        sequence.row = row

    def _reuse(self, sequence: Sequence, source: Source, length: int) -> None:
        """Copy the known beginning of a context into its row."""
        if isinstance(source, Sequence):
            self._rows.copy(source.row, sequence.row, length)
        elif source is not None:
            self._rows.restore(sequence.row, source.keys, source.values, length)

    def _allot(self, budget: int) -> list[tuple[Sequence, int, int]]:
        """The pieces of prompts to compute now, first come, first served: sequence, start and count."""
        pieces = []
        for sequence in self.seated.values():
            missing = sequence.length - 1 - sequence.computed
            if missing > 0 and budget > 0:
                count = min(missing, budget)
                pieces.append((sequence, sequence.computed, count))
                sequence.computed += count
                budget -= count
        return pieces

    def _fill(self, pieces: list[tuple[Sequence, int, int]]) -> int:
        """Compute these pieces; how many tokens that was."""
        if pieces:
            segments = [Segment(s.row, start, s.known()[start : start + count]) for s, start, count in pieces]
            self.decoder.fill(segments, self._rows)
        tokens = sum(count for _, _, count in pieces)
        self.prefilled += tokens
        return tokens

    # -- the plan of a step ----------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        ready = sorted((s for s in self.seated.values() if s.ready), key=lambda sequence: sequence.row)
        device = self.decoder.shape.device
        positions: Index = np.array([sequence.computed for sequence in ready], np.int64)
        self._rows.show(positions)
        panels, steps = self._panels(ready)
        return _Plan(
            ready=ready,
            ids=torch.tensor([sequence.last() for sequence in ready], device=device),
            positions=torch.from_numpy(positions).to(device),
            places=self._rows.places(np.arange(len(ready)), positions),
            panels=panels,
            steps_left=steps,
            law=law_of([sequence.request.sampling for sequence in ready], self.decoder.vocab, device),
            counters=counters(
                [sequence.request.seed for sequence in ready],
                [sequence.request.offset + len(sequence.tokens) for sequence in ready],
            ),
        )

    def _extended(self, plan: _Plan) -> _Plan:
        """The same plan when its panels have become too narrow."""
        if self._reserve():
            return self._planned()
        plan.panels, plan.steps_left = self._panels(plan.ready)
        return plan

    def _panels(self, ready: list[Sequence]) -> tuple[list[Panel], int]:
        """Cut the rows into panels, and say for how many steps they are wide enough."""
        cells = self.decoder.shape.heads * self.decoder.shape.key_dim
        panels: list[Panel] = []
        steps = GRAIN
        for first in range(0, len(ready), UNIT):
            unit = ready[first : first + UNIT]
            longest = max(sequence.length for sequence in unit)
            width, last = _wide(longest), first + len(unit)
            steps = min(steps, width - longest + 1)
            if panels and len(unit) * (panels[-1].width - width) * cells < SPLIT:
                before = panels.pop()
                first, width = before.first, max(width, before.width)
            panels.append(Panel(first, last, width))
        return panels, steps


@dataclass(slots=True)
class _Plan:
    """What stays the same from one step to the next while nobody comes or goes."""

    ready: list[Sequence]
    """By row."""
    ids: Tensor
    """[n] the last token of each."""
    positions: Tensor
    """[n] where it stands."""
    places: Tensor
    """[n * heads] where its keys and values go."""
    panels: list[Panel]
    steps_left: int
    """Steps for which the panels are wide enough."""
    law: Law
    counters: NDArray[np.uint64]
    """[n] where each stands in its stream of random numbers."""


def _wide(length: int) -> int:
    return -(-length // GRAIN) * GRAIN


def _moves(sequences: list[Sequence], rows: Iterable[int]) -> list[tuple[Sequence, int]]:
    """Who has to move, and where to, so that these sequences sit in these rows."""
    free = dict.fromkeys(rows)
    moving = []
    for sequence in sequences:
        if sequence.row in free:
            del free[sequence.row]
        else:
            moving.append(sequence)
    return list(zip(moving, free, strict=True))
