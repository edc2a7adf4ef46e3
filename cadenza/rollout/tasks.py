"""Where tasks come from, and which domain is next.

Domains share the groups by weight (stride scheduling): the next group belongs to the domain that has the fewest
started groups per weight. A group that is filtered or retired is handed back, so that the mix that is trained, and
not the mix that is tried, follows the weights.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from cadenza.rollout.config import DomainConfig, EnvManagerConfig
from cadenza.rollout.ledger import Group
from cadenza.rollout.records import Task


class Domain:
    """The tasks of one kind, and how many of its groups and envs are under way."""

    __slots__ = (
        "count", "drawn", "max_envs", "name", "pending", "running", "source", "started",
        "task_at", "to_redraw", "weight",
    )  # fmt: skip

    def __init__(self, name: str, config: DomainConfig, first_seed: int) -> None:
        self.name = name
        self.weight = config.weight
        self.max_envs = config.max_envs
        self.count = config.tasks if config.tasks is None or isinstance(config.tasks, int) else len(config.tasks)
        """Tasks there are; None when they never run out."""
        self.source = _source(config.tasks, first_seed)
        """Where the tasks come from, in words: a resumed run must say the same."""
        self.task_at = _tasks(name, config.tasks, first_seed)
        """The task at a position of the order, None behind the last one."""
        self.drawn = 0
        """How far the order was followed."""
        self.to_redraw: deque[Task] = deque()
        """Tasks of a run before a restart that are drawn once more, before new ones."""
        self.started = 0
        self.running = 0
        self.pending: deque[tuple[Group, int]] = deque()
        """Members of admitted groups that wait for a slot."""

    def has_free_env(self) -> bool:
        return self.max_envs is None or self.running < self.max_envs

    @property
    def exhausted(self) -> bool:
        return self.count is not None and self.drawn >= self.count and not self.to_redraw

    def next(self) -> Task | None:
        """The next task, or None when there are no more."""
        if self.to_redraw:
            return self.to_redraw.popleft()
        task = self.task_at(self.drawn)
        self.drawn += task is not None
        return task


class Domains:
    """All domains of a scheduler."""

    def __init__(self, config: EnvManagerConfig) -> None:
        self.all = {name: Domain(name, domain, config.first_seed) for name, domain in config.domains.items()}
        self._list = list(self.all.values())

    @property
    def endless(self) -> list[str]:
        """Names of the domains that never run out."""
        return [domain.name for domain in self._list if domain.count is None]

    @property
    def exhausted(self) -> bool:
        return all(domain.exhausted for domain in self._list)

    def restart(self) -> None:
        """Follow the order of every domain from its beginning."""
        for domain in self._list:
            domain.drawn = domain.started = 0
            domain.to_redraw.clear()

    def waiting(self) -> Domain | None:
        """The domain whose admitted group waits longest for a slot that it may have."""
        oldest: Domain | None = None
        for domain in self._list:
            if not domain.pending or not domain.has_free_env():
                continue
            if oldest is None or domain.pending[0][0].id < oldest.pending[0][0].id:
                oldest = domain
        return oldest

    def draw(self) -> tuple[Domain, Task] | None:
        """The task of the next group, from the domain that is furthest behind its share and may have another env."""
        while True:
            behind: Domain | None = None
            for domain in self._list:
                if domain.exhausted or not domain.has_free_env():
                    continue
                if behind is None or domain.started * behind.weight < behind.started * domain.weight:
                    behind = domain
            if behind is None:
                return None
            task = behind.next()
            if task is not None:
                return behind, task


def _tasks(name: str, tasks: int | Sequence[Any] | None, first_seed: int) -> Callable[[int], Task | None]:
    if tasks is None or isinstance(tasks, int):
        if tasks is not None and tasks <= 0:
            raise ValueError(f"domains.{name}.tasks must be positive, got {tasks}; None means an endless stream")
        return _seeds(name, tasks, first_seed)
    if not tasks:
        raise ValueError(f"domains.{name}.tasks is empty")
    ids = [task.id for task in tasks if isinstance(task, Task)]
    if twice := next((id for id, count in Counter(ids).items() if count > 1), None):
        raise ValueError(f"domains.{name}.tasks has two tasks with the id '{twice}'; ids must be unique")
    return _rows(name, tasks)


def _source(tasks: int | Sequence[Any] | None, first_seed: int) -> str:
    if tasks is None or isinstance(tasks, int):
        return f"{'endless' if tasks is None else tasks} seeds from {first_seed}"
    return f"{len(tasks)} rows"


def _seeds(name: str, count: int | None, first: int) -> Callable[[int], Task | None]:
    def at(number: int) -> Task | None:
        if count is not None and number >= count:
            return None
        return Task(id=f"{name}/{first + number}", seed=first + number, domain=name)

    return at


def _rows(name: str, rows: Sequence[Any]) -> Callable[[int], Task | None]:
    def at(number: int) -> Task | None:
        if number >= len(rows):
            return None
        row = rows[number]
        if not isinstance(row, Task):
            return Task(id=f"{name}/{number}", seed=number, domain=name, data=row)
        if row.domain != name:
            raise ValueError(f"task '{row.id}' says domain '{row.domain}', but stands under domains.{name}")
        return row

    return at
