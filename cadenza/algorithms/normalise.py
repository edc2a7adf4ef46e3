"""Normalisation by group, by batch, and by everything seen so far.

Every function takes a weight of the shape of its values: a mask, or what each value counts (see groups.py). What
does not count changes no statistic and comes back as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.algorithms.groups import Groups
from cadenza.algorithms.shapes import at_least_float32, check_shapes

EPS = 1e-6
"""Added to every standard deviation that divides."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and spread of numbers that may come in chunks. As a state that is kept, it is the running normaliser."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """The sum of squared distances from the mean."""

    @classmethod
    def of(cls, values: Tensor, weight: Tensor | None = None) -> Moments:
        """Of values [*] where `weight` [*] is not 0."""
        weight = torch.ones_like(values, dtype=torch.float64) if weight is None else weight.double()
        check_shapes(values=values, weight=weight)
        counted = torch.where(weight > 0, values.double(), 0.0)
        count = weight.sum().round(decimals=9)
        mean = (counted * weight).sum() / torch.where(count > 0, count, 1.0)
        squares = ((counted - mean) ** 2 * weight).sum()
        count_, mean_, squares_ = torch.stack([count, mean, squares]).tolist()
        return cls(count_, mean_, squares_)

    @property
    def std(self) -> float:
        """The sample deviation (n - 1); 0 when at most one value was seen."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of numbers together."""
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Moments(count, mean, self.squares + other.squares + gap**2 * self.count * other.count / count)

    def update(self, values: Tensor, weight: Tensor | None = None, *, decay: float = 1.0) -> Moments:
        """The state after seeing more values. With `decay` below 1, what was seen before counts that much less."""
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        old = Moments(self.count * decay, self.mean, self.squares * decay)
        return old.merge(Moments.of(values, weight))

    def normalise(
        self,
        values: Tensor,
        weight: Tensor | None = None,
        *,
        centre: bool = True,
        divide_by_std: bool = True,
        eps: float = EPS,
    ) -> Tensor:
        """The values [*] measured by these moments. While all that was seen is equal, nothing is divided."""
        result = values.double() - (self.mean if centre else 0.0)
        if divide_by_std and self.std > 0:
            result = result / (self.std + eps)
        return _counted(result, weight).to(at_least_float32(values).dtype)


def normalise(
    values: Tensor,
    weight: Tensor | None = None,
    *,
    centre: bool = True,
    divide_by_std: bool = True,
    eps: float = EPS,
) -> Tensor:
    """The values [*] measured by the mean and the deviation of this batch."""
    moments = Moments.of(values, weight)
    return moments.normalise(values, weight, centre=centre, divide_by_std=divide_by_std, eps=eps)


def normalise_by_group(
    values: Tensor,
    *ids: Tensor,
    weight: Tensor | None = None,
    divide_by_std: bool = True,
    eps: float = EPS,
) -> Tensor:
    """The values [*] measured by the mean and the deviation of their group: where all the ids [*] agree.

    A group of one, or of equal values, has nothing to compare: it comes back as 0.
    """
    check_shapes(values=values, **{f"ids[{i}]": key for i, key in enumerate(ids)})
    groups = Groups.of(*ids, weight=weight)
    result = values.double() - groups.mean(values)
    if divide_by_std:
        result = result / (groups.std(values) + eps)
    return _counted(result, groups.weight).to(at_least_float32(values).dtype)


def _counted(values: Tensor, weight: Tensor | None) -> Tensor:
    return values if weight is None else torch.where(weight > 0, values, 0.0)
