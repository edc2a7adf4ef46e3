"""Sums of two digits, for a chat model: the prompt shows one solved sum and asks for another."""

from typing import Any


class Adding:
    """The seed chooses the sum: there are 100."""

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
