"""`cadenza demo`: a simulated run with a live display, then its ledger and its timeline."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cadenza.observe.timeline import FATES, Timeline, build_timeline
from cadenza.observe.timeline_html import write_html
from cadenza.observe.timeline_png import write_png
from cadenza.simulation.demo.run import REPLICAS, SLOTS, STEPS, BatchSummary, DemoRun, DemoSnapshot
from cadenza.simulation.quiet import quiet_log
from cadenza.simulation.virtual_cluster import clock

PACE = 30.0
"""Virtual seconds shown per second of real time."""
FRAME = 0.1
"""Seconds between two pictures when drawing is slower than the run."""
WIDTH = 112
"""Columns of the screen, where the terminal has them."""
NOTE = "a simulation: production scheduler, virtual clock, simulated replicas and envs"
STATES = {"active": "green", "paused": "yellow", "lost": "red"}


def show(out: Path, *, seed: int, fast: bool) -> int:
    """Run the demo; returns the exit code."""
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    run = DemoRun(seed)
    with quiet_log(), _interruptible(run), _view(console, run, fast) as view:
        clock.run(lambda: run.play(view.update))
    timeline = build_timeline(run.events)
    console.print()
    adds_up = _print_ledger(console, run, timeline)
    _print_failed_attempt(console, run, timeline)
    _write_plots(console, timeline, out, f"cadenza demo, seed {seed}")
    _print_next_commands(console, seed)
    return 0 if adds_up else 1


@contextlib.contextmanager
def _interruptible(run: DemoRun) -> Iterator[None]:
    """Let Control-C end the run between two events, and not in the middle of one."""
    before = signal.signal(signal.SIGINT, lambda *_: run.stop())
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


# -- while it runs -----------------------------------------------------------------------------------------------------


class DemoView(Protocol):
    """Shows the run; `update` receives every snapshot."""

    def update(self, snapshot: DemoSnapshot) -> None: ...


@contextlib.contextmanager
def _view(console: Console, run: DemoRun, fast: bool) -> Iterator[DemoView]:
    if not console.is_terminal:
        yield DemoTextView(console, run)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield DemoTerminalView(live, run, None if fast else PACE)


class DemoTextView:
    """Plain lines of text, for a file or a pipe: every batch and every notable event once."""

    def __init__(self, console: Console, run: DemoRun) -> None:
        self._console = console
        self._run = run
        self._batches = self._notes = 0
        console.print(f"cadenza demo, {NOTE}", soft_wrap=True)

    def update(self, snapshot: DemoSnapshot) -> None:
        run = self._run
        new = [(when, f"{when:7.1f} s  {text}") for when, text in run.notes[self._notes :]]
        new += [(batch.time, f"{batch.time:7.1f} s  {_sentence(batch)}") for batch in run.batches[self._batches :]]
        self._notes, self._batches = len(run.notes), len(run.batches)
        for _, line in sorted(new):
            self._console.print(escape(line), soft_wrap=True)


def _sentence(batch: BatchSummary) -> str:
    return (
        f"step {batch.step:2} of {STEPS}: {batch.trajectories} trajectories, {batch.tokens:,} tokens for version "
        f"{batch.version}, waited {batch.wait_seconds:.1f} s, staleness mean {batch.mean_staleness:.2f}, "
        f"max {batch.max_staleness}"
    )


class DemoTerminalView:
    """The run on one screen, at a readable speed."""

    def __init__(self, live: Live, run: DemoRun, pace: float | None) -> None:
        self._live = live
        self._run = run
        self._pace = pace
        self._began = time.perf_counter()
        self._drawn = 0.0

    def update(self, snapshot: DemoSnapshot) -> None:
        now = time.perf_counter()
        early = self._began + snapshot.time / self._pace - now if self._pace else 0.0
        if early > 0:
            time.sleep(early)
        elif now - self._drawn < FRAME and snapshot.phase != "done":
            return  # drawing is behind the run: skip this picture
        self._drawn = now
        self._live.update(self._draw(snapshot), refresh=True)

    def _draw(self, snapshot: DemoSnapshot) -> RenderableType:
        width = min(self._live.console.width, WIDTH)
        left = width * 48 // 100
        right = width - left
        return Group(
            _head(snapshot, width, self._pace),
            Columns([_replicas(snapshot, left), _batches(self._run.batches, right)], padding=0),
            Columns([_fates(snapshot, left), _notes(self._run.notes, right)], padding=0),
        )


def _head(snapshot: DemoSnapshot, width: int, pace: float | None) -> RenderableType:
    title = Text.assemble(("cadenza demo", "bold"), ("  " + NOTE, "dim"), overflow="ellipsis", no_wrap=True)
    done = snapshot.step if snapshot.phase == "done" else max(0, snapshot.step - 1)
    speed = f"virtual, {pace:g} per second" if pace else "virtual"
    line = Table.grid(padding=(0, 1))
    line.add_row(
        f"step {max(1, snapshot.step):2}/{STEPS}",
        ProgressBar(total=STEPS, completed=done, width=max(8, width - 64), complete_style="cyan"),
        f"[bold]{snapshot.time:3.0f} s[/] [dim]{speed}[/]",
        Text(snapshot.phase, style="cyan"),
    )
    return Group(title, line)


def _replicas(snapshot: DemoSnapshot, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    kv_bar = 6 if width >= 44 else 0
    bar = width - 33 - kv_bar
    for replica in snapshot.replicas:
        table.add_row(
            replica.name,
            Text(replica.state, style=STATES[replica.state]),
            f"v{replica.version}",
            _bar(replica.running, SLOTS / REPLICAS * 1.34, bar, "cyan"),
            f"{replica.running:2} req",
            *([_bar(replica.kv_share, 1.0, kv_bar, "magenta")] if kv_bar else []),
            f"{replica.kv_share:3.0%} kv",
        )
    table.add_row("", "slots", "", _bar(snapshot.busy, SLOTS, bar, "blue"), f"{snapshot.busy}/{SLOTS}")
    return _panel("replicas", table, width)


def _bar(value: float, total: float, width: int, style: str) -> Text:
    """Return a bar in eighths of a character, so that small changes show."""
    eighths = round(min(value / total, 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return Text.assemble((bar, style), ("·" * (width - len(bar)), "dim"))


def _batches(batches: list[BatchSummary], width: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, pad_edge=False, header_style="dim")
    for name in ("step", "ver", "wait", "stale", "trajs", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in batches[-4:]:
        table.add_row(
            str(batch.step), f"v{batch.version}", f"{batch.wait_seconds:.1f} s",
            f"{batch.mean_staleness:.2f}/{batch.max_staleness}", str(batch.trajectories), f"{batch.tokens:,}",
        )  # fmt: skip
    for _ in range(4 - len(batches)):
        table.add_row()
    return _panel("batches [dim](stale: mean/max)[/]", table, width)


def _fates(snapshot: DemoSnapshot, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    bar = max(4, width - 24)
    for fate in ("trained", "filtered", "failed", "cancelled"):
        count = snapshot.fates.get(fate, 0)
        table.add_row(fate, f"{count:>5,}", _bar(count, max(snapshot.issued, 1), bar, FATES[fate]))
    table.add_row("live", f"{snapshot.live:>5,}", _bar(snapshot.live, max(snapshot.issued, 1), bar, "blue"))
    table.add_row("[bold]issued[/]", f"[bold]{snapshot.issued:>5,}[/]", "")
    return _panel("ledger", table, width)


def _notes(notes: list[tuple[float, str]], width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", width=width - 12)
    for when, text in [*notes[-6:], *[(0.0, "")] * (6 - len(notes))]:
        style = "red" if " lost: " in text else "yellow" if " failed: " in text else ""
        table.add_row(f"{when:5.0f} s" if text else "", Text(text, style=style))
    return _panel("events", table, width)


def _panel(title: str, inside: RenderableType, width: int) -> Panel:
    return Panel(inside, title=title, title_align="left", box=box.ROUNDED, border_style="dim", width=width)


# -- after the run -----------------------------------------------------------------------------------------------------


def _print_ledger(console: Console, run: DemoRun, timeline: Timeline) -> bool:
    """Print the sums of all attempts and all tokens; returns whether they add up."""
    ledger = run.scheduler.ledger
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for attempt in timeline.attempts:
        rows[attempt.fate, attempt.cause].append(attempt.tokens)
    table = Table(title="The ledger", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("fate", "cause"):
        table.add_column(name)
    for name in ("attempts", "tokens"):
        table.add_column(name, justify="right")
    for (fate, cause), tokens in sorted(rows.items(), key=lambda row: -len(row[1])):
        table.add_row(Text(fate, style=FATES[fate]), escape(cause), f"{len(tokens):,}", f"{sum(tokens):,}")
    console.print(table)
    ledger.check()
    attempts = {fate.value: count for fate, count in ledger.fates.most_common()}
    tokens_of: Counter[str] = Counter({"of these attempts": ledger.tokens.total()})
    for replica in run.replicas:
        tokens_of.update({f"cut off ({cause})": tokens for cause, tokens in replica.discarded.items()})
    generated = sum(replica.generated for replica in run.replicas)
    sums = [
        _sum(console, "attempts issued", len(timeline.attempts), attempts),
        _sum(console, "tokens generated", generated, tokens_of),
    ]
    return all(sums)


def _sum(console: Console, what: str, total: int, terms: Mapping[str, int]) -> bool:
    right = sum(terms.values()) == total
    verdict = "[green]adds up[/]" if right else f"[bold red]does not add up: {sum(terms.values()):,}[/]"
    text = " + ".join(f"{count:,} {escape(name)}" for name, count in terms.items())
    console.print(f"{total:,} {what} = {text}: {verdict}", soft_wrap=True)
    return right


def _print_failed_attempt(console: Console, run: DemoRun, timeline: Timeline) -> None:
    """Print the history of one attempt that failed, and of the next attempt, as `scheduler.why` tells it."""
    keys = [attempt.key for attempt in timeline.attempts]
    failed = [
        attempt.key for attempt in timeline.attempts if attempt.fate == "failed" and _next_try(attempt.key) in keys
    ]
    if not failed:
        return
    console.print("\n[bold]What happened to one attempt, and to the next try at it[/]")
    for key in (failed[0], _next_try(failed[0])):
        console.print(f"[cyan]>>> print(scheduler.why({key!r}))[/]\n{escape(run.scheduler.why(key))}", soft_wrap=True)


def _next_try(key: str) -> str:
    member, _, number = key.partition("#")
    return f"{member}#{int(number) + 1}"


def _write_plots(console: Console, timeline: Timeline, out: Path, title: str) -> None:
    console.print("\n[bold]The timeline[/]")
    try:
        write_png(timeline, out / "timeline.png", title=title)
        console.print(f"{out / 'timeline.png'}", soft_wrap=True)
    except ImportError as error:
        console.print(f"no PNG: {error}", soft_wrap=True, markup=False)
    write_html(timeline, out / "timeline.html", title=title)
    console.print(f"{out / 'timeline.html'}  [dim]in a browser: hover, zoom, click an attempt[/]", soft_wrap=True)


def _print_next_commands(console: Console, seed: int) -> None:
    console.print("\n[bold]Next[/]")
    table = Table.grid(padding=(0, 3))
    table.add_row(f"[cyan]cadenza demo --seed {seed + 1}[/]", "another run")
    table.add_row("[cyan]cadenza fuzz --schedules 200[/]", "random schedules with faults, checked")
    table.add_row("[cyan]cadenza bench control-plane[/]", "what the scheduler costs per trajectory")
    console.print(table)
