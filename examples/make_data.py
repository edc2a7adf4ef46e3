"""Writes the files in examples/data, the same ones every time: python examples/make_data.py

Rows stand in a random order, so that `split` in a config can hold some of them out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from cadenza.datasets import DataConfig, open_dataset

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
    while len(rows) < 3000:
        numbers = rng.sample(range(10, 100), 3)
        prompt = " ".join(f"{letter}{number}" for letter, number in zip("ABC", numbers, strict=True)) + " largest:"
        rows[prompt] = {"prompt": prompt, "answer": "ABC"[numbers.index(max(numbers))]}
    return list(rows.values())


def words(count: int) -> list[Row]:
    """The first words to spell backward that the domain 'backward' of rlvr-domains.yaml trains."""
    domain = yaml.safe_load((DATA.parent / "rlvr-domains.yaml").read_text(encoding="utf-8"))["domains"]["backward"]
    dataset = open_dataset(DataConfig.model_validate(domain["data"]), key="", seed=0)
    rows = [dataset.row(index) for index in range(count)]
    return [{"prompt": row["messages"][0]["content"], "answer": row["answer"]} for row in rows]


def main() -> None:
    added, largest = sums(random.Random(0)), choices(random.Random(1))
    write("sums.jsonl", added)
    write("largest.jsonl", largest)
    write("digits-chat.jsonl", digits(random.Random(2)))
    worked = [*added[TRAINED], *largest[TRAINED][:15], *words(125)]  # a few show the form; sums want more
    write("three-domains-worked.jsonl", ({"prompt": row["prompt"], "response": row["answer"]} for row in worked))


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    main()
