"""The schedules of other systems, as small controllers over the same replicas, envs and traces that Cadenza gets.

    barrier      a group is pinned to a replica, round robin; the batch waits for all (verl, synchronous)
    queue        a queue of samples; a replica with a free slot takes the next one (ROLL, synchronous)
    oracle       the queue in the order of the true lengths, longest first
    admission    groups are admitted while floor((submitted - 1) / B) <= version + eta; an update interrupts running
                 samples, which continue after a new prefill; the oldest whole groups are trained (AReaL)
    group-queue  a queue per group of envs, in order, one group per queue and round; an update discards the turns under
                 way; redundant groups are dropped above the bound; envs stick to replicas (ROLL, asynchronous)
Each of them retries an env that fails, and none is charged for its own bookkeeping.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from heapq import heappop, heappush

from cadenza.inference.replica import Finish, PauseMode, Request, Sampling
from cadenza.simulation.comparison.figures import BatchRow, UsageTotals
from cadenza.simulation.comparison.strategy import (
    ENGINE_LIMIT,
    ScheduleStrategy,
    observation_of,
    tokens_discarded,
    tokens_generated,
)
from cadenza.simulation.comparison.workloads import NEVER, TraceEpisode
from cadenza.simulation.virtual_cluster.replica import SimReplica

SAMPLING = Sampling(max_tokens=1 << 20)


class BaselineSample:
    """One trajectory of a baseline, running or finished."""

    __slots__ = ("done", "episode", "group", "member", "oldest", "replica", "task", "tokens")

    def __init__(self, group: int, member: int, episode: TraceEpisode) -> None:
        self.group = group
        self.member = member
        self.episode = episode
        self.replica = 0
        self.oldest = -1
        self.tokens = 0
        """Tokens written so far in this attempt."""
        self.done = False
        self.task: asyncio.Task[None] | None = None


class BaselineStrategy(ScheduleStrategy):
    """Base class of the baselines: runs samples on replicas, starts pending ones in free slots, and counts tokens."""

    keep_kv = True
    pause = PauseMode.KEEP

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self.replicas = [
            SimReplica(
                f"r{number}",
                self.workload.cost,
                _length,
                load_seconds=self.workload.sync_seconds,
                keep_kv=self.keep_kv,
                on_event=self.recorder.replica_listener(number) if self.recorder is not None else None,
            )
            for number in range(self.generating_gpus)
        ]
        self.running = [0] * self.generating_gpus
        """Samples that run on each replica."""
        self.pending: deque[BaselineSample] = deque()
        """Samples that wait for a free slot on any replica."""
        self.trained = self.given_up = 0
        self._tasks = tasks
        self._samples: set[BaselineSample] = set()
        self._ids = 0
        self._waste: Counter[str] = Counter()
        self._finished: asyncio.Future[None] | None = None

    async def publish(self, version: int) -> None:
        await asyncio.gather(*(replica.pause(0, self.pause) for replica in self.replicas))
        await asyncio.gather(*(replica.load_weights(version, None) for replica in self.replicas))
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    async def close(self) -> None:
        for sample in list(self._samples):
            self.stop(sample, "the end")

    def totals(self) -> UsageTotals:
        wasted = self._waste + tokens_discarded(self.replicas)
        return UsageTotals(tokens_generated(self.replicas), wasted, self.trained + self.given_up)

    # -- for the strategies --------------------------------------------------------------------------------------------

    def members(self, group: int) -> list[BaselineSample]:
        count = self.workload.group_size + self.settings.extra_members
        return [BaselineSample(group, member, self.trace.episode(group, member)) for member in range(count)]

    def launch(self, sample: BaselineSample, replica: int) -> None:
        """Start a sample on a replica."""
        sample.replica = replica
        self.running[replica] += 1
        self._samples.add(sample)
        sample.task = self._tasks.create_task(self._run(sample))

    def stop(self, sample: BaselineSample, cause: str) -> None:
        """End a sample that is not needed any more; its slot is free at once."""
        self._release_replica(sample)
        if sample.task is not None and not sample.task.done():
            sample.task.cancel(cause)
        self._waste[cause] += sample.tokens

    def least_loaded(self) -> int | None:
        """Return the replica with the fewest samples, or None when it has no free slot."""
        replica = min(range(len(self.running)), key=self.running.__getitem__)
        return replica if self.running[replica] < (self.settings.concurrency or ENGINE_LIMIT) else None

    def launch_pending(self) -> None:
        """Start pending samples while a replica has a free slot."""
        while self.pending and (replica := self.least_loaded()) is not None:
            self.launch(self.pending.popleft(), replica)

    def on_left_replica(self, sample: BaselineSample) -> None:
        """Called when a sample has generated its last token, before its reward."""
        self.launch_pending()

    def on_finished(self, sample: BaselineSample) -> None:
        """Called when a sample has its reward."""

    def notify(self) -> None:
        """Wake `wait_for_change`."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    async def wait_for_change(self) -> None:
        self._finished = asyncio.get_running_loop().create_future()
        await self._finished

    def rows(self, samples: list[BaselineSample]) -> list[BatchRow]:
        self.trained += len(samples) // self.workload.group_size
        return [BatchRow(sample.group, sample.episode, sample.oldest) for sample in samples]

    def _release_replica(self, sample: BaselineSample) -> None:
        """Free the slot of a sample; a second call does nothing."""
        if sample in self._samples:
            self._samples.discard(sample)
            self.running[sample.replica] -= 1

    # -- an episode ----------------------------------------------------------------------------------------------------

    async def _run(self, sample: BaselineSample) -> None:
        try:
            failing = sample.episode.fails_at
            while not await self._attempt(sample, failing):
                self._waste["env failed"] += sample.tokens
                sample.tokens, sample.oldest, failing = 0, -1, NEVER
        finally:
            self._release_replica(sample)
        self.on_left_replica(sample)
        if sample.episode.reward:
            await asyncio.sleep(sample.episode.reward)
        sample.done = True
        self.on_finished(sample)

    async def _attempt(self, sample: BaselineSample, failing: int) -> bool:
        """Play one attempt; returns whether the env lasted to the end."""
        episode = sample.episode
        self._ids += 1
        session, context = self._ids, 0
        if episode.reset:
            await asyncio.sleep(episode.reset)
        for turn, (observation, length) in enumerate(zip(episode.observations, episode.lengths, strict=True)):
            context = observation if episode.fresh else context + observation
            await self._turn(sample, session, context, length)
            context += length
            if seconds := episode.steps[turn]:
                await asyncio.sleep(seconds)
            if turn == failing:
                return False
        return True

    async def _turn(self, sample: BaselineSample, session: int, context: int, length: int) -> None:
        replica, done = self.replicas[sample.replica], 0
        prompt = (observation_of(sample.episode.observations[0]),)
        while done < length:
            self._ids += 1
            request = Request(
                id=self._ids,
                chunks=prompt,
                context=context + done,
                max_tokens=length - done,
                sampling=SAMPLING,
                seed=session,
                offset=done,
                session=session,
                group=sample.group,
                epoch=0,
            )
            try:
                answer = await replica.generate(request)
            except asyncio.CancelledError as error:
                replica.abort(request.id, str(error))
                raise
            count = len(answer.tokens)
            if answer.finish is Finish.ABORT:
                self._waste["aborted"] += count
                continue
            done += count
            sample.tokens += count
            oldest = min(span.version for span in answer.spans)
            sample.oldest = oldest if sample.oldest < 0 else min(sample.oldest, oldest)


