"""The tests of a row for a program, and what they say of a run. Two kinds: input and output, and assertions.

"tests": [{"input": "2 3", "output": "5"}, ...]          the program reads and prints
"tests": {"inputs": ["2 3"], "outputs": ["5"]}           the same, as two lists
"tests": ["assert add(2, 3) == 5", ...]                  the program defines what they call
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.errors import RewardError
from cadenza.rewards.sample import Sample

TOLERANCE = 1e-6
"""Relative or absolute, between numbers with a decimal point."""

HARNESS = """\
import json, os, sys

def run():
    mark, out = sys.stdin.readline().strip(), os.dup(1)
    tests = json.load(open("tests.json"))
    sys.stdin = open(os.devnull)
    names = {"__name__": "solution", "__file__": "solution.py"}
    exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"test {number}", "exec"), names)
        except BaseException as error:
            print(f"test {number}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            os.write(out, f"\\n{mark} {number}\\n".encode())

run()
"""
"""Runs the program, then each assertion, and says which ones held. The mark, which comes through standard input, is not
known to a program that ends the process early or prints that it passed."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """What the program prints when it reads this."""

    input: str
    output: str

    def is_right(self, printed: bytes) -> bool:
        """Whether the words are the same; numbers with a decimal point may differ a little."""
        found, wanted = printed.decode(errors="replace").split(), self.output.split()
        return len(found) == len(wanted) and all(map(_same_word, found, wanted))


@dataclass(frozen=True, slots=True)
class Assertions:
    """Statements that raise nothing where the program is right."""

    statements: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.statements)


def tests_of(sample: Sample, field: str) -> Sequence[InputOutput] | Assertions:
    """The tests of a row, all of one kind; raises RewardError, which shows what they may be, for anything else."""
    given = sample.get(field)
    try:
        tests = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        tests = None
    if isinstance(tests, Mapping):
        tests = _paired(tests)
    if isinstance(tests, Sequence) and tests:
        if all(isinstance(test, str) for test in tests):
            return Assertions(tuple(tests))
        if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
            return [InputOutput(_text(test["input"]), _text(test["output"])) for test in tests]
    raise RewardError(
        f"{sample.row_name} has '{field}' {str(given)[:100]!r}; it must be a list of "
        "{input: ..., output: ...}, or of assertions as 'assert add(2, 3) == 5'"
    )


def passed_assertions(printed: bytes, mark: str, count: int) -> int:
    """How many assertions the harness says have held."""
    lines = set(printed.decode(errors="replace").splitlines())
    return sum(f"{mark} {number}" in lines for number in range(count))


def _paired(tests: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        return None
    return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    """A text as it is, a list as its lines."""
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if "." not in found + wanted:
        return False
    try:
        return math.isclose(float(found), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
