"""The episodes of a report: a choice from samples.jsonl, shown turn by turn.

samples.jsonl is read twice: once for an `EpisodeRef` of every line, and again at the offsets of the chosen ones.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

from cadenza.observe.run import parse_line

EPISODES = 12
"""Episodes in each of the five sections at most."""
SECTION = 240_000
"""Bytes of a section at most."""
EPISODE = 16_000
"""Characters of an episode at most, before they are escaped."""
TURNS = 40
"""Turns of an episode at most."""


class EpisodeRef(NamedTuple):
    """The offset of an episode in samples.jsonl, and the values by which it is chosen."""

    offset: int
    """Bytes before its line."""
    step: int
    score: float | None
    mode: str
    turns: int


def episodes_html(path: Path) -> str:
    """Return the section with early, middle, late, best and worst episodes; empty when the run has none."""
    episodes = find_episodes(path)
    if not episodes:
        return ""
    note = (
        f"{len(episodes):,} are in samples.jsonl, these are some of them. What changed since the last turn is marked."
    )
    pieces = [f"<h2>Episodes</h2><p class='faint'>{note}</p>"]
    with path.open("rb") as lines:
        for title, few in choose(episodes).items():
            if few:
                pieces.append(f"<h3>{title}</h3>")
                pieces.append(_section(lines, few))
    return "".join(pieces)


def find_episodes(path: Path) -> list[EpisodeRef]:
    """Return a reference to every episode in the file."""
    episodes = []
    offset = 0
    if not path.exists():
        return []
    with path.open("rb") as lines:
        for line in lines:
            if (record := _record(line)) is not None:
                score = record.get("score")
                number = float(score) if isinstance(score, (int, float)) else None
                turns = len(record["turns"])
                episodes.append(EpisodeRef(offset, record["step"], number, str(record.get("mode")), turns))
            offset += len(line)
    return episodes


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the episode of a line, or None when the line is not one."""
    record = parse_line(line)
    known = record is not None and isinstance(record.get("step"), int) and isinstance(record.get("turns"), list)
    return record if known else None


