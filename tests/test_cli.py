"""The commands as a user types them: the installed script, in its own process."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cadenza
from cadenza.cli import main
from cadenza.rollout.failures import FilterLimit
from cadenza.simulation.demo import display

CADENZA = Path(sys.executable).with_name("cadenza")


def cadenza_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CADENZA, *arguments], capture_output=True, text=True, timeout=100, check=False)


def test_version() -> None:
    done = cadenza_command("--version")
    assert (done.returncode, done.stdout.strip()) == (0, cadenza.__version__)


def test_without_a_command_it_lists_them() -> None:
    done = cadenza_command()
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "fuzz", "bench"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demoo"], 'Did you mean "demo"?'),
        (["bench", "everything"], "control-plane"),
        (["bench", "trl", "--task", "everything"], "smollm2"),
        (["demo", "--sede", "1"], "Did you mean --seed?"),
        (["demo", "--seed", "one"], "--seed"),
        (["fuzz", "--schedules", "0"], "Must be >= 1"),
        (["fuzz", "--seed", "-1"], "Must be >= 0"),
    ],
)
def test_a_wrong_command_gets_a_short_message_and_code_2(arguments: list[str], message: str) -> None:
    done = cadenza_command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert re.search(r"Try: cadenza .*--help", done.stderr)
    assert "Traceback" not in done.stderr
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 2)


def test_help_imports_nothing_heavy() -> None:
    program = "import sys, cadenza.cli; cadenza.cli.main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "ray", "matplotlib", "numpy", "cadenza.rollout.scheduler"}.isdisjoint(done.stderr.split())


def test_an_error_of_the_rollout_is_a_message_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*arguments: object, **options: object) -> int:
        raise FilterLimit("all groups were filtered")

    monkeypatch.setattr(display, "show", show)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "cadenza: all groups were filtered\n"


# -- demo --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `cadenza demo` prints into a pipe, and where its files are."""
    out = tmp_path_factory.mktemp("demo")
    done = cadenza_command("demo", "--fast", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, out


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_demo_says_that_it_is_a_simulation(shown: tuple[str, Path]) -> None:
    assert "a simulation: production scheduler, virtual clock" in shown[0].splitlines()[0]


def test_the_demo_prints_a_ledger_that_adds_up(shown: tuple[str, Path]) -> None:
    sums = [line for line in shown[0].splitlines() if line.endswith(": adds up")]
    assert len(sums) == 2
    for line in sums:
        total, _, parts = line.partition("=")
        assert number(total.split()[0]) == sum(number(found) for found in re.findall(r"[\d,]+(?= )", parts))
    assert " 768 trained" in sums[0]


def test_the_demo_writes_both_timelines_and_says_where(shown: tuple[str, Path]) -> None:
    text, out = shown
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in (out / "timeline.html").read_text(encoding="utf-8")
    assert str(out / "timeline.png") in text
    assert str(out / "timeline.html") in text


def test_the_demo_shows_its_faults_and_tells_the_life_of_an_attempt(shown: tuple[str, Path]) -> None:
    text, _ = shown
    assert re.search(r"r\d lost: r\d crashed", text)
    assert "no progress within lease_seconds" in text
    assert re.search(r"scheduler\.why\('g\d+\.\d#0'\).*\n.*\n.*-> failed", text)
    assert re.search(r"scheduler\.why\('g\d+\.\d#1'\)", text)


def test_the_same_seed_is_the_same_demo(shown: tuple[str, Path], tmp_path: Path) -> None:
    text, out = shown
    again = cadenza_command("demo", "--fast", "--out", tmp_path)
    assert again.stdout.replace(str(tmp_path), "OUT") == text.replace(str(out), "OUT")
    assert (tmp_path / "timeline.html").read_bytes() == (out / "timeline.html").read_bytes()


def test_a_terminal_gets_the_live_display(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    with subprocess.Popen(
        [CADENZA, "demo", "--fast", "--out", tmp_path],
        stdin=writer, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:  # fmt: skip
        os.close(writer)
        screen = _all_of(reader)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    for part in ("replicas", "batches", "ledger", "events", "step 12/12", "adds up"):
        assert part in screen


def _all_of(reader: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # Linux says so when the other end is closed
            part = b""
        if not part:
            os.close(reader)
            return b"".join(parts).decode(errors="replace")
        parts.append(part)


def test_a_file_in_the_way_is_a_message_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    done = cadenza_command("demo", "--fast", "--out", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr.startswith("cadenza: ")
    assert "Traceback" not in done.stderr
