"""The timeline of a run as one interactive page: a single file, no network, no build."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from cadenza.observe.timeline import FATES, VERSIONS, AttemptSpan, Timeline


def write_html(timeline: Timeline, path: Path, *, title: str = "cadenza") -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(timeline, title), encoding="utf-8")


def render(timeline: Timeline, title: str) -> str:
    """Return the page as text."""
    template = resources.files("cadenza.observe").joinpath("timeline.html").read_text(encoding="utf-8")
    head, middle, tail = template.replace("__TITLE__", html.escape(title)).partition("__DATA__")
    assert middle, "timeline.html has lost its place for the data"
    return head + script_json(_data(timeline)) + tail


def _data(timeline: Timeline) -> dict[str, Any]:
    replicas = {name: number for number, name in enumerate(timeline.replicas)}
    return {
        "start": timeline.start,
        "end": timeline.end,
        "slots": timeline.slots,
        "replicas": timeline.replicas,
        "suspensions": timeline.suspensions,
        "published": timeline.published,
        "cuts": timeline.cuts,
        "lost": [(time, replicas[name], cause) for time, name, cause in timeline.lost],
        "fates": FATES,
        "versions": VERSIONS,
        "lives": [_attempt(attempt, replicas) for attempt in timeline.attempts],
    }


def _attempt(attempt: AttemptSpan, replicas: dict[str, int]) -> list[Any]:
    """Return the columns that `timeline.html` reads; times are rounded to a tenth of a millisecond."""
    calls = [
        (replicas[call.replica], round(call.start, 4), round(call.end, 4), call.outcome, call.tokens)
        for call in attempt.calls
    ]
    times = [round(time, 4) for time in (attempt.start, attempt.end, attempt.closed)]
    return [
        attempt.key,
        attempt.task,
        attempt.version,
        attempt.slot,
        *times,
        attempt.fate,
        attempt.cause,
        attempt.reward,
        calls,
    ]


def script_json(data: Any) -> str:
    """Return JSON that is safe inside a script element: no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
