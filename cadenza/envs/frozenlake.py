"""FrozenLake in text: walk over the ice to the goal, around the holes.

    P...    P player    . ice    O hole    G goal
    .O.O    X the player in a hole    * the player at the goal
    ...O
    O..G    one step is Left, Down, Right or Up; the edge holds the player back

Every board can be solved within `max_steps`. A board depends on the seed and the arguments, and on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cadenza.envs.board import BoardEnv, check_map
from cadenza.envs.directions import LETTERS, Style, answer, deltas
from cadenza.envs.protocol import Outcome

MAPS = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": ("SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"),
}
"""The maps of gymnasium."""
SYMBOLS = {"S": "P", "P": "P", "F": ".", ".": ".", "H": "O", "O": "O", "G": "G"}
"""Symbols of a map, and those of the board that they mean."""
MAX_DRAWS = 100
"""Random boards that are tried before a path is cut into an unsolvable one."""


@dataclass(frozen=True, slots=True)
class LakeBoard:
    """A board of ice, holes and a goal."""

    text: str
    """Rows of '.', 'O' and 'G', each with its newline; without the player."""
    start: int
    """First cell of the player, as an index into `text`."""
    width: int

    @property
    def height(self) -> int:
        return len(self.text) // (self.width + 1)

    def show(self, player: int) -> str:
        """Return the board with the player on it."""
        here = _PLAYER_ON[self.text[player]]
        return f"{self.text[:player]}{here}{self.text[player + 1 :]}"

    def distance(self, player: int) -> int | None:
        """Return the fewest steps to the goal; None when there is no way."""
        # The cells in reach are the bits of one number, so a step in all directions is four shifts.
        last = len(self.text) - 1
        free = int(self.text.translate(_FREE), 2)
        goals = int(self.text.translate(_GOAL), 2)
        down = self.width + 1
        reach, before, steps = 1 << (last - player), 0, 0
        while not reach & goals:
            if reach == before:
                return None
            before = reach
            reach |= (reach << 1 | reach >> 1 | reach << down | reach >> down) & free
            steps += 1
        return steps

    def path(self, player: int) -> list[str] | None:
        """Return the letters of a shortest way to the goal; None when there is none."""
        moves = deltas(self.width)
        text, size = self.text, len(self.text)
        came: dict[int, tuple[int, str]] = {player: (player, "")}
        queue = [player]
        for cell in queue:
            if text[cell] == "G":
                letters = []
                while cell != player:
                    cell, letter = came[cell]
                    letters.append(letter)
                return letters[::-1]
            for letter, delta in moves.items():
                near = cell + delta
                if 0 <= near < size and near not in came and text[near] in ".G":
                    came[near] = cell, letter
                    queue.append(near)
        return None


class FrozenLake(BoardEnv):
    """The env. Every observation shows the whole state, so rollouts may use a fresh context every turn."""

    __slots__ = ("_deltas", "_lake", "_random", "_seeded", "_slippery")

    blocked = "You did not move: that is the edge of the lake."

    def __init__(
        self,
        *,
        size: int = 4,
        map: str | Sequence[str] | None = None,
        holes: float = 0.2,
        slippery: bool = False,
        max_steps: int | None = None,
        style: Style = "compact",
        repeat_rules: bool = False,
        invalid_penalty: float = 0.0,
    ) -> None:
        """`map` is '4x4' or '8x8' (gymnasium's), or rows of S start, F or . ice, H or O hole, G goal. Without it every
        seed has a random board of `size` x `size` whose cells are holes with probability `holes`.

        `max_steps` is by default the number of cells. An answer that is no direction moves nothing, counts as a step
        and costs `invalid_penalty`. On slippery ice a step goes to either side as often as ahead; the slips come from
        the seed. `repeat_rules` puts the rules of the style 'chat' before every board instead of the first: rollouts
        with a fresh context every turn need it.
        """
        super().__init__(style=style, repeat_rules=repeat_rules, invalid_penalty=invalid_penalty)
        self._slippery = slippery
        self._lake: LakeBoard | None = None
        self._seeded: tuple[int, float, int] | None = None
        if map is None:
            _check_random(size, holes, max_steps)
            self.max_steps = size * size if max_steps is None else max_steps
            self._seeded = size, holes, self.max_steps
            width = size
        else:
            lake, shortest = _fixed(map if isinstance(map, str) else tuple(map))
            self.max_steps = lake.width * lake.height if max_steps is None else max_steps
            if self.max_steps < shortest:
                raise ValueError(f"max_steps must be at least {shortest}, the way to the goal, got {max_steps}")
            self._lake = lake
            width = lake.width
        self._deltas = deltas(width)
        self._random: random.Random | None = None

    @property
    def optimal_steps(self) -> int:
        """Fewest steps from the player's cell to the goal, if nothing slips."""
        return self._board().distance(self._player) or 0

    def solution(self) -> list[str]:
        """Return answers that lead to the goal on a shortest way, if nothing slips: a demonstration."""
        path = self._board().path(self._player)
        return [answer(letter, self.style) for letter in path or ()]

    def render(self) -> str:
        """Return the board as rows of characters."""
        return self._board().show(self._player).removesuffix("\n")

    async def reset(self, seed: int) -> str:
        if self._seeded is not None:
            self._lake = _drawn(seed, *self._seeded)
        lake = self._board(started=False)
        self._random = random.Random(f"slips {seed}") if self._slippery else None
        return self._begin(lake.start, lake.show(lake.start))

    async def step(self, action: str) -> Outcome:
        lake = self._board()
        text, here = lake.text, self._player
        letter = self._count(action, over=text[here] != ".")
        reward = 0.0
        if letter is None:
            reward -= self._penalty
        else:
            if self._random is not None:
                letter = LETTERS[(LETTERS.index(letter) + self._random.randrange(-1, 2)) % 4]
            there = here + self._deltas[letter]
            if 0 <= there < len(text) and text[there] != "\n":
                self._player = there
        cell = text[self._player]
        success = cell == "G"
        if success:
            reward += 1.0
        terminated = cell != "."
        truncated = not terminated and self._steps >= self.max_steps
        board = self._observe(lake.show(self._player), valid=letter is not None, moved=self._player != here)
        return board, reward, terminated, truncated, self._info(success)

    def _board(self, started: bool = True) -> LakeBoard:
        if self._lake is None or (started and self._player < 0):
            raise RuntimeError("there is no board yet; call reset")
        return self._lake

    def _rules(self) -> str:
        slips = " The ice is slippery: you may slide to either side." if self._slippery else ""
        return (
            "You walk on a frozen lake. P is you, . is ice, O is a hole, G is the goal. Reach the goal and stay out of "
            f"the holes.{slips} You have {self.max_steps} steps. "
            "Take one step at a time: Left, Down, Right or Up. Answer like this: <answer>Right</answer>"
        )


_PLAYER_ON = {".": "P", "O": "X", "G": "*"}
_FREE = str.maketrans(".OG\n", "1010")
_GOAL = str.maketrans(".OG\n", "0010")


def _check_random(size: int, holes: float, max_steps: int | None) -> None:
    if size < 2:
        raise ValueError(f"size must be at least 2, got {size}")
    if not 0 <= holes <= 1:
        raise ValueError(f"holes must be a probability between 0 and 1, got {holes}")
    if max_steps is not None and max_steps < 2 * (size - 1):
        raise ValueError(f"max_steps must be at least {2 * (size - 1)}, the way from corner to corner, got {max_steps}")


@lru_cache(maxsize=64)
def _fixed(map: str | tuple[str, ...]) -> tuple[LakeBoard, int]:
    """Return the board of a given map, and its fewest steps."""
    if isinstance(map, str):
        if map not in MAPS:
            raise ValueError(f"map must be one of {', '.join(MAPS)} or a list of rows, got '{map}'")
        map = MAPS[map]
    check_map(map, "".join(SYMBOLS), "S (start), F or . (ice), H or O (hole), G (goal)")
    text = "".join("".join(SYMBOLS[symbol] for symbol in row) + "\n" for row in map)
    if text.count("P") != 1 or "G" not in text:
        raise ValueError(f"map must have one start S and a goal G, got {list(map)}")
    lake = LakeBoard(text.replace("P", "."), text.index("P"), len(map[0]))
    distance = lake.distance(lake.start)
    if distance is None:
        raise ValueError(f"map has no way from the start to the goal: {list(map)}")
    return lake, distance


@lru_cache(maxsize=4096)
def _drawn(seed: int, size: int, holes: float, max_steps: int) -> LakeBoard:
    """Return the board of a seed; it is cached, because the members of a group share it."""
    draw = random.Random(seed)
    for _ in range(MAX_DRAWS):
        lake = _lake(["O" if draw.random() < holes else "." for _ in range(size * size)], size)
        distance = lake.distance(0)
        if distance is not None and distance <= max_steps:
            return lake
    cells = list(lake.text.replace("\n", ""))
    cell, moves = 0, [1] * (size - 1) + [size] * (size - 1)
    draw.shuffle(moves)
    for move in moves:
        cell += move
        cells[cell] = "."
    return _lake(cells, size)


def _lake(cells: list[str], size: int) -> LakeBoard:
    cells[0], cells[-1] = ".", "G"
    return LakeBoard("".join("".join(cells[i : i + size]) + "\n" for i in range(0, size * size, size)), 0, size)
