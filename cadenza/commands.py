"""`cadenza train | resume | eval | play`: a run from the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cadenza.config import import_from_working_directory
from cadenza.data import DataProto
from cadenza.observe.curve import curve
from cadenza.observe.display import Display
from cadenza.observe.report import write_report
from cadenza.observe.run import CONFIG_END, RunDirectory, config_text, read_lines
from cadenza.off_loop import as_async
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.config_file import dump_config, read_config
from cadenza.run.engines import EngineConfig
from cadenza.run.episodes import EpisodeStats, sample_of
from cadenza.run.export import export_checkpoint
from cadenza.run.pipeline import STOPPED, RunProgress, find_pipeline
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.run.rollouts import validate_checkpoint
from cadenza.training.checkpoint import CheckpointError, latest, step_of

logger = logging.getLogger(__name__)
REPORT_SECONDS = 120


def train(path: Path, overrides: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """A new run."""
    import_from_working_directory()
    config = read_config(path, overrides)
    config.check_names()
    if dry_run:
        values = dump_config(config)
        print(json.dumps(values) if as_json else config_text(values).rstrip())
        return 0
    with _stdout_for_figures(as_json):
        run = _new_run(config)
        try:
            summary = _run(config, run, None, as_json)
        except BaseException:
            if not run.step and not run.checkpoints.exists() and not (run.path / "failures").exists():
                run.discard()  # nothing was learned yet
            raise
    return _print_outcome(config, summary, as_json)


def resume(run_dir: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Go on with a run from its last checkpoint."""
    import_from_working_directory()
    config = _config_of(run_dir, overrides)
    checkpoint = _checkpoint(run_dir, "last")
    step = step_of(checkpoint)
    if step >= config.steps:
        raise ConfigError(f"{run_dir} has done its {step} steps; give it more with steps={2 * step}")
    if config.preset is not None:
        raise ConfigError(f"preset={config.preset} would do nothing: {run_dir} has a value for each of its settings")
    asyncio.run(find_pipeline(config.pipeline).check_checkpoint(config, checkpoint))
    with _stdout_for_figures(as_json):
        try:
            run = RunDirectory(run_dir, resume=step, config=dump_config(config), trackers=config.trackers)
        except RuntimeError as error:  # another process has it
            raise ConfigError(str(error)) from error
        summary = _run(config, run, checkpoint, as_json)
    return _print_outcome(config, summary, as_json)


def evaluate(run_dir: Path, *, episodes: int, which: str, greedy: bool, as_json: bool) -> int:
    """How good a checkpoint is, on the tasks of the validation."""
    checkpoint = _checkpoint(run_dir, which)
    batch, version = asyncio.run(_play_checkpoint(run_dir, checkpoint, episodes, greedy, shown=0))
    found: EpisodeStats = batch.meta_info["episodes"]
    figures = {**_episode_figures(found), "version": version}
    domains = {name: _episode_figures(own) for name, own in sorted(found.domains.items())}
    if as_json:
        print(json.dumps({**figures, "domains": domains, "checkpoint": str(checkpoint)}))
        return 0
    title = f"{run_dir}, checkpoint {checkpoint.name}"
    if len(domains) > 1:
        figures |= {f"{name}/{key}": value for name, own in domains.items() for key, value in own.items()}
    table = Table(title=title, show_header=False, min_width=len(title))
    for name, value in figures.items():
        table.add_row(name, "-" if value is None else f"{value:.4g}")
    Console().print(table)
    return 0


def _episode_figures(found: EpisodeStats) -> dict[str, float | None]:
    return {"success": found.success, "reward_mean": found.score, "episodes": found.count}


def play(run_dir: Path, *, episodes: int, which: str, greedy: bool) -> int:
    """Watch a checkpoint play."""
    console = Console(highlight=False)
    checkpoint = _checkpoint(run_dir, which)
    batch, version = asyncio.run(_play_checkpoint(run_dir, checkpoint, episodes, greedy, shown=episodes))
    found: EpisodeStats = batch.meta_info["episodes"]
    for trajectory in found.shown:
        sample = sample_of(trajectory, batch.meta_info["codec"], step=version, mode="val")
        console.print(f"\n[bold]{sample['task']}[/bold]")
        for number, turn in enumerate(sample["turns"], 1):
            console.print(turn["prompt"].rstrip("\n"), markup=False)
            console.print(f"[cyan]{number}.[/cyan] ", end="")
            console.print(repr(turn["response"]), markup=False)
        if "final" in sample:
            console.print(sample["final"].rstrip("\n"), markup=False)
        verdict = {True: "[green]success[/green]", False: "[red]no success[/red]", None: ""}[trajectory.success]
        console.print(f"score {sample['score']:g} {verdict}")
    return 0


