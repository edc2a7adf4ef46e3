"""`cadenza fuzz`: random schedules by the thousand, and their findings.

Invariant: the findings of N schedules do not depend on the number of processes: each schedule is a function of its own
seed, and the findings are added up in the order of the seeds.

    fuzz(N, seed) -> chunks of seeds -> processes -> Findings of each chunk -> Findings
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from cadenza.simulation.fuzzing.difference import first_difference
from cadenza.simulation.fuzzing.monitor import Violation
from cadenza.simulation.fuzzing.scenario import MIN_TRAJECTORIES, MIN_VERSIONS, Scenario
from cadenza.simulation.fuzzing.schedule import ScheduleOutcome, run
from cadenza.simulation.virtual_cluster.faults import KINDS

REPEAT_EVERY = 10
"""One schedule in this many runs twice, and its events are compared."""
CHUNK = 25
SHOWN = 20
"""Violations and events that are printed at most; all are counted."""


@dataclass(slots=True)
class Findings:
    """The counts and violations of a number of schedules."""

    schedules: int = 0
    trajectories: int = 0
    """Attempts issued."""
    trained: int = 0
    """Attempts trained."""
    repeated: int = 0
    """Schedules that ran twice and were compared."""
    faults_injected: Counter[str] = field(default_factory=Counter)
    """Faults that took effect, by kind."""
    violations: list[Violation] = field(default_factory=list)
    staleness_max: dict[str, int] = field(default_factory=dict)
    """Largest staleness that was trained under the rule `wait`, by alpha."""
    stale_under_wait: int = 0
    """Attempts dropped for their staleness although the staleness rule was `wait`."""
    min_trajectories: int | None = None
    """Fewest attempts issued in any schedule."""
    min_versions: int | None = None
    """Fewest versions published in any schedule."""
    min_faults: int | None = None
    """Fewest faults that took effect in any schedule."""
    virtual_seconds: float = 0.0

    def add(self, outcome: ScheduleOutcome) -> None:
        """Count one schedule."""
        scenario = outcome.scenario
        self.schedules += 1
        self.trajectories += outcome.issued
        self.trained += outcome.trained
        self.faults_injected.update(outcome.injected)
        self.violations += outcome.violations
        self.virtual_seconds += outcome.seconds
        if scenario.staleness == "wait":
            alpha = f"{scenario.alpha:g}"
            self.staleness_max[alpha] = max(self.staleness_max.get(alpha, 0), outcome.max_staleness)
            self.stale_under_wait += outcome.stale
        self.min_trajectories = _least(self.min_trajectories, outcome.issued)
        self.min_versions = _least(self.min_versions, outcome.versions)
        self.min_faults = _least(self.min_faults, sum(outcome.injected.values()))

    def merge(self, other: Findings) -> None:
        """Count the schedules of another process."""
        self.schedules += other.schedules
        self.trajectories += other.trajectories
        self.trained += other.trained
        self.repeated += other.repeated
        self.faults_injected.update(other.faults_injected)
        self.violations += other.violations
        self.virtual_seconds += other.virtual_seconds
        for alpha, staleness in other.staleness_max.items():
            self.staleness_max[alpha] = max(self.staleness_max.get(alpha, 0), staleness)
        self.stale_under_wait += other.stale_under_wait
        self.min_trajectories = _least(self.min_trajectories, other.min_trajectories)
        self.min_versions = _least(self.min_versions, other.min_versions)
        self.min_faults = _least(self.min_faults, other.min_faults)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the schedules with a violation."""
        return sorted({violation.seed for violation in self.violations})


def _least(known: int | None, new: int | None) -> int | None:
    return new if known is None else known if new is None else min(known, new)


def examine(scenario: Scenario, *, twice: bool) -> ScheduleOutcome:
    """Run a schedule and check that it issued, published and broke enough; with `twice`, that its events repeat."""
    outcome = run(scenario)
    problems: list[tuple[int, str]] = []
    if twice and (difference := first_difference(outcome.events, run(scenario).events)):
        problems.append((8, f"the same seed gave another schedule; {difference}"))
    enough = outcome.issued >= MIN_TRAJECTORIES and outcome.versions >= MIN_VERSIONS and bool(outcome.injected)
    if not enough and not outcome.violations:
        found = f"{outcome.issued} trajectories, {outcome.versions} versions, faults {outcome.injected}"
        problems.append((0, f"not a schedule: {found}"))
    return outcome.with_violations(problems)


def fuzz(
    schedules: int,
    seed: int = 0,
    workers: int | None = None,
    *,
    repeat_every: int = REPEAT_EVERY,
    draw: Callable[[int], Scenario] = Scenario.draw,
    progress: Callable[[Findings], None] | None = None,
) -> Findings:
    """Run the schedules of the seeds `seed` to `seed + schedules - 1` in `workers` processes: 1 is this process, None
    is one per core. `progress` is called with the findings so far."""
    if schedules < 1:
        raise ValueError(f"schedules must be at least 1, got {schedules}")
    workers = workers or len(os.sched_getaffinity(0))
    chunks = [(first, min(CHUNK, seed + schedules - first)) for first in range(seed, seed + schedules, CHUNK)]
    findings = Findings()
    if workers == 1 or len(chunks) == 1:
        results: Iterator[Findings] = (_chunk(first, count, repeat_every, draw) for first, count in chunks)
        _collect(findings, results, progress)
    else:
        # A fresh interpreter: a fork would copy the threads of a progress display.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            results = _in_order(pool, chunks, repeat_every, draw, ahead=4 * workers)
            _collect(findings, results, progress)
    return findings


