"""Rows that share an id, in any order and any number: sums, means and deviations without a loop over groups.

A weight says what a value counts: 0 or False is a value that does not exist, 1/k a trajectory that is k rows.
Statistics are taken in float64, so that equal float32 rewards have a deviation of exactly 0. Half a rounding error
divided by a tiny standard deviation would otherwise be an advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.algorithms.shapes import check_rows


@dataclass(frozen=True, slots=True)
class Groups:
    """A partition of values [*] of any shape."""

    index: Tensor
    """[*] the group of each value, 0 to G-1"""
    weight: Tensor
    """[*] float64"""

    @classmethod
    def of(cls, *ids: Tensor, weight: Tensor | None = None) -> Groups:
        """Values are in one group when all their ids [*] agree. `weight` [*] is a mask or float weights."""
        index = torch.zeros_like(ids[0], dtype=torch.int64)
        for key in ids:
            distinct, number = _numbered(key)
            # Numbered anew after the product, so that the sums are as long as the groups are many.
            _, index = _numbered(index * distinct + number)
        return cls(index, torch.ones_like(index, dtype=torch.float64) if weight is None else weight.double())

    def sum(self, values: Tensor) -> Tensor:
        """[*] the weighted sum over each value's group."""
        counted = torch.where(self.weight > 0, values.double() * self.weight, 0.0)
        sums = counted.new_zeros(self.count).index_add(0, self.index.flatten(), counted.flatten())
        return sums[self.index]

    @property
    def count(self) -> int:
        """G, groups without weight included."""
        return int(self.index.max()) + 1 if self.index.numel() else 0

    @property
    def size(self) -> Tensor:
        """[*] how many values, by weight, each value's group has."""
        # Rounded: the weights of one trajectory in ten rows add up to a little less or more than 1.
        return self.sum(torch.ones_like(self.weight)).round(decimals=9)

    def mean(self, values: Tensor) -> Tensor:
        """[*] the mean of each value's group; 0 where a group counts nothing."""
        size = self.size
        return self.sum(values) / torch.where(size > 0, size, 1.0)

    def std(self, values: Tensor) -> Tensor:
        """[*] the sample deviation (n - 1) of each value's group; 0 for a group of one."""
        squares = self.sum((values.double() - self.mean(values)) ** 2)
        size = self.size
        return torch.where(size > 1, squares / torch.where(size > 1, size - 1, 1.0), 0.0).sqrt()


def row_weights(like: Tensor, *, valid: Tensor | None = None, traj_ids: Tensor | None = None) -> Tensor:
    """[N] float64: 0 for rows that are not valid, 1/k for the k valid rows of one trajectory.

    A trajectory whose contexts start afresh is several rows with one score; it counts once in any statistic.
    """
    check_rows(like, valid=valid, traj_ids=traj_ids)
    weight = torch.ones(like.shape[:1], dtype=torch.float64, device=like.device)
    if valid is not None:
        weight = weight * valid.bool()
    if traj_ids is not None:
        rows = Groups.of(traj_ids, weight=weight).size
        weight = weight / torch.where(rows > 0, rows, 1.0)
    return weight


def sum_by_id(values: Tensor, ids: Tensor | None) -> Tensor:
    """[N, ...]: the sum over all rows with the same id [N]; the values themselves without ids."""
    if ids is None:
        return values
    check_rows(values, ids=ids)
    groups = Groups.of(ids)
    return values.new_zeros(groups.count, *values.shape[1:]).index_add(0, groups.index, values)[groups.index]


def _numbered(key: Tensor) -> tuple[int, Tensor]:
    """How many distinct values there are, and the number of each."""
    distinct: Tensor
    number: Tensor
    distinct, number = torch.unique(key, return_inverse=True)
    return len(distinct), number
