"""The code reward: a fake at the seam for what it asks of the sandbox, and the sandbox itself where it is available."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from cadenza.errors import InfrastructureError, RewardError
from cadenza.rewards import RewardUnavailable, Sample, Scored, make_reward
from cadenza.rewards.code_tests import InputOutput
from cadenza.sandbox import SandboxResult
from cadenza.simulation.virtual_cluster.clock import run

ADDS = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]
PROGRAM = "Here it is:\n```python\nprint(sum(map(int, input().split())))\n```\nIt adds."


def ended(stdout: bytes = b"", **changes: Any) -> SandboxResult:
    known: dict[str, Any] = {
        "outcome": "exited", "exit_code": 0, "signal": None, "stdout": stdout, "stderr": b"", "stdout_truncated": False,
        "stderr_truncated": False, "wall_seconds": 0.1, "cpu_seconds": 0.1,
    }  # fmt: skip
    return SandboxResult(**(known | changes))


class FakeSandbox:
    """Answers runs by a function of standard input, and writes them down."""

    def __init__(self, answer: Callable[[bytes], SandboxResult]) -> None:
        self.answer = answer
        self.runs: list[tuple[Sequence[str], bytes, Mapping[str, str | bytes]]] = []

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", files: Mapping[str, str | bytes] | None = None
    ) -> SandboxResult:
        self.runs.append((argv, stdin, files or {}))
        await asyncio.sleep(1)
        return self.answer(stdin)


def scored(sandbox: Any, response: str, tests: Any, **settings: Any) -> Scored:
    async def main() -> Scored:
        spec = {"name": "code", "sandbox": sandbox, "retry_seconds": 0.0, **settings}
        return await make_reward(spec, "programs")(Sample(response=response, row={"tests": tests}, domain="programs"))

    return run(main)


@pytest.mark.parametrize("tests", [ADDS, json.dumps(ADDS), {"inputs": ["2 3\n", ["1 1"]], "outputs": ["5", ["2"]]}])
def test_the_last_fenced_program_runs_once_for_each_test_of_input_and_output(tests: Any) -> None:
    sandbox = FakeSandbox(lambda stdin: ended(b"5\n"))
    result = scored(sandbox, PROGRAM, tests)
    assert (result.value, result.success, result.parts["code/passed"]) == (0.5, False, 0.5)
    assert result.note == "code: test 1: printed b'5\\n', not '2'"
    assert [(argv, stdin) for argv, stdin, _ in sandbox.runs] == [
        (["python3", "main.py"], b"2 3\n"),
        (["python3", "main.py"], b"1 1"),
    ]
    assert {files["main.py"] for _, _, files in sandbox.runs} == {b"print(sum(map(int, input().split())))\n"}


def test_all_or_nothing_stops_at_the_first_failure() -> None:
    sandbox = FakeSandbox(lambda stdin: ended(b"2"))
    assert scored(sandbox, PROGRAM, ADDS, score="all").value == 0.0
    assert len(sandbox.runs) == 1
    assert scored(FakeSandbox(lambda stdin: ended(b"5")), PROGRAM, ADDS[:1], score="all").value == 1.0


@pytest.mark.parametrize(
    ("result", "note"),
    [
        (ended(b"5", exit_code=1, stderr=b"Traceback\nZeroDivisionError: by zero\n"), "exit code 1: ZeroDivisionError"),
        (ended(b"5", outcome="wall_time", exit_code=None), "stopped by the limit of wall_time"),
        (ended(b"5", outcome="killed", exit_code=None, signal=9), "signal 9"),
    ],
)
def test_a_program_that_does_not_end_well_fails_its_test_whatever_it_printed(result: SandboxResult, note: str) -> None:
    outcome = scored(FakeSandbox(lambda stdin: result), PROGRAM, ADDS[:1])
    assert outcome.value == 0.0
    assert note in outcome.note


def test_a_sandbox_that_breaks_is_an_infrastructure_fault_and_not_the_program_s() -> None:
    def breaks(stdin: bytes) -> SandboxResult:
        raise InfrastructureError("the launcher died")

    sandbox = FakeSandbox(breaks)
    with pytest.raises(RewardUnavailable, match="reward 'code' of domain 'programs': the launcher died, asked 2 times"):
        scored(sandbox, PROGRAM, ADDS, tries=2)


def test_an_empty_response_runs_nothing() -> None:
    sandbox = FakeSandbox(lambda stdin: ended())
    assert scored(sandbox, "```python\n```", ADDS).value == 0.0
    assert not sandbox.runs


@pytest.mark.parametrize("tests", [[], "no json", [{"input": "1"}], [1], {"inputs": ["1"], "outputs": []}])
def test_tests_that_are_none_are_an_error_that_shows_them(tests: Any) -> None:
    with pytest.raises(RewardError, match=r"domain 'programs' has 'tests' .*; it must be a list of \{input"):
        scored(FakeSandbox(lambda stdin: ended()), PROGRAM, tests)


@pytest.mark.parametrize(
    ("printed", "wanted", "right"),
    [
        (b"1  2\n3\n\n", "1 2\n3", True),
        (b"0.3333333333", "0.33333333", True),
        (b"0.3334", "0.3333", False),
        (b"1", "1.0", True),
        (b"10", "11", False),
        (b"yes", "YES", False),
        (b"1 2", "1", False),
        (b"\xff", "1", False),
    ],
)
def test_output_is_compared_word_by_word(printed: bytes, wanted: str, right: bool) -> None:
    assert InputOutput("", wanted).is_right(printed) is right


# -- in the sandbox ----------------------------------------------------------------------------------------------------

in_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def really_scored(responses: Sequence[str], tests: Any) -> list[float]:
    async def main() -> list[float]:
        async with make_reward({"name": "code", "run_seconds": 20}, "programs") as reward:
            samples = [Sample(response=f"```python\n{text}\n```", row={"tests": tests}) for text in responses]
            return [(await reward(sample)).value for sample in samples]

    return asyncio.run(main())


@in_sandbox
def test_programs_that_read_and_print_are_scored_in_the_sandbox() -> None:
    right = "print(sum(map(int, input().split())))"
    assert really_scored([right, "print(5)", "import sys; sys.exit(1)", "print(open('/etc/passwd').read())"], ADDS) == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]


@in_sandbox
def test_assertions_are_scored_in_the_sandbox_and_cannot_be_passed_by_leaving_early_or_by_printing() -> None:
    tests = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
    add = "def add(a, b):\n    return a + b\n"
    responses = [
        add,
        "def add(a, b):\n    return abs(a) + abs(b)",
        f"{add}import os\nos._exit(0)",
        f"{add}raise SystemExit(0)",
        "print('0\\n1\\n2')",
        f"{add}if __name__ == '__main__':\n    add(input(), 1)",
        f"import sys\ntext = sys.stdin.read()\n{add}print(text)",
    ]
    assert really_scored(responses, tests) == [1.0, pytest.approx(1 / 3), 0.0, 0.0, 0.0, 1.0, 1.0]
