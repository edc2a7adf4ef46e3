"""The group queue for workers that are no part of Cadenza: as an actor, or in their process.

Invariant: a worker has a lease on its attempt. The lease ends with the first word of the worker (`put`, `fail`), or it
runs out and the attempt fails (remote_attempts.py).

    worker:      next_attempt() -> runs it, with renew() if that takes long -> put() or fail()
    controller:  take() -> trains, publishes -> advance()
"""

from __future__ import annotations

from cadenza.observe.events import EventSink
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.group_queue import GroupQueue, Mode
from cadenza.rollout.ledger import Attempt, AttemptCopy
from cadenza.rollout.records import Trajectory
from cadenza.rollout.remote_attempts import MAX_WAITING, RemoteAttempts, WaitingWorkers


class GroupQueueManager(GroupQueue):
    """Buffers finished episodes, assembles groups, cuts batches.

    It runs as an actor, for a program that brings workers of its own (a scheduler uses its base, `GroupQueue`):

        queue = ray.remote(GroupQueueManager).remote(RolloutConfig(batch_size=8, group_size=4), env_manager_config)
        attempt = ray.get(queue.next_attempt.remote())       # a worker: which task to run; None when there is no more
        queue.put.remote(attempt, trajectory)                # or queue.fail.remote(attempt, "env: crashed")
        groups = ray.get(queue.take.remote(2))               # the controller: two whole groups, the oldest first
        queue.advance.remote(1)                              # after weights were published; queue.reset.remote()

    A worker far away has a copy of its attempt, and a lease: without a word for `lease_seconds` the attempt fails and
    is issued anew, so that a worker that vanishes costs its own attempt. One that takes longer calls `renew`, which
    answers whether to go on. `put` and `fail` of a copy also free its slot; what comes of an attempt that has its fate
    already is dropped. The calls need a running event loop, the constructor does not.
    """

    def __init__(
        self,
        config: RolloutConfig,
        env_manager_config: EnvManagerConfig,
        mode: Mode = "train",
        *,
        events: EventSink | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`max_waiting` calls of `next_attempt` may wait, further ones are refused: each takes one of the concurrent
        calls of an actor, of which Ray allows 1,000 unless `max_concurrency` says more."""
        super().__init__(config, env_manager_config, mode, events=events)
        self._workers = WaitingWorkers(max_waiting)
        """In `next_attempt`."""
        self._given_out = RemoteAttempts(env_manager_config.lease_seconds, self._on_lease_expired)
        """Attempts that `next_attempt` gave out and whose slots are not free yet."""
        self.on_work = self._workers.wake_next

    # -- what workers ask ----------------------------------------------------------------------------------------

    async def next_attempt(self, slot: int = 0) -> Attempt | None:
        """Waits for the next attempt to run, whose lease begins then. None when the tasks ran out, or the run has
        ended."""
        has_waited = False
        while (attempt := self.issue(slot)) is None:
            if self._error is not None or (self.domains.exhausted and not self.bound.unconsumed):
                self._workers.wake_next()
                return None
            if not has_waited:
                self._workers.enter()
            await self._workers.wait(as_first=has_waited)
            has_waited = True
        self._workers.wake_next()
        self._given_out.begin(attempt)
        return attempt

    def renew(self, attempt: Attempt) -> bool:
        """The worker of an attempt that `next_attempt` gave out makes progress: its lease begins anew. Returns whether
        it should go on; False when the attempt has its fate."""
        return self._given_out.renew(attempt)

    def put(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """The episode is finished and has its reward."""
        if not self._is_given_out(attempt):
            super().put(attempt, trajectory)
        elif original := self._end(attempt, trajectory.response_tokens, len(trajectory.turns)):
            self.ledger.mark_scoring(original)
            super().put(original, trajectory)

    def fail(
        self, attempt: Attempt, cause: str, detail: str = "", *, tries_used: float = 1.0, outage: bool = False
    ) -> None:
        """The attempt is lost. The next try is issued, unless the task had its tries. `tries_used` is how much of
        `max_attempts` this failure uses: 0.25 if infrastructure failed, inf if a retry cannot help. `outage`: what the
        reward needs is out of service. The tokens that the worker counted in its copy are booked."""
        if not self._is_given_out(attempt):
            super().fail(attempt, cause, detail, tries_used=tries_used, outage=outage)
        elif original := self._end(attempt, attempt.tokens, attempt.turns):
            super().fail(original, cause, detail, tries_used=tries_used, outage=outage)

    # -- what the controller asks --------------------------------------------------------------------------------

    async def take(self, groups: int | None = None) -> list[list[Trajectory]]:
        """Waits for a batch of so many groups, or of all that the tasks give, and hands over its trajectories group by
        group. Fewer, or none, when the tasks ran out."""
        if groups is None:
            self.refuse_endless_tasks()
        with self.awaiting(groups):
            while (batch := self.cut()) is None:
                await self.changed()
        taken: list[list[Trajectory]] = []
        for group in batch:
            attempts = sorted(group.finished, key=lambda attempt: attempt.member)
            taken.append([attempt.trajectory for attempt in attempts if attempt.trajectory is not None])
            for attempt in attempts:
                attempt.trajectory = None
        return taken

    def end_run(self, error: RolloutError) -> None:
        """End the run: everything that is not consumed is cancelled, those that wait for a batch get the error, those
        that wait for an attempt get None."""
        super().end_run(error)
        self._workers.wake_next()
        self._given_out.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_given_out(self, attempt: Attempt) -> bool:
        return isinstance(attempt, AttemptCopy) or attempt in self._given_out

    def _end(self, attempt: Attempt, tokens: int, turns: int) -> Attempt | None:
        """A worker elsewhere is done with an attempt: its slot is free, its tokens are booked. Returns the attempt;
        None if it has its fate, or if the worker has spoken of it before."""
        original = self._given_out.end(attempt)
        if original is None:
            return None
        self.release_slot(original)
        self._workers.wake_next()
        if original is not attempt:
            original.turns = turns
        self.ledger.add_tokens(original, tokens - original.tokens)
        return original if original.fate is None else None

    def _on_lease_expired(self, attempt: Attempt) -> None:
        """The worker of an attempt is silent: its slot is free. It counts against the task, for a task that always ends
        its worker must be retired."""
        detail = f"no word from its worker within lease_seconds {self._given_out.lease_seconds:g}"
        self.release_slot(attempt)
        if attempt.fate is None:
            logger.warning("%s of task '%s' failed: %s", attempt.key, attempt.group.task.id, detail)
            self.fail(attempt, "worker: lease expired", detail)
        self._workers.wake_next()
