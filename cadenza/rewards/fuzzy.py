"""`fuzzy`: how much the response is like the answer."""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from typing import Literal

from pydantic import Field

from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.text import TextReward


class Fuzzy(TextReward):
    """From 0 to 1, the likeness to the answer that is nearest."""

    metric: Literal["ratio", "token_f1"] = "ratio"
    """`ratio`: the share of characters in common blocks (difflib). `token_f1`: the harmonic mean of precision and
    recall of words, as question answering counts it."""
    success_at: float = Field(default=1.0, gt=0, le=1)
    """The likeness from which on the task counts as solved."""

    def __call__(self, sample: Sample) -> Scored:
        answers, found = self.right_texts(sample), self.extracted(sample)
        likeness = _ratio if self.metric == "ratio" else _token_f1
        best = 0.0 if found is None else max(likeness(self.normalised(found), answer) for answer in answers)
        return Scored(best, best >= self.success_at)


def _ratio(text: str, answer: str) -> float:
    return SequenceMatcher(None, text, answer, autojunk=False).ratio()


def _token_f1(text: str, answer: str) -> float:
    words, wanted = Counter(text.split()), Counter(answer.split())
    if not words or not wanted:
        return float(words == wanted)
    return 2 * (words & wanted).total() / (words.total() + wanted.total())
