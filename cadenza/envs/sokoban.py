"""Sokoban in text: push every box onto a target.

    ######    # wall    _ floor    O target
    #__X_#    X box     * box on a target
    #_P__#    P player  S player on a target
    #___O#
    #____#    one step is Left, Down, Right or Up; a step into a box pushes it, if the cell behind it is free
    ######

Boards are made backwards, by pulling boxes away from the targets, so every one can be solved: in at most `max_moves`
moves. A board depends on the seed and the arguments, and on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cadenza.envs.board import BoardEnv, check_map
from cadenza.envs.directions import Style, answer, deltas
from cadenza.envs.protocol import Outcome

SYMBOLS = "#_OX*PS"
MAX_LAYOUTS = 200
"""Layouts that are tried before the arguments are refused."""
FRONTIER = 256
"""Positions kept at each distance while a board is made backwards. Small boards have fewer, so that their distances
are exact; on larger ones a distance is a bound."""
SEARCH_LIMIT = 200_000
"""Positions that a search for a solution examines at most."""

Boxes = frozenset[int]


@dataclass(frozen=True, slots=True)
class SokobanBoard:
    """A board and its first position."""

    text: str
    """Rows of '#', '_' and 'O', each with its newline; without player and boxes."""
    width: int
    player: int
    """First cell of the player, as an index into `text`."""
    boxes: Boxes
    targets: Boxes

    def show(self, player: int, boxes: Boxes) -> str:
        """Return the board with player and boxes on it."""
        cells = list(self.text)
        for box in boxes:
            cells[box] = "*" if box in self.targets else "X"
        cells[player] = "S" if player in self.targets else "P"
        return "".join(cells)

    def move(self, player: int, boxes: Boxes, delta: int) -> tuple[int, Boxes]:
        """Return player and boxes after a step; they do not change when something is in the way."""
        there = player + delta
        if self.text[there] == "#":
            return player, boxes
        if there in boxes:
            behind = there + delta
            if self.text[behind] == "#" or behind in boxes:
                return player, boxes
            boxes = boxes - {there} | {behind}
        return there, boxes

    def solve(self, player: int, boxes: Boxes, limit: int = SEARCH_LIMIT) -> list[str] | None:
        """Return the letters of a shortest solution; None when `limit` positions do not contain one."""
        if boxes == self.targets:
            return []
        moves = deltas(self.width)
        dead = self._corners(moves)
        first = player, boxes
        came: dict[tuple[int, Boxes], tuple[tuple[int, Boxes], str]] = {first: (first, "")}
        queue = [first]
        for position in queue:
            for letter, delta in moves.items():
                after = self.move(*position, delta)
                if after in came or not dead.isdisjoint(after[1]):
                    continue
                came[after] = position, letter
                if after[1] == self.targets:
                    return _trace(came, after)
                queue.append(after)
            if len(came) > limit:
                return None
        return None

    def _corners(self, moves: dict[str, int]) -> set[int]:
        """Return the cells that a box never leaves again and that are no targets."""
        wall = [cell == "#" for cell in self.text]
        across, along = (moves["L"], moves["R"]), (moves["D"], moves["U"])
        return {
            cell
            for cell, symbol in enumerate(self.text)
            if symbol == "_" and any(wall[cell + a] for a in across) and any(wall[cell + a] for a in along)
        }


class Sokoban(BoardEnv):
    """The env. Every observation shows the whole state, so rollouts may use a fresh context every turn."""

    __slots__ = ("_box_reward", "_boxes", "_deltas", "_drawn", "_solved_reward", "_step_reward", "_warehouse")

    blocked = "You did not move: something is in the way."

    def __init__(
        self,
        *,
        size: int | Sequence[int] = 6,
        boxes: int = 1,
        walls: float = 0.15,
        min_moves: int = 4,
        max_moves: int = 20,
        map: Sequence[str] | None = None,
        max_steps: int = 40,
        style: Style = "compact",
        repeat_rules: bool = False,
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        solved_reward: float = 10.0,
        invalid_penalty: float = 0.0,
    ) -> None:
        """Every seed has a random board of `size` (a number, or rows and columns; the outer walls count) with `boxes`
        boxes and inner walls of density `walls`, whose shortest solution has between `min_moves` and `max_moves` moves.
        On large boards `max_moves` still holds, but some solutions are shorter than `min_moves`. `map` gives the rows
        of one board instead.

        A step pays `step_reward`. A box that comes onto a target pays `box_reward`, and takes it back when it leaves;
        the last one also pays `solved_reward`. An answer that is no direction moves nothing, counts as a step and
        costs `invalid_penalty`. `repeat_rules` puts the rules of the style 'chat' before every board instead of the
        first: rollouts with a fresh context every turn need it.
        """
        super().__init__(style=style, repeat_rules=repeat_rules, invalid_penalty=invalid_penalty)
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}")
        self.max_steps = max_steps
        self._step_reward = step_reward
        self._box_reward = box_reward
        self._solved_reward = solved_reward
        self._drawn: _BoardSpec | None = None
        self._warehouse: SokobanBoard | None = None
        if map is None:
            rows, columns = (size, size) if isinstance(size, int) else size
            self._drawn = _BoardSpec(
                rows=rows, columns=columns, boxes=boxes, walls=walls, min_moves=min_moves, max_moves=max_moves
            )
            self._drawn.check(max_steps)
            width = columns
        else:
            self._warehouse, moves = _fixed(tuple(map))
            width = self._warehouse.width
            if max_steps < moves:
                raise ValueError(f"max_steps must be at least {moves}, the solution of the map, got {max_steps}")
        self._deltas = deltas(width)
        self._boxes: Boxes = frozenset()

    @property
    def optimal_steps(self) -> int | None:
        """Fewest steps that solve the board from its present position; None when no solution was found."""
        letters = self._board().solve(self._player, self._boxes)
        return None if letters is None else len(letters)

    def solution(self, limit: int = SEARCH_LIMIT) -> list[str] | None:
        """Return answers that solve the board from its present position in the fewest steps: a demonstration. None when
        `limit` positions do not contain a solution."""
        letters = self._board().solve(self._player, self._boxes, limit)
        return None if letters is None else [answer(letter, self.style) for letter in letters]

    def render(self) -> str:
        """Return the board as rows of characters."""
        return self._board().show(self._player, self._boxes).removesuffix("\n")

    async def reset(self, seed: int) -> str:
        if self._drawn is not None:
            self._warehouse = _draw(seed, self._drawn)
        warehouse = self._board(started=False)
        self._boxes = warehouse.boxes
        return self._begin(warehouse.player, warehouse.show(warehouse.player, warehouse.boxes))

    async def step(self, action: str) -> Outcome:
        warehouse = self._board()
        targets, player, boxes = warehouse.targets, self._player, self._boxes
        letter = self._count(action, over=boxes == targets)
        reward = self._step_reward
        if letter is None:
            reward -= self._penalty
        else:
            self._player, self._boxes = warehouse.move(player, boxes, self._deltas[letter])
        if self._boxes is not boxes:
            reward += self._box_reward * (len(self._boxes & targets) - len(boxes & targets))
        solved = self._boxes == targets
        if solved:
            reward += self._solved_reward
        truncated = not solved and self._steps >= self.max_steps
        board = warehouse.show(self._player, self._boxes)
        board = self._observe(board, valid=letter is not None, moved=self._player != player)
        return board, reward, solved, truncated, self._info(solved)

    def _board(self, started: bool = True) -> SokobanBoard:
        if self._warehouse is None or (started and self._player < 0):
            raise RuntimeError("there is no board yet; call reset")
        return self._warehouse

    def _rules(self) -> str:
        return (
            "You push boxes in a warehouse. # is a wall, _ is floor, O is a target, X is a box, * is a box on a "
            "target, P is you, S is you on a target. Push every box onto a target. You cannot pull a box, nor push "
            f"two at once. You have {self.max_steps} steps. "
            "Take one step at a time: Left, Down, Right or Up. Answer like this: <answer>Right</answer>"
        )


@dataclass(frozen=True, slots=True)
class _BoardSpec:
    """The kind of board to draw."""

    rows: int
    columns: int
    boxes: int
    walls: float
    min_moves: int
    max_moves: int

    def check(self, max_steps: int) -> None:
        if min(self.rows, self.columns) < 3:
            raise ValueError(f"size must be at least 3, the outer walls included, got {self.rows} x {self.columns}")
        if self.boxes < 1:
            raise ValueError(f"boxes must be at least 1, got {self.boxes}")
        if not 0 <= self.walls < 1:
            raise ValueError(f"walls must be a density between 0 and 1, got {self.walls}")
        if not 1 <= self.min_moves <= self.max_moves:
            raise ValueError(f"min_moves must lie between 1 and max_moves {self.max_moves}, got {self.min_moves}")
        if self.max_moves > max_steps:
            raise ValueError(f"max_steps must be at least max_moves {self.max_moves}, got {max_steps}")


@lru_cache(maxsize=4096)
def _draw(seed: int, wanted: _BoardSpec) -> SokobanBoard:
    """Return the board of a seed; it is cached, because the members of a group share it."""
    draw = random.Random(seed)
    for _ in range(MAX_LAYOUTS):
        text, floor = _layout(draw, wanted)
        if len(floor) < 2 * wanted.boxes + 1:
            continue
        targets = frozenset(draw.sample(floor, wanted.boxes))
        positions = _pulled(draw, text, floor, targets, wanted)
        if positions:
            player, boxes = draw.choice(draw.choice(positions))
            marked = "".join("O" if cell in targets else symbol for cell, symbol in enumerate(text))
            return SokobanBoard(marked, wanted.columns, player, boxes, targets)
    raise ValueError(
        f"no board of {wanted.rows} x {wanted.columns} with {wanted.boxes} boxes and walls {wanted.walls} was found "
        f"that takes {wanted.min_moves} to {wanted.max_moves} moves; lower min_moves, boxes or walls, or raise size"
    )


def _layout(draw: random.Random, wanted: _BoardSpec) -> tuple[str, list[int]]:
    """Draw walls and floor; returns the text and the cells of the floor. Only the largest connected region is floor."""
    inner = [
        "".join("#" if draw.random() < wanted.walls else "_" for _ in range(wanted.columns - 2))
        for _ in range(wanted.rows - 2)
    ]
    edge = "#" * wanted.columns + "\n"
    text = edge + "".join(f"#{row}#\n" for row in inner) + edge
    moves = deltas(wanted.columns).values()
    rest = {cell for cell, symbol in enumerate(text) if symbol == "_"}
    largest: list[int] = []
    while rest:
        region = [min(rest)]
        rest.discard(region[0])
        for cell in region:
            near = [cell + delta for delta in moves if cell + delta in rest]
            rest.difference_update(near)
            region += near
        largest = max(largest, region, key=len)
    floor = set(largest)
    text = "".join("#" if symbol == "_" and cell not in floor else symbol for cell, symbol in enumerate(text))
    return text, sorted(floor)


def _pulled(
    draw: random.Random, text: str, floor: list[int], targets: Boxes, wanted: _BoardSpec
) -> list[list[tuple[int, Boxes]]]:
    """Return positions that are solved in the wanted number of moves, grouped by that number. The search goes backwards
    from all solved positions: a move backwards is a step back, with or without the box ahead."""
    frontier = [(player, targets) for player in floor if player not in targets]
    seen = set(frontier)
    found: list[list[tuple[int, Boxes]]] = []
    moves = deltas(wanted.columns).values()
    for distance in range(1, wanted.max_moves + 1):
        before: list[tuple[int, Boxes]] = []
        for player, boxes in frontier:
            for delta in moves:
                back, ahead = player - delta, player + delta
                if text[back] == "#" or back in boxes:
                    continue
                steps = [(back, boxes)]
                if ahead in boxes:
                    steps.append((back, boxes - {ahead} | {player}))
                for position in steps:
                    if position not in seen:
                        seen.add(position)
                        before.append(position)
        if not before:
            break
        if distance >= wanted.min_moves:
            found.append(before)
        frontier = before if len(before) <= FRONTIER else draw.sample(before, FRONTIER)
    return found


def _trace(came: dict[tuple[int, Boxes], tuple[tuple[int, Boxes], str]], position: tuple[int, Boxes]) -> list[str]:
    """Return the letters that lead from the first position to this one."""
    letters: list[str] = []
    while True:
        position, letter = came[position]
        if not letter:
            return letters[::-1]
        letters.append(letter)


@lru_cache(maxsize=64)
def _fixed(rows: tuple[str, ...]) -> tuple[SokobanBoard, int]:
    """Return the board of a given map, and its fewest moves."""
    check_map(
        rows,
        SYMBOLS,
        "# (wall), _ (floor), O (target), X (box), * (box on a target), P (player), S (player on a target)",
    )
    edge = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    if edge.strip("#"):
        raise ValueError(f"map must have walls # all around, got {list(rows)}")
    text = "".join(row + "\n" for row in rows)
    players = [cell for cell, symbol in enumerate(text) if symbol in "PS"]
    boxes = frozenset(cell for cell, symbol in enumerate(text) if symbol in "X*")
    targets = frozenset(cell for cell, symbol in enumerate(text) if symbol in "O*S")
    if len(players) != 1 or not boxes or len(boxes) != len(targets) or boxes == targets:
        raise ValueError(
            "map must have one player, and as many targets as boxes, not all of them covered; "
            f"got {len(players)} players, {len(boxes)} boxes, {len(targets)} targets"
        )
    floor = text.translate(str.maketrans("XP*S", "__OO"))
    warehouse = SokobanBoard(floor, len(rows[0]), players[0], boxes, targets)
    letters = warehouse.solve(players[0], boxes)
    if letters is None:
        raise ValueError(f"map has no solution among {SEARCH_LIMIT:,} positions: {list(rows)}")
    return warehouse, len(letters)
