"""What the sandbox refuses, on machines with bubblewrap and without."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from cadenza.sandbox import Sandbox, SandboxLimits, SandboxUnavailable, inputs, probe
from cadenza.sandbox.seccomp import DENIED, MACHINES, seccomp_filter

HOST = {name: f"{name}:[1]" for name in probe.NAMESPACES}
ISOLATED = {
    "namespaces": {name: f"{name}:[2]" for name in probe.NAMESPACES}, "capabilities": 0, "no_new_privileges": 1,
    "seccomp": 2, "user": 65534, "written": [], "interfaces": ["lo"], "processes": 2, "environment": ["PATH"],
    "process_limit": 9,
}  # fmt: skip


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def opened() -> None:
    async def open_and_close() -> None:
        async with Sandbox(SandboxLimits(), concurrency=1):
            pass

    asyncio.run(open_and_close())


def put_bwrap(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


# -- machines ----------------------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        opened()


def test_where_bubblewrap_fails_its_words_are_shown(public_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bwrap(public_directory, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1", monkeypatch)
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create new namespace.*apt-get install bubblewrap"):
        opened()


def test_a_bubblewrap_without_namespaces_is_refused(public_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_bwrap(public_directory, 'shift 3; exec "$@"', monkeypatch)
    with pytest.raises(SandboxUnavailable, match="the host's namespaces user, pid, net, ipc, uts"):
        opened()


def test_a_sandbox_that_is_not_open_runs_nothing() -> None:
    with pytest.raises(RuntimeError, match="async with Sandbox"):
        asyncio.run(Sandbox().run(["true"]))


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_an_isolated_program_passes_the_probe() -> None:
    assert probe.faults(json.dumps(ISOLATED).encode(), HOST, processes=8) == []


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        ({"namespaces": {**ISOLATED["namespaces"], "net": HOST["net"]}}, "namespaces net"),
        ({"namespaces": {}}, "namespaces user, pid"),
        ({"capabilities": 1}, "capabilities"),
        ({"no_new_privileges": 0}, "gain privileges"),
        ({"seccomp": 0}, "no system call"),
        ({"user": 0}, "root"),
        ({"written": ["/etc/canary"]}, "write /etc/canary"),
        ({"interfaces": ["eth0", "lo"]}, "eth0"),
        ({"processes": 80}, "80 processes"),
        ({"environment": ["PATH", "API_KEY"]}, "has API_KEY"),
        ({"process_limit": -1}, "not limited"),
    ],
)
def test_the_probe_finds_each_hole(seen: dict[str, object], fault: str) -> None:
    (found,) = probe.faults(json.dumps(ISOLATED | seen).encode(), HOST, processes=8)
    assert fault in found


def test_a_probe_that_prints_nonsense_is_a_fault() -> None:
    assert probe.faults(b"Segmentation fault", HOST, processes=8)


# -- inputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "", ".", "zero\0byte"])
def test_files_stay_in_the_directory_of_their_program(name: str) -> None:
    with pytest.raises(ValueError, match="relative to the program's directory"):
        inputs.checked_files({name: "x"}, SandboxLimits())


@pytest.mark.parametrize("names", [("a", "./a"), ("a/b", "a"), ("a/b/c", "a")])
def test_files_that_cannot_be_together_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"twice|directory of"):
        inputs.checked_files(dict.fromkeys(names, "x"), SandboxLimits())


def test_files_larger_than_tmp_are_refused_before_they_are_sent() -> None:
    with pytest.raises(ValueError, match="tmp_mb is 1"):
        inputs.checked_files({"a": bytes(1 << 20), "b": b"x"}, SandboxLimits(tmp_mb=1))


@pytest.mark.parametrize("argv", ["python3 main.py", [], ["a\0b"], ["python3", "-c", "x" * 200_000]])
def test_arguments_that_no_kernel_takes_are_refused(argv: object) -> None:
    with pytest.raises(ValueError, match=r"argv|argument"):
        inputs.checked_argv(argv)


@pytest.mark.parametrize("name", ["A=B", "1A", "A B", "", "A;id"])
def test_variables_that_no_shell_takes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="environment variable"):
        inputs.checked_environment({name: "x"})


@pytest.mark.parametrize("forward", [0, 70_000, "/etc/hostname"])
def test_what_cannot_be_forwarded_is_refused(forward: int | str) -> None:
    with pytest.raises(ValueError, match="forward must be"):
        inputs.checked_forward(forward)


@pytest.mark.parametrize(
    "limits", [{"wall_seconds": 0}, {"memory_mb": 1}, {"processes": 0}, {"cpu_seconds": float("inf")}, {"memory": 5}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SandboxLimits(**limits)


# -- system calls ------------------------------------------------------------------------------------------------------


def verdict(machine: str, number: int, argument: int = 0, audit: int | None = None) -> int:
    """What the kernel would do: the value that the filter returns."""
    data = {0: number, 4: MACHINES[machine].audit if audit is None else audit, 16: argument}
    steps = list(struct.iter_unpack("<HBBI", seccomp_filter(machine)))
    at = loaded = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = data[value]
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_the_filter_refuses_what_it_lists_and_nothing_else(machine: str) -> None:
    kind, allow = MACHINES[machine], 0x7FFF0000
    denied = {numbers[kind.column] for numbers in DENIED.values()} - {-1}
    special = {kind.clone3, kind.clone, kind.prctl, kind.socket}
    for number in range(500):
        expected = number not in denied
        if number not in special:
            assert (verdict(machine, number) == allow) == expected, number
    assert verdict(machine, kind.clone, 0x11) == allow
    assert verdict(machine, kind.clone, 0x10000011) != allow
    assert verdict(machine, kind.clone3) == 0x00050000 | 38, "the C library falls back to clone"
    assert [family for family in range(50) if verdict(machine, kind.socket, family) == allow] == [1, 2, 10]
    assert [option for option in range(60) if verdict(machine, kind.prctl, option) != allow] == [1]
    assert verdict(machine, 0, audit=0x40000003) == 0x80000000, "another machine's calls kill"
    assert verdict(machine, 0x40000000) != allow


def test_a_machine_whose_system_calls_are_not_known_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="x86_64, aarch64, not of pdp11"):
        seccomp_filter("pdp11")
