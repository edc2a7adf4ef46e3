"""`cadenza plan` on the command line: its arguments, and the table of candidates."""

from __future__ import annotations

import json
from dataclasses import replace

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cadenza.simulation.comparison import cli_args
from cadenza.simulation.comparison.cli_args import InvalidArgument
from cadenza.simulation.comparison.experiment import trial_pool
from cadenza.simulation.comparison.simulate import wide_console
from cadenza.simulation.planning.plan import Plan, make_plan

ALPHAS = "0,0.5,1,2,4"
WORKLOAD = "W2"


def plan(
    gpus: int | None,
    workload: str | None,
    alpha: str | None,
    model_cost: str | None,
    *,
    shared: bool,
    as_json: bool,
) -> int:
    """Make a plan and show it; returns the exit code."""
    chosen_workload = cli_args.workload(workload or WORKLOAD, needs_costs=model_cost is None)
    alphas = cli_args.alphas(alpha or ALPHAS)
    if gpus is not None:
        chosen_workload = replace(chosen_workload, gpus=gpus)
    if model_cost is not None:
        chosen_workload = cli_args.with_cost(chosen_workload, model_cost)
    if chosen_workload.gpus == 1 and any(alphas):
        raise InvalidArgument("with one GPU nothing can train while something generates: give --gpus 2, or --alpha 0")
    with trial_pool() as pool:
        made = make_plan(pool, chosen_workload, alphas, shared=shared)
    if as_json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        show(made)
    return 0


def show(made: Plan, why: str = "") -> None:
    console = wide_console()
    workload = made.workload
    title = f"{workload.name} {workload.like}, {workload.groups} x {workload.group_size} a batch, {workload.gpus} GPUs"
    table = Table(title=escape(title), title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("alpha", "train", "generate", "step s", "efficiency", "tokens/s", "staleness", "trainer waits s"):
        table.add_column(column, justify="right")
    table.add_column("limited by")
    table.add_column("steps", justify="right", style="dim")
    for prediction in made.predicted:
        figures = prediction.figures
        table.add_row(
            f"{prediction.alpha:g}",
            f"{prediction.train_gpus or 'in turn'}{' shared' if prediction.shared_gpus else ''}",
            str(prediction.rollout_gpus),
            f"{figures.step_seconds:,.4g}",
            f"{figures.efficiency:.3f}",
            f"{figures.tokens_per_second:,.0f}",
            f"{figures.staleness_mean:.2f}/{figures.staleness_max}",
            f"{figures.wait_seconds:,.4g}",
            Text(f"{prediction.limited_by} {prediction.explained:.0%}"),
            str(prediction.steps),
            style="bold cyan" if prediction is made.chosen else "",
        )
    console.print(table)
    console.print(
        "[dim]staleness mean/max; limited by: what asks for most of a step, and the share that it alone takes; steps: "
        "how many were simulated and counted[/]",
        soft_wrap=True,
    )
    console.print(f"\n[bold]chosen[/] {escape(why or made.why)}", soft_wrap=True)
