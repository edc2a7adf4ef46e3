"""A CPU that announces AMX and cannot use it: the child that tries dies, this process and its children do not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import cpu

WITH_AMX = "processor\t: 0\nflags\t\t: fpu sse2 avx512f amx_bf16 avx512_fp16 amx_tile amx_int8\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n"
DIES = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")


@pytest.fixture(autouse=True)
def fresh_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is known of this machine, and what a test sets is taken back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(cpu.VARIABLE, "")
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.limit_onednn.cache_clear()
    yield
    cpu.limit_onednn.cache_clear()


def announce(monkeypatch: pytest.MonkeyPatch, probe: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A CPU with AMX, on which the probe is this program; the programs that were run."""
    runs: list[tuple[str, ...]] = []
    real = cpu.amx_works

    def amx_works() -> bool:
        runs.append(probe)
        return real(probe)

    monkeypatch.setattr(cpu, "announces_amx", lambda: True)
    monkeypatch.setattr(cpu, "amx_works", amx_works)
    return runs


@pytest.mark.parametrize(("text", "announced"), [(WITH_AMX, True), (WITHOUT, False), ("", False)])
def test_amx_is_read_from_the_flags_of_the_cpu(tmp_path: Path, text: str, announced: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert cpu.announces_amx(cpuinfo) is announced


def test_a_system_without_cpuinfo_announces_nothing(tmp_path: Path) -> None:
    assert not cpu.announces_amx(tmp_path / "nothing")


def test_a_child_that_dies_of_the_product_limits_onednn_here_and_in_children(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    announce(monkeypatch, DIES)
    with caplog.at_level(logging.WARNING, "cadenza"):
        cpu.limit_onednn()
    assert os.environ[cpu.VARIABLE] == cpu.WITHOUT_AMX
    (record,) = caplog.records
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in record.getMessage()
    program = "import os; print(os.environ['ONEDNN_MAX_CPU_ISA'])"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == cpu.WITHOUT_AMX


def test_a_child_that_survives_limits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, (sys.executable, "-c", ""))
    cpu.limit_onednn()
    assert cpu.VARIABLE not in os.environ


def test_a_child_that_fails_without_a_signal_says_nothing_about_the_cpu() -> None:
    assert cpu.amx_works((sys.executable, "-c", "raise ImportError('no torch')"))


def test_the_product_is_tried_once_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = announce(monkeypatch, DIES)
    cpu.limit_onednn()
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.limit_onednn.cache_clear()  # another process
    cpu.limit_onednn()
    assert len(runs) == 1
    assert os.environ[cpu.VARIABLE] == cpu.WITHOUT_AMX


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    runs = announce(monkeypatch, DIES)
    monkeypatch.setenv(variable, "AVX2")
    cpu.limit_onednn()
    assert not runs
    assert os.environ[variable] == "AVX2"


def test_the_probe_itself_runs_on_a_sound_machine() -> None:
    """With the instructions that every machine with AVX-512 and AMX has besides; the probe is a real product."""
    if cpu.announces_amx():
        pytest.skip("this CPU has AMX: whether it works is what the probe finds out")
    child = subprocess.run([sys.executable, "-c", cpu.PROBE], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
