"""A run as one page: the curves, the config, and episodes to look at. One file, no network, no build.

The files are read as streams and thinned on the way, so that the page stays below 2 MB however long the run was:

    metrics.jsonl --> one `DownsampledCurve` per metric --> curves as SVG
    samples.jsonl --> an `EpisodeRef` per line, chosen ones read again --> film strips

Everything that the run wrote is text to be shown: it passes `_text` on its way into the page.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

from cadenza.observe.display import CurvePoint, DownsampledCurve, duration, short
from cadenza.observe.run import read_lines

POINTS = 800
"""Points of a curve at most; when there are more, every two become one."""
ROWS = 250
"""Metrics in the table of all metrics at most."""
EPISODES = 12
"""Episodes in each of the five sections at most."""
SECTION = 240_000
"""Bytes of a section at most."""
EPISODE = 16_000
"""Characters of an episode at most, before they are escaped."""
TURNS = 40
"""Turns of an episode at most."""
FOLDED = 60_000
"""Characters of the config at most."""


class Chart(NamedTuple):
    title: str
    names: tuple[str, ...]
    unit: str = ""


CHARTS = (
    Chart("Success", ("train/success", "val/success"), "%"),
    Chart("Reward", ("train/score", "val/score")),
    Chart("Response length", ("train/response_tokens",), "tokens"),
    Chart("Turns", ("train/turns",)),
    Chart("Entropy", ("train/entropy",)),
    Chart("KL", ("train/kl",)),
    Chart("Loss", ("train/loss",)),
    Chart("Gradient norm", ("train/grad_norm",)),
    Chart("Staleness", ("staleness/mean", "staleness/max"), "versions"),
    Chart("Speed", ("perf/tokens_per_second",), "tokens/s"),
)


def write_report(run_dir: Path | str) -> Path:
    """Make report.html from the files of a run; the run may still be going on."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run in {run_dir}")
    path, beside = run_dir / "report.html", run_dir / ".report.html.new"
    beside.write_bytes(render(run_dir).encode("utf-8", "replace"))
    beside.replace(path)
    return path


def render(run_dir: Path) -> str:
    """The page as text."""
    metrics = _MetricHistory(run_dir / "metrics.jsonl")
    pieces = [
        _headline(run_dir, metrics),
        _charts(metrics),
        _episodes(run_dir / "samples.jsonl"),
        *(_folded(f"Config: {path.name}", path) for path in sorted(run_dir.glob("config*.yaml"))),
        _folded("Summary", run_dir / "summary.json"),
        _table(metrics),
    ]
    template = resources.files("cadenza.observe").joinpath("report.html").read_text(encoding="utf-8")
    title = _text(f"{run_dir.resolve().name}, cadenza")
    head, middle, tail = template.replace("__TITLE__", title).partition("__BODY__")
    assert middle, "report.html has lost its place for the body"
    return head + "\n".join(filter(None, pieces)) + tail


def _text(text: str) -> str:
    """As text in an element or in a quoted attribute."""
    return html.escape(text)


# -- numbers -----------------------------------------------------------------------------------------------------------


class _MetricHistory:
    """All metrics of the run, thinned."""

    def __init__(self, path: Path) -> None:
        self.series: dict[str, DownsampledCurve] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.steps = self.lines = 0
        self.seconds = self.cpu_seconds = 0.0
        for record in read_lines(path):
            self._read(record)

    def _read(self, record: dict[str, Any]) -> None:
        step = record.pop("step", None)
        if not isinstance(step, int):
            return
        self.steps = max(self.steps, step)
        self.lines += 1
        self.seconds = record.pop("time", None) or self.seconds
        self.cpu_seconds = record.pop("cpu", None) or self.cpu_seconds
        for name, value in record.items():
            if value is not None and not isinstance(value, (int, float)):
                continue
            self.series.setdefault(name, DownsampledCurve(POINTS)).add(step, float("nan") if value is None else value)
            if value is not None:
                self.first.setdefault(name, value)
                self.last[name] = value


