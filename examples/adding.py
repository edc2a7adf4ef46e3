"""Sums of two digits, for a model that speaks: one is shown solved, one is asked."""

from typing import Any


class Adding:
    """The seed is the sum: 0 to 99 are all that there are."""

    def reset(self, seed: int) -> list[dict[str, str]]:
        one, two = divmod(seed % 100, 10)
        self.answer = str(one + two)
        return [
            {"role": "user", "content": "4 + 3 ="},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": f"{one} + {two} ="},
        ]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == self.answer
        return "", float(right), True, False, {"success": right}
