"""The difficulty of the rows that are made, by position.

Invariant: the level of a position never changes once a row was drawn there. A change of level begins behind the last
position that was drawn, and the state keeps all changes. So a resumed run finds at each position the row that stood
there, those in flight included.

    position   0 ........ 119 | 120 ....... 287 | 288 ...
    level      0              | 1               | 2            changes = [[0, 0], [120, 1], [288, 2]]
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from cadenza.datasets.config import CurriculumConfig


class Curriculum:
    """Follows the results of the rows: what was drawn at another level than the present one does not count."""

    def __init__(self, config: CurriculumConfig, levels: range) -> None:
        """`levels` are those that there are, the first one of the config among them."""
        self.first_level = config.level
        self._config = config
        self._easiest = levels[0]
        self._hardest = levels[-1] if config.max_level is None else min(config.max_level, levels[-1])
        self._changes = [[0, config.level]]
        """[first position, level]."""
        self._drawn = 0
        """Positions below are settled."""
        self._results: list[float] = []
        """Of the present level."""

    @property
    def level(self) -> int:
        """Of the next position that is drawn."""
        return self._changes[-1][1]

    def draw(self, position: int) -> None:
        """Settle the level of a position and of all before."""
        self._drawn = max(self._drawn, position + 1)

    def level_at(self, position: int) -> int:
        """The level of a position; it may still change if nothing was drawn there."""
        return self._changes[bisect_right(self._changes, position, key=lambda change: change[0]) - 1][1]

    def record(self, position: int, success: float) -> None:
        """The success, from 0 to 1, at a position that was drawn."""
        if position < self._changes[-1][0]:
            return
        self._results.append(float(success))
        if len(self._results) < self._config.window:
            return
        mean = sum(self._results) / len(self._results)
        self._results = []
        if mean >= self._config.raise_at:
            self._move(min(self.level + 1, self._hardest))
        elif mean < self._config.lower_at:
            self._move(max(self.level - 1, self._easiest))

    def state(self) -> dict[str, Any]:
        return {
            "changes": [list(change) for change in self._changes],
            "drawn": self._drawn,
            "results": self._results[:],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._changes = [list(change) for change in state["changes"]]
        self._drawn = state["drawn"]
        self._results = list(state["results"])

    def _move(self, level: int) -> None:
        if level == self.level:
            return
        if self._changes[-1][0] == self._drawn:
            self._changes.pop()
        self._changes.append([self._drawn, level])
