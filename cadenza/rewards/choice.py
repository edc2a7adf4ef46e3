"""`choice`: multiple choice. The letter that the response settles on is the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from cadenza.errors import RewardError
from cadenza.rewards.base import ConfiguredReward, answers_of, row_problem
from cadenza.rewards.sample import Sample, Scored

LETTER = r"[\(\[\*_`\s{]*(?:\\text(?:bf|rm)?\{)?\(?([A-Z](?![A-Za-z'\u2019])|[a-z](?=[\W_]*$))"
PATTERNS = (
    r"\\boxed\{" + LETTER,
    r"\b(?i:answer|choice|option)(?i:\s+(?:is|would\s+be|must\s+be))?[\s:=*_]*(?i:option|choice)?" + LETTER,
    r"\b([A-Z]) (?:is|must be) (?:the )?(?:correct|right|true|best)",
    r"\(([A-Za-z])\)",
    r"^\W*([A-Za-z])\W*$",
    r"^\W*([A-Z])[.):](?!\w)",
)
"""Where letters stand, surest place first; of each the last match counts."""


class Choice(ConfiguredReward):
    """1 where the chosen letter is the answer of the row, else 0.

    The answer is a letter ('B'), the number of a choice (1 is the second), or the text of one of `choices` in the row;
    a list of answers accepts each of them. A response that gives the text of a choice instead of its letter counts too.
    """

    needs_answer = True
    letters: int = Field(default=10, gt=1, le=26)
    """How many letters can be meant, from A on; the row's `choices` say it where they are there."""
    choices_field: str = "choices"
    """The field of the row with the texts of the choices, in order."""

    def __call__(self, sample: Sample) -> Scored:
        letters, choices, right = self._meant(sample)
        chosen = chosen_letter(sample.response, letters) or _letter_of_text(sample.response, letters, choices)
        return Scored(float(chosen in right), chosen in right, note=f"chose {chosen or 'nothing'}")

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        return row_problem(self._meant, row)

    def _meant(self, sample: Sample) -> tuple[str, list[str], set[str]]:
        """The letters, the texts of the choices, and the letters that are right."""
        choices = [str(choice).strip() for choice in sample.row.get(self.choices_field) or ()]
        letters = string.ascii_uppercase[: len(choices) or self.letters]
        return letters, choices, {self._letter_of(answer, letters, choices, sample) for answer in answers_of(sample)}

    def _letter_of(self, answer: object, letters: str, choices: list[str], sample: Sample) -> str:
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
            return letters[answer]
        text = str(answer).strip()
        if text in choices:
            return letters[choices.index(text)]
        letter = text.strip("().").upper()
        if len(letter) == 1 and letter in letters:
            return letter
        raise RewardError(
            f"{sample.row_name} has the answer {answer!r}, which is none of the letters {letters[0]} to "
            f"{letters[-1]}, nor the number or text of a choice in '{self.choices_field}'"
        )


def chosen_letter(response: str, letters: str) -> str | None:
    """The letter that a response settles on, None if it does not."""
    for pattern in PATTERNS:
        found = [match[1].upper() for match in re.finditer(pattern, response, re.MULTILINE)]
        found = [letter for letter in found if letter in letters]
        if found:
            return found[-1]
    return None


def _letter_of_text(response: str, letters: str, choices: list[str]) -> str | None:
    """The letter of the one choice whose text the response ends with."""
    said = response.strip().rstrip(".").casefold()
    ends = [
        letter
        for letter, choice in zip(letters, choices, strict=False)  # there may be no texts
        if choice and re.search(rf"(?<!\w){re.escape(choice.casefold())}$", said)
    ]
    return ends[0] if len(ends) == 1 else None
