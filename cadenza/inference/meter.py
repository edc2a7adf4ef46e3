"""What the steps of an engine take, as the cost model of the simulation says it.

Invariant: nothing is kept but sums, so that a run of weeks costs as much memory as one of a minute, and a step two
microseconds.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

WARM_UP = 20
"""Steps at the beginning that are not counted: memory is allocated, kernels are chosen."""
MIN_STEPS = 30
"""With fewer steps the meter gives no costs."""
MIN_SECONDS = 1e-7
RIDGE = 1e-9
"""A ridge term: coefficients that the steps so far cannot separate stay bounded."""


class StepCosts(NamedTuple):
    """A decode step of B sequences with C tokens of context takes `a + b*B + c*C` seconds, and prefill `p` per token.

    They are fitted to whole steps, with whatever else this process did meanwhile: what a step takes here, and not what
    it would take alone.
    """

    a: float
    b: float
    c: float
    p: float


class StepMeter:
    """Sums over steps, from which their costs are fitted by least squares, none of them below 0.

    One thread adds, any thread may ask: a fit that meets half of a step is as good as one that does not.
    """

    __slots__ = ("_costs", "_next_fit", "_xx", "_xy", "_yy", "steps")

    def __init__(self) -> None:
        self.steps = 0
        """All of them, the warm-up included."""
        self._xx = [0.0] * 10
        self._xy = [0.0] * 4
        self._yy = 0.0
        self._costs: StepCosts | None = None
        self._next_fit = WARM_UP + MIN_STEPS
        """Steps at which it is fitted again."""

    def add(self, running: int, context: int, prefilled: int, seconds: float) -> None:
        """A step of so many sequences (0: it only prefilled) that hold so much context."""
        self.steps += 1
        if self.steps <= WARM_UP:
            return
        one = 1 if running else 0
        xx, xy = self._xx, self._xy
        xx[0] += one
        xx[1] += running
        xx[2] += context * one
        xx[3] += prefilled * one
        xx[4] += running * running
        xx[5] += running * context
        xx[6] += running * prefilled
        xx[7] += context * context * one
        xx[8] += context * prefilled * one
        xx[9] += prefilled * prefilled
        xy[0] += seconds * one
        xy[1] += seconds * running
        xy[2] += seconds * context * one
        xy[3] += seconds * prefilled
        self._yy += seconds * seconds

    def costs(self) -> StepCosts | None:
        """The fit, renewed whenever there are a tenth more steps; None before there is enough to fit."""
        if self.steps >= self._next_fit and self._xx[0]:
            self._costs = self._fitted()
            self._next_fit = self.steps + self.steps // 10
        return self._costs

    def _fitted(self) -> StepCosts:
        xx = np.zeros((4, 4))
        xx[np.triu_indices(4)] = self._xx
        xx += np.triu(xx, 1).T
        scale = np.sqrt(np.maximum(np.diag(xx), MIN_SECONDS))
        xx, xy = xx / np.outer(scale, scale) + RIDGE * np.eye(4), np.array(self._xy) / scale
        best = np.zeros(4)
        least = float("inf")
        for count in range(1, 5):  # which of them are above 0: with four, all choices can be tried
            for chosen in combinations(range(4), count):
                columns = list(chosen)
                solution = np.linalg.solve(xx[np.ix_(columns, columns)], xy[columns])
                error = self._yy - float(solution @ xy[columns])
                if solution.min() >= 0 and error < least - RIDGE * self._yy:
                    best, least = np.zeros(4), error
                    best[columns] = solution
        a, b, c, p = (best / scale).tolist()
        return StepCosts(max(a, MIN_SECONDS), b, c, p)
