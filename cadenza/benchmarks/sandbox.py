"""`cadenza bench sandbox`: what it costs to isolate a program.

A Python that does nothing runs many times in a sandbox, and as often without one. CPU time is that of all processes:
this one, the launcher, bubblewrap and the programs. What a sandbox costs without any program, its own start, is taken
off; so is the start-up of Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from cadenza.sandbox import Sandbox

PROGRAMS = 100
ROUNDS = 3
ARGUMENTS = ("-c", "pass")


def sandbox(as_json: bool) -> int:
    """Measure and print; returns the exit code."""
    figures = measure()
    if as_json:
        print(json.dumps(figures, indent=2))
        return 0
    table = Table("", "", title="A Python program that does nothing, in the sandbox", show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
    return 0


def measure() -> dict[str, float]:
    """The figures, each the median of some rounds."""
    rounds = [_round() for _ in range(ROUNDS)]
    figures: dict[str, float] = {"programs": PROGRAMS, "concurrency": os.cpu_count() or 1}
    return figures | {name: round(median(found[name] for found in rounds), 2) for name in rounds[0]}


def _round() -> dict[str, float]:
    idle_cpu, _ = _cpu_and_seconds(0)
    cpu, seconds = _cpu_and_seconds(PROGRAMS)
    python = _python_cpu()
    return {
        "programs_per_second": PROGRAMS / seconds,
        "cpu_ms_per_program": ((cpu - idle_cpu) / PROGRAMS - python) * 1e3,
        "python_startup_cpu_ms": python * 1e3,
    }


def _cpu_and_seconds(programs: int) -> tuple[float, float]:
    """CPU seconds of a sandbox from its start to its end, and the seconds that the programs took."""

    async def run() -> float:
        async with Sandbox() as sandbox, asyncio.TaskGroup() as group:
            began = perf_counter()
            tasks = [group.create_task(sandbox.run(["python3", *ARGUMENTS])) for _ in range(programs)]
            results = [await task for task in tasks]
            assert all(result.ok for result in results)
            return perf_counter() - began

    before = _cpu()
    seconds = asyncio.run(run())
    return _cpu() - before, seconds


def _python_cpu() -> float:
    """CPU seconds of one start of the same Python without a sandbox."""
    python = Path(sys.base_prefix, "bin", "python3")
    before = getrusage(RUSAGE_CHILDREN)
    for _ in range(PROGRAMS):
        subprocess.run([python, *ARGUMENTS], check=True, env={})
    after = getrusage(RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / PROGRAMS


def _cpu() -> float:
    """CPU seconds of this process and of all that have ended below it."""
    return sum(getrusage(who).ru_utime + getrusage(who).ru_stime for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
