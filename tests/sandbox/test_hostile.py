"""Hostile programs are contained: each is its own failure, and the host is as it was."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from hostile_attacks import ATTACKS
from hostile_greed import GREED, PRELUDE, Hostile
from sandbox_cases import SECRET, WatchedHost, needs_bwrap

from cadenza.sandbox import Sandbox, SandboxLimits

pytestmark = needs_bwrap
LIMITS = SandboxLimits(
    wall_seconds=100, cpu_seconds=20, memory_mb=128, processes=16, file_mb=8, open_files=64, files=2000,
    output_bytes=1 << 16, tmp_mb=16,
)  # fmt: skip
PROGRAMS = GREED + ATTACKS
KINDS = {"patient": {}, "short_wall": {"wall_seconds": 1.0}, "short_cpu": {"cpu_seconds": 0.5}}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedHost]:
    host = WatchedHost(tmp_path_factory.mktemp("host"))
    yield host
    host.close()


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner, host: WatchedHost) -> Iterator[dict[str, Sandbox]]:
    sandboxes = {kind: Sandbox(LIMITS.model_copy(update=update), concurrency=1) for kind, update in KINDS.items()}
    for sandbox in sandboxes.values():
        runner.run(sandbox.open())
    yield sandboxes
    for sandbox in sandboxes.values():
        runner.run(sandbox.close())


def test_there_are_many_hostile_programs() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 100


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_hostile_program_fails_alone(
    program: Hostile, runner: asyncio.Runner, sandboxes: dict[str, Sandbox], host: WatchedHost
) -> None:
    code = PRELUDE + host.names() + program.code
    result = runner.run(sandboxes[program.kind].run(["python3", "-S", "-c", code]))
    shown = result.stderr[-2000:].decode(errors="replace")
    assert not result.ok, "it counts as a failure of the program"
    assert result.outcome in program.outcomes, shown
    assert SECRET.encode() not in result.stdout + result.stderr
    assert len(result.stdout) <= LIMITS.output_bytes
    assert not re.search("NameError|SyntaxError|ImportError|AttributeError", shown), "the attack was made"
    assert host.damage() == []
