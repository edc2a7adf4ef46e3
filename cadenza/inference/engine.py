"""Continuous batching: which sequences the next step computes, and what becomes of the tokens.

Invariant: a sequence is waiting, seated or gone, and everything changes between two steps. The rows 0..n-1 hold the
seated sequences that are ready (keys and values of all their tokens but the last are computed), the rows behind them
those that are still being filled; the last token of a ready sequence is the input of the next step.

    add -> waiting --admit--> seated: filling --> ready --advance--> gone (stop | length | abort)
              ^                  ^                  |
              +---- preempted ---+-- new weights ---+       (recompute; the tokens are kept)

    prepare   admit, copy what is known of a context, fill the rest up to a budget, arrange the rows
    compute   one forward pass of the ready rows, one token drawn for each
    advance   note the tokens; whoever is done leaves, and its context goes to the shelf

A prompt is computed without its last token, for that one is the input of a step like any other. So members of a group
need nothing but a copy of what the first of them computed.

While nobody comes or goes, a step costs nothing per row but arithmetic: what it needs is in a plan that moves on by
itself, and the tokens are noted there by step. They are booked to their sequences when the plan ends.

The cache is bounded by what is allocated: rows are dense, so a long sequence makes those of all others as wide. Rows
and shelf together have at most `kv_tokens` cells. Sequences sit down while that leaves room for them, and when somebody
grows out of it, the last to sit down stand up again; one alone always fits, for none is longer than `kv_tokens`.

Not thread-safe: whoever drives it, `TorchReplica` for one, does so from one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza.inference.decoder import Decoder, Segment
from cadenza.inference.kv_cache import Context, Index, KVRows, Panel, Shelf, shared, with_spare
from cadenza.inference.replica import Finish, Generation, Request, Sampling, Span, Tokens
from cadenza.inference.sampling import GOLDEN, MASK64, Law, draw, law_of, stream, uniforms

UNIT = 8
"""Rows whose lengths are kept close together, when that is worth it."""
GRAIN = 32
"""Panels are a multiple of it wide, so that the shapes of a step stay the same for a while."""
SPLIT = 1 << 15
"""Cached numbers that a panel of its own must spare per layer to be worth its three operations."""
AHEAD = 8
"""Steps whose random numbers are made at once."""
WORTH_WAITING = 4
"""Tokens of a prompt that make it worth waiting for the member of the group that computes them."""


class Sequence:
    """A request in the engine."""

    __slots__ = (
        "arrival", "computed", "context", "counter", "finish", "last", "length", "logprobs", "marked", "request", "row",
        "spans", "stops", "target", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, context: Tokens, stops: frozenset[int], target: int, arrival: int) -> None:
        self.request = request
        self.context = context
        """The chunks of the request in one piece."""
        self.stops = stops
        self.target = target
        """Tokens to write, at most."""
        self.arrival = arrival
        self.tokens: list[int] = []
        """Written and booked so far."""
        self.logprobs: list[float] = []
        self.length = len(self.context)
        """Tokens that are known, those of the context included."""
        self.last = int(self.context[-1])
        """The last of them, input of the next step."""
        self.counter = stream(request.seed, request.offset)
        """Where it stands in its stream of random numbers."""
        self.computed = 0
        """Positions of the row that hold the keys and values of this sequence."""
        self.row = -1
        self.spans: list[Span] = []
        self.marked = 0
        """Tokens that `spans` covers; the rest is of the present version."""
        self.finish: Finish | None = None

    def known(self) -> Tokens:
        return np.concatenate((self.context, np.array(self.tokens, np.int32))) if self.tokens else self.context

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


Source = Sequence | Context
"""Where keys and values can be copied from."""


class NotNumbers(Exception):
    """The model gives logits from which nothing can be drawn."""


class Drawn(NamedTuple):
    """What a step computed; it counts when the engine advances by it."""

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
        self._filling: dict[int, Sequence] = {}
        """Of the seated, those that are not ready."""
        self._groups: dict[int, dict[int, Sequence]] = {}
        """The seated by group."""
        self._rows = KVRows(decoder.shape)
        self._shelf = Shelf()
        self._laws: dict[Sampling, Law] = {}
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

    def drop_all(self) -> list[Sequence]:
        """Take everything out, and trust nothing that was computed."""
        self._forget()
        return self.abort_all()

    def load(self, version: int, packed: object) -> None:
        """Weights as the decoder packs them, from the next step on. Without `keep_kv`, nothing that the old ones
        computed is used again."""
        self.decoder.load(packed)
        self._end_plan()
        for sequence in (*self.seated.values(), *self.waiting.values()):
            sequence.mark(self.version)
        if not self.keep_kv:
            self._forget()
        self.version = version

    def release(self) -> None:
        """Free the memory of the cache; nothing is in flight."""
        assert not self.seated
        self._shelf.clear()
        self._rows.free()

    # -- one step --------------------------------------------------------------------------------------------------

    def prepare(self, until: int) -> bool:
        """Seat who waits, if it arrived no later than `until`, and fill; False when there is nothing to compute."""
        self._make_room()
        budget = self.prefill_tokens
        while (self.waiting or self._filling) and budget > 0:
            work = self._admit(until, budget)
            if not work.moved:
                break
            self._end_plan()
            self._arrange()
            for sequence, source, length in work.known:
                self._copy(sequence, source, length)
            self._fill(work.pieces)
            for (_, length), (mate, *members) in work.follow.items():
                self._rows.spread(mate.row, [sequence.row for sequence in members], length)
            budget -= sum(count for _, _, count in work.pieces)
        if self._plan is None:
            self._arrange()
            self._plan = self._planned()
        return bool(self._plan.ready)

    def compute(self) -> Drawn:
        """One token for every ready row."""
        plan = self._plan
        assert plan is not None
        if plan.panel_steps == 0:
            plan = self._plan = self._extended(plan)
        logits = self.decoder.step(plan.ids, plan.positions, plan.places, plan.panels, self._rows)
        tokens, logprobs = draw(logits, plan.law, plan.uniform())
        plan.ids = tokens
        plan.positions.add_(1)
        plan.places.add_(1)
        plan.panel_steps -= 1
        drawn = Drawn(tokens.tolist(), logprobs.tolist())
        if not math.isfinite(sum(drawn.logprobs)):
            raise NotNumbers(f"version {self.version} gives logits that are not finite")
        return drawn

    def advance(self, drawn: Drawn) -> list[Sequence]:
        """Note a step; the sequences that it ended."""
        plan = self._plan
        assert plan is not None
        plan.tokens.append(drawn.tokens)
        plan.logprobs.append(drawn.logprobs)
        plan.steps_left -= 1
        self.generated += len(drawn.tokens)
        self.kv += len(drawn.tokens)
        if plan.steps_left > 0 and plan.stops.isdisjoint(drawn.tokens):
            return []
        plan.book()
        done = []
        for sequence in plan.ready:
            if sequence.last in sequence.stops:
                done.append((sequence, Finish.STOP))
            elif len(sequence.tokens) == sequence.target:
                done.append((sequence, Finish.LENGTH))
        for sequence, finish in done:
            self._leave(sequence, finish)
        return [sequence for sequence, _ in done]

    def check(self) -> None:
        """Assert what must hold between two steps."""
        if self._plan is not None:
            self._plan.book()
            assert [sequence.row for sequence in self._plan.ready] == list(range(len(self._plan.ready)))
        seated = self.seated.values()
        assert self.kv == sum(sequence.length for sequence in seated)
        assert self._rows.cells + self._shelf.tokens <= self.kv_tokens
        assert len(seated) <= self.max_running
        assert not self.seated.keys() & self.waiting.keys()
        assert len({sequence.row for sequence in seated}) == len(seated)
        assert all(sequence.row < 0 and sequence.computed == 0 for sequence in self.waiting.values())
        assert self._filling.items() <= self.seated.items()
        for sequence in seated:
            ready = sequence.request.id not in self._filling
            assert sequence.length == len(sequence.context) + len(sequence.tokens)
            assert sequence.computed == sequence.length - 1 if ready else sequence.computed < sequence.length - 1
        assert {id for group in self._groups.values() for id in group} == self.seated.keys()
        self._shelf.check()

    # -- who sits --------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Who sat down last stands up while the rows of all are too many cells. A plan has what its steps need."""
        if self._plan is not None:
            if self._plan.panel_steps > 0:
                return
            self._plan.book()
        while len(self.seated) > 1 and self._cells(len(self.seated), self._longest()) > self.kv_tokens:
            self._end_plan()
            sequence = self.seated[next(reversed(self.seated))]
            self._stand_up(sequence)
            self.waiting[sequence.request.id] = sequence
            self.waiting.move_to_end(sequence.request.id, last=False)

    def _longest(self) -> int:
        """Tokens of the longest seated sequence. What a plan has not booked is left out: it is within the width that
        the plan was made with, and its end is no wider."""
        return max((sequence.length for sequence in self.seated.values()), default=0)

    def _cells(self, sequences: int, longest: int) -> int:
        """What these take at least."""
        return with_spare(sequences) * self._wide(longest)

    def _wide(self, length: int) -> int:
        """Positions for a sequence of this length and, most of the time, for some of its next tokens."""
        return min(-(-length // GRAIN) * GRAIN, self.kv_tokens)

    def _admit(self, until: int, budget: int) -> _Work:
        """First come, first served, while the rows of everybody fit, with one more token of who comes."""
        work = _Work()
        longest = self._longest()
        for sequence in self._filling.values():
            budget -= work.fill(sequence, budget)
        for sequence in self.waiting.values():
            if len(self.seated) >= self.max_running or sequence.arrival > until:
                break
            longest = max(longest, sequence.length + 1)
            if self.seated and self._cells(len(self.seated) + 1, longest) > self.kv_tokens:
                break
            source, length = self._source(sequence)
            if source is None and length:
                continue  # a member of its group is computing the prompt, and is not done with it in this round
            self._sit_down(sequence, length)
            work.moved[sequence.request.id] = sequence
            if isinstance(source, Sequence) and source.request.id in work.moved:
                work.follow.setdefault((source.request.id, length), [source]).append(sequence)
            else:
                if source is not None:
                    work.known.append((sequence, source, length))
                budget -= work.fill(sequence, budget)
        for id, sequence in work.moved.items():
            self.waiting.pop(id, None)
            if sequence.computed == sequence.length - 1:
                self._filling.pop(id, None)
        return work

    def _source(self, sequence: Sequence) -> tuple[Source | None, int]:
        """Where most of a context is known from: the session or the group on the shelf, or a member that is seated.
        No source but a length: a member is about to compute so much of it."""
        request = sequence.request
        known = sequence.known()
        best: Source | None = None
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
        self.seated[request.id] = self._filling[request.id] = sequence
        self._groups.setdefault(request.group, {})[request.id] = sequence
        sequence.computed = computed
        self.kv += sequence.length

    def _stand_up(self, sequence: Sequence) -> None:
        request = sequence.request
        del self.seated[request.id]
        self._filling.pop(request.id, None)
        members = self._groups[request.group]
        del members[request.id]
        if not members:
            del self._groups[request.group]
        self.kv -= sequence.length
        sequence.row = -1
        sequence.computed = 0

    def _leave(self, sequence: Sequence, finish: Finish) -> None:
        """The end of a sequence; what was computed for it stays on the shelf while there is room."""
        self._end_plan()
        request = sequence.request
        sequence.finish = finish
        sequence.mark(self.version)
        if request.id not in self.seated:
            self.waiting.pop(request.id, None)
            return
        row, computed = sequence.row, sequence.computed
        self._stand_up(sequence)
        if computed and self._rows.cells + computed <= self.kv_tokens:
            context = Context(sequence.known()[:computed], self._rows.save(row, computed), request.group)
            self._shelf.put(request.session, context)
            self._shelf.shrink(self.kv_tokens - self._rows.cells)

    def _forget(self) -> None:
        """Nothing that was computed is used again."""
        self._end_plan()
        self._shelf.clear()
        for sequence in self.seated.values():
            sequence.computed = 0
            if sequence.length > 1:
                self._filling[sequence.request.id] = sequence

    # -- rows ------------------------------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Have rows for all, and width for their next steps; True when the rows are new ones. The shelf gives way.
        Who sits sits in the first rows, unless there are too few of them."""
        new = self._rows.reserve(len(self.seated), self._wide(self._longest()), self.kv_tokens)
        if new:
            self._shelf.shrink(self.kv_tokens - self._rows.cells)
        return new

    def _arrange(self) -> None:
        """Give every seated sequence its row: the ready ones first, and as few moves as that allows. When much shorter
        panels reward it, the long ones come first, each in the right unit of rows."""
        if too_few := with_spare(len(self.seated)) > self._rows.rows:
            self._reserve()
        ready = [sequence for id, sequence in self.seated.items() if id not in self._filling]
        ready.sort(key=_row)
        unit = max(len(ready), 1)
        if self._worth_sorting([sequence.length for sequence in ready]):
            ready.sort(key=lambda sequence: -sequence.length)
            unit = UNIT
        moves: list[tuple[Sequence, int]] = []
        for first in range(0, len(ready), unit):
            moves += _moves(ready[first : first + unit], first)
        moves += _moves(list(self._filling.values()), len(ready))
        self._move(moves)
        if not too_few:
            self._reserve()

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

    def _copy(self, sequence: Sequence, source: Source, length: int) -> None:
        """The known beginning of a context into its row."""
        if isinstance(source, Sequence):
            self._rows.copy(source.row, sequence.row, length)
        else:
            self._rows.restore(sequence.row, source.saved, length)

    def _fill(self, pieces: list[tuple[Sequence, int, int]]) -> None:
        if pieces:
            segments = [Segment(s.row, start, s.known()[start : start + count]) for s, start, count in pieces]
            self.decoder.fill(segments, self._rows)
            self.prefilled += sum(count for _, _, count in pieces)

    # -- the plan of a step ----------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        ready = [sequence for id, sequence in self.seated.items() if id not in self._filling]
        ready.sort(key=_row)
        device = self.decoder.shape.device
        positions: Index = np.array([sequence.computed for sequence in ready], np.int64)
        self._rows.show(positions)
        panels, panel_steps = self._panels([sequence.length for sequence in ready])
        return _Plan(
            ready=ready,
            ids=torch.from_numpy(np.array([sequence.last for sequence in ready], np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            places=self._rows.places(np.arange(len(ready)), positions),
            panels=panels,
            panel_steps=panel_steps,
            law=self._law(ready),
            counters=np.array([sequence.counter for sequence in ready], np.uint64)[:, None],
            stops=frozenset().union(*{sequence.stops for sequence in ready}),
            steps_left=min([sequence.target - len(sequence.tokens) for sequence in ready], default=0),
        )

    def _law(self, ready: list[Sequence]) -> Law:
        """How these are drawn. Usually they are all drawn alike, and the law is known."""
        samplings = [sequence.request.sampling for sequence in ready]
        if len({id(sampling) for sampling in samplings}) != 1:
            return law_of(samplings, self.decoder.vocab, self.decoder.shape.device)
        law = self._laws.get(samplings[0])
        if law is None:
            law = self._laws[samplings[0]] = law_of(samplings[:1], self.decoder.vocab, self.decoder.shape.device)
        return law

    def _end_plan(self) -> None:
        """Somebody comes or goes, or the weights change."""
        if self._plan is not None:
            self._plan.book()
            self._plan = None

    def _extended(self, plan: _Plan) -> _Plan:
        """The same plan when its panels have become too narrow."""
        plan.book()
        if self._reserve():
            return self._planned()
        plan.panels, plan.panel_steps = self._panels([sequence.length for sequence in plan.ready])
        return plan

    def _panels(self, lengths: list[int]) -> tuple[list[Panel], int]:
        """Cut rows of these lengths into panels, and say for how many steps they are wide enough."""
        cells = self.decoder.shape.heads * self.decoder.shape.key_dim
        panels: list[Panel] = []
        steps = GRAIN
        for first in range(0, len(lengths), UNIT):
            unit = lengths[first : first + UNIT]
            longest = max(unit)
            width, last = self._wide(longest), first + len(unit)
            steps = min(steps, width - longest + 1)
            if panels and len(unit) * abs(panels[-1].width - width) * cells < SPLIT:
                before = panels.pop()
                first, width = before.first, max(width, before.width)
            panels.append(Panel(first, last, width))
        return panels, steps

    def _worth_sorting(self, lengths: list[int]) -> bool:
        """Whether the panels of rows of these lengths would cover clearly less if the long ones came first."""
        least = SPLIT // (self.decoder.shape.heads * self.decoder.shape.key_dim)
        if len(lengths) <= UNIT or len(lengths) * (max(lengths) - min(lengths)) < least:
            return False
        now, then = (
            sum((panel.last - panel.first) * panel.width for panel in self._panels(order)[0])
            for order in (lengths, sorted(lengths, reverse=True))
        )
        return now - then >= least


@dataclass(slots=True)
class _Work:
    """What one round of admission leads to."""

    moved: dict[int, Sequence] = field(default_factory=dict)
    """Who sat down, or is filled a little more."""
    known: list[tuple[Sequence, Source, int]] = field(default_factory=list)
    """Whose beginning is copied before the filling, from where, and how much."""
    pieces: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """What is filled: sequence, start, count."""
    follow: dict[tuple[int, int], list[Sequence]] = field(default_factory=dict)
    """Whose beginning is copied after the filling, for it is filled in this round: by the member that has it and the
    length of it, this member and those that follow it."""

    def fill(self, sequence: Sequence, budget: int) -> int:
        """Compute the rest of a prompt, as far as the budget goes; what that costs."""
        count = min(sequence.length - 1 - sequence.computed, budget)
        if count > 0:
            self.pieces.append((sequence, sequence.computed, count))
            sequence.computed += count
            self.moved[sequence.request.id] = sequence
        return max(count, 0)


@dataclass(slots=True)
class _Plan:
    """What a step needs; it moves on by itself while nobody comes or goes."""

    ready: list[Sequence]
    """By row."""
    ids: Tensor
    """[n] the last token of each."""
    positions: Tensor
    """[n] where it stands."""
    places: Tensor
    """[n * heads] where its keys and values go."""
    panels: list[Panel]
    panel_steps: int
    """Steps for which the panels are wide enough."""
    law: Law
    counters: NDArray[np.uint64]
    """[n, 1] where each stands in its stream of random numbers, after those in `uniforms`."""
    stops: frozenset[int]
    """Tokens that end any of them."""
    steps_left: int
    """Steps until the first of them is as long as it may be."""
    tokens: list[list[int]] = field(default_factory=list)
    """[steps][n] not booked yet"""
    logprobs: list[list[float]] = field(default_factory=list)
    uniforms: list[Tensor] = field(default_factory=list)
    """[steps][n, 1] the random numbers of the next steps, last step first"""

    def uniform(self) -> Tensor:
        """The random numbers of this step."""
        if not self.uniforms:
            ahead = torch.from_numpy(uniforms(self.counters, AHEAD)).to(self.ids.device)
            self.uniforms = list(ahead.flip(0))
            self.counters += np.uint64(AHEAD * GOLDEN & MASK64)
        return self.uniforms.pop()

    def book(self) -> None:
        """Give the noted tokens to their sequences."""
        if steps := len(self.tokens):
            columns = zip(self.ready, zip(*self.tokens, strict=True), zip(*self.logprobs, strict=True), strict=True)
            for sequence, tokens, logprobs in columns:
                sequence.tokens.extend(tokens)
                sequence.logprobs.extend(logprobs)
                sequence.last = tokens[-1]
                sequence.length += steps
                sequence.computed += steps
                sequence.counter = (sequence.counter + steps * GOLDEN) & MASK64
            self.tokens.clear()
            self.logprobs.clear()


_row = attrgetter("row")


def _moves(sequences: list[Sequence], first: int) -> list[tuple[Sequence, int]]:
    """Who has to move, and where to, so that these sequences sit in the rows from `first` on."""
    rows = range(first, first + len(sequences))
    moving = [sequence for sequence in sequences if sequence.row not in rows]
    if not moving:
        return []
    taken = {sequence.row for sequence in sequences}
    return list(zip(moving, [row for row in rows if row not in taken], strict=True))
