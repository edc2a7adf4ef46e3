"""`cadenza simulate`: policies side by side on the same traces, and the gates that say whether to believe it."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cadenza.simulation import gates as calibration
from cadenza.simulation.experiment import POLICIES, Result, Workers, evaluate, workers
from cadenza.simulation.gates import Gate
from cadenza.simulation.traces import read_trace
from cadenza.simulation.workloads import WORKLOADS, Workload, find

GATE_SEEDS = 3
WIDTH = 160
"""Columns, where there is no terminal to say."""


class BadRequest(ValueError):
    """The command asks for something that there is not."""


def simulate(
    workload: str,
    policy: str,
    alpha: str,
    *,
    seeds: int,
    steps: int,
    warm_up: int,
    gates: bool,
    search: bool,
    as_json: bool,
) -> int:
    """Run what was asked; returns the exit code."""
    if warm_up >= steps:
        raise BadRequest(f"--warm-up must be below --steps {steps}, got {warm_up}")
    asked = [(w, p, a) for w in _workloads(workload) for a in _alphas(alpha) for p in _policies(policy)]
    synchronous = {p for _, p, _ in asked if not POLICIES[p].asynchronous}
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has all the room
        console.width = WIDTH
    with workers() as crew:
        checked = calibration.check(crew, range(min(seeds, GATE_SEEDS))) if gates else []
        results: list[Result] = []
        done: dict[tuple[str, str], Result] = {}
        for w, p, a in [] if gates else asked:
            if (w.name, p) not in done:
                result = _run(crew, w, p, a, seeds, steps, warm_up, search)
                results.append(result)
                if p in synchronous:  # they have no alpha: once is enough
                    done[w.name, p] = result
    if as_json:
        print(jsonlib.dumps(_to_json(results, checked), indent=2))
    else:
        _show(console, results, checked)
    return 0 if all(gate.holds for gate in checked) else 1


def _run(
    crew: Workers, workload: Workload, policy: str, alpha: float, seeds: int, steps: int, warm_up: int, search: bool
) -> Result:
    return evaluate(crew, workload, policy, alpha, range(seeds), steps=steps, warm_up=warm_up, search_anew=search)


# -- what was asked ----------------------------------------------------------------------------------------------------


def _workloads(names: str) -> list[Workload]:
    if names == "all":
        return list(WORKLOADS.values())
    found = []
    for name in _split(names, "workload"):
        path = Path(name)
        try:
            found.append(read_trace(path) if path.suffix == ".json" else find(name))
        except ValueError as error:
            raise BadRequest(str(error)) from None
    return found


def _policies(names: str) -> list[str]:
    chosen = list(POLICIES) if names == "all" else _split(names, "policy")
    if unknown := [name for name in chosen if name not in POLICIES]:
        raise BadRequest(f"policy '{unknown[0]}' is not known; take some of {', '.join(POLICIES)}, or all")
    return chosen


def _alphas(values: str) -> list[float]:
    alphas = []
    for value in _split(values, "alpha"):
        try:
            alphas.append(float(value))
        except ValueError:
            raise BadRequest(f"alpha must be numbers with commas between them, got '{value}'") from None
        if not 0 <= alphas[-1] <= 64:
            raise BadRequest(f"alpha must be from 0 to 64, got {value}")
    return alphas


def _split(names: str, what: str) -> list[str]:
    parts = [part.strip() for part in names.split(",")]
    if not all(parts):
        raise BadRequest(f"{what} must be names with commas between them, got '{names}'")
    return list(dict.fromkeys(parts))


# -- what came of it ---------------------------------------------------------------------------------------------------


def _to_json(results: list[Result], checked: list[Gate]) -> dict[str, Any]:
    """One result stands at the top, several in a list."""
    told: dict[str, Any] = {}
    if len(results) == 1:
        told |= results[0].to_json()
    elif results:
        told["results"] = [result.to_json() for result in results]
    if checked:
        told["gates"] = {gate.name: gate.to_json() for gate in checked}
        told["gates_hold"] = all(gate.holds for gate in checked)
    return told


def _show(console: Console, results: list[Result], checked: list[Gate]) -> None:
    for name in dict.fromkeys(result.workload for result in results):
        console.print(_table(name, [result for result in results if result.workload == name]))
    if results:
        console.print(
            "[dim]medians over the seeds; staleness mean/max; worst: the seed with the lowest efficiency; "
            "a comparison holds while `cadenza simulate --gates` does[/]",
            soft_wrap=True,
        )
    if checked:
        console.print(_gate_table(checked))


def _table(name: str, results: list[Result]) -> Table:
    like = WORKLOADS[name].like if name in WORKLOADS else ""
    seeds = len(results[0].seeds)
    title = f"{name} {like}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
    table = Table(title=escape(title), title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for column in ("alpha", "efficiency", "worst", "step s", "limit s", "tokens/s", "staleness", "bias", "waste"):
        table.add_column(column, justify="right")
    table.add_column("wait s", justify="right")
    table.add_column("settings")
    best = max(result.typical.efficiency for result in results)
    for result in results:
        typical = result.typical
        table.add_row(
            Text(result.policy, style="bold cyan" if result.policy == "cadenza" else ""),
            f"{result.alpha:g}",
            Text(f"{typical.efficiency:.3f}", style="bold" if typical.efficiency == best else ""),
            f"{result.worst.efficiency:.3f}",
            f"{typical.step_seconds:,.1f}",
            f"{typical.limit_seconds:,.1f}",
            f"{typical.tokens_per_second:,.0f}",
            f"{typical.staleness_mean:.2f}/{typical.staleness_max}",
            f"{typical.length_bias:.3f}",
            _waste(typical.waste),
            f"{typical.wait_seconds:,.1f}",
            _settings(result),
        )
    return table


def _waste(waste: dict[str, float]) -> str:
    told = [
        f"{share:.1%} {cause}" for cause, share in sorted(waste.items(), key=lambda item: -item[1]) if share >= 5e-4
    ]
    return ", ".join(told) or "0"


def _settings(result: Result) -> str:
    settings = result.settings
    told = [f"{settings.train_gpus} train" if settings.train_gpus else "shared GPUs"]
    if settings.concurrency:
        told.append(f"{settings.concurrency} at once")
    if settings.extra_groups or settings.extra_members:
        told.append(f"+{settings.extra_groups} groups +{settings.extra_members} members")
    if result.policy == "cadenza" and not settings.balance_seconds:
        told.append("no balance")
    return ", ".join(told)


def _gate_table(checked: list[Gate]) -> Table:
    table = Table(title="Calibration", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("gate", "what", "published", "here", "holds"):
        table.add_column(column)
    for gate in checked:
        verdict = Text("yes", style="green") if gate.holds else Text("no", style="bold red")
        table.add_row(gate.name, gate.what, _figures(gate.published), _figures(gate.value), verdict)
    return table


def _figures(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
