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


@pytest.mark.parametrize("name", ["rlvr-arithmetic", "rlvr-domains"])
def test_no_row_that_measures_an_example_is_trained_or_shown_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = cadenza("data", f"examples/{name}.yaml", "--json").figures["datasets"]
    held_out = {key: report for key, report in found.items() if key.endswith(".validation")}
    assert all(report["rows"] > 100 for report in held_out.values())
    assert [key for key, report in held_out.items() if report["also_in"]] == []