def _length(request: Request) -> int:
    """Return the length of the turn: a request asks for exactly the tokens that its episode still has to write."""
    return request.offset + request.max_tokens


class BarrierStrategy(BaselineStrategy):
    """A batch of pinned groups, and a wait for the last of them."""

    asynchronous = False

    async def batch(self, groups: int) -> list[BatchRow]:
        samples: list[BaselineSample] = []
        for number in range(groups):
            members = self.members(self.version * groups + number)
            samples += members
            for sample in members:
                self.launch(sample, number % self.generating_gpus)
        while not all(sample.done for sample in samples):
            await self.wait_for_change()
        return self.rows(samples)

    def on_finished(self, sample: BaselineSample) -> None:
        if not self._samples:
            self.notify()


class QueueStrategy(BaselineStrategy):
    """One queue of samples per batch, in the order of the trace."""

    asynchronous = False

    async def batch(self, groups: int) -> list[BatchRow]:
        numbers = range(self.version * groups, (self.version + 1) * groups)
        samples = [sample for number in numbers for sample in self.members(number)]
        self.pending.extend(self.order(samples))
        self._missing = len(samples)
        self.launch_pending()
        while self._missing:
            await self.wait_for_change()
        return self.rows(samples)

    def order(self, samples: list[BaselineSample]) -> list[BaselineSample]:
        return samples

    def on_finished(self, sample: BaselineSample) -> None:
        self._missing -= 1
        if not self._missing:
            self.notify()


class OracleStrategy(QueueStrategy):
    """The queue in the order of the true lengths, which no real system knows."""

    def order(self, samples: list[BaselineSample]) -> list[BaselineSample]:
        return sorted(samples, key=lambda sample: -sample.episode.response)