def export(run_dir: Path, to: Path, *, which: str, merged: bool, as_json: bool) -> int:
    """A checkpoint as a directory that transformers loads."""
    import_from_working_directory()
    checkpoint = _checkpoint(run_dir, which)
    export_checkpoint(_config_of(run_dir, []), checkpoint, to, merged=merged)
    figures = {"to": str(to), "checkpoint": str(checkpoint), "version": step_of(checkpoint)}
    print(json.dumps(figures) if as_json else f"{checkpoint} -> {to}")
    return 0


# -- a run -------------------------------------------------------------------------------------------------------------


def _stdout_for_figures(as_json: bool) -> AbstractContextManager[object]:
    """With --json, stdout is for the figures alone: envs and trackers may print, and Ray passes on what its workers
    print."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _new_run(config: RunConfig) -> RunDirectory:
    try:
        return RunDirectory(config.out / config.name, config=dump_config(config), trackers=config.trackers)
    except CheckpointError:
        raise
    except OSError as error:
        where = error.filename or config.out
        raise ConfigError(
            f"out: no run can be written to {config.out}: {where}: {error.strerror}; set out to a directory of yours"
        ) from error


def _run(config: RunConfig, run: RunDirectory, checkpoint: Path | None, quiet: bool) -> dict[str, Any]:
    """Train to the end; the figures of the run."""
    title = run.path.resolve().name  # not always the name in the config: that one may have been taken
    with run, Display(title, config.steps, target=config.target, quiet=quiet) as display:
        try:
            progress = asyncio.run(_train_until_stopped(config, run, checkpoint, display))
        except BaseException:
            with suppress(OSError):  # the error before is the one to tell
                write_report(run.path)
            raise
        summary: dict[str, Any] = {
            "success_first": progress.success_first,
            "success_last": progress.success_last,
            "success_best": progress.success_best,
            "steps": progress.step,
            "samples": progress.samples,
            "cpu_seconds": round(run.cpu_seconds, 2),
            "wall_seconds": round(run.seconds, 2),
            "run_dir": str(run.path),
            "ended": progress.ended or "all steps done",
        }
        if progress.domains:
            summary["domains"] = _domain_figures(progress)
        if progress.loss_first is not None:
            summary |= {"loss_first": progress.loss_first, "loss_last": progress.loss_last}
        run.summary(summary)
    write_report(run.path)
    return summary


def _domain_figures(progress: RunProgress) -> dict[str, dict[str, Any]]:
    """What came of each domain: its share of the trained samples, and its success."""
    return {
        name: {
            "success_first": domain.success_first,
            "success_last": domain.success_last,
            "share": domain.samples / progress.samples if progress.samples else 0.0,
            "samples": domain.samples,
        }
        for name, domain in progress.domains.items()
    }


class SignalWatch:
    """Says what to look at when step after step has nothing to learn from."""

    def __init__(self, say: Callable[[str], None], after: int = 10) -> None:
        self._say, self._after = say, after
        self._skipped = 0
        """Steps in a row without an update."""

    def update(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step; those of a validation change nothing."""
        if "train/updates_skipped" not in metrics:
            return
        self._skipped = self._skipped + 1 if metrics["train/updates_skipped"] >= 1 else 0
        if self._skipped == self._after:
            self._say(
                f"{self._after} steps in a row had no signal and changed no weight: within each group, all scores were "
                "equal. Look at rollout.group_size (more tries make a difference likelier), at the difficulty of the "
                "tasks (see train/score: too hard or too easy), and at the rewards (cadenza play shows episodes)"
            )


async def _train_until_stopped(
    config: RunConfig, run: RunDirectory, checkpoint: Path | None, display: Display
) -> RunProgress:
    signal_watch = SignalWatch(display.say)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        display.update(step, metrics)
        signal_watch.update(metrics)

    pipeline = find_pipeline(config.pipeline)(config, run, on_step=on_step)
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        display.say("stopping after the step under way; Ctrl-C once more to break off")
        pipeline.stop()
        loop.remove_signal_handler(signal.SIGINT)  # SIGTERM may come twice: some senders signal the process group too

    with suppress(NotImplementedError, ValueError):  # not on every system, and not outside the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted)
    report = loop.create_task(_refresh_report(run.path))
    try:
        return await pipeline.train(resume=checkpoint)
    finally:
        report.cancel()
        with suppress(asyncio.CancelledError):
            await report


