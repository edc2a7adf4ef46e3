"""The examples that learn from rows run as they are, for a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_cases import cadenza

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for name in ("sft", "dpo", "reward-model", "distill"):
        done = cadenza("train", f"examples/{name}.yaml", "steps=2", "trackers=[]", "--json")
        assert (done.code, done.figures["steps"]) == (0, 2), done.err
        assert done.figures["loss_last"] < done.figures["loss_first"]
