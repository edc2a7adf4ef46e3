"""Which sequence has which row of the KV cache, and which rows attend to how many positions."""

from __future__ import annotations

from operator import attrgetter

from cadenza.inference.kv_cache import KVCache, KVShape, RowBlock
from cadenza.inference.sequence import EngineSequence

ROWS_PER_BLOCK = 8
"""Rows whose lengths are kept close together, when that is worth it."""
WIDTH_MULTIPLE = 32
"""Row blocks are a multiple of it wide, so that the shapes of a step stay the same for a while."""
MIN_SPLIT_SAVING = 1 << 15
"""Cached numbers that a row block of its own must spare per layer to be worth its three operations."""
by_row = attrgetter("row")


def rounded_width(length: int, kv_tokens: int) -> int:
    """Positions for a sequence of this length and, most of the time, for some of its next tokens."""
    return min(-(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, kv_tokens)


def row_blocks(lengths: list[int], shape: KVShape, kv_tokens: int) -> tuple[list[RowBlock], int]:
    """Cut rows of these lengths into row blocks, and say for how many steps they are wide enough."""
    cells = shape.heads * shape.key_dim
    blocks: list[RowBlock] = []
    steps = WIDTH_MULTIPLE
    for first in range(0, len(lengths), ROWS_PER_BLOCK):
        unit = lengths[first : first + ROWS_PER_BLOCK]
        longest = max(unit)
        width, last = rounded_width(longest, kv_tokens), first + len(unit)
        steps = min(steps, width - longest + 1)
        if blocks and len(unit) * abs(blocks[-1].width - width) * cells < MIN_SPLIT_SAVING:
            before = blocks.pop()
            first, width = before.first, max(width, before.width)
        blocks.append(RowBlock(first, last, width))
    return blocks, steps


def _is_sorting_worth_it(lengths: list[int], shape: KVShape, kv_tokens: int) -> bool:
    """Whether the row blocks of rows of these lengths would cover clearly less if the long ones came first."""
    least = MIN_SPLIT_SAVING // (shape.heads * shape.key_dim)
    if len(lengths) <= ROWS_PER_BLOCK or len(lengths) * (max(lengths) - min(lengths)) < least:
        return False
    now, then = (
        sum((block.last - block.first) * block.width for block in row_blocks(order, shape, kv_tokens)[0])
        for order in (lengths, sorted(lengths, reverse=True))
    )
    return now - then >= least


def row_moves(
    ready: list[EngineSequence], prefilling: list[EngineSequence], shape: KVShape, kv_tokens: int
) -> list[tuple[EngineSequence, int]]:
    """Which sequences have to move, and to which row, so that the ready ones are in the first rows and those that are
    being prefilled behind them. Where that makes row blocks much shorter, the long ones come first, each in the right
    block of rows."""
    ready = sorted(ready, key=by_row)
    unit = max(len(ready), 1)
    if _is_sorting_worth_it([sequence.length for sequence in ready], shape, kv_tokens):
        ready.sort(key=lambda sequence: -sequence.length)
        unit = ROWS_PER_BLOCK
    moves: list[tuple[EngineSequence, int]] = []
    for first in range(0, len(ready), unit):
        moves += _moves_from(ready[first : first + unit], first)
    return moves + _moves_from(prefilling, len(ready))


def _moves_from(sequences: list[EngineSequence], first: int) -> list[tuple[EngineSequence, int]]:
    """Which sequences have to move, and where to, so that these are in the rows from `first` on."""
    rows = range(first, first + len(sequences))
    moving = [sequence for sequence in sequences if sequence.row not in rows]
    if not moving:
        return []
    taken = {sequence.row for sequence in sequences}
    return list(zip(moving, [row for row in rows if row not in taken], strict=True))


def move_rows(cache: KVCache, moves: list[tuple[EngineSequence, int]]) -> None:
    """Bring sequences to their rows. One whose row is not vacated yet is moved later; a circle is broken by
    way of the spare row."""
    taken = {sequence.row for sequence, _ in moves if sequence.row >= 0}
    while moves:
        blocked = []
        for sequence, row in moves:
            if row in taken:
                blocked.append((sequence, row))
            else:
                taken.discard(sequence.row)
                _move_to_row(cache, sequence, row)
        if len(blocked) == len(moves):
            first, _ = blocked[0]
            taken.discard(first.row)
            _move_to_row(cache, first, cache.rows - 1)
        moves = blocked


def _move_to_row(cache: KVCache, sequence: EngineSequence, row: int) -> None:
    if sequence.row >= 0 and sequence.computed:
        cache.copy(sequence.row, row, sequence.computed)
    sequence.row = row
