"""Continuous batching: which sequences the next step computes, and what becomes of the tokens.

Invariant: a sequence is waiting, running or gone, and everything changes between two steps. The rows 0..n-1 hold the
running sequences that are ready (keys and values of all their tokens but the last are computed), the rows behind them
those that are still being prefilled; the last token of a ready sequence is the input of the next step.

    add -> waiting --admit--> running: prefill --> ready --advance--> gone (stop | length | abort)
              ^                  ^                  |
              +---- preempted ---+-- new weights ---+       (recompute; the tokens are kept)

    admit_and_prefill   start sequences, copy the cached prefix of a context, prefill the rest up to a budget
    compute             one forward pass of the ready rows, one token sampled for each
    advance             append the tokens; a sequence that is done leaves, its context goes to the prefix cache

A prompt is computed without its last token, for that one is the input of a step like any other. So members of a group
need nothing but a copy of what the first of them computed.

While no sequence starts or ends, a step costs nothing per row but arithmetic: what it needs is in a `DecodeBatch` that
moves on by itself, and the tokens are noted there by step. `DecodeBatch.flush` gives them to their sequences when the
batch ends.

The cache is bounded by what is allocated: rows are dense, so a long sequence makes those of all others as wide. Rows
and prefix cache together have at most `kv_tokens` cells. Sequences are admitted while enough of them are left, and when
the rows outgrow them, the last to start is preempted; one alone always fits, for none is longer than `kv_tokens`.

Not thread-safe: all calls come from one `EngineThread`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

from cadenza.inference.admission import Admission, PrefixSource, find_prefix
from cadenza.inference.decode_batch import DecodeBatch
from cadenza.inference.decoders import Decoder, PrefillSegment
from cadenza.inference.kv_cache import CachedPrefix, Index, KVCache, KVPrefixCache, rows_needed
from cadenza.inference.replica import Finish, Sampling
from cadenza.inference.row_layout import by_row, move_rows, rounded_width, row_blocks, row_moves
from cadenza.inference.sampling import BatchSampling, batch_sampling, sample_tokens
from cadenza.inference.sequence import EngineSequence


class NonFiniteLogits(Exception):
    """The model gives logits from which nothing can be sampled."""


class SampledTokens(NamedTuple):
    """One token per ready row, as `compute` sampled them; they count when they are given to `advance`."""

    tokens: list[int]
    logprobs: list[float]


class Engine:
    """A model that writes many sequences at once.

    An `EngineThread` adds sequences and then calls `admit_and_prefill`, `compute` and `advance` over and over. Three
    prompts of ten tokens, the first with one token to write, on an engine with `max_running=2`:

        engine.add(first); engine.add(second); engine.add(third)
        engine.admit_and_prefill(last_arrival)  # first and second start, with nine tokens prefilled each; third waits
        engine.advance(engine.compute())        # one token for each row; returns [first], which has all of its tokens
        engine.admit_and_prefill(last_arrival)  # third takes the free row; a prompt it shares with first is copied
        engine.advance(engine.compute())        # the second token of second, the first of third

    `load` changes the weights between two steps, and `abort` takes a sequence out with the tokens it has.
    """

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
        self.running_tokens = 0
        """Tokens of the running sequences."""
        self.waiting: OrderedDict[int, EngineSequence] = OrderedDict()
        self.running: dict[int, EngineSequence] = {}
        """In the order in which they started."""
        self._prefilling: dict[int, EngineSequence] = {}
        """Of the running sequences, those that are not ready."""
        self._groups: dict[int, dict[int, EngineSequence]] = {}
        """The running sequences by group."""
        self._cache = KVCache(decoder.shape)
        self._prefix_cache = KVPrefixCache()
        self._batch_samplings: dict[Sampling, BatchSampling] = {}
        self._batch: DecodeBatch | None = None

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, sequence: EngineSequence) -> None:
        self.waiting[sequence.request.id] = sequence

    def abort(self, request_id: int) -> EngineSequence | None:
        """Take a sequence out, with the tokens it has."""
        sequence = self.running.get(request_id) or self.waiting.get(request_id)
        if sequence is not None:
            self._finish(sequence, Finish.ABORT)
        return sequence

    def abort_all(self) -> list[EngineSequence]:
        """Abort everything; each sequence keeps the tokens it has."""
        sequences = [*self.running.values(), *self.waiting.values()]
        for sequence in sequences:
            self._finish(sequence, Finish.ABORT)
        return sequences

    def abort_all_and_invalidate_kv(self) -> list[EngineSequence]:
        """Abort everything and discard all KV, including the prefix cache."""
        self._invalidate_kv()
        return self.abort_all()

    def load(self, version: int, packed: object) -> None:
        """Weights as the decoder packs them, from the next step on. Without `keep_kv`, nothing that the old ones
        computed is used again."""
        self.decoder.load(packed)
        self._end_batch()
        for sequence in (*self.running.values(), *self.waiting.values()):
            sequence.assign_version(self.version)
        if not self.keep_kv:
            self._invalidate_kv()
        self.version = version

    def release_cache_memory(self) -> None:
        """Free the memory of the KV cache. Requires that no sequence is running."""
        assert not self.running
        self._prefix_cache.clear()
        self._cache.free()

    # -- one step --------------------------------------------------------------------------------------------------

    def admit_and_prefill(self, last_arrival: int) -> bool:
        """Admit waiting sequences that arrived no later than `last_arrival`, and prefill; False when there is nothing
        to decode."""
        self._preempt()
        budget = self.prefill_tokens
        while (self.waiting or self._prefilling) and budget > 0:
            admission = self._admit(last_arrival, budget)
            if not admission.scheduled:
                break
            self._end_batch()
            self._assign_rows()
            for sequence, source, length in admission.copies_before:
                self._copy_prefix(sequence, source, length)
            self._prefill(admission.prefills)
            for (_, length), (first_member, *members) in admission.copies_after.items():
                self._cache.copy_to_rows(first_member.row, [sequence.row for sequence in members], length)
            budget -= sum(count for _, _, count in admission.prefills)
        if self._batch is None:
            self._assign_rows()
            self._batch = self._new_batch()
        return bool(self._batch.ready)

    def compute(self) -> SampledTokens:
        """One token for every ready row."""
        batch = self._batch
        assert batch is not None
        if batch.block_steps == 0:
            batch = self._batch = self._widened_batch(batch)
        logits = self.decoder.decode(batch.ids, batch.positions, batch.cache_indices, batch.row_blocks, self._cache)
        tokens, logprobs = sample_tokens(logits, batch.sampling, batch.next_uniforms())
        batch.ids = tokens
        batch.positions.add_(1)
        batch.cache_indices.add_(1)
        batch.block_steps -= 1
        sampled = SampledTokens(tokens.tolist(), logprobs.tolist())
        if not math.isfinite(sum(sampled.logprobs)):
            raise NonFiniteLogits(f"version {self.version} gives logits that are not finite")
        return sampled

    def advance(self, sampled: SampledTokens) -> list[EngineSequence]:
        """Append the sampled tokens; returns the sequences that finished."""
        batch = self._batch
        assert batch is not None
        batch.tokens.append(sampled.tokens)
        batch.logprobs.append(sampled.logprobs)
        batch.steps_left -= 1
        self.generated += len(sampled.tokens)
        self.running_tokens += len(sampled.tokens)
        if batch.steps_left > 0 and batch.stop_ids.isdisjoint(sampled.tokens):
            return []
        batch.flush()
        done = []
        for sequence in batch.ready:
            if sequence.last_token in sequence.stop_ids:
                done.append((sequence, Finish.STOP))
            elif len(sequence.tokens) == sequence.max_new_tokens:
                done.append((sequence, Finish.LENGTH))
        for sequence, finish in done:
            self._finish(sequence, finish)
        return [sequence for sequence, _ in done]

    def check(self) -> None:
        """Assert what must hold between two steps."""
        if self._batch is not None:
            self._batch.flush()
            assert [sequence.row for sequence in self._batch.ready] == list(range(len(self._batch.ready)))
        running = self.running.values()
        assert self.running_tokens == sum(sequence.length for sequence in running)
        assert self._cache.cells + self._prefix_cache.tokens <= self.kv_tokens
        assert len(running) <= self.max_running
        assert not self.running.keys() & self.waiting.keys()
        assert len({sequence.row for sequence in running}) == len(running)
        assert all(sequence.row < 0 and sequence.computed == 0 for sequence in self.waiting.values())
        assert self._prefilling.items() <= self.running.items()
        for sequence in running:
            ready = sequence.request.id not in self._prefilling
            assert sequence.length == len(sequence.context) + len(sequence.tokens)
            assert sequence.computed == sequence.length - 1 if ready else sequence.computed < sequence.length - 1
        assert {id for group in self._groups.values() for id in group} == self.running.keys()
        self._prefix_cache.check()

    # -- which sequences run -----------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        """Preempt the sequence that started last while the rows of all are too many cells. While the width
        that the batch reserved lasts, nothing is to be done."""
        if self._batch is not None:
            if self._batch.block_steps > 0:
                return
            self._batch.flush()
        while len(self.running) > 1 and self._cells_needed(len(self.running), self._longest_running()) > self.kv_tokens:
            self._end_batch()
            sequence = self.running[next(reversed(self.running))]
            self._stop_running(sequence)
            self.waiting[sequence.request.id] = sequence
            self.waiting.move_to_end(sequence.request.id, last=False)

    def _longest_running(self) -> int:
        """Tokens of the longest running sequence. What a batch has not flushed is left out: it is within the width that
        the batch was made with, and its end is no wider."""
        return max((sequence.length for sequence in self.running.values()), default=0)

    def _cells_needed(self, sequences: int, longest: int) -> int:
        """The fewest cells for so many sequences, the longest of this length."""
        return rows_needed(sequences) * rounded_width(longest, self.kv_tokens)

    def _admit(self, last_arrival: int, budget: int) -> Admission:
        """Starts waiting sequences in the order of their arrival, while the rows of all running sequences and one more
        token of the new one fit into the cache."""
        admission = Admission()
        longest = self._longest_running()
        for sequence in self._prefilling.values():
            budget -= admission.plan_prefill(sequence, budget)
        for sequence in self.waiting.values():
            if len(self.running) >= self.max_running or sequence.arrival > last_arrival:
                break
            longest = max(longest, sequence.length + 1)
            if self.running and self._cells_needed(len(self.running) + 1, longest) > self.kv_tokens:
                break
            group_members = self._groups.get(sequence.request.group)
            source, length = find_prefix(sequence, self._prefix_cache, group_members)
            if source is None and length:
                continue  # a member of its group is computing the prompt, and is not done with it in this round
            self._start_running(sequence, length)
            admission.scheduled[sequence.request.id] = sequence
            if isinstance(source, EngineSequence) and source.request.id in admission.scheduled:
                admission.copies_after.setdefault((source.request.id, length), [source]).append(sequence)
            else:
                if source is not None:
                    admission.copies_before.append((sequence, source, length))
                budget -= admission.plan_prefill(sequence, budget)
        for id, sequence in admission.scheduled.items():
            self.waiting.pop(id, None)
            if sequence.computed == sequence.length - 1:
                self._prefilling.pop(id, None)
        return admission

    def _start_running(self, sequence: EngineSequence, computed: int) -> None:
        request = sequence.request
        self._prefix_cache.take(request.session)
        self.running[request.id] = self._prefilling[request.id] = sequence
        self._groups.setdefault(request.group, {})[request.id] = sequence
        sequence.computed = computed
        self.running_tokens += sequence.length

    def _stop_running(self, sequence: EngineSequence) -> None:
        request = sequence.request
        del self.running[request.id]
        self._prefilling.pop(request.id, None)
        members = self._groups[request.group]
        del members[request.id]
        if not members:
            del self._groups[request.group]
        self.running_tokens -= sequence.length
        sequence.row = -1
        sequence.computed = 0

    def _finish(self, sequence: EngineSequence, finish: Finish) -> None:
        """The end of a sequence; what was computed for it goes to the prefix cache while there are free cells."""
        self._end_batch()
        request = sequence.request
        sequence.finish = finish
        sequence.assign_version(self.version)
        if request.id not in self.running:
            self.waiting.pop(request.id, None)
            return
        row, computed = sequence.row, sequence.computed
        self._stop_running(sequence)
        if computed and self._cache.cells + computed <= self.kv_tokens:
            context = CachedPrefix(sequence.all_tokens()[:computed], self._cache.save(row, computed), request.group)
            self._prefix_cache.put(request.session, context)
            self._prefix_cache.evict_to(self.kv_tokens - self._cache.cells)

    def _invalidate_kv(self) -> None:
        """Nothing that was computed is used again."""
        self._end_batch()
        self._prefix_cache.clear()
        for sequence in self.running.values():
            sequence.computed = 0
            if sequence.length > 1:
                self._prefilling[sequence.request.id] = sequence

    # -- rows ------------------------------------------------------------------------------------------------------

    def _reserve_rows(self) -> bool:
        """Have rows for all, and width for their next steps; True when the rows are new ones. The prefix cache gives
        way. Running sequences are in the first rows, unless the cache has too few rows for them."""
        width = rounded_width(self._longest_running(), self.kv_tokens)
        new = self._cache.reserve(len(self.running), width, self.kv_tokens)
        if new:
            self._prefix_cache.evict_to(self.kv_tokens - self._cache.cells)
        return new

    def _assign_rows(self) -> None:
        """Give every running sequence its row: the ready ones first, and as few moves as that allows."""
        if too_few := rows_needed(len(self.running)) > self._cache.rows:
            self._reserve_rows()
        ready = [sequence for id, sequence in self.running.items() if id not in self._prefilling]
        moves = row_moves(ready, list(self._prefilling.values()), self.decoder.shape, self.kv_tokens)
        move_rows(self._cache, moves)
        if not too_few:
            self._reserve_rows()

    def _copy_prefix(self, sequence: EngineSequence, source: PrefixSource, length: int) -> None:
        """The known beginning of a context into its row."""
        if isinstance(source, EngineSequence):
            self._cache.copy(source.row, sequence.row, length)
        else:
            self._cache.restore(sequence.row, source.saved, length)

    def _prefill(self, prefills: list[tuple[EngineSequence, int, int]]) -> None:
        if prefills:
            segments = [
                PrefillSegment(s.row, start, s.all_tokens()[start : start + count]) for s, start, count in prefills
            ]
            self.decoder.prefill(segments, self._cache)
            self.prefilled += sum(count for _, _, count in prefills)

    # -- the batch of a step ---------------------------------------------------------------------------------------

    def _new_batch(self) -> DecodeBatch:
        ready = [sequence for id, sequence in self.running.items() if id not in self._prefilling]
        ready.sort(key=by_row)
        device = self.decoder.shape.device
        positions: Index = np.array([sequence.computed for sequence in ready], np.int64)
        self._cache.set_visible_lengths(positions)
        blocks, block_steps = row_blocks([sequence.length for sequence in ready], self.decoder.shape, self.kv_tokens)
        return DecodeBatch(
            ready=ready,
            ids=torch.from_numpy(np.array([sequence.last_token for sequence in ready], np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            cache_indices=self._cache.indices(np.arange(len(ready)), positions),
            row_blocks=blocks,
            block_steps=block_steps,
            sampling=self._sampling_of(ready),
            rng_counters=np.array([sequence.rng_counter for sequence in ready], np.uint64)[:, None],
            stop_ids=frozenset().union(*{sequence.stop_ids for sequence in ready}),
            steps_left=min([sequence.max_new_tokens - len(sequence.tokens) for sequence in ready], default=0),
        )

    def _sampling_of(self, ready: list[EngineSequence]) -> BatchSampling:
        """How these are sampled. Usually they are all sampled alike, and the tensors are known."""
        samplings = [sequence.request.sampling for sequence in ready]
        if len({id(sampling) for sampling in samplings}) != 1:
            return batch_sampling(samplings, self.decoder.vocab, self.decoder.shape.device)
        sampling = self._batch_samplings.get(samplings[0])
        if sampling is None:
            sampling = self._batch_samplings[samplings[0]] = batch_sampling(
                samplings[:1], self.decoder.vocab, self.decoder.shape.device
            )
        return sampling

    def _end_batch(self) -> None:
        """Flush the batch and discard it: a sequence starts or ends, or the weights change."""
        if self._batch is not None:
            self._batch.flush()
            self._batch = None

    def _widened_batch(self, batch: DecodeBatch) -> DecodeBatch:
        """The same batch when its row blocks have become too narrow."""
        batch.flush()
        if self._reserve_rows():
            return self._new_batch()
        batch.row_blocks, batch.block_steps = row_blocks(
            [sequence.length for sequence in batch.ready], self.decoder.shape, self.kv_tokens
        )
        return batch
