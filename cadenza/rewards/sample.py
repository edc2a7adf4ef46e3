"""What a reward gets (`Sample`) and what it may return (`Scored`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.errors import RewardError


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge, with everything that is known about it. It can be made by hand, in a test or a notebook:

    Sample(response="The sum is 42.", row={"answer": "42"})
    """

    response: str
    """What the model wrote, special tokens left out."""
    prompt: str = ""
    """What it answered, as one text."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of the dataset, with all its fields."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation, the response included. Not given, it is the prompt and the response."""
    domain: str = "default"
    """Empty where a row is checked before a run: its place in the file names it then."""
    finish: str = "stop"
    """Why the response ended: 'stop', or 'length' where it was cut off."""
    prompt_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    """[P]; None where nobody tokenised."""
    response_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    """[R]; None where nobody tokenised."""
    trajectory: Any = field(default=None, compare=False)
    """The trajectory of a run, None outside one."""
    score_id: int | None = field(default=None, compare=False)
    """The number under which a process that computes rewards knows where the sample came from; None elsewhere."""

    def __post_init__(self) -> None:
        if not self.messages:
            asked = ({"role": "user", "content": self.prompt},) if self.prompt else ()
            object.__setattr__(self, "messages", (*asked, {"role": "assistant", "content": self.response}))

    @property
    def answer(self) -> Any:
        """The field `answer` of the row; raises RewardError if the row has none."""
        return self.get("answer")

    @property
    def row_name(self) -> str:
        """What messages call the row."""
        return f"a row of domain '{self.domain}'" if self.domain else "the row"

    def get(self, name: str) -> Any:
        """A field of the row; raises RewardError, which names the domain and the fields there are, if it has none."""
        if self.row.get(name) is None:
            fields = ", ".join(map(repr, self.row)) or "no field at all"
            raise RewardError(f"{self.row_name} has no '{name}'; it has {fields}")
        return self.row[name]


@dataclass(frozen=True, slots=True)
class Scored:
    """What a response is worth, and why."""

    value: float
    """The reward."""
    success: bool | None = None
    """Whether the task is solved, which success rates count; None says nothing about it."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the value is made of; each part becomes a metric."""
    note: str = ""
    """A word to whoever reads the sample later: the verdict of a judge, the test that failed."""
