from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza import DataProto, RolloutScheduler
from cadenza.observe.events import Event
from cadenza.observe.timeline import AttemptSpan, RequestSpan, Timeline, build_timeline
from cadenza.observe.timeline_html import render, write_html
from cadenza.observe.timeline_png import concurrency, write_png
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.simulation.virtual_cluster.clock import run
from cadenza.testing import FakeReplica, LocalCluster

NASTY = "</script><img src=x onerror=alert(1)> & \u2028 'quoted\""

BEGIN = [Event(1.0, "open", "g0", "math/7 at version 3"), Event(1.0, "issue", "g0.0#0", "slot 2")]


def only(timeline: Timeline) -> AttemptSpan:
    (attempt,) = timeline.attempts
    return attempt


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_an_attempt_holds_its_slot_from_issue_to_finish_and_closes_with_its_fate() -> None:
    events = [*BEGIN, Event(4.0, "finish", "g0.0#0", "reward 0.5"), Event(9.0, "trained", "g0.0#0", "")]
    attempt = only(build_timeline(events))
    assert (attempt.task, attempt.version, attempt.slot) == ("math/7", 3, 2)
    assert (attempt.start, attempt.end, attempt.closed) == (1.0, 4.0, 9.0)
    assert (attempt.fate, attempt.reward) == ("trained", 0.5)


def test_a_turn_that_moves_is_one_call_per_replica() -> None:
    events = [
        *BEGIN,
        Event(2.0, "ask", "g0.0#0", "r0"),
        Event(3.0, "answer", "g0.0#0", "abort 40"),
        Event(5.0, "ask", "g0.0#0", "r1"),
        Event(6.0, "answer", "g0.0#0", "error"),
        Event(6.0, "ask", "g0.0#0", "r0"),
        Event(8.0, "answer", "g0.0#0", "stop 60"),
    ]
    attempt = only(build_timeline(events))
    assert attempt.calls == [
        RequestSpan("r0", 2.0, 3.0, "abort", 40),
        RequestSpan("r1", 5.0, 6.0, "error", 0),
        RequestSpan("r0", 6.0, 8.0, "stop", 60),
    ]
    assert attempt.tokens == 100


def test_a_request_without_an_answer_ends_with_its_attempt() -> None:
    events = [*BEGIN, Event(2.0, "ask", "g0.0#0", "r0"), Event(5.0, "surplus", "g0.0#0", "too late")]
    attempt = only(build_timeline(events))
    assert attempt.calls == [RequestSpan("r0", 2.0, 5.0, "cut off", 0)]
    assert (attempt.end, attempt.cause, attempt.reward) == (5.0, "too late", None)


def test_what_is_open_when_the_events_stop_ends_there() -> None:
    events = [*BEGIN, Event(2.0, "ask", "g0.0#0", "r0"), Event(3.0, "suspend", "sampler", "keep")]
    timeline = build_timeline([*events, Event(7.0, "suspended", "sampler", "")])
    assert (only(timeline).fate, only(timeline).end, only(timeline).calls[0].end) == ("running", 7.0, 7.0)
    assert timeline.suspensions == [(3.0, 7.0)]
    assert (timeline.start, timeline.end) == (1.0, 7.0)


def test_members_trained_together_are_one_batch() -> None:
    events = [Event(0.0, "open", "g0", "t at version 0")]
    events += [Event(0.0, "issue", f"g0.{member}#0", f"slot {member}") for member in range(3)]
    events += [Event(time, "trained", f"g0.{member}#0", "") for member, time in enumerate((4.0, 4.0, 6.0))]
    assert build_timeline(events).cuts == [(4.0, 2), (6.0, 1)]


def test_a_slot_is_free_when_the_next_attempt_takes_it_although_a_reward_is_late() -> None:
    events = [
        *BEGIN,
        Event(5.0, "issue", "g0.1#0", "slot 2"),
        Event(8.0, "finish", "g0.0#0", "reward 1"),
        Event(9.0, "finish", "g0.1#0", "reward 1"),
    ]
    assert [(attempt.start, attempt.end) for attempt in build_timeline(events).attempts] == [(1.0, 5.0), (5.0, 9.0)]


def test_versions_and_losses_are_marks_in_time_and_replicas_are_in_their_natural_order() -> None:
    events = [
        *BEGIN,
        Event(2.0, "ask", "g0.0#0", "r10"),
        Event(3.0, "publish", "sampler", "4"),
        Event(4.0, "lost", "r2", "crashed"),
    ]
    timeline = build_timeline(events)
    assert timeline.published == [(3.0, 4)]
    assert timeline.lost == [(4.0, "r2", "crashed")]
    assert timeline.replicas == ["r2", "r10"]