class AdmissionStrategy(BaselineStrategy):
    """Groups admitted ahead of the version, within eta."""

    keep_kv = False

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await super().start(tasks)
        self._submitted = 0
        self._groups: dict[int, list[BaselineSample]] = {}
        self._ready: list[int] = []
        self._admit(0)

    async def batch(self, groups: int) -> list[BatchRow]:
        while len(self._ready) < groups:
            await self.wait_for_change()
        numbers = [heappop(self._ready) for _ in range(groups)]
        return self.rows([sample for number in numbers for sample in self._groups.pop(number)])

    async def publish(self, version: int) -> None:
        await super().publish(version)
        self._admit(version)

    def _admit(self, version: int) -> None:
        while self._submitted // self.workload.groups <= version + self.alpha:
            self._groups[self._submitted] = self.members(self._submitted)
            self.pending.extend(self._groups[self._submitted])
            self._submitted += 1
        self.launch_pending()

    def on_finished(self, sample: BaselineSample) -> None:
        if all(member.done for member in self._groups[sample.group]):
            heappush(self._ready, sample.group)
            self.notify()


class _EnvGroupQueue:
    """The groups of one set of envs, oldest first."""

    __slots__ = ("groups", "made")

    def __init__(self) -> None:
        self.groups: deque[list[BaselineSample]] = deque()
        self.made: deque[int] = deque()
        """Version at which each group was made."""


class GroupQueueStrategy(BaselineStrategy):
    """One queue of groups per set of envs, each env on a fixed replica."""

    pause = PauseMode.ABORT

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        await super().start(tasks)
        count = self.workload.groups + self.settings.extra_groups
        self._queues = [_EnvGroupQueue() for _ in range(count)]
        self._queue_of_group: dict[int, int] = {}
        self._made = 0
        self._envs = self.workload.group_size + self.settings.extra_members
        self._bound = math.ceil(self.alpha)
        for _ in range(self._bound + 1):
            self._next_round(0)

    async def batch(self, groups: int) -> list[BatchRow]:
        while len(whole := [queue for queue in self._queues if self._whole(queue)]) < self.workload.groups:
            await self.wait_for_change()
        whole = sorted(whole, key=lambda queue: queue.made[0])[: self.workload.groups]
        samples: list[BaselineSample] = []
        for queue in whole:
            queue.made.popleft()
            group = queue.groups.popleft()
            samples += [sample for sample in group if sample.done][: self.workload.group_size]
        return self.rows(samples)

    async def publish(self, version: int) -> None:
        await super().publish(version)
        for queue in self._queues:
            while queue.made and queue.made[0] < version - self._bound:
                queue.made.popleft()
                self.given_up += 1
                for sample in queue.groups.popleft():
                    self.stop(sample, "stale")
        self._next_round(version)

    def on_left_replica(self, sample: BaselineSample) -> None:
        self._start_next(self._queue_of_group[sample.group], sample.member)
        if self.settings.concurrency:  # other envs of this replica may have waited for the free slot
            for number in range(sample.replica, len(self._queues) * self._envs, self.generating_gpus):
                self._start_next(*divmod(number, self._envs))

    def on_finished(self, sample: BaselineSample) -> None:
        queue = self._queues[self._queue_of_group[sample.group]]
        group = next(group for group in queue.groups if group[0].group == sample.group)
        if sum(member.done for member in group) == self.workload.group_size:
            for member in group:
                if not member.done:
                    self.stop(member, "surplus")
                    self._start_next(self._queue_of_group[member.group], member.member)
            self.notify()

    def _whole(self, queue: _EnvGroupQueue) -> bool:
        """Whether the first group of a queue, the only one that can be taken, is whole."""
        return bool(queue.groups) and sum(s.done for s in queue.groups[0]) >= self.workload.group_size

    def _next_round(self, version: int) -> None:
        for number, queue in enumerate(self._queues):
            if len(queue.groups) > self._bound:
                continue
            queue.groups.append(self.members(self._made))
            queue.made.append(version)
            self._queue_of_group[self._made] = number
            self._made += 1
        for number in range(len(self._queues)):
            for env in range(self._envs):
                self._start_next(number, env)

    def _start_next(self, number: int, env: int) -> None:
        """Start the next episode of an env, its member of the oldest group that has not begun, unless it is busy."""
        for group in self._queues[number].groups:
            sample = group[env]
            if sample.task is None and not self._decided(group):
                replica = (number * self._envs + env) % self.generating_gpus
                if self.running[replica] < (self.settings.concurrency or ENGINE_LIMIT):
                    self.launch(sample, replica)
                return
            if sample in self._samples:
                return

    def _decided(self, group: list[BaselineSample]) -> bool:
        return sum(sample.done for sample in group) >= self.workload.group_size
