from __future__ import annotations

import json

import pytest
from sandbox_cases import needs_bwrap

from cadenza.benchmarks import sandbox


@needs_bwrap
def test_the_benchmark_prints_what_scripts_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "PROGRAMS", 3)
    monkeypatch.setattr(sandbox, "ROUNDS", 1)
    assert sandbox.sandbox(as_json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["programs_per_second"] > 0
    assert figures["python_startup_cpu_ms"] > 0
    assert "cpu_ms_per_program" in figures