async def _refresh_report(run_dir: Path) -> None:
    """Write the report every few minutes, so that a long run can be looked at."""
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        try:
            await as_async(write_report)(run_dir)
        except OSError as error:  # a full disk, for one
            logger.warning("the report of %s could not be written: %s", run_dir, error)


def _print_outcome(config: RunConfig, summary: dict[str, Any], as_json: bool) -> int:
    """Say what came of a run; returns the exit code."""
    if as_json:
        print(json.dumps(summary))
    else:
        _describe_outcome(
            Path(summary["run_dir"]),
            summary,
            "" if config.backend == "embedded" else " of the controller",
            plays=isinstance(config, RolloutRunConfig),
        )
    return 130 if summary["ended"] == STOPPED else 0


def _describe_outcome(run_dir: Path, summary: dict[str, Any], whose: str, *, plays: bool) -> None:
    """`plays` is whether the run has episodes that can be watched."""
    console = Console(highlight=False)
    points = [(r["step"], r["val/success"]) for r in read_lines(run_dir / "metrics.jsonl") if "val/success" in r]
    if len(points) > 1:
        steps, successes = zip(*points, strict=True)
        console.print("\nsuccess in validation, by step", markup=False)
        console.print(curve(steps, successes, percent=True), markup=False)
    first, last = (_percent(summary[name]) for name in ("success_first", "success_last"))
    loss = f", loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}" if "loss_first" in summary else ""
    console.print(
        f"\n{summary['ended']}: success {first} -> {last}{loss} in {summary['steps']} steps, {summary['samples']} "
        f"{'episodes' if plays else 'rows'}, {summary['cpu_seconds']:.0f} CPU seconds{whose}"
    )
    best = run_dir / "checkpoints" / "best"
    console.print(f"checkpoint  {best if best.exists() else best.with_name('last')}", soft_wrap=True)
    console.print(f"report      {run_dir / 'report.html'}", soft_wrap=True)
    if not plays:
        return
    called = sys.argv[0]  # the environment may not be activated
    program = called if Path(called).name == "cadenza" and not shutil.which("cadenza") else "cadenza"
    console.print(f"play it     {program} play {run_dir}", soft_wrap=True)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# -- a checkpoint ------------------------------------------------------------------------------------------------------


async def _play_checkpoint(
    run_dir: Path, checkpoint: Path, episodes: int, greedy: bool, *, shown: int
) -> tuple[DataProto, int]:
    """Plays episodes with a checkpoint; the batch, and the version."""
    import_from_working_directory()
    config = _config_of(run_dir, [])
    if not isinstance(config, RolloutRunConfig):
        raise ConfigError(f"{run_dir} plays no episodes: its pipeline '{config.pipeline}' has no rollouts")
    config = config.for_playing(episodes, greedy=greedy)
    overrides: dict[str, Any] = {"samples": shown, "critic": None, "backend": "embedded", "devices": {}}
    if config.engine.kind != "torch":
        overrides["engine"] = EngineConfig(max_running=config.engine.max_running)
    return await validate_checkpoint(config.model_copy(update=overrides), checkpoint)


def _config_path(run_dir: Path) -> Path:
    """Where the config of a run is, if there is a run."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"there is no run in {run_dir}: it has no config.yaml")
    return path


def _config_of(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    path = _config_path(run_dir)
    if CONFIG_END not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} was cut off, or no run wrote it: its last line must be '{CONFIG_END}'. Write it anew from the "
            "config file that the run was started with, and the same overrides: "
            f"cadenza train FILE KEY=VALUE ... --dry-run > {path}"
        )
    config = read_config(path, overrides)
    config.check_names()
    return config


def _checkpoint(run_dir: Path, which: str) -> Path:
    """The checkpoint that 'last', 'best' or 'step-000012' means; 'best' is the last where none was chosen."""
    directory = _config_path(run_dir).with_name("checkpoints")
    path = directory / which
    if which == "last" or (which == "best" and not path.exists()):
        path = latest(directory) or path  # a kill may come between a checkpoint and the link to it
    if not (path / "training").is_dir():
        known = sorted(p.name for p in directory.iterdir() if not p.name.startswith(".")) if directory.is_dir() else []
        rest = f"there are {', '.join(known)}" if known else "it has none: start it again with `cadenza train`"
        raise ConfigError(f"{run_dir} has no checkpoint '{which}'; {rest}")
    return path.resolve()
