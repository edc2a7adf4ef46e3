"""`exact`: the response is the answer, letter by letter once both are normalised."""

from __future__ import annotations

from cadenza.rewards.sample import Sample
from cadenza.rewards.text import TextReward


class Exact(TextReward):
    """1 where the response is the answer of the row, or one of them; else 0."""

    def __call__(self, sample: Sample) -> bool:
        answers, found = self.right_texts(sample), self.extracted(sample)
        return found is not None and self.normalised(found) in answers
