"""`cadenza simulate`: strategies side by side on the same traces, and the calibration checks."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cadenza.simulation.comparison import calibration, cli_args, plots
from cadenza.simulation.comparison.calibration import CalibrationCheck
from cadenza.simulation.comparison.cli_args import InvalidArgument
from cadenza.simulation.comparison.experiment import STRATEGIES, StrategyResult, TrialPool, evaluate, trial_pool
from cadenza.simulation.comparison.workloads import WORKLOADS, Workload

CHECK_SEEDS = 3
WIDTH = 160
"""Columns of the output where there is no terminal."""


def simulate(
    workload: str,
    strategy: str,
    alpha: str | None,
    *,
    seeds: int,
    steps: int,
    warm_up: int,
    gates: bool,
    search: bool,
    settings: str,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run the command; returns the exit code."""
    if warm_up >= steps:
        raise InvalidArgument(f"--warm-up must be below --steps {steps}, got {warm_up}")
    if gates and (settings or out is not None):
        raise InvalidArgument("--gates checks workloads and settings of its own: leave out --settings and --out")
    workloads = cli_args.workloads(workload)
    given = cli_args.settings(settings)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fails now, and not after the simulation
    strategies = cli_args.strategies(strategy)
    wanted = [(w, p, a) for w in workloads for a in _alphas(alpha, w, strategies) for p in strategies]
    synchronous = {p for _, p, _ in wanted if not STRATEGIES[p].asynchronous}
    console = wide_console()
    with trial_pool() as pool:
        checks = calibration.run_checks(pool, range(min(seeds, CHECK_SEEDS))) if gates else []
        results: list[StrategyResult] = []
        done: dict[tuple[str, str], StrategyResult] = {}
        for w, p, a in [] if gates else wanted:
            if (w.name, p) not in done:
                try:
                    result = evaluate(
                        pool, w, p, a, range(seeds), given=given, steps=steps, warm_up=warm_up, search_anew=search
                    )
                except ValueError as error:  # the settings do not fit the workload
                    why = f"settings '{settings}', " if settings else ""
                    raise InvalidArgument(f"{why}{p} on {w.name}: {error}") from None
                results.append(result)
                if p in synchronous:  # they have no alpha: one run serves all
                    done[w.name, p] = result
        is_comparison = len({result.strategy for result in results}) > 1
        holds = calibration.which_checks_hold(pool) if is_comparison else None
        plotted = [] if out is None or gates else _record_runs(pool, workloads, results, warm_up)
    if as_json:
        print(jsonlib.dumps(_to_json(results, checks, holds), indent=2))
    else:
        _show(console, results, checks, holds)
    if out is not None and results:
        _draw(console, out, plotted, quiet=as_json)
    return 0 if all(check.holds for check in checks) else 1


def _alphas(alpha: str | None, workload: Workload, strategies: list[str]) -> list[float]:
    """The asynchronous ratios for one workload. On one GPU the default is 0, and no other value is possible."""
    found = cli_args.alphas(alpha or ("1" if workload.gpus > 1 else "0"))
    if workload.gpus == 1 and any(found) and any(STRATEGIES[name].asynchronous for name in strategies):
        raise InvalidArgument(
            f"{workload.name} has one GPU, on which nothing can train while something generates: give --alpha 0, or a "
            "workload with more GPUs"
        )
    return found


def _record_runs(
    pool: TrialPool, workloads: list[Workload], results: list[StrategyResult], warm_up: int
) -> list[plots.PlottedRun]:
    by_workload = [
        (workload, [result for result in results if result.workload == workload.name]) for workload in workloads
    ]
    return [run for workload, own in by_workload for run in plots.record_runs(pool, workload, own, warm_up)]


def _draw(console: Console, out: Path, plotted: list[plots.PlottedRun], *, quiet: bool) -> None:
    """Write the plots, and print their paths unless `quiet`."""
    files, missing = plots.write(out, plotted)
    if missing:
        print(missing, file=sys.stderr)
    for file in [] if quiet else files:
        console.print(str(file), soft_wrap=True, markup=False)


# -- the output --------------------------------------------------------------------------------------------------------


def wide_console() -> Console:
    """Return a console as wide as the terminal; a file gets WIDTH columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _to_json(
    results: list[StrategyResult], checks: list[CalibrationCheck], holds: dict[str, bool] | None
) -> dict[str, Any]:
    """Return the output of `--json`: one result at the top level, several in a list."""
    told: dict[str, Any] = {}
    if len(results) == 1:
        told |= results[0].to_json()
    elif results:
        told["results"] = [result.to_json() for result in results]
    if checks:
        told["gates"] = {check.name: check.to_json() for check in checks}
        holds = {check.name: check.holds for check in checks}
    if holds is not None:
        told["gates_hold"] = all(holds.values())
    return told


def _show(
    console: Console, results: list[StrategyResult], checks: list[CalibrationCheck], holds: dict[str, bool] | None
) -> None:
    for name in dict.fromkeys(result.workload for result in results):
        console.print(_table(name, [result for result in results if result.workload == name]))
    if results:
        console.print(
            "[dim]medians over the seeds; staleness mean/max; worst: the seed with the lowest efficiency[/]",
            soft_wrap=True,
        )
    if holds is not None:
        console.print(_verdict(holds), soft_wrap=True)
    if checks:
        console.print(_check_table(checks))


def _verdict(holds: dict[str, bool]) -> str:
    """Say whether the calibration checks support a comparison."""
    if broken := [name for name, does in holds.items() if not does]:
        return f"[bold red]not to be believed: {', '.join(broken)} of the calibration checks do not hold[/]"
    return f"[green]all {len(holds)} calibration checks hold[/] [dim](one seed; `--gates` shows them)[/]"


def _table(name: str, results: list[StrategyResult]) -> Table:
    like = WORKLOADS[name].like if name in WORKLOADS else ""
    seeds = len(results[0].seeds)
    title = f"{f'{name} {like}'.rstrip()}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
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
            Text(result.strategy, style="bold cyan" if result.strategy == "cadenza" else ""),
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


def _settings(result: StrategyResult) -> str:
    settings = result.settings
    told = [f"{settings.train_gpus} train" if settings.train_gpus else "shared GPUs"]
    if settings.shared:
        told.append(f"{settings.shared} of them generate too")
    if settings.concurrency:
        told.append(f"{settings.concurrency} at once")
    if settings.extra_groups or settings.extra_members:
        late = f" after {settings.extra_after:g}" if settings.extra_after else ""
        told.append(f"+{settings.extra_groups} groups +{settings.extra_members} members{late}")
    if settings.parts > 1:
        told.append(f"{settings.parts} parts")
    if result.strategy == "cadenza" and not settings.balance_seconds:
        told.append("no balance")
    if settings.slice_tokens >= 0:
        told.append(f"slices of {settings.slice_tokens:,}" if settings.slice_tokens else "no slices")
    return ", ".join(told)


def _check_table(checks: list[CalibrationCheck]) -> Table:
    table = Table(title="Calibration", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("gate", "what", "published", "here", "holds"):
        table.add_column(column)
    for check in checks:
        verdict = Text("yes", style="green") if check.holds else Text("no", style="bold red")
        table.add_row(check.name, check.what, _figures(check.published), _figures(check.value), verdict)
    return table


def _figures(values: tuple[float, ...]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
