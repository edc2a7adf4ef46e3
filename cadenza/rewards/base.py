"""What a reward is, and how a class of rewards declares its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from cadenza.config import Config
from cadenza.errors import InfrastructureError, RewardError
from cadenza.rewards.sample import Sample, Scored
from cadenza.scalars import as_number


class LastingFault(InfrastructureError):
    """An infrastructure fault that another try would meet again: it is passed on at once, whatever `tries` says."""


class ConfiguredReward(Config):
    """A reward whose fields are its settings: keys beside `name` in a config. Settings that it does not know fail.

        class Short(ConfiguredReward):
            words: int = 50

            def __call__(self, sample: Sample) -> float:
                return float(len(sample.response.split()) <= self.words)

        reward: {name: my_module:Short, words: 20}

    `__call__` is plain, and runs off the loop, or async. What it needs while it works is made in `async open()` and
    given up in `async close()`; both are optional, and so are `score_batch(samples) -> list` with `batch_size`,
    `concurrency`, the calls at once that it bears, and `use_host(host)`, which gets the `RewardHost` before `open`.
    """

    needs_answer: ClassVar[bool] = False
    """Whether it compares the response with the field `answer` of the row; then rows without one are refused before a
    run."""
    asks_policy: ClassVar[bool] = False
    """Whether it asks the policy of the run. Only then `RewardHost.ask_policy` is there for it, and `reward_seconds`
    does not count for its calls, which wait while the gate is closed."""

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        """What keeps this row from being scored, whatever the response is: "the row has no 'tests'". None: nothing. A
        run and `cadenza data` refuse such a row by its place, as one without an `answer` where `needs_answer`."""
        return None

    def __call__(self, sample: Sample) -> Any:
        """A number, a bool or a `Scored`; or an awaitable of one."""
        raise NotImplementedError


def row_problem(read: Callable[[Sample], object], row: Mapping[str, Any]) -> str | None:
    """The RewardError that a function raises of a sample with this row and some response, as text; None for none."""
    try:
        read(Sample(response="-", row=row, domain=""))
    except RewardError as error:
        return str(error)
    return None


def as_scored(value: Any, place: str) -> Scored:
    """What a reward returned as a `Scored` with finite floats, or the RewardError that says what is wrong with it.

    `place` names the reward in the message. A bool says whether the task is solved, a number does not.
    """
    if not isinstance(value, Scored):
        success = bool(value) if _is_bool(value) else None
        return Scored(finite(value, place), success)
    parts = {name: finite(part, f"part '{name}' of {place}") for name, part in value.parts.items()}
    success = None if value.success is None else bool(value.success)
    return Scored(finite(value.value, place), success, parts, value.note)


def finite(value: Any, place: str) -> float:
    """A number or a bool as a finite float; raises RewardError for everything else."""
    number = as_number(value)
    if number is None:
        raise RewardError(f"{place} returned {value!r}; return a number or a bool")
    if not math.isfinite(number):
        raise RewardError(f"{place} returned {number}; return a finite number")
    return number


def answers_of(sample: Sample) -> Sequence[Any]:
    """The answers that count as right: the field `answer`, or each of them where it is a list; raises RewardError for
    an empty list."""
    answer = sample.answer
    answers = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if not answers:
        raise RewardError(f"{sample.row_name} has an empty list as its 'answer'; leave the row out")
    return answers


def _is_bool(value: Any) -> bool:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return isinstance(value, bool)
