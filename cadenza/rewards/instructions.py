"""`instructions`: the response keeps to constraints that a program can check (constraints.py)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cadenza.errors import RewardError
from cadenza.rewards.base import ConfiguredReward, row_problem
from cadenza.rewards.constraints import CONSTRAINTS
from cadenza.rewards.sample import Sample, Scored


class Instructions(ConfiguredReward):
    """The share of the row's constraints that the response keeps to; an empty response keeps to none.

    The field `instructions` of the row is a list, or its JSON: `[{"kind": "words", "at_most": 50}, {"kind": "json"}]`.
    The share that is kept of each kind is a part.
    """

    score: Literal["share", "all"] = "share"
    """`all` pays 1 for a response that keeps to all of them, and else 0."""
    field: str = "instructions"
    """The field of the row that has them."""

    def __call__(self, sample: Sample) -> Scored:
        kept: list[tuple[str, bool]] = []
        for instruction in self._instructions(sample):
            arguments = {str(key): value for key, value in instruction.items() if value is not None}
            kind = str(arguments.pop("kind", ""))
            kept.append((kind, self._check(kind, arguments, sample)))
        share = sum(is_kept for _, is_kept in kept) / len(kept)
        parts = {kind: _share_of(kind, kept) for kind, _ in kept}
        broken = ", ".join(dict.fromkeys(kind for kind, is_kept in kept if not is_kept))
        value = float(share == 1.0) if self.score == "all" else share
        return Scored(value, share == 1.0, parts, f"not kept: {broken}" if broken else "")

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        return row_problem(self, row)

    def _instructions(self, sample: Sample) -> Sequence[Mapping[str, Any]]:
        found = sample.get(self.field)
        try:
            found = json.loads(found) if isinstance(found, str) else found
        except ValueError:
            found = None
        if not isinstance(found, Sequence) or not found or not all(isinstance(item, Mapping) for item in found):
            raise RewardError(
                f"{sample.row_name} has '{self.field}' {sample.get(self.field)!r}; it must be a list "
                "of constraints as {kind: words, at_most: 50}"
            )
        return found

    def _check(self, kind: str, arguments: Mapping[str, Any], sample: Sample) -> bool:
        check = CONSTRAINTS.get(kind)
        place = f"'{self.field}' of {sample.row_name}"
        if check is None:
            near = difflib.get_close_matches(kind, CONSTRAINTS, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(CONSTRAINTS)}"
            raise RewardError(f"{place}: kind {kind!r} is no constraint; {hint}")
        try:
            return bool(sample.response.strip()) and check(sample.response, **arguments)
        except (TypeError, ValueError) as error:
            raise RewardError(f"{place}: {kind} with {dict(arguments)!r}: {error}") from error


def _share_of(kind: str, kept: Sequence[tuple[str, bool]]) -> float:
    of_kind = [is_kept for name, is_kept in kept if name == kind]
    return sum(of_kind) / len(of_kind)
