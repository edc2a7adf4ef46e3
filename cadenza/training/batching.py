"""A batch cut into micro-batches that fit a token budget: every row exactly once, the same cut for the same rows.

The budget counts what is computed: padded positions, packed tokens, or slots that rows share (packing.py). A row longer
than the budget is a micro-batch of its own. How a batch is cut changes memory and speed, never the result: each
micro-batch's loss is a sum over its tokens, divided by the count of the whole (`cadenza.algorithms.aggregate`).
"""

from __future__ import annotations

import numpy as np

from cadenza.training.packing import Packing, shared_prefixes
from cadenza.training.token_rows import Array, TokenRows, ranges


def micro_batches(rows: TokenRows, chosen: Array, budget: int, packing: Packing) -> list[Array]:
    """The chosen rows that train, in batches of at most `budget` tokens."""
    if budget < 1:
        raise ValueError(f"token_budget must be >= 1, got {budget}")
    chosen = chosen[rows.counts[chosen] > 0]
    if not len(chosen):
        return []
    if packing == "shared":
        order = _by_tokens(rows, chosen)
        return _cut(order, rows.lengths[order], _prefixes(rows, order), budget)
    # The longest first: rows of a batch are then of similar length, and the first one gives the width.
    order = chosen[np.argsort(-rows.lengths[chosen], kind="stable")]
    lengths = rows.lengths[order]
    if packing == "packed":
        return _cut(order, lengths, np.zeros_like(lengths), budget)
    batches, start = [], 0
    while start < len(order):
        stop = start + max(budget // int(lengths[start]), 1)
        batches.append(order[start:stop])
        start = stop
    return batches


def pair_batches(rows: TokenRows, chosen: Array, budget: int) -> list[Array]:
    """The chosen rows, which come in pairs, in batches of at most `budget` tokens, counted as if all were padded. The
    two rows of a pair stay side by side: their loss needs both at once."""
    if not len(chosen):
        return []
    pairs = chosen.reshape(-1, 2)
    widths = rows.lengths[pairs].max(1)
    order = np.argsort(-widths, kind="stable")
    pairs, widths = pairs[order], widths[order]
    batches, start = [], 0
    while start < len(pairs):
        stop = start + max(budget // (2 * int(widths[start])), 1)
        batches.append(pairs[start:stop].ravel())
        start = stop
    return batches


def mini_batches(traj_ids: Array, count: int, rng: np.random.Generator) -> list[Array]:
    """All rows in `count` random batches of about the same number of trajectories, each trajectory whole in one of
    them; in fewer if there are fewer trajectories."""
    number = np.unique(traj_ids, return_inverse=True)[1]
    trajectories = int(number.max(initial=-1)) + 1
    count = min(count, trajectories)
    owner = np.empty(trajectories, np.int64)
    owner[rng.permutation(trajectories)] = np.arange(trajectories) * count // trajectories
    return [np.flatnonzero(owner[number] == i) for i in range(count)]


def _cut(order: Array, lengths: Array, prefixes: Array, budget: int) -> list[Array]:
    """Batches of consecutive rows; a row costs what it does not share with the row before it in its batch."""
    batches, start, used = [], 0, 0
    for i, (length, prefix) in enumerate(zip(lengths.tolist(), prefixes.tolist(), strict=True)):
        cost = length - prefix
        if i > start and used + cost > budget:
            batches.append(order[start:i])
            start, used, cost = i, 0, length
        used += cost
    batches.append(order[start:])
    return batches


def _by_tokens(rows: TokenRows, chosen: Array) -> Array:
    """The rows sorted by their inputs, so that rows with a common prefix are neighbours."""
    # Big-endian bytes compare like the numbers they hold.
    text = rows.tokens.astype(">u4").tobytes()
    starts = (rows.offsets[:-1][chosen] * 4).tolist()
    ends = ((rows.offsets[:-1] + rows.lengths)[chosen] * 4).tolist()
    keys = [text[a:b] for a, b in zip(starts, ends, strict=True)]
    return chosen[sorted(range(len(keys)), key=keys.__getitem__)]


def _prefixes(rows: TokenRows, order: Array) -> Array:
    """[n]: tokens in common with the row before; 0 for the first."""
    lengths = rows.lengths[order]
    ids = np.zeros((len(order), int(lengths.max())), rows.tokens.dtype)
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = rows.tokens[ranges(rows.offsets[:-1][order], lengths)]
    return np.concatenate(([0], shared_prefixes(ids, lengths)))
