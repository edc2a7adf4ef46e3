"""Where the tasks of a domain come from: seeds, rows that are given, or the rows of a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cadenza.datasets import Dataset, RowError, open_dataset
from cadenza.datasets.rows import check_answer
from cadenza.rewards.config import RowCheck
from cadenza.rollout.config import DomainConfig
from cadenza.rollout.records import Task

CountTokens = Callable[[Any], int]
"""The tokens of a prompt, given as chat messages."""


class TaskSource:
    """The tasks of a domain in one order, which does not change over a restart."""

    count: int | None
    """Tasks there are; None when they never run out."""
    description: str
    """The source in words: a resumed run must say the same."""
    follows_results = False
    """Whether `record` changes which tasks come."""

    def at(self, position: int) -> Task | None:
        """The task at a position of the order, None behind the last one."""
        raise NotImplementedError

    def id_at(self, position: int) -> str | None:
        """The id of the task at a position; no row of a dataset is read for it."""
        task = self.at(position)
        return None if task is None else task.id

    def row_at(self, position: int) -> tuple[int, int] | None:
        """(row, epoch) at a position, without reading the row; None behind the last one, and where tasks are no rows
        of a dataset."""
        return None

    @property
    def level(self) -> int | None:
        """How hard the next tasks are; None without a curriculum."""
        return None

    def record(self, task: Task, success: float) -> None:
        """What came of the group of a task, from 0 to 1: what a curriculum follows."""

    def go_back_to(self, description: str) -> None:
        """Have the tasks of then, if only rows were added to a file since a run began with this description."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides its position."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""

    def close(self) -> None:
        """Give back files; no task can be drawn afterwards."""


class Seeds(TaskSource):
    """Tasks that are only a seed."""

    def __init__(self, name: str, count: int | None, first: int) -> None:
        if count is not None and count <= 0:
            raise ValueError(f"domains.{name}.tasks must be positive, got {count}; None means an endless stream")
        self.count = count
        self.description = f"{'endless' if count is None else count} seeds from {first}"
        self._name, self._first = name, first

    def at(self, position: int) -> Task | None:
        if self.count is not None and position >= self.count:
            return None
        seed = self._first + position
        return Task(id=f"{self._name}/{seed}", seed=seed, domain=self._name)


class Rows(TaskSource):
    """Rows that the config holds; each passes once."""

    def __init__(
        self, name: str, rows: Sequence[Any], *, answered: bool = False, check_row: RowCheck | None = None
    ) -> None:
        """With `answered`, each row must have an `answer` that a response can be compared with; `check_row` says what
        else is wrong with one."""
        if not rows:
            raise ValueError(f"domains.{name}.tasks is empty")
        ids = [task.id for task in rows if isinstance(task, Task)]
        if twice := next((id for id, count in Counter(ids).items() if count > 1), None):
            raise ValueError(f"domains.{name}.tasks has two tasks with the id '{twice}'; ids must be unique")
        for number, row in enumerate(rows):
            given = row.data if isinstance(row, Task) else row
            data, place = given if isinstance(given, Mapping) else {}, f"domains.{name}.tasks row {number}"
            if answered:
                check_answer(data, place)
            if check_row is not None and (problem := check_row(data)) is not None:
                raise RowError(place, "cannot be scored", problem)
        self.count = len(rows)
        self.description = f"{len(rows)} rows"
        self._name, self._rows = name, rows

    def at(self, position: int) -> Task | None:
        if position >= len(self._rows):
            return None
        row = self._rows[position]
        if not isinstance(row, Task):
            return Task(id=f"{self._name}/{position}", seed=position, domain=self._name, data=row, row=position)
        if row.domain != self._name:
            raise ValueError(f"task '{row.id}' says domain '{row.domain}', but stands under domains.{self._name}")
        return row


class DatasetRows(TaskSource):
    """The rows of a dataset, in the order of its epochs."""

    def __init__(self, name: str, open: Callable[..., Dataset]) -> None:
        """`open` is `open_dataset` with all of its arguments but `as_of`."""
        self._name, self._open = name, open
        self._use(open())
        self.follows_results = self.dataset.config.curriculum is not None

    def _use(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.count = dataset.count
        self.description = dataset.source

    def at(self, position: int) -> Task | None:
        found = self.dataset.number_at(position)
        if found is None:
            return None
        row, epoch = found
        data: Any
        try:
            data = self.dataset.drawn_row(row)
        except RowError as error:  # its attempt fails with it, as data, and the ledger says so
            data = error
        return Task(id=self._id(row, epoch), seed=row, domain=self._name, data=data, row=row, epoch=epoch)

    def id_at(self, position: int) -> str | None:
        found = self.dataset.number_at(position)
        return None if found is None else self._id(*found)

    def _id(self, row: int, epoch: int) -> str:
        return f"{self._name}/{row}" if epoch == 0 else f"{self._name}/{row}@{epoch}"

    def row_at(self, position: int) -> tuple[int, int] | None:
        return self.dataset.number_at(position)

    @property
    def level(self) -> int | None:
        return self.dataset.level

    def record(self, task: Task, success: float) -> None:
        self.dataset.record(task.row, success)

    def go_back_to(self, description: str) -> None:
        if description == self.description:
            return
        dataset = self._open(as_of=description)
        if dataset.source != description:
            dataset.close()
            return
        self.dataset.close()
        self._use(dataset)

    def state(self) -> dict[str, Any]:
        return self.dataset.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.dataset.load_state(state)

    def close(self) -> None:
        self.dataset.close()


def open_tasks(
    key: str, name: str, config: DomainConfig, first_seed: int, seed: int, count_tokens: CountTokens | None
) -> TaskSource:
    """The tasks that a domain's config names. Datasets of the same rows under other keys have other orders."""
    if config.data is not None:
        opening = partial(
            open_dataset,
            config.data,
            key=key,
            seed=seed,
            count_tokens=count_tokens,
            answered=config.needs_answers,
            check_row=config.row_check(),
        )
        return DatasetRows(name, opening)
    if config.tasks is None or isinstance(config.tasks, int):
        return Seeds(name, config.tasks, first_seed)
    return Rows(name, config.tasks, answered=config.needs_answers, check_row=config.row_check())
