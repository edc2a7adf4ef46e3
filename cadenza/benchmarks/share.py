"""`cadenza bench share`: replicas leave and come back under load, on Ray.

Four replicas run in processes of their own, each with many requests in flight. One of them repeatedly leaves by a
shrink and comes back by an expand, as for a train step on its device. The engines take the times of a cost model on the
wall clock, and every token follows from the seed of its turn and its position, so the benchmark finds a token that is
lost, wrong or written twice. It measures:

- turns in flight on the other replicas while one left or came, against those that saw no change, in one run;
- the time of a shrink, and the time until the last moved request runs on another replica;
- the cost of a move for the request: the prefill of its context on the new replica.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import numpy as np

from cadenza.benchmarks.paced import VOCAB, own_ray, paced_replicas
from cadenza.data import DataProto
from cadenza.inference.replica import Request, Sampling, Tokens
from cadenza.observe.events import Event
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.model import GOLDEN, MASK64
from cadenza.rollout.records import Trajectory
from cadenza.rollout.scheduler import RolloutScheduler
from cadenza.simulation.virtual_cluster.cost import CostModel
from cadenza.simulation.virtual_cluster.tokens import seeded_tokens
from cadenza.testing import LocalCluster

REPLICAS, IN_FLIGHT = 4, 96
TURNS = 1600
PROMPT, ANSWER = 1000, 300
PERIOD = 6.0
"""Seconds between two changes."""
COST = CostModel(a=0.01, b=0.0, c=0.0, p=5e-6, kv_capacity=1 << 20)
"""A turn alone takes 3 s; moving one costs 5 to 6.5 ms of prefill."""


class QuestionEnv:
    """An env with one turn."""

    async def reset(self, seed: int) -> Tokens:
        return (np.arange(PROMPT, dtype=np.int32) + seed) % VOCAB

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class ReplicaChange(NamedTuple):
    """One shrink or expand."""

    kind: str
    began: float
    ended: float
    moved: int
    """Requests that it moved."""


class ObservedTurn(NamedTuple):
    """A turn, as its client saw it."""

    asked: float
    answered: float
    first: str
    """Name of the replica that got its first request."""
    interruptions: int
    is_exact: bool


def measure(turns: int = TURNS, in_flight: int = IN_FLIGHT, period: float = PERIOD) -> dict[str, Any]:
    """Measure all figures in one Ray of this process."""
    with own_ray(REPLICAS):
        return asyncio.run(_measured(turns, in_flight, period))


def _length(request: Request) -> int:
    return ANSWER


async def _measured(turns: int, in_flight: int, period: float) -> dict[str, Any]:
    async with paced_replicas(REPLICAS, COST, _length) as replicas:
        local, events, found = LocalCluster(replicas), list[Event](), list[Trajectory]()

        def collator(trajectories: list[Trajectory]) -> DataProto:
            found.extend(trajectories)
            return DataProto()

        scheduler = RolloutScheduler(
            RolloutConfig(batch_size=turns),
            EnvManagerConfig(
                domains={"questions": DomainConfig(env=QuestionEnv, tasks=turns)},
                slots=in_flight,
                sampling=Sampling(max_tokens=ANSWER),
            ),
            local.resources,
            local,
            collator=collator,
            events=events.append,
        )
        changes = await _under_load(scheduler, turns, period)
        stats = await local.sampler.stats()
        metrics = scheduler.metrics()
        await scheduler.shutdown()
        await local.sampler.close()
    written = sum(one.generated for one in stats.values())
    return _figures(_seen(found, events), changes, events, written, metrics, turns)


async def _under_load(scheduler: RolloutScheduler, turns: int, period: float) -> list[ReplicaChange]:
    """Shrink and expand the last replica until all turns are answered; returns the changes."""
    loop, changes = asyncio.get_running_loop(), list[ReplicaChange]()
    batch = asyncio.ensure_future(scheduler.get_batch(DataProto(meta_info={"global_step": 0}), turns))
    device, kind = [REPLICAS - 1], "shrink"
    while not batch.done():
        await asyncio.wait([batch], timeout=period)
        if batch.done() and kind == "shrink":
            break
        began = loop.time()
        change = scheduler.shrink_sampler if kind == "shrink" else scheduler.expand_sampler
        report = await change(device)
        changes.append(ReplicaChange(kind, began, loop.time(), report.get("moved", 0)))
        kind = "expand" if kind == "shrink" else "shrink"
    await batch
    return changes


def _seen(trajectories: list[Trajectory], events: list[Event]) -> list[ObservedTurn]:
    asked: dict[str, list[str]] = {}
    for event in events:
        if event.kind == "ask":
            asked.setdefault(event.subject, []).append(event.detail)
    seen = []
    for trajectory in trajectories:
        [turn] = trajectory.turns
        where = asked[f"g{trajectory.group}.{trajectory.member}#{trajectory.attempt}"]
        seed = (trajectory.seed + GOLDEN) & MASK64
        tokens, logprobs = seeded_tokens(seed, 0, ANSWER, VOCAB)
        is_exact = np.array_equal(turn.response, tokens) and np.array_equal(turn.logprobs, logprobs)
        seen.append(ObservedTurn(turn.asked, turn.answered, where[0], len(where) - 1, is_exact))
    return seen


def _figures(
    seen: list[ObservedTurn],
    changes: list[ReplicaChange],
    events: list[Event],
    written: int,
    metrics: dict[str, float],
    turns: int,
) -> dict[str, Any]:
    leaving = f"paced-{REPLICAS - 1}"
    warm = min(turn.answered for turn in seen)  # turns before it include the first calls of everything
    stayed = [turn for turn in seen if turn.first != leaving and not turn.interruptions and turn.asked >= warm]
    saw = [any(turn.asked < c.ended and turn.answered > c.began for c in changes) for turn in stayed]
    calm = [turn.answered - turn.asked for turn, did in zip(stayed, saw, strict=True) if not did]
    changing = [turn.answered - turn.asked for turn, did in zip(stayed, saw, strict=True) if did]
    moved = [turn.answered - turn.asked for turn in seen if turn.interruptions]
    shrinks = [change for change in changes if change.kind == "shrink"]
    settled = [_settled(change, events) for change in shrinks]
    per_shrink = max((change.moved for change in shrinks), default=0)
    return {
        "turns": len(seen),
        "shrinks": len(shrinks),
        "expands": len(changes) - len(shrinks),
        "moved_per_shrink": per_shrink,
        "moves": sum(turn.interruptions for turn in seen),
        "lost": turns - len(seen),
        "failed": int(metrics["fate/failed"]),
        "inexact": sum(not turn.is_exact for turn in seen),
        "regenerated_tokens": written - ANSWER * len(seen),
        "healthy_ms": {"calm": _quantiles(calm), "while a replica leaves or comes": _quantiles(changing)},
        "moved_ms": _quantiles(moved),
        "shrink_ms": _quantiles([change.ended - change.began for change in shrinks]),
        "settled_ms": _quantiles(settled),
        "own_cost_ms": round(per_shrink * (PROMPT + ANSWER) * COST.p / (REPLICAS - 1) * 1e3, 1),
    }


def _settled(change: ReplicaChange, events: list[Event]) -> float:
    """Return the seconds from the start of a shrink until the last interrupted request was sent to another replica."""
    waiting, last = set[str](), change.began
    for event in events:
        if event.time < change.began:
            continue
        if event.kind == "answer" and event.detail.startswith("abort") and event.time <= change.ended + 1.0:
            waiting.add(event.subject)
        elif event.kind == "ask" and event.subject in waiting:
            waiting.discard(event.subject)
            last = event.time
    return last - change.began


def _quantiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
    return {"count": len(seconds), "p50": round(float(p50), 1), "p99": round(float(p99), 1)}


def share(as_json: bool) -> int:
    """Measure and print; returns 1 when a request was lost, or a token was wrong or written twice."""
    figures = measure()
    if as_json:
        print(json.dumps(figures))
    else:
        _show(figures)
    return int(any(figures[name] for name in ("lost", "failed", "inexact", "regenerated_tokens")))


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    changes = f"{figures['shrinks']} shrinks and {figures['expands']} expands"
    title = f"{changes} under {IN_FLIGHT} requests in flight on {REPLICAS} replicas"
    table = Table("turns", "count", "p50 ms", "p99 ms", title=title)
    rows = {f"on other replicas, {when}": found for when, found in figures["healthy_ms"].items()}
    rows |= {"that moved": figures["moved_ms"], "shrink": figures["shrink_ms"]}
    rows["until the last that moved runs elsewhere"] = figures["settled_ms"]
    for name, found in rows.items():
        table.add_row(name, *(f"{found.get(key, float('nan')):,.0f}" for key in ("count", "p50", "p99")))
    console = Console()
    console.print(table)
    console.print(
        f"{figures['turns']} turns, {figures['moves']} moves: {figures['lost']} lost, {figures['failed']} failed, "
        f"{figures['inexact']} with other tokens, {figures['regenerated_tokens']} tokens written twice; the prefill of "
        f"what one shrink moves takes {figures['own_cost_ms']} ms on each of the others",
        soft_wrap=True,
        highlight=False,
    )
