"""The contract of the simulated replica, against the closed form and against a step-by-step reference."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.inference.replica import (
    Finish,
    Generation,
    PauseMode,
    Replica,
    ReplicaError,
    ReplicaLost,
    Request,
    Sampling,
    Span,
    StaleEpoch,
)
from cadenza.simulation.clock import Deadlock, run
from cadenza.simulation.replica import H100_QWEN3_8B, CostModel, SimReplica, drawn

T = TypeVar("T")
SAMPLING = Sampling()
COST = CostModel(a=0.0101, b=0.00013, c=0.0000017, p=0.00031, kv_capacity=100_000)
VOCAB = 1000


def ask(id: int = 1, prompt: int = 10, **fields: Any) -> Request:
    """A request with a prompt that nobody shares."""
    values: dict[str, Any] = {
        "chunks": (), "context": prompt, "max_tokens": 10_000, "sampling": SAMPLING, "seed": 7 * id + 3, "offset": 0,
        "session": id, "group": id, "epoch": 0,
    }  # fmt: skip
    return Request(id=id, **(values | fields))


def chunks(*lengths: int) -> dict[str, Any]:
    return {"chunks": tuple(np.zeros(n, np.int32) for n in lengths), "context": sum(lengths)}


def make(length: int | Callable[[Request], int] = 50, cost: CostModel = COST, **options: Any) -> SimReplica:
    return SimReplica("r0", cost, length if callable(length) else lambda _: length, vocab=VOCAB, **options)


def alone(prompt: int, steps: int, cost: CostModel = COST) -> float:
    """Seconds that a request needs alone."""
    return cost.p * prompt + cost.decode(steps, 1, prompt)


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(awaitable: Awaitable[T]) -> tuple[T, float]:
    return await awaitable, now()


def simulate(main: Callable[[], Coroutine[Any, Any, T]], **options: Any) -> T:
    return run(main, max_time=1e6, **options)


def assert_continues(request: Request, *parts: Generation) -> None:
    """The parts, in order, are the turn without a gap, a repetition or a restart."""
    total = sum(len(part.tokens) for part in parts)
    tokens, logprobs = drawn(request.seed, 0, total, VOCAB)
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), tokens)
    np.testing.assert_array_equal(np.concatenate([part.logprobs for part in parts]), logprobs)
    for part in parts:
        assert sum(span.length for span in part.spans) == len(part.tokens)


# -- the cost model --------------------------------------------------------------------------------------------------


def test_it_is_a_replica() -> None:
    async def main() -> None:
        replica: Replica = make()
        assert (replica.name, replica.devices, replica.kv_capacity) == ("r0", (0,), COST.kv_capacity)

    simulate(main)


@given(
    seconds=st.floats(0, 1e4), running=st.integers(1, 256), context=st.integers(0, 10**6), c=st.sampled_from([0.0, 1e-8, 1e-5])
)
def test_steps_within_is_the_inverse_of_decode(seconds: float, running: int, context: int, c: float) -> None:
    cost = CostModel(a=0.01, b=1e-5, c=c, p=0.0, kv_capacity=10**6)
    steps = cost.steps_within(seconds, running, context)
    assert cost.decode(steps, running, context) <= seconds < cost.decode(steps + 1, running, context)


def test_a_cost_model_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="a must be > 0"):
        CostModel(a=0.0, b=0.0, c=0.0, p=0.0, kv_capacity=10)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 5000)), min_size=1, max_size=40))
def test_a_set_that_arrives_together_takes_exactly_the_bound(shapes: list[tuple[int, int]]) -> None:
    cost = H100_QWEN3_8B
    work = sum(cost.b * n + cost.c * (n * p + n * (n - 1) / 2) + cost.p * p for p, n in shapes)
    bound = cost.a * max(n for _, n in shapes) + work

    async def main() -> float:
        replica = make(lambda request: shapes[request.id][1], cost)
        await asyncio.gather(*[replica.generate(ask(i, prompt)) for i, (prompt, _) in enumerate(shapes)])
        replica.check()
        return now()

    if sum(p + n for p, n in shapes) <= cost.kv_capacity:
        assert simulate(main) == pytest.approx(bound, rel=1e-9)


@dataclass
class Row:
    """A request of the reference simulation."""

    arrive: float
    prompt: int
    length: int
    abort: float | None
    written: int = 0
    where: str = "outside"
    done: float = 0.0
    joins: int = 0


@dataclass
class Reference:
    """The engine, one decode step at a time."""

    cost: CostModel
    rows: list[Row]
    time: float = 0.0
    running: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)

    def run(self) -> None:
        events = [(row.arrive, "arrive", row) for row in self.rows]
        events += [(row.abort, "abort", row) for row in self.rows if row.abort is not None]
        events.sort(key=lambda event: event[0])
        while events or self.running:
            if not self.running:
                self.time = events[0][0]
            while events and events[0][0] <= self.time:  # idle, or the prefill goes on
                self.take(*events.pop(0))
                self.admit()
                if not self.running:
                    break
            if not self.running or (events and events[0][0] <= self.time):
                continue
            self.time += self.cost.decode(1, len(self.running), self.kv())
            for row in self.running:
                row.written += 1
            for row in [row for row in self.running if row.written == row.length]:
                self.leave(row, "finished", self.time)
            while events and events[0][0] < self.time:  # during the step
                self.take(*events.pop(0))
            while self.running and self.kv() + len(self.running) > self.cost.kv_capacity:
                row = self.running.pop()
                row.where = "waiting"
                self.waiting.insert(0, row)
            self.admit()

    def kv(self) -> int:
        return sum(row.prompt + row.written for row in self.running)

    def take(self, when: float, kind: str, row: Row) -> None:
        if kind == "arrive":
            row.where = "waiting"
            self.waiting.append(row)
        elif row.where == "running":
            self.leave(row, "aborted", max(when, self.time) if self.steps_now(when) else when)
        elif row.where == "waiting":
            self.waiting.remove(row)
            row.where, row.done = "aborted", when

    def steps_now(self, when: float) -> bool:
        return when < self.time and not self.prefilling

    prefilling: bool = False

    def leave(self, row: Row, where: str, when: float) -> None:
        self.running.remove(row)
        row.where, row.done = where, when

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.cost.max_running:
            row = self.waiting[0]
            context = row.prompt + row.written
            if self.kv() + context + len(self.running) + 1 > self.cost.kv_capacity:
                return
            self.waiting.pop(0)
            self.running.append(row)
            row.where = "running"
            row.joins += 1
            self.time += self.cost.p * context
