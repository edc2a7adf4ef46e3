"""What envs on a text board share: the answer styles, the count of steps, and the texts around the board."""

from __future__ import annotations

from cadenza.envs.directions import ANSWERS, Style, check_style, parse


class BoardEnv:
    """Base class of envs whose answers are directions on a board.

    An answer that is no direction moves nothing, counts as a step and costs `invalid_penalty`.
    """

    __slots__ = ("_invalid", "_penalty", "_player", "_repeat", "_steps", "max_steps", "style")

    blocked = ""
    """Text for a move that a wall or the edge stops, in the style 'chat'."""

    def __init__(self, *, style: Style, repeat_rules: bool, invalid_penalty: float) -> None:
        check_style(style)
        if invalid_penalty < 0:
            raise ValueError(f"invalid_penalty must be >= 0, got {invalid_penalty}")
        self.style: Style = style
        self.max_steps = 0
        self._repeat = repeat_rules
        self._penalty = invalid_penalty
        self._player = -1
        self._steps = self._invalid = 0

    @property
    def actions(self) -> tuple[str, ...]:
        """Every well-formed answer: a format-only cold start draws from them."""
        return ANSWERS[self.style]

    def _rules(self) -> str:
        raise NotImplementedError

    def _begin(self, player: int, board: str) -> str:
        """Start an episode with the player on a cell; returns the first observation."""
        self._player = player
        self._steps = self._invalid = 0
        return board if self.style == "compact" else f"{self._rules()}\n\n{board}"

    def _count(self, action: str, *, over: bool) -> str | None:
        """Count a step; returns the letter of the direction, or None when the answer is no direction."""
        if over or self._steps >= self.max_steps:
            raise RuntimeError("step after the end of the episode; call reset")
        self._steps += 1
        letter = parse(action, self.style)
        if letter is None:
            self._invalid += 1
        return letter

    def _observe(self, board: str, *, valid: bool, moved: bool) -> str:
        """Return the observation after a step: the board, and in the style 'chat' what happened."""
        if self.style == "compact":
            return board
        said = [self._rules()] if self._repeat else []
        if not valid:
            said.append("That was no direction, so you did not move. Answer like this: <answer>Right</answer>")
        elif not moved:
            said.append(self.blocked)
        said.append(f"{self.max_steps - self._steps} steps left.")
        return f"{' '.join(said)}\n\n{board}"

    def _info(self, success: bool) -> dict[str, bool | int]:
        return {"success": success, "steps": self._steps, "invalid": self._invalid}


def check_map(rows: tuple[str, ...], symbols: str, meaning: str) -> None:
    """Refuse a map whose rows differ in length, or that has a symbol which is not in `symbols`."""
    if not rows or any(len(row) != len(rows[0]) or not row for row in rows):
        raise ValueError(f"map must have rows of one length, got {list(rows)}")
    for number, row in enumerate(rows):
        for symbol in row:
            if symbol not in symbols:
                raise ValueError(f"map row {number} has the symbol '{symbol}'; use {meaning}")