def _collect(findings: Findings, results: Iterator[Findings], progress: Callable[[Findings], None] | None) -> None:
    for result in results:
        findings.merge(result)
        if progress is not None:
            progress(findings)


def _in_order(
    pool: ProcessPoolExecutor,
    chunks: list[tuple[int, int]],
    repeat_every: int,
    draw: Callable[[int], Scenario],
    *,
    ahead: int,
) -> Iterator[Findings]:
    """Yield results in the order of the chunks; at most `ahead` chunks are under way."""
    futures = (pool.submit(_chunk, first, count, repeat_every, draw) for first, count in chunks)
    waiting = list(islice(futures, ahead))
    while waiting:
        yield waiting.pop(0).result()
        waiting += islice(futures, 1)


def _chunk(first: int, count: int, repeat_every: int, draw: Callable[[int], Scenario]) -> Findings:
    findings = Findings()
    for seed in range(first, first + count):
        twice = seed % repeat_every == 0
        findings.add(examine(draw(seed), twice=twice))
        findings.repeated += twice
    return findings


# -- the command -------------------------------------------------------------------------------------------------------


def cli_fuzz(schedules: int, seed: int, replay: int | None, json: bool) -> int:
    """`cadenza fuzz`; returns the exit code: 1 when an invariant was violated."""
    if replay is not None:
        return _replay(replay, json)
    started = time.perf_counter()
    findings = fuzz(schedules, seed) if json else _with_progress(schedules, seed)
    seconds = time.perf_counter() - started
    if json:
        print(msgspec.json.encode(_report(findings, seconds)).decode())
    else:
        _print_findings(findings, seconds)
    return 1 if findings.violations else 0


def _report(findings: Findings, seconds: float) -> dict[str, object]:
    """Return the output of `--json`."""
    return {
        "schedules": findings.schedules,
        "trajectories": findings.trajectories,
        "trained": findings.trained,
        "repeated": findings.repeated,
        "faults_injected": {kind: findings.faults_injected[kind] for kind in KINDS},
        "violations": [
            {"seed": found.seed, "invariant": found.invariant, "message": found.message, "replay": _command(found.seed)}
            for found in findings.violations
        ],
        "staleness_max": findings.staleness_max,
        "min_trajectories": findings.min_trajectories,
        "min_versions": findings.min_versions,
        "min_faults": findings.min_faults,
        "virtual_seconds": round(findings.virtual_seconds, 3),
        "seconds": round(seconds, 3),
    }


def _command(seed: int) -> str:
    return f"cadenza fuzz --replay {seed}"


def _with_progress(schedules: int, seed: int) -> Findings:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("schedules", total=schedules)

        def tell(findings: Findings) -> None:
            seeds = findings.seeds
            found = f"[red]{len(seeds)} with violations" if seeds else "schedules"
            bar.update(task, completed=findings.schedules, description=found)

        return fuzz(schedules, seed, progress=tell)


def _print_findings(findings: Findings, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{findings.schedules:,} schedules in {seconds:,.1f} s", show_header=False)
    table.add_row("trajectories", f"{findings.trajectories:,}, {findings.trained:,} of them trained")
    least = f"{findings.min_trajectories} trajectories, {findings.min_versions} versions, {findings.min_faults} faults"
    table.add_row("at least, in each", least)
    table.add_row("virtual time", f"{findings.virtual_seconds / 3600:,.1f} hours")
    table.add_row("run twice, same events", f"{findings.repeated:,}")
    faults = [f"{kind} {count:,}" for kind, count in sorted(findings.faults_injected.items())]
    table.add_row("faults that took effect", "\n".join(faults))
    ages = [f"alpha {alpha}: {findings.staleness_max[alpha]}" for alpha in sorted(findings.staleness_max, key=float)]
    table.add_row("largest staleness under wait", "\n".join(ages))
    table.add_row("violations", f"{len(findings.violations):,} in {len(findings.seeds):,} schedules")
    console.print(table)
    for found in findings.violations[:SHOWN]:
        message = found.message.partition("\n")[0]
        console.print(f"[red]invariant {found.invariant}[/red] seed {found.seed}: {message}", markup=True)
    for seed in findings.seeds[:SHOWN]:
        console.print(_command(seed))


def _replay(seed: int, json: bool) -> int:
    """Run the schedule of one seed again, and print its scenario, its last events and its violations."""
    scenario = Scenario.draw(seed)
    outcome = examine(scenario, twice=True)
    if json:
        findings = Findings()
        findings.add(outcome)
        findings.repeated = 1
        print(msgspec.json.encode(_report(findings, 0.0)).decode())
        return 1 if outcome.violations else 0
    print(f"schedule {seed}")
    for name in scenario.__dataclass_fields__:
        print(f"  {name}: {getattr(scenario, name)}")
    print(f"faults that took effect: {outcome.injected or 'none'}")
    print(f"{outcome.issued} trajectories, {outcome.trained} trained, {outcome.versions} versions")
    print(f"virtual time: {outcome.seconds:.3f} s")
    print(f"the last {SHOWN} of {len(outcome.events)} events:")
    for logged in outcome.events[-SHOWN:]:
        event = logged.event
        print(f"  {event.time:12.6f} {logged.source:8} {event.kind:10} {event.subject:12} {event.detail}")
    for found in outcome.violations:
        print(f"invariant {found.invariant} violated: {found.message}", file=sys.stderr)
    if not outcome.violations:
        print("no invariant violated")
    return 1 if outcome.violations else 0
