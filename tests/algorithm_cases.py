"""Random train batches for the tests of `cadenza.algorithms`, and what may be done to them without effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

Test = Callable[..., None]


def given(*strategies: Any, **named: Any) -> Callable[[Test], Test]:
    """Hypothesis with fewer examples: each is a whole batch, with many tokens in it."""
    return lambda test: hypothesis.settings(max_examples=25)(hypothesis.given(*strategies, **named)(test))


GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30, -7.0)


@dataclass(frozen=True)
class Case:
    """A train batch in float64. Masks and ids are of any form: empty rows, single tokens, groups of one."""

    mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    rewards: Tensor
    entropies: Tensor
    scores: Tensor
    group_ids: Tensor
    valid: Tensor

    @classmethod
    def random(cls, seed: int, rows: int, length: int) -> Case:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        logprobs = -normal(rows, length).abs()
        return cls(
            mask=torch.rand(rows, length, generator=g) < 0.6,
            logprobs=logprobs,
            old_logprobs=logprobs + 0.5 * normal(rows, length),
            reference=logprobs + 0.5 * normal(rows, length),
            advantages=normal(rows, length),
            values=normal(rows, length),
            old_values=normal(rows, length),
            returns=normal(rows, length),
            rewards=normal(rows, length),
            entropies=normal(rows, length).abs(),
            scores=torch.randint(0, 3, (rows,), generator=g).double(),
            group_ids=torch.randint(0, 3, (rows,), generator=g) * 1000 - 7,
            valid=torch.ones(rows, dtype=torch.bool),
        )

    def take(self, rows: Tensor) -> Case:
        return Case(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def with_garbage(self, seed: int) -> Case:
        """Masked tokens hold anything, NaN and infinity included."""
        g = torch.Generator().manual_seed(seed)
        junk = torch.tensor(GARBAGE, dtype=torch.float64)
        changed: dict[str, Tensor] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if column.dtype == torch.float64 and column.ndim == 2:
                anything = junk[torch.randint(len(junk), column.shape, generator=g)]
                changed[field.name] = torch.where(self.mask, column, anything)
        return replace(self, **changed)

    def with_padding_rows(self, count: int) -> Case:
        """Copies of the first rows at the end, marked as not being there; their scores are garbage."""
        copies = self.take(torch.arange(count) % len(self.mask))
        copies = replace(
            copies,
            mask=torch.zeros_like(copies.mask),
            valid=torch.zeros_like(copies.valid),
            scores=torch.full_like(copies.scores, float("nan")),
        ).with_garbage(count)
        return Case(
            **{
                field.name: torch.cat([getattr(self, field.name), getattr(copies, field.name)])
                for field in fields(self)
            }
        )


def cases() -> st.SearchStrategy[Case]:
    return st.builds(Case.random, st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7))


def random_turns(seed: int, rows: int, turns: int) -> tuple[Tensor, Tensor]:
    """The response mask [N, L] of episodes with up to `turns` turns, and the turn [N, L] of each token."""
    g = torch.Generator().manual_seed(seed)

    def upto(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    lines: list[list[int]] = []
    for _ in range(rows):
        line: list[int] = []
        for turn in range(upto(1, turns)):
            line += [-1] * upto(1, 2) + [turn] * upto(1, 3)
        lines.append(line + [-1] * upto(0, 2))
    width = max(len(line) for line in lines)
    numbers = torch.tensor([line + [-1] * (width - len(line)) for line in lines])
    return numbers >= 0, numbers


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, equal_nan=True, check_dtype=False)


def tensor(*values: object) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)
