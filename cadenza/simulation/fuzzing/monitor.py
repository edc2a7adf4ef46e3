"""Checks the eight invariants of the design against the truth, and never against the scheduler's own counters.

The truth is what the simulated replicas, envs, rewards and filters did, the calls and answers of the controller, and
the stream of events. A failed check is recorded under the number of its invariant; the schedule continues. The
`SchedulerView` of a scheduler checks its stream, `BatchChecks` its batches, and the `Monitor` the sampler and the sums.

1. Fates: each issued attempt gets exactly one fate in the stream, and none is live after the shutdown; the world
   explains the fate; the ledger's sums are those of the stream; the tokens that the replicas returned are the tokens of
   the attempts.
2. Groups: every batch holds, for each of its groups, `group_size` different attempts and members of one task, and a
   trajectory comes back once in a run.
3. Staleness: computed from the version of every token of the batch, which must be the version with which the replica
   wrote it; at most ceil(alpha) below the published version. Once a version has its batch under `wait`, at most
   k*B + R groups that began at or before v - ceil(alpha) + k are left, for each k. `stale` exists under `drop` only,
   whose loss and length bias are in the metrics.
4. Cut: the monitor keeps its own list of whole groups that passed their filter. A batch is cut, and returned, at the
   very instant at which one was possible, and no group that was ready before is left behind for a younger one.
5. Deadlines: the schedule ends within the time that its work and the deadlines of its faults add up to; an attempt
   fails only if a fault hit it; a cancelled attempt belongs to a retired task or to the end; every env is closed once,
   and no slot is taken in the end.
6. Suspension: from the return of `suspend` until the controller opens the gate again, no replica writes a token or
   accepts a request. Every request continues its turn from exactly the tokens that were returned for it before. A
   request is interrupted only during a suspension or a shrink of its own replica, or to be moved to another replica.
7. Rewards: each reward in a batch is the one that the world gave for this trajectory, and no fault broke a trajectory
   in it. Its tokens are those that env and replica produced.
8. The same scenario gives the same stream: `fuzz` runs schedules twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cadenza.inference.replica import Finish, Generation, PauseMode, Request
from cadenza.observe.events import Event
from cadenza.rollout.failures import StalenessError
from cadenza.rollout.ledger import LedgerError
from cadenza.simulation.fuzzing.scenario import Scenario
from cadenza.simulation.fuzzing.scheduler_view import SchedulerView
from cadenza.simulation.fuzzing.world import SimWorld
from cadenza.simulation.virtual_cluster.faults import FaultyReplica
from cadenza.simulation.virtual_cluster.tokens import seeded_tokens

RESOLUTION = 1e-9
"""Seconds; times that are closer than this count as equal."""
MAX_EVENTS = 200_000
"""Events after which a schedule counts as a livelock."""

GenerationFuture: TypeAlias = "asyncio.Future[Generation]"


class Violation(NamedTuple):
    """An invariant that did not hold."""

    seed: int
    invariant: int
    message: str


class Livelock(RuntimeError):
    """The schedule has more events than any that makes progress."""


class LoggedEvent(NamedTuple):
    """One event of a schedule, and its source: a scheduler or the sampler."""

    source: str
    event: Event


class Monitor:
    """Follows one schedule from outside and records the violations of its invariants."""

    def __init__(self, scenario: Scenario, world: SimWorld) -> None:
        self.scenario = scenario
        self.world = world
        self.violations: list[Violation] = []
        self.log: list[LoggedEvent] = []
        self.views: list[SchedulerView] = []
        self.replicas: Sequence[FaultyReplica] = ()
        self.version = 0
        """Newest fully published version."""
        self.controller_failed = False
        """The controller received an error that ends the schedule."""
        self.on_issued: Callable[[int], None] = lambda issued: None
        self._requests: dict[int, list[tuple[Request, GenerationFuture, FaultyReplica]]] = {}
        self._answers: dict[int, GenerationFuture] = {}
        self._suspending = 0
        self._mode = PauseMode(scenario.suspend_mode)
        self._closed_at: float | None = None
        self._leaving: Counter[int] = Counter()

    def violate(self, invariant: int, message: str) -> None:
        self.violations.append(Violation(self.scenario.seed, invariant, message))

    def log_event(self, source: str, event: Event) -> None:
        self.log.append(LoggedEvent(source, event))
        if len(self.log) > MAX_EVENTS:
            raise Livelock(f"{MAX_EVENTS} events at virtual time {event.time:.3f} s, the last one: {event}")

    def notify_issued(self, issued: int) -> None:
        self.on_issued(issued)

    def on_sampler_event(self, event: Event) -> None:
        """Log an event of the sampler: its event sink."""
        self.log_event("sampler", event)

    def on_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an exception that no task caught: the exception handler of the loop."""
        error, message = context.get("exception"), str(context.get("message"))
        if error is not None and not isinstance(error, Livelock) and "shutdown" not in message:
            self.violate(invariant_of(error), f"{message}: {error!r}")

    # -- versions ------------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """Check that every active replica has the version that the sampler reports as published."""
        self.version = version
        self.world.injector.on_published(version)
        behind = {r.name: r.version for r in self.replicas if not r.dead and not r.asleep and r.version != version}
        if behind:
            self.violate(3, f"version {version} is published, but replicas have {behind}")
        for view in self.views:
            view.published()

    # -- the gate ------------------------------------------------------------------------------------------------------

    def suspending(self) -> None:
        self._suspending += 1

    def suspended(self) -> None:
        """Check that no replica generates when `suspend` has returned."""
        self._suspending -= 1
        self._closed_at = asyncio.get_running_loop().time()
        if generating := [replica.name for replica in self.replicas if replica.generating]:
            self.violate(6, f"suspend returned while {generating} generate")

    def gate_may_open(self) -> None:
        """Check the time since `suspend`: the controller calls `resume` or `get_batch` now, which open the gate."""
        closed, self._closed_at = self._closed_at, None
        if closed is None:
            return
        for replica in self.replicas:
            if replica.last_generation_time > closed + RESOLUTION:
                when = replica.last_generation_time
                self.violate(6, f"{replica.name} wrote a token at {when:.4f} s, suspended since {closed:.4f} s")

    def leaving(self, devices: Sequence[int]) -> None:
        self._leaving.update(devices)

    def left(self, devices: Sequence[int]) -> None:
        self._leaving.subtract(devices)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_request(self, replica: FaultyReplica, request: Request, future: GenerationFuture) -> None:
        """Record a request that a client sends to a replica."""
        env = int(request.chunks[0][0]) if request.chunks else -1
        self._requests.setdefault(env, []).append((request, future, replica))
        self._answers[request.id] = future

    def replica_sink(self, index: int) -> Callable[[float, str, Any], None]:
        """Return the `on_event` callback of a replica."""

        def on_event(time: float, kind: str, request: Any) -> None:
            if kind == "start":
                if self._closed_at is not None:
                    self.violate(6, f"r{index} accepted request {request.id} while suspended")
            elif kind == "abort":
                by_suspend = self._suspending > 0 and self._mode is PauseMode.ABORT
                asked = self._leaving[index] > 0 or request.id in self.replicas[index].moving
                if not (by_suspend or asked or self._answers[request.id].cancelled()):
                    self.violate(6, f"r{index} interrupted request {request.id} at {time:.4f} s unasked")

        return on_event

    def turns(self, env: int) -> list[list[Generation]]:
        """Return the answers of the replicas to the requests of an env, by turn."""
        found: list[list[Generation]] = []
        seed: int | None = None
        for request, future, _ in self._requests.get(env, ()):
            if request.seed != seed:
                seed = request.seed
                found.append([])
            if future.done() and not future.cancelled() and future.exception() is None:
                found[-1].append(future.result())
        return found

    def finish(self) -> None:
        """Run the checks that need the whole schedule, after the shutdown."""
        for view in self.views:
            view.finish()
        for number, episode in enumerate(self.world.episodes):
            if episode.closed != 1:
                self.violate(5, f"env {number} of {episode.attempt} was closed {episode.closed} times")
        self._check_turns()
        self._check_tokens()

    def _check_turns(self) -> None:
        for env, requests in self._requests.items():
            seed: int | None = None
            done = 0
            ended = False
            for request, future, replica in requests:
                if request.seed != seed:
                    seed, done, ended = request.seed, 0, False
                where = f"request {request.id} of env {env} to {replica.name}"
                if ended:
                    self.violate(6, f"{where} goes on with a turn that had ended")
                if request.offset != done:
                    self.violate(6, f"{where} continues from token {request.offset}, but {done} were returned before")
                elif done and not np.array_equal(
                    request.chunks[-1], seeded_tokens(request.seed, 0, done, replica.vocab)[0]
                ):
                    self.violate(6, f"{where} does not continue from the tokens that were returned before")
                if future.done() and not future.cancelled() and future.exception() is None:
                    answer = future.result()
                    done += len(answer.tokens)
                    ended = answer.finish is not Finish.ABORT

    def _check_tokens(self) -> None:
        returned = lost = 0
        for replica in self.replicas:
            try:
                replica.check()
            except AssertionError as error:
                self.violate(1, f"{replica.name} does not add up: {error}")
            returned += replica.returned
            lost += sum(replica.discarded.values())
        booked = sum(sum(view.ledger.tokens.values()) for view in self.views if view.ledger is not None)
        if returned != booked:
            self.violate(1, f"replicas returned {returned} tokens, the ledgers have {booked} ({lost} were discarded)")


def invariant_of(error: BaseException | None) -> int:
    """Return the number of the invariant that an error of the scheduler concerns."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, LedgerError):
        return 3 if "staleness" in str(error) else 1
    return 3 if isinstance(error, StalenessError) else 5