def _headline(run_dir: Path, metrics: _MetricHistory) -> str:
    summary = _json(run_dir / "summary.json")
    tiles = []
    for mode, name in (("val", "validation success"), ("train", "training success")):
        series = metrics.series.get(f"{mode}/success")
        if series is not None and series.points:
            first, last = _ends(series, 1 if mode == "val" else 10)
            tiles.append((f"{first:.0%} → {last:.0%}", f"{name}, first and last"))
    tiles.append((f"{metrics.steps:,}", "steps"))
    if "samples" in metrics.last:
        tiles.append((f"{metrics.last['samples']:,.0f}", "trajectories trained"))
    tiles.append((duration(metrics.seconds), f"wall time ({metrics.seconds:,.0f} s)"))
    tiles.append((duration(metrics.cpu_seconds), f"CPU time ({metrics.cpu_seconds:,.0f} s)"))
    paths = {"run": f"<code>{_text(str(run_dir))}</code>"}
    if (checkpoint := _checkpoint(run_dir, summary)) is not None:
        play = summary.get("play") or f"cadenza play {shlex.quote(str(run_dir))}"
        paths["checkpoint"] = f"<code>{_text(checkpoint)}</code>"
        paths["play it"] = f"<code>{_text(str(play))}</code>"
    boxes = "".join(f'<div class="tile"><b>{_text(value)}</b><span>{name}</span></div>' for value, name in tiles)
    pairs = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in paths.items())
    name = _text(run_dir.resolve().name)
    return f'<h1>{name}</h1><div class="tiles">{boxes}</div><dl class="paths">{pairs}</dl>'


