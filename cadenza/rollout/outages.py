"""Domains whose rewards are out of service: their groups wait, and the other domains fill the batches.

Invariant: a domain is held back only while another one that is not paused has tasks left, so there is always a group
that may begin, and no caller waits for the end of a pause. Where none is left, the paused ones are drawn from without
a wait, and the queue's limit of failures in a row ends the run unless one of them comes back.

    rewards fail in a row, as infrastructure --pause--> wait --probe: one group--> a reward comes: the pause ends
                                                          ^           |
                                                          +-----------+ a reward fails again: twice the wait
"""

from __future__ import annotations

from cadenza.rollout.failures import logger
from cadenza.rollout.ledger import Group, GroupState
from cadenza.rollout.records import Task
from cadenza.rollout.tasks import Domain, Domains

MIN_FAILURES = 8
"""Rewards of a domain that must fail in a row before it is paused; twice the group size if that is more."""
FIRST_WAIT_SECONDS = 5.0
"""How long a domain is paused before its first probe. Each probe that fails doubles it."""
MAX_WAIT_SECONDS = 300.0


class Pause:
    """One domain of which no group begins, but for probes."""

    __slots__ = ("began", "probe", "until", "wait")

    def __init__(self, now: float) -> None:
        self.began = now
        self.wait = FIRST_WAIT_SECONDS
        self.until = now + self.wait
        """When the next probe may begin."""
        self.probe: Group | None = None
        """The newest group that began during the pause."""

    def is_due(self, now: float) -> bool:
        """Whether a probe may begin: it is time, and no other one runs."""
        return now >= self.until and (self.probe is None or self.probe.state is GroupState.CLOSED)

    def double_wait(self, now: float) -> None:
        """The probe has failed."""
        self.wait = min(2 * self.wait, MAX_WAIT_SECONDS)
        self.until = now + self.wait


class Outages:
    """Counts the rewards of each domain that fail in a row, and pauses the domain.

    With two domains, of which the judge of 'judged' is down:

        outages.record_failure("judged", reason, now)  # True at the eighth in a row: its open groups end
        outages.held_back(now)                         # {'judged'}; 5 s later empty: its next group is the probe
        outages.begin(domain, group)
        outages.end_probe(group, now)                  # its reward failed too: held back for 10 s
        outages.record_success("judged", now)          # or it came: the pause is over
    """

    def __init__(self, domains: Domains, group_size: int) -> None:
        self.failures: dict[str, int] = {}
        """Failed rewards by domain, since its last success. Empty while all is well."""
        self.pauses: dict[str, Pause] = {}
        """Of the paused domains; the one of which no group began for the longest time is the first."""
        self.has_paused = False
        """Whether a domain was ever paused."""
        self._domains = domains
        self._limit = max(MIN_FAILURES, 2 * group_size)

    @property
    def is_any_healthy(self) -> bool:
        """Whether a domain that is not paused has tasks left."""
        return any(name not in self.pauses and not domain.exhausted for name, domain in self._domains.all.items())

    def record_failure(self, name: str, reason: str, now: float) -> bool:
        """Count a reward that failed as infrastructure. Returns whether the domain is paused by it."""
        count = self.failures[name] = self.failures.get(name, 0) + 1
        if count < self._limit or name in self.pauses or len(self._domains.all) == 1:
            return False
        self.pauses[name] = Pause(now)
        self.has_paused = True
        logger.warning(
            "domain '%s' is paused: %d rewards of it failed in a row, the last one: %s. %s. Bring back what its reward "
            "needs; the run need not be restarted",
            name, count, reason,
            f"The other domains fill its share; one group of it is tried in {FIRST_WAIT_SECONDS:g} s, then less often"
            if self.is_any_healthy
            else "No other domain can fill its share: it is tried until the limit of failures in a row ends the run",
        )  # fmt: skip
        return True

    def record_success(self, name: str, now: float) -> None:
        """A reward of the domain came: it is not out of service."""
        self.failures.pop(name, None)
        if (pause := self.pauses.pop(name, None)) is not None:
            logger.warning(
                "domain '%s' is trained again after a pause of %.0f s. Shares follow the weights from now on; what it "
                "missed is not made up for",
                name, now - pause.began,
            )  # fmt: skip

    def held_back(self, now: float) -> set[str]:
        """Returns the paused domains of which no probe may begin now."""
        return {name for name, pause in self.pauses.items() if not pause.is_due(now)}

    def draw(self, now: float) -> tuple[Domain, Task] | None:
        """Returns the task of the next group, of a domain that is not held back. Where no domain is healthy, the paused
        ones take turns: by their shares it would be the same one again, for its lost groups do not count."""
        drawn = self._domains.draw(self.held_back(now)) if self.is_any_healthy else None
        if drawn is not None or self.is_any_healthy:  # asked again: the rows that were left may all rest
            return drawn
        for name in self.pauses:
            if (drawn := self._domains.draw(self._domains.all.keys() - {name})) is not None:
                return drawn
        return None

    def begin(self, domain: Domain, group: Group) -> None:
        """A group begins while domains are paused: it is a probe, or the paused ones move up to its domain's level, so
        that they will not make up for what they miss. Called before the group is counted."""
        if (pause := self.pauses.pop(domain.name, None)) is not None:
            pause.probe = group
            self.pauses[domain.name] = pause  # the last one in turn
            return
        for name in self.pauses:
            paused = self._domains.all[name]
            paused.started = int(domain.started * paused.weight / domain.weight)

    def leave_out_paused(self) -> list[str]:
        """Draw no more of the paused domains in this pass over the tasks, if others are measured in it. Returns the
        names of those that had tasks left."""
        if len(self.pauses) == len(self._domains.all):
            return []
        names = [name for name in self.pauses if self._domains.all[name].leave_out_rest()]
        if names:
            logger.warning(
                "the rest of domain '%s' is left out of this validation, for its rewards fail; the figures are those "
                "of what was measured",
                "', '".join(names),
            )  # fmt: skip
        return names

    def end_probe(self, group: Group, now: float) -> bool:
        """A reward of a group of a paused domain failed. Returns whether the group should end, so that no batch waits
        for its tries: not where no other domain could take its place."""
        if not self.is_any_healthy:
            return False
        pause = self.pauses[group.task.domain]
        if group is pause.probe:
            pause.double_wait(now)
        return True
