"""Writes the files in examples/data, the same ones every time: python examples/make_data.py

Rows stand in a random order, so that `split` in a config can hold some of them out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym

DATA = Path(__file__).parent / "data"
TRAINED = slice(150, None)
"""The rows of a file that may be shown with their answers; those before are held out."""

Row = dict[str, Any]


def write(name: str, rows: Iterable[Row]) -> None:
    """The rows as a file of JSON lines."""
    (DATA / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sums(rng: random.Random) -> list[Row]:
    """All sums of a number from 10 to 89 and a digit."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 90) for b in range(10)]
    rng.shuffle(rows)
    return rows


def digits(rng: random.Random) -> list[Row]:
    """All sums of two digits for a chat model, which is shown one with its answer: without it, it talks."""
    shown = [{"role": "user", "content": "4 + 3 ="}, {"role": "assistant", "content": "7"}]
    rows = [
        {"messages": [*shown, {"role": "user", "content": f"{a} + {b} ="}], "answer": str(a + b)}
        for a in range(10)
        for b in range(10)
        if (a, b) != (4, 3)
    ]
    rng.shuffle(rows)
    return rows


def choices(rng: random.Random) -> list[Row]:
    """Which of three numbers is the largest, by its letter."""
    rows: dict[str, Row] = {}
    while len(rows) < 800:
        numbers = rng.sample(range(10, 100), 3)
        prompt = " ".join(f"{letter}{number}" for letter, number in zip("ABC", numbers, strict=True)) + " largest:"
        rows[prompt] = {"prompt": prompt, "answer": "ABC"[numbers.index(max(numbers))]}
    return list(rows.values())


def words() -> list[Row]:
    """Words of four letters to spell backward, from another seed than those that a run makes for itself."""
    tasks = reasoning_gym.create_dataset("spell_backward", size=240, seed=2026, min_word_len=4, max_word_len=4)
    return [{"prompt": f"{task['metadata']['word']} backward:", "answer": task["answer"]} for task in tasks]


def main() -> None:
    added, largest = sums(random.Random(0)), choices(random.Random(1))
    write("sums.jsonl", added)
    write("largest.jsonl", largest)
    write("digits-chat.jsonl", digits(random.Random(2)))
    worked = [*added[TRAINED], *largest[TRAINED][:60], *words()]  # a few show the form; sums want more
    write("three-domains-worked.jsonl", ({"prompt": row["prompt"], "response": row["answer"]} for row in worked))


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    main()