def test_no_events_are_an_empty_timeline() -> None:
    assert build_timeline([]) == Timeline()


class TwoTurns:
    def __init__(self) -> None:
        self.turn = 0

    async def reset(self, seed: int) -> str:
        return "begin"

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        self.turn += 1
        return "go on", 1.0, self.turn == 2, False, {}


def test_the_events_of_a_scheduler_hold_what_its_ledger_holds() -> None:
    events: list[Event] = []

    async def main() -> RolloutScheduler:
        cluster = LocalCluster([FakeReplica(seconds=1.0, name=f"r{n}", devices=(n,)) for n in range(2)])
        cluster.sampler.events = events.append
        scheduler = RolloutScheduler(
            RolloutConfig(batch_size=4, group_size=2, alpha=1.0),
            EnvManagerConfig(domains={"two": DomainConfig(env=TwoTurns)}, slots=4),
            cluster.resources,
            cluster,
            events=events.append,
        )
        for step in (1, 2):
            await scheduler.suspend()
            await cluster.sampler.load_weights(step)
            await scheduler.get_batch(DataProto(meta_info={"global_step": step}), 4)
        await scheduler.shutdown()
        await cluster.sampler.close()
        return scheduler

    ledger = run(main).ledger
    timeline = build_timeline(events)
    assert len(timeline.attempts) == ledger.issued
    assert {fate: sum(attempt.fate == fate for attempt in timeline.attempts) for fate in ledger.fates} == ledger.fates
    assert sum(attempt.tokens for attempt in timeline.attempts) == ledger.tokens.total()
    assert [version for _, version in timeline.published] == [1, 2]
    assert [count for _, count in timeline.cuts] == [4, 4]
    assert timeline.replicas == ["r0", "r1"]


# -- the page ----------------------------------------------------------------------------------------------------------


def nasty_timeline() -> Timeline:
    events = [
        Event(0.0, "open", "g0", f"{NASTY} at version 0"),
        Event(0.0, "issue", "g0.0#0", "slot 0"),
        Event(0.5, "ask", "g0.0#0", NASTY),
        Event(1.0, "answer", "g0.0#0", "stop 12"),
        Event(2.0, "failed", "g0.0#0", NASTY),
        Event(2.0, "lost", NASTY, NASTY),
    ]
    return build_timeline(events)


def test_the_page_holds_the_data_and_no_text_of_it_becomes_markup() -> None:
    page = render(nasty_timeline(), NASTY)
    assert "<img" not in page
    assert page.count("</script>") == 2
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])
    assert data["replicas"] == [NASTY]
    assert data["lost"] == [[2.0, 0, NASTY]]
    assert data["lives"] == [["g0.0#0", NASTY, 0, 0, 0.0, 2.0, 2.0, "failed", NASTY, None, [[0, 0.5, 1.0, "stop", 12]]]]


def test_a_title_or_a_cause_that_looks_like_a_placeholder_stays_what_it_is() -> None:
    events = [*BEGIN, Event(2.0, "failed", "g0.0#0", "__TITLE__ __DATA__")]
    page = render(build_timeline(events), "of __DATA__")
    assert '"__TITLE__ __DATA__"' in page
    assert "<h1>of __DATA__</h1>" in page


def test_the_page_needs_no_network() -> None:
    page = render(nasty_timeline(), "run")
    assert "//" not in re.sub(r"^\s*//.*$", "", page, flags=re.MULTILINE)
    assert not re.search(r"<(link|iframe)|<script[^>]+src=|@import|url\(", page)


def test_the_page_is_written_where_asked(tmp_path: Path) -> None:
    write_html(Timeline(), tmp_path / "new" / "t.html", title="empty")
    assert (tmp_path / "new" / "t.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# -- the picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeline", [nasty_timeline(), Timeline()], ids=["one attempt", "empty"])
def test_the_picture_is_a_png(timeline: Timeline, tmp_path: Path) -> None:
    write_png(timeline, tmp_path / "t.png", title="$x & <y>")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_without_matplotlib_the_picture_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'cadenza\[plot\]'"):
        write_png(Timeline(), tmp_path / "t.png")


def test_concurrency_is_the_average_over_a_column() -> None:
    edges = np.array([0.0, 2.0, 4.0])
    np.testing.assert_allclose(concurrency([(0.0, 1.0), (1.0, 4.0), (3.0, 3.5)], edges), [1.0, 1.25])


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(lambda pair: (min(pair), max(pair)))))
def test_concurrency_loses_no_time(spans: list[tuple[float, float]]) -> None:
    edges = np.linspace(0, 100, 38)
    assert (concurrency(spans, edges) * np.diff(edges)).sum() == pytest.approx(sum(b - a for a, b in spans), abs=1e-6)
