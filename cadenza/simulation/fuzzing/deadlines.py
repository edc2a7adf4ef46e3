"""The deadlines of every simulated scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of every simulated scheduler in seconds: short, and far enough apart to tell which one expired."""

    lease: float = 20.0
    reward: float = 8.0
    close: float = 3.0
    stall: float = 400.0
    control: float = 5.0
    load: float = 6.0
    heartbeat: float = 4.0
    strikes: int = 3

    @property
    def fault(self) -> float:
        """Seconds that one fault may cost: one of these deadlines notices it."""
        health = self.heartbeat * (self.strikes + 3)
        return self.lease + self.close + health + 2 * self.control + 2 * self.load + 3 * self.reward


DEADLINES = Deadlines()