def _ends(series: DownsampledCurve, points: int) -> tuple[float, float]:
    """The mean of the first points and of the last ones; fewer where there are few."""
    count = max(1, min(points, len(series.points) // 4))
    first, last = series.points[:count], series.points[-count:]
    return sum(point.y for point in first) / count, sum(point.y for point in last) / count


def _checkpoint(run_dir: Path, summary: Mapping[str, Any]) -> str | None:
    """What the summary names, else the best one, the last one, the newest one."""
    if isinstance(named := summary.get("checkpoint"), str):
        return str(run_dir / named) if (run_dir / named).exists() else named
    there = run_dir / "checkpoints"
    found = [path for path in (there / "best", there / "last") if path.exists()] or sorted(there.glob("step-*"))[-1:]
    return str(found[0]) if found else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _table(metrics: _MetricHistory) -> str:
    """Every metric, also those that no chart knows."""
    rows = []
    for name in sorted(metrics.series)[:ROWS]:
        series = metrics.series[name]
        if series.points:
            weight = series.count
            mean = sum(point.y * point.weight for point in series.points) / weight
            low, high = min(point.low for point in series.points), max(point.high for point in series.points)
            values = [_figure(value) for value in (metrics.first[name], metrics.last[name], low, high, mean)]
        else:
            values = [""] * 5
        bad = f'<span class="bad">{series.bad:,}</span>' if series.bad else ""
        cells = "".join(f"<td>{value}</td>" for value in (*values, f"{series.count:,}", bad))
        rows.append(f"<tr><td>{_text(name)}</td>{cells}<td>{_spark(series.points)}</td></tr>")
    if not rows:
        return ""
    names = ("metric", "first", "last", "lowest", "highest", "mean", "values", "not finite", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    more = len(metrics.series) - ROWS
    rest = f"<p class='faint'>{more:,} more are in metrics.jsonl</p>" if more > 0 else ""
    return (
        f"<details><summary>All metrics ({len(metrics.series):,})</summary>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>{rest}</details>'
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spark(points: Sequence[CurvePoint]) -> str:
    few = points[:: max(1, len(points) // 80)]
    if len(few) < 2:
        return ""
    box = _PlotArea(1, 1, 119, 21, few[0].x, few[-1].x, *_limits([point.y for point in few]))
    line = box.line((point.x, point.y) for point in few)
    return f'<svg viewBox="0 0 120 22" class="s0"><polyline class="smooth" points="{line}"/></svg>'


# -- curves ------------------------------------------------------------------------------------------------------------


class _PlotArea(NamedTuple):
    """Where values lie in a picture."""

    left: float
    top: float
    right: float
    bottom: float
    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / ((self.x1 - self.x0) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y0) / ((self.y1 - self.y0) or 1) * (self.bottom - self.top)

    def line(self, pairs: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in pairs)


def _charts(metrics: _MetricHistory) -> str:
    figures: list[str] = []
    for chart in CHARTS:
        drawn = {name: metrics.series[name] for name in chart.names if name in metrics.series}
        if any(series.points for series in drawn.values()):
            figures.append(_chart(chart, drawn, wide=not figures))
    if not figures:
        return "<h2>Curves</h2><p class='faint'>Nothing has been measured yet.</p>"
    note = "<p class='faint'>Thin: measured. Thick: smoothed. Point at a curve to read it.</p>"
    return f'<h2>Curves</h2>{note}<div class="charts">{"".join(figures)}</div>'


def _chart(chart: Chart, drawn: Mapping[str, DownsampledCurve], *, wide: bool) -> str:
    width, height = (1160, 250) if wide else (360, 180)
    points = [point for series in drawn.values() for point in series.points]
    low, high = _limits([y for point in points for y in (point.low, point.high)], share=chart.unit == "%")
    first, last = min(point.x for point in points), max(point.x for point in points)
    box = _PlotArea(44, 10, width - 8, height - 22, first, last, low, high)
    lines = "".join(_curve(box, at, name, series.points) for at, (name, series) in enumerate(drawn.items()))
    keys = "".join(
        f'<span class="s{at}" title="{name}">{_key(name, drawn)}{_bad(series)}</span>'
        for at, (name, series) in enumerate(drawn.items())
    )
    unit = f"<span>{chart.unit}</span>" if chart.unit not in ("", "%") else ""
    now = ", ".join(_axis_label(series.points[-1].y, chart.unit) for series in drawn.values() if series.points)
    return (
        f'<figure data-box="{json.dumps(list(box))}"{" class=wide" if wide else ""}>'
        f'<figcaption>{chart.title}{unit}{keys}<span class="read">last {now}</span></figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{chart.title}">'
        f"{_axes(box, chart.unit, width)}{lines}</svg></figure>"
    )


def _key(name: str, drawn: Mapping[str, DownsampledCurve]) -> str:
    """What tells a curve from the others of its chart."""
    if len(drawn) == 1:
        return "" if name.startswith("train/") else '<i class="key"></i>' + name
    area, _, rest = name.partition("/")
    alike = len({other.partition("/")[2] for other in drawn}) == 1
    return f'<i class="key"></i>{area if alike else rest}'


def _bad(series: DownsampledCurve) -> str:
    return f' <b class="bad">{series.bad:,} not finite</b>' if series.bad else ""


def _curve(box: _PlotArea, at: int, name: str, points: Sequence[CurvePoint]) -> str:
    """What was measured, thin, with the range of what was thinned out; the smoothed line over it."""
    if not points:
        return ""
    label = _text(name)
    raw = box.line((point.x, point.y) for point in points)
    if len(points) <= 60:
        dots = "".join(f'<circle class="dot" cx="{box.x(p.x):.1f}" cy="{box.y(p.y):.1f}" r="2.5"/>' for p in points)
        line = f'<polyline class="smooth only" data-name="{label}" points="{raw}"/>'
        return f'<g class="s{at}">{line}{dots}</g>'
    band = ""
    if any(point.weight > 1 for point in points):
        around = [(point.x, point.high) for point in points] + [(point.x, point.low) for point in reversed(points)]
        band = f'<polygon class="band" points="{box.line(around)}"/>'
    soft = box.line(zip((point.x for point in points), smooth([point.y for point in points]), strict=True))
    lines = f'<polyline class="raw" data-name="{label}" points="{raw}"/><polyline class="smooth" points="{soft}"/>'
    return f'<g class="s{at}">{band}{lines}</g>'


def smooth(values: Sequence[float]) -> list[float]:
    """A moving average over about a thirtieth of the curve, of both sides, so that it does not lag behind."""
    keep = 1 - 1 / max(1.0, len(values) / 60)

    def one_side(values: Iterable[float]) -> list[tuple[float, float]]:
        total = weight = 0.0
        sums = []
        for value in values:
            total, weight = keep * total + value, keep * weight + 1
            sums.append((total, weight))
        return sums

    sides = zip(values, one_side(values), reversed(one_side(reversed(values))), strict=True)
    return [(left + right - value) / (w + v - 1) for value, (left, w), (right, v) in sides]


def _axes(box: _PlotArea, unit: str, width: int) -> str:
    out = []
    for at in range(5 if width > 500 else 3):
        value = box.y0 + (box.y1 - box.y0) * at / (4 if width > 500 else 2)
        y = box.y(value)
        label = _axis_label(value, unit)
        out.append(f'<line class="grid" x1="{box.left}" x2="{box.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{box.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, anchor in ((box.x0, "start"), (box.x1, "end")):
        label = f"step {value:,.0f}"
        out.append(f'<text x="{box.x(value):.1f}" y="{box.bottom + 17}" text-anchor="{anchor}">{label}</text>')
    return "".join(out)


def _axis_label(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else short(value)


def _limits(values: Sequence[float], *, share: bool = False) -> tuple[float, float]:
    """The range of the values; of shares all of it. Zero belongs to it when it is near."""
    low, high = min(values), max(values)
    if share and low >= 0 and high <= 1:
        return 0.0, 1.0
    if 0 < low < high / 2:
        low = 0.0
    if low == high:
        return low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    return low, high


# -- episodes ----------------------------------------------------------------------------------------------------------


class EpisodeRef(NamedTuple):
    """Where an episode stands in the file, and what it is chosen by."""

    offset: int
    step: int
    score: float | None
    mode: str
    turns: int


def _episodes(path: Path) -> str:
    episodes = find_episodes(path)
    if not episodes:
        return ""
    note = (
        f"{len(episodes):,} are in samples.jsonl, these are some of them. What changed since the last turn is marked."
    )
    pieces = [f"<h2>Episodes</h2><p class='faint'>{note}</p>"]
    with path.open("rb") as lines:
        for title, few in choose(episodes).items():
            if few:
                pieces.append(f"<h3>{title}</h3>")
                pieces.append(_section(lines, few))
    return "".join(pieces)


def find_episodes(path: Path) -> list[EpisodeRef]:
    """All of them, without their text."""
    episodes = []
    offset = 0
    if not path.exists():
        return []
    with path.open("rb") as lines:
        for line in lines:
            if (record := _record(line)) is not None:
                score = record.get("score")
                number = float(score) if isinstance(score, (int, float)) else None
                turns = len(record["turns"])
                episodes.append(EpisodeRef(offset, record["step"], number, str(record.get("mode")), turns))
            offset += len(line)
    return episodes


def _record(line: bytes) -> dict[str, Any] | None:
    """An episode, if the line is one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    known = isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("turns"), list)
    return record if known else None


def choose(episodes: Sequence[EpisodeRef]) -> dict[str, list[EpisodeRef]]:
    """Episodes of the first, the middle and the last sixth of the run, the best ones and the worst ones."""
    first, last = min(episode.step for episode in episodes), max(episode.step for episode in episodes)
    sixth = (last - first) / 6
    middle = (first + last) / 2
    spans = {
        "Early": (first, first + sixth),
        "Middle": (middle - sixth / 2, middle + sixth / 2),
        "Late": (last - sixth, last),
    }
    chosen = {name: _spread([p for p in episodes if low <= p.step <= high]) for name, (low, high) in spans.items()}
    # Of equals, the latest: it says most about what the model has become.
    scored = [(episode.score, episode) for episode in episodes if episode.score is not None]
    best = sorted(scored, key=lambda pair: (-pair[0], -pair[1].step, pair[1].turns))
    if best and best[0][0] > best[-1][0]:
        worst = sorted(scored, key=lambda pair: (pair[0], -pair[1].step, -pair[1].turns))
        chosen["Best"], chosen["Worst"] = ([episode for _, episode in few[: EPISODES // 2]] for few in (best, worst))
    return chosen


def _spread(episodes: Sequence[EpisodeRef]) -> list[EpisodeRef]:
    """As many as may be shown, evenly from all of training and all of validation."""
    kinds = [
        [episode for episode in episodes if episode.mode == mode] for mode in dict.fromkeys(p.mode for p in episodes)
    ]
    chosen: list[EpisodeRef] = []
    for kind in kinds:
        share = max(2, EPISODES // len(kinds))
        chosen += kind if len(kind) <= share else [kind[at * (len(kind) - 1) // (share - 1)] for at in range(share)]
    return sorted(chosen, key=lambda episode: episode.offset)[:EPISODES]


def _section(lines: IO[bytes], episodes: Sequence[EpisodeRef]) -> str:
    pieces: list[str] = []
    size = 0
    for number, episode in enumerate(episodes):
        lines.seek(episode.offset)
        record = _record(lines.readline())
        piece = "" if record is None else _episode(record)
        size += len(piece.encode("utf-8", "replace"))
        if size > SECTION:
            pieces.append(f"<p class='faint'>{len(episodes) - number} more were too long to be shown.</p>")
            break
        pieces.append(piece)
    return f'<div class="rollouts">{"".join(pieces)}</div>'


def _episode(record: Mapping[str, Any]) -> str:
    turns = [turn for turn in record["turns"] if isinstance(turn, dict)]
    shown = list(enumerate(turns, 1))
    if len(shown) > TURNS:
        shown = shown[: TURNS // 2] + shown[-TURNS // 2 :]
    limit = max(80, EPISODE // max(1, 2 * len(shown)))
    frames = []
    before: tuple[int, str] = (0, "")
    for number, turn in shown:
        if number > before[0] + 1:
            frames.append(f'<div class="frame">{number - before[0] - 1} turns<br>left out</div>')
        prompt = _clip(str(turn.get("prompt", "")), limit)
        frames.append(_frame(number, prompt, before[1], turn, limit))
        before = (number, prompt)
    if isinstance(final := record.get("final"), str) and final.strip():
        frames.append(_frame("end", _clip(final, limit), before[1], {}, limit))
    return f'<div class="rollout">{_title(record, len(turns))}<div class="film">{"".join(frames)}</div></div>'


def _title(record: Mapping[str, Any], turns: int) -> str:
    success = record.get("success")
    result = ""
    if isinstance(success, bool):
        result = '<b class="good">success</b>' if success else '<b class="bad">no success</b>'
    versions = dict.fromkeys(str(version) for version in record.get("versions") or ())
    facts = [
        f"score {_score(record.get('score'))}",
        f"{turns} turn{'' if turns == 1 else 's'}",
        str(record.get("mode", "")),
        str(record.get("fate", "")),
        f"version {' to '.join(versions)}" if versions else "",
    ]
    domain, task = str(record.get("domain", "")), str(record.get("task", ""))
    name = _text(task if task.startswith(domain) else f"{domain} {task}")
    rest = _text(" · ".join(fact for fact in facts if fact))
    step = f"<b>step {record['step']:,}</b>"
    return f'<header>{step}{result}<span>{name}</span><span class="faint">{rest}</span></header>'


def _score(score: object) -> str:
    return f"{score:.3g}" if isinstance(score, (int, float)) else "unknown"


def _frame(name: int | str, prompt: str, before: str, turn: Mapping[str, Any], limit: int) -> str:
    reward = turn.get("reward")
    paid = ""
    if isinstance(reward, (int, float)) and reward:
        paid = f'<span class="{"good" if reward > 0 else "bad"}">{reward:+.3g}</span>'
    seen = "".join(_block(block, old) for block, old in _blocks(prompt, before))
    said = ""
    if "response" in turn:
        said = f'<div class="said"><pre>{_text(_clip(str(turn["response"]), limit))}</pre></div>'
    return (
        f'<div class="frame"><small>{name}{paid}</small><div class="turn">'
        f'<div class="seen">{seen}</div>{said}</div></div>'
    )


def _clip(text: str, limit: int) -> str:
    """The beginning and the end; a board is most often at the end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]}\n… {len(text) - limit:,} characters left out …\n{text[-(limit - limit // 3) :]}"


def _blocks(prompt: str, before: str) -> list[tuple[str, str]]:
    """Blocks between empty lines, boards each with the board before it."""
    boards = iter([block for block in _split(before) if _is_board(block)])
    return [(block, next(boards, "") if _is_board(block) else "") for block in _split(prompt)]


def _split(text: str) -> list[str]:
    return [block for block in re.split(r"\n[ \t]*\n", text.strip("\n")) if block.strip()]


def _is_board(block: str) -> bool:
    """Rows of one length without words: most of what the envs draw."""
    rows = block.split("\n")
    even = len({len(row) for row in rows}) == 1
    return len(rows) > 1 and even and len(rows[0]) <= 60 and not re.search(r"[A-Za-z]{3,} [A-Za-z]{2,}", block)


def _block(block: str, before: str) -> str:
    if not _is_board(block):
        return f"<pre>{_text(block)}</pre>"
    same = [len(row) for row in block.split("\n")] == [len(row) for row in before.split("\n")]
    return f'<pre class="board">{_cells(block, before if same else block)}</pre>'


def _cells(board: str, before: str) -> str:
    """What has changed is marked, and empty ground is faint."""
    out = []
    start = 0
    kinds = ["b" if new != old else "s" if new in "._" else "" for new, old in zip(board, before, strict=True)]
    for at, (kind, following) in enumerate(zip_longest(kinds, kinds[1:]), 1):
        if kind != following:
            run = _text(board[start:at])
            out.append(f"<{kind}>{run}</{kind}>" if kind else run)
            start = at
    return "".join(out)


def _folded(title: str, path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"<details><summary>{_text(title)}</summary><pre>{_text(_clip(text, FOLDED))}</pre></details>"
