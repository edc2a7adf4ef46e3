"""`format`: the response has a form, given as a regular expression."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from cadenza.rewards.base import ConfiguredReward
from cadenza.rewards.sample import Sample
from cadenza.rewards.text import checked_pattern


class Format(ConfiguredReward):
    """1 where the response matches, else 0. A dot matches line ends too; write `(?m)` for `^` and `$` at lines."""

    pattern: str
    match: Literal["whole", "search"] = "whole"
    """`whole`: the whole response but for white space around it. `search`: any piece of it."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        return checked_pattern(pattern)

    def __call__(self, sample: Sample) -> bool:
        match = re.fullmatch if self.match == "whole" else re.search
        return match(self.pattern, sample.response.strip(), re.DOTALL) is not None
