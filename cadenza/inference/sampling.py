"""How the next token is drawn from logits.

Invariant: token i of a turn depends on its distribution and on the key (seed, i) only. The uniform number behind it is
a hash of that key, so the batch it was drawn in, an interruption before it and the replica that drew it change nothing.

    logits / temperature -> softmax -> top-k -> top-p of what is left -> renormalise -> inverse CDF(uniform(seed, i))

The CDF runs in the order of the vocabulary and not of the probabilities: there, two nearly equal probabilities whose
order is decided by the last bit of a sum would exchange their tokens. The logprob of a token is that of the
distribution at the end of this line, the one it was drawn from. At temperature 0 the largest logit is taken, whatever
top-k and top-p say, and its logprob is that of temperature 1: the point mass that it was drawn from says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza.inference.replica import Sampling

GOLDEN, MASK64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
_TOP_P_CANDIDATES = 256
"""Candidates looked at for top-p before the whole vocabulary is sorted."""


def rng_counter(seed: int, position: int) -> int:
    """The splitmix64 counter of the random number of a position; that of the next position is `GOLDEN` further.

    The seed is mixed first: the seeds of the turns of one trajectory lie a multiple of `GOLDEN` apart, and their
    streams would be the same one, shifted.
    """
    start = seed & MASK64
    start = (start ^ (start >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    start = (start ^ (start >> 27)) * 0x94D049BB133111EB & MASK64
    return ((start ^ (start >> 31)) + position * GOLDEN) & MASK64


def uniforms(counters: NDArray[np.uint64], steps: int) -> NDArray[np.float32]:
    """[steps, n, 1] for the next positions of rows that stand at these counters [n, 1] of their streams: splitmix64.

    They are in [0, 1 - 2^-23]: a float32 multiplied by one of them becomes smaller, also after rounding.
    """
    bits = counters + (np.arange(steps, dtype=np.uint64) * np.uint64(GOLDEN))[:, None, None]
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: NDArray[np.float32] = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(41)).astype(np.float32)
    return numbers * np.float32(2.0**-23)


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """The sampling settings of the rows of a batch, as columns [n, 1], or [1, 1] when they are all drawn alike. None
    stands for columns that would change nothing."""

    temperature: Tensor | None
    """1 in greedy rows."""
    greedy: Tensor | None
    """Rows that take the largest logit."""
    all_greedy: bool
    limits: tuple[Tensor, Tensor] | None
    """top-k and top-p; the size of the vocabulary and 1 mean no limit."""
    width: int
    """Candidates to rank for the limits: the largest top-k, or a first guess when a row has none."""


def batch_sampling(rows: Sequence[Sampling], vocab: int, device: torch.device) -> BatchSampling:
    """The common form of what the rows want. Columns of equal values have length 1."""
    if len(kinds := set(rows)) == 1:
        rows = list(kinds)
    greedy = [row.temperature == 0 for row in rows]
    temperatures = [1.0 if row.temperature == 0 else row.temperature for row in rows]
    top_k = [vocab if row.top_k == 0 or row.temperature == 0 else min(row.top_k, vocab) for row in rows]
    top_p = [1.0 if row.temperature == 0 else row.top_p for row in rows]
    limited = min(top_k, default=vocab) < vocab or min(top_p, default=1.0) < 1.0
    widest = max(top_k, default=vocab)

    def column(values: list[int] | list[float] | list[bool]) -> Tensor:
        return torch.tensor(values, device=device)[:, None]

    return BatchSampling(
        temperature=None if all(value == 1.0 for value in temperatures) else column(temperatures),
        greedy=column(greedy) if any(greedy) else None,
        all_greedy=all(greedy),
        limits=(column(top_k), column(top_p)) if limited else None,
        width=widest if widest < vocab else min(_TOP_P_CANDIDATES, vocab),
    )


def sample_tokens(logits: Tensor, sampling: BatchSampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their logprobs [n] from float32 logits [n, V] and numbers [n, 1]."""
    if sampling.all_greedy:
        best = logits.argmax(-1, keepdim=True)
        return best[:, 0], torch.log_softmax(logits, -1).gather(1, best)[:, 0]
    if sampling.temperature is not None:
        logits = logits / sampling.temperature
    probabilities = torch.softmax(logits, -1)
    if sampling.limits is not None:
        probabilities = _limited(probabilities, *sampling.limits, sampling.width)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform * total, right=True)
    # Only what is not a number is nowhere in the CDF; the clamp lets it come out as a logprob that says so.
    tokens.clamp_max_(logits.shape[-1] - 1)
    if sampling.greedy is not None:
        tokens = torch.where(sampling.greedy, logits.argmax(-1, keepdim=True), tokens)
    probability = probabilities.gather(1, tokens)
    if sampling.limits is not None:
        probability = probability / total
    return tokens[:, 0], probability.log_()[:, 0]


def _limited(probabilities: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """The probabilities [n, V] with zeros outside top-k and top-p. What ties with the last one kept is kept too."""
    vocab = probabilities.shape[-1]
    mass = probabilities.sum(-1, keepdim=True)
    while True:
        best = probabilities.topk(width, -1).values
        ranked = torch.where(torch.arange(width, device=probabilities.device) < top_k, best, 0.0)
        within = ranked.cumsum(-1)
        enough = top_p * torch.where(top_k < vocab, within[:, -1:], mass)
        enough = torch.where(top_p < 1.0, enough, torch.inf)
        settled = (top_k <= width) | ((top_k == vocab) & ((within[:, -1:] >= enough) | (top_p >= 1.0)))
        if width == vocab or bool(settled.all()):
            break
        width = vocab
    kept = (within - ranked < enough) & (ranked > 0)
    least = torch.where(kept, ranked, torch.inf).amin(-1, keepdim=True)
    least = torch.where((top_p >= 1.0) & (top_k == vocab), 0.0, least)
    return torch.where(probabilities >= least, probabilities, 0.0)
