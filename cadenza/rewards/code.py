"""`code`: the program in the response passes the tests of the row, in the sandbox."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, PrivateAttr

from cadenza.rewards.base import ConfiguredReward, row_problem
from cadenza.rewards.code_tests import HARNESS, Assertions, InputOutput, passed_assertions, tests_of
from cadenza.rewards.fenced import last_block
from cadenza.rewards.sample import Sample, Scored
from cadenza.rewards.together import all_of
from cadenza.sandbox import Sandbox, SandboxLimits, SandboxResult

LANGUAGES = ("python", "python3", "py")


class ProgramRunner(Protocol):
    """What runs programs: a `Sandbox`, or what stands for it in a test."""

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", files: Mapping[str, str | bytes] | None = None
    ) -> SandboxResult: ...


class Code(ConfiguredReward):
    """The share of the row's tests that the Python program passes (code_tests.py says what tests may be).

    The program is the last fenced block of the response, or all of it where there is none. What it does wrong, limits
    included, is the response's own failure; where the sandbox breaks, it is an infrastructure fault.
    """

    score: Literal["share", "all"] = "share"
    """`all` pays 1 for a program that passes all tests, and else 0; it stops at the first failure."""
    field: str = "tests"
    """The field of the row that has the tests."""
    run_seconds: float = Field(default=5.0, gt=0)
    """Wall and CPU time of one run: one test of input and output, or all assertions."""
    memory_mb: int = Field(default=512, ge=32)
    programs: int | None = Field(default=None, gt=0)
    """Programs at once; None is one for each CPU."""
    sandbox: Any = None
    """An open `Sandbox` to share; None opens one. Its limits hold, not those above."""

    _own: Sandbox | None = PrivateAttr(default=None)
    _opening: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)

    async def open(self) -> None:
        async with self._opening:
            if self.sandbox is None and self._own is None:
                seconds = self.run_seconds
                limits = SandboxLimits(wall_seconds=seconds, cpu_seconds=seconds, memory_mb=self.memory_mb)
                own = Sandbox(limits, concurrency=self.programs)
                await own.open()
                self._own = own

    async def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await own.close()

    async def __call__(self, sample: Sample) -> Scored:
        await self.open()
        tests = tests_of(sample, self.field)
        program = last_block(sample.response, LANGUAGES)
        program = sample.response if program is None else program
        if not program.strip():
            return Scored(0.0, False, {"passed": 0.0}, "no program")
        runner: Any = self.sandbox or self._own
        if isinstance(tests, Assertions):
            passed, note = await _run_assertions(runner, program, tests)
        else:
            passed, note = await self._run_each(runner, program, tests)
        share = passed / len(tests)
        return Scored(float(share == 1) if self.score == "all" else share, share == 1, {"passed": share}, note)

    def check_row(self, row: Mapping[str, Any]) -> str | None:
        return row_problem(lambda sample: tests_of(sample, self.field), row)

    async def _run_each(self, runner: ProgramRunner, program: str, tests: Sequence[InputOutput]) -> tuple[int, str]:
        """How many tests it passes, and how the first other one went."""
        if self.score == "all":
            for number, test in enumerate(tests):
                if note := await _trouble(runner, program, test):
                    return number, f"test {number}: {note}"
            return len(tests), ""
        troubles = await all_of([_trouble(runner, program, test) for test in tests])
        notes = [f"test {number}: {trouble}" for number, trouble in enumerate(troubles) if trouble]
        return len(tests) - len(notes), notes[0] if notes else ""


async def _trouble(runner: ProgramRunner, program: str, test: InputOutput) -> str:
    """What went wrong in one test; nothing if it passes."""
    result = await runner.run(
        ["python3", "main.py"],
        stdin=test.input.encode(errors="replace"),
        files={"main.py": program.encode(errors="replace")},
    )
    if result.ok and not result.stdout_truncated and test.is_right(result.stdout):
        return ""
    return _ending(result) or f"printed {result.stdout[:80]!r}, not {test.output[:80]!r}"


async def _run_assertions(runner: ProgramRunner, program: str, tests: Assertions) -> tuple[int, str]:
    """How many assertions hold, and what was said of the others."""
    mark = secrets.token_hex(8)
    files: dict[str, str | bytes] = {
        "harness.py": HARNESS,
        "solution.py": program.encode(errors="replace"),
        "tests.json": json.dumps(tests.statements),
    }
    result = await runner.run(["python3", "harness.py"], stdin=f"{mark}\n".encode(), files=files)
    passed = passed_assertions(result.stdout, mark, len(tests))
    return passed, "" if passed == len(tests) else _ending(result) or _last_line(result.stderr) or "it ended early"


def _ending(result: SandboxResult) -> str:
    """How a program ended that did not end well."""
    if result.ok:
        return ""
    if result.outcome == "exited":
        return f"exit code {result.exit_code}: {_last_line(result.stderr)}"
    return f"stopped by the limit of {result.outcome}" if result.outcome != "killed" else f"signal {result.signal}"


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or [""])[-1][:160]
