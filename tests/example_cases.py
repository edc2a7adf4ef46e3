"""Runs on rows, small enough for a test: sums of one digit, a policy of one layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pipeline_cases import Done, cadenza

TINY: dict[str, Any] = {
    "name": "tiny",
    "out": "runs",
    "steps": 6,
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "data": "train.jsonl",
    "actor": {"lr": 1e-2, "batch_size": 8},
    "checkpoint": {"every": 2},
    "trackers": [],
}
SUMS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "no idea"} for row in SUMS]


def write_rows(rows: Sequence[Any], name: str = "train.jsonl") -> Path:
    """The rows as a file in the working directory; one that is text is written as it is."""
    path = Path(name)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def config_file(**values: Any) -> Path:
    """TINY with other values at its top, as a file in the working directory."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump({**TINY, **values}), encoding="utf-8")
    return path


def trained(*overrides: str, **values: Any) -> Done:
    """A run that must come to its end."""
    done = cadenza("train", config_file(**values), *overrides, "--json")
    assert done.code == 0, done.err
    return done
