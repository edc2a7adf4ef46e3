"""One round of admission: what is computed for the sequences that start, and what is copied to them instead.

The beginning of a context is copied from where its keys and values are: the prefix cache, or a running member of its
group. The engine decides which sequences start (engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza.inference.kv_cache import CachedPrefix, KVPrefixCache, common_prefix_length
from cadenza.inference.sequence import EngineSequence

MIN_SHARED_TOKENS = 4
"""Tokens of a prompt that make it worth waiting for the member of the group that computes them."""

PrefixSource = EngineSequence | CachedPrefix
"""Where keys and values can be copied from."""


@dataclass(slots=True)
class Admission:
    """What one round of admission decided: which sequences start, what is copied, what is prefilled."""

    scheduled: dict[int, EngineSequence] = field(default_factory=dict)
    """Sequences that start, or are prefilled further."""
    copies_before: list[tuple[EngineSequence, PrefixSource, int]] = field(default_factory=list)
    """Sequences whose prefix is copied before the prefill, from where, and how many tokens."""
    prefills: list[tuple[EngineSequence, int, int]] = field(default_factory=list)
    """What is prefilled: sequence, start, count."""
    copies_after: dict[tuple[int, int], list[EngineSequence]] = field(default_factory=dict)
    """Sequences whose prefix is copied after the prefill, which computes it in this round: by (id of the member that
    has it, length of it), this member and those that are copied from it."""

    def plan_prefill(self, sequence: EngineSequence, budget: int) -> int:
        """Plan as much of the rest of the prompt as the budget allows; returns the tokens planned."""
        count = min(sequence.length - 1 - sequence.computed, budget)
        if count > 0:
            self.prefills.append((sequence, sequence.computed, count))
            sequence.computed += count
            self.scheduled[sequence.request.id] = sequence
        return max(count, 0)


def find_prefix(
    sequence: EngineSequence, prefix_cache: KVPrefixCache, group_members: Mapping[int, EngineSequence] | None
) -> tuple[PrefixSource | None, int]:
    """Returns the best source of the beginning of a context, and how many tokens it covers. One of three outcomes:

    (source, n)       copy n tokens from the source: the prefix cache, by session or group, or a running member
    (None, 0)         there is nothing to copy: prefill the whole context
    (None, n), n > 0  wait: a running member of the group is about to compute n tokens that can be copied then
    """
    request = sequence.request
    known = sequence.all_tokens()
    best: PrefixSource | None = None
    length = 0
    for context in prefix_cache.candidates(request.session, request.group):
        if (common := min(common_prefix_length(known, context.tokens), len(known) - 1)) > length:
            best, length = context, common
    if group_members:
        first_member = next(iter(group_members.values()))
        common = min(common_prefix_length(known, first_member.context), len(known) - 1)
        if min(common, first_member.length - 1) - max(first_member.computed, length) >= MIN_SHARED_TOKENS:
            return None, common
        if min(common, first_member.computed) > length:
            best, length = first_member, min(common, first_member.computed)
    return best, length