def choose(episodes: Sequence[EpisodeRef]) -> dict[str, list[EpisodeRef]]:
    """Choose episodes of the first, the middle and the last sixth of the run, the best and the worst."""
    first, last = min(episode.step for episode in episodes), max(episode.step for episode in episodes)
    sixth = (last - first) / 6
    middle = (first + last) / 2
    spans = {
        "Early": (first, first + sixth),
        "Middle": (middle - sixth / 2, middle + sixth / 2),
        "Late": (last - sixth, last),
    }
    chosen = {name: _spread([p for p in episodes if low <= p.step <= high]) for name, (low, high) in spans.items()}
    # Of equals, the latest: it says most about the trained model.
    scored = [(episode.score, episode) for episode in episodes if episode.score is not None]
    best = sorted(scored, key=lambda pair: (-pair[0], -pair[1].step, pair[1].turns))
    if best and best[0][0] > best[-1][0]:
        worst = sorted(scored, key=lambda pair: (pair[0], -pair[1].step, -pair[1].turns))
        chosen["Best"], chosen["Worst"] = ([episode for _, episode in few[: EPISODES // 2]] for few in (best, worst))
    return chosen


def _spread(episodes: Sequence[EpisodeRef]) -> list[EpisodeRef]:
    """Choose at most `EPISODES` episodes, evenly from training and from validation."""
    kinds = [
        [episode for episode in episodes if episode.mode == mode] for mode in dict.fromkeys(p.mode for p in episodes)
    ]
    chosen: list[EpisodeRef] = []
    for kind in kinds:
        share = max(2, EPISODES // len(kinds))
        chosen += kind if len(kind) <= share else [kind[at * (len(kind) - 1) // (share - 1)] for at in range(share)]
    return sorted(chosen, key=lambda episode: episode.offset)[:EPISODES]


def _section(lines: IO[bytes], episodes: Sequence[EpisodeRef]) -> str:
    pieces: list[str] = []
    size = 0
    for number, episode in enumerate(episodes):
        lines.seek(episode.offset)
        record = _record(lines.readline())
        piece = "" if record is None else _episode(record)
        size += len(piece.encode("utf-8", "replace"))
        if size > SECTION:
            pieces.append(f"<p class='faint'>{len(episodes) - number} more were too long to be shown.</p>")
            break
        pieces.append(piece)
    return f'<div class="rollouts">{"".join(pieces)}</div>'


def _episode(record: Mapping[str, Any]) -> str:
    turns = [turn for turn in record["turns"] if isinstance(turn, dict)]
    shown = list(enumerate(turns, 1))
    if len(shown) > TURNS:
        shown = shown[: TURNS // 2] + shown[-TURNS // 2 :]
    limit = max(80, EPISODE // max(1, 2 * len(shown)))
    frames = []
    before: tuple[int, str] = (0, "")
    for number, turn in shown:
        if number > before[0] + 1:
            frames.append(f'<div class="frame">{number - before[0] - 1} turns<br>left out</div>')
        prompt = clip(str(turn.get("prompt", "")), limit)
        frames.append(_frame(number, prompt, before[1], turn, limit))
        before = (number, prompt)
    if isinstance(final := record.get("final"), str) and final.strip():
        frames.append(_frame("end", clip(final, limit), before[1], {}, limit))
    return f'<div class="rollout">{_title(record, len(turns))}<div class="film">{"".join(frames)}</div></div>'


def _title(record: Mapping[str, Any], turns: int) -> str:
    success = record.get("success")
    result = ""
    if isinstance(success, bool):
        result = '<b class="good">success</b>' if success else '<b class="bad">no success</b>'
    versions = dict.fromkeys(str(version) for version in record.get("versions") or ())
    facts = [
        f"score {_score(record.get('score'))}",
        f"{turns} turn{'' if turns == 1 else 's'}",
        str(record.get("mode", "")),
        str(record.get("fate", "")),
        f"version {' to '.join(versions)}" if versions else "",
    ]
    domain, task = str(record.get("domain", "")), str(record.get("task", ""))
    name = html.escape(task if task.startswith(domain) else f"{domain} {task}")
    rest = html.escape(" · ".join(fact for fact in facts if fact))
    step = f"<b>step {record['step']:,}</b>"
    return f'<header>{step}{result}<span>{name}</span><span class="faint">{rest}</span></header>'


def _score(score: object) -> str:
    return f"{score:.3g}" if isinstance(score, (int, float)) else "unknown"


def _frame(name: int | str, prompt: str, before: str, turn: Mapping[str, Any], limit: int) -> str:
    reward = turn.get("reward")
    paid = ""
    if isinstance(reward, (int, float)) and reward:
        paid = f'<span class="{"good" if reward > 0 else "bad"}">{reward:+.3g}</span>'
    seen = "".join(_block(block, old) for block, old in _blocks(prompt, before))
    said = ""
    if "response" in turn:
        said = f'<div class="said"><pre>{html.escape(clip(str(turn["response"]), limit))}</pre></div>'
    return (
        f'<div class="frame"><small>{name}{paid}</small><div class="turn">'
        f'<div class="seen">{seen}</div>{said}</div></div>'
    )


def clip(text: str, limit: int) -> str:
    """Return the beginning and the end of a long text; boards are most often at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]}\n… {len(text) - limit:,} characters left out …\n{text[-(limit - limit // 3) :]}"


def _blocks(prompt: str, before: str) -> list[tuple[str, str]]:
    """Split a prompt at empty lines, and pair each board with the same board of the turn before."""
    boards = iter([block for block in _split(before) if _is_board(block)])
    return [(block, next(boards, "") if _is_board(block) else "") for block in _split(prompt)]


def _split(text: str) -> list[str]:
    return [block for block in re.split(r"\n[ \t]*\n", text.strip("\n")) if block.strip()]


def _is_board(block: str) -> bool:
    """Whether a block is a board: several rows of one length, without words."""
    rows = block.split("\n")
    even = len({len(row) for row in rows}) == 1
    return len(rows) > 1 and even and len(rows[0]) <= 60 and not re.search(r"[A-Za-z]{3,} [A-Za-z]{2,}", block)


def _block(block: str, before: str) -> str:
    if not _is_board(block):
        return f"<pre>{html.escape(block)}</pre>"
    same = [len(row) for row in block.split("\n")] == [len(row) for row in before.split("\n")]
    return f'<pre class="board">{_cells(block, before if same else block)}</pre>'


def _cells(board: str, before: str) -> str:
    """Mark the cells that have changed, and make empty ones faint."""
    out = []
    start = 0
    kinds = ["b" if new != old else "s" if new in "._" else "" for new, old in zip(board, before, strict=True)]
    for at, (kind, following) in enumerate(zip_longest(kinds, kinds[1:]), 1):
        if kind != following:
            run = html.escape(board[start:at])
            out.append(f"<{kind}>{run}</{kind}>" if kind else run)
            start = at
    return "".join(out)
