"""Which task is next: the order of each domain, and the share of each domain.

Domains share the groups by weight (stride scheduling): the next group belongs to the domain that has the fewest
started groups per weight. A group that is filtered or retired is handed back, so that the mix that is trained, and
not the mix that is tried, follows the weights. While a domain is paused (outages.py) the others share its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from cadenza.rollout.config import DomainConfig, EnvManagerConfig
from cadenza.rollout.ledger import Group
from cadenza.rollout.records import Task
from cadenza.rollout.task_sources import CountTokens, TaskSource, open_tasks


class Domain:
    """The tasks of one kind, and how many of its groups and envs are under way."""

    __slots__ = (
        "drawn", "follows_results", "max_envs", "name", "pending", "rest_epochs", "rested", "resting", "running",
        "started", "tasks", "to_redraw", "weight",
    )  # fmt: skip

    def __init__(self, name: str, config: DomainConfig, tasks: TaskSource) -> None:
        self.name = name
        self.weight = config.weight
        self.max_envs = config.max_envs
        self.tasks = tasks
        self.drawn = 0
        """How far the order was followed."""
        self.to_redraw: deque[Task] = deque()
        """Tasks that are drawn once more, before new ones: of a run before a restart, or lost with a node."""
        self.rest_epochs = config.rest
        self.resting: dict[int, int] = {}
        """Rows that rest, and the epoch in which each comes back."""
        self.follows_results = bool(config.rest) or tasks.follows_results
        """Whether what came of its groups decides which tasks are next."""
        self.rested = 0
        """Times that a row was passed over because it rests."""
        self.started = 0
        self.running = 0
        self.pending: deque[tuple[Group, int]] = deque()
        """Members of admitted groups that wait for a slot."""

    def has_free_env(self) -> bool:
        return self.max_envs is None or self.running < self.max_envs

    @property
    def exhausted(self) -> bool:
        count = self.tasks.count
        return count is not None and self.drawn >= count and not self.to_redraw

    def next(self) -> Task | None:
        """The next task that does not rest, or None when there are no more."""
        if self.to_redraw:
            return self.to_redraw.popleft()
        if self.resting:
            self._pass_over_resting()
        task = self.tasks.at(self.drawn)
        if task is not None:
            self.drawn += 1
        return task

    def leave_out_rest(self) -> bool:
        """Draw no more of this pass over the tasks. Returns whether there was something left; False for tasks that
        never end."""
        if self.exhausted or self.tasks.count is None:
            return False
        self.drawn = self.tasks.count
        self.to_redraw.clear()
        return True

    def _pass_over_resting(self) -> None:
        """Go on to the next position whose row does not rest; that one is awake again. No row is read for it."""
        while (found := self.tasks.row_at(self.drawn)) is not None:
            row, epoch = found
            if self.resting.get(row, 0) <= epoch:
                self.resting.pop(row, None)
                return
            self.drawn += 1
            self.rested += 1

    def record(self, task: Task, scores: Sequence[float], success: float) -> None:
        """What came of a whole group: its row rests if all scores are equal, and a curriculum follows the success."""
        if self.rest_epochs and min(scores) == max(scores):
            self.resting[task.row] = task.epoch + 1 + self.rest_epochs
        self.tasks.record(task, success)

    def explain_rest(self, row: int) -> str:
        """Why the row is not drawn, if it rests."""
        epoch = self.resting.get(row)
        return "" if epoch is None else f"rests until epoch {epoch}: the scores of its last group were all equal"


class Domains:
    """All domains of a scheduler."""

    def __init__(
        self,
        config: EnvManagerConfig,
        mode: str = "train",
        seed: int = 0,
        count_tokens: CountTokens | None = None,
    ) -> None:
        """`mode` and `seed` choose the order of datasets; `count_tokens` is for their length filters."""
        self.all: dict[str, Domain] = {}
        with ExitStack() as opened:  # those before one that cannot be opened are closed
            for name, domain in config.domains.items():
                tasks = open_tasks(f"{mode}/{name}", name, domain, config.first_seed, seed, count_tokens)
                opened.callback(tasks.close)
                self.all[name] = Domain(name, domain, tasks)
            opened.pop_all()
        self._list = list(self.all.values())

    def close(self) -> None:
        """Give back the files of all datasets; no task can be drawn afterwards."""
        for domain in self._list:
            domain.tasks.close()

    @property
    def endless(self) -> list[str]:
        """Names of the domains that never run out."""
        return [domain.name for domain in self._list if domain.tasks.count is None]

    @property
    def exhausted(self) -> bool:
        return all(domain.exhausted for domain in self._list)

    def begin_pass(self) -> None:
        """The tasks begin anew: follow the order of every domain from its beginning."""
        for domain in self._list:
            domain.drawn = domain.started = 0
            domain.to_redraw.clear()
            domain.resting.clear()

    def explain_rest(self, id: str) -> str:
        """Why the task of this id is not drawn, if its row rests."""
        name, _, row = id.partition("@")[0].rpartition("/")
        domain = self.all.get(name)
        return domain.explain_rest(int(row)) if domain is not None and row.isdecimal() else ""

    def waiting(self) -> Domain | None:
        """The domain whose admitted group waits longest for a slot that it may have."""
        oldest: Domain | None = None
        for domain in self._list:
            if not domain.pending or not domain.has_free_env():
                continue
            if oldest is None or domain.pending[0][0].id < oldest.pending[0][0].id:
                oldest = domain
        return oldest

    def draw(self, held_back: Collection[str] = ()) -> tuple[Domain, Task] | None:
        """The task of the next group, from the domain that is furthest behind its share, may have another env and is
        not held back."""
        while True:
            behind: Domain | None = None
            for domain in self._list:
                if domain.exhausted or not domain.has_free_env() or domain.name in held_back:
                    continue
                if behind is None or domain.started * behind.weight < behind.started * domain.weight:
                    behind = domain
            if behind is None:
                return None
            task = behind.next()
            if task is not None:
                return behind, task
