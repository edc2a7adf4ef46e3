"""Rewards in processes of their own, so that they slow down neither the scheduler nor the envs.

Invariant: every sample that is given to the pool gets one answer: what its reward says or raises. A process that dies
or falls silent costs no sample: another one scores it. Where none is left and none is on its way, the run ends.
```
pool.score(domain, sample) --> process with the fewest samples: Channel --> RewardProcess --> DomainReward
future <-- Channel <-------------- each sample as soon as it is scored <-- Mailbox
```
The process that runs the slots has the pool. The processes are of one of two kinds:
- `reward_workers`: the pool starts them, replaces those that die, and ends them; none outlives `close`, also none that
  is being started. They are Ray's: on the embedded backend the pool is a rehearsal in the process that owns it.
- `devices.reward`: the run has one on each device, and all pools share them. None is replaced; they end with the run.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from cadenza.cluster.channel import Channel
from cadenza.cluster.worker import WorkerLost
from cadenza.cluster.worker_group import BackgroundTasks
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.errors import USER_CODE_ERRORS, DeadlinePassed, InfrastructureError, raise_if_cancelled
from cadenza.off_loop import ignore_result, resolve_future, with_deadline
from cadenza.rewards import AskPolicy, LastingFault, RewardUnavailable, Sample, Scored
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.failures import logger
from cadenza.rollout.reward_process import (
    CancelQuestion,
    CancelScore,
    PolicyAnswer,
    PolicyQuestion,
    RewardConfigs,
    RewardProcess,
    ScoreRequest,
    portable,
)
from cadenza.rollout.slot_pool import SlotSettings

START_SECONDS = 600.0
MAX_LOSSES = 3
"""Processes that may be lost under one sample: it may be what kills them."""
REPLACE_TRIES = 5
REPLACE_SECONDS = 5.0
"""The wait before the second try to replace a process; it doubles with every further one."""


class NoRewardProcess(RewardUnavailable):
    """No process is left to compute rewards, and none is on its way."""


class _PoolWorker:
    """One process of the pool, as its owner knows it."""

    def __init__(
        self,
        handle: WorkerHandle,
        client: str,
        ask_policy: AskPolicy,
        on_lost: Callable[[_PoolWorker, Exception], None],
    ) -> None:
        self.handle = handle
        self.futures: dict[int, asyncio.Future[Scored]] = {}
        self.samples: dict[int, Sample] = {}
        """Those that are being scored, by the ids of their futures."""
        self._ask_policy = ask_policy
        self._questions: dict[int, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self.channel = Channel(
            partial(handle.call_small, "exchange", client),
            self._on_message,
            partial(on_lost, self),
            is_expecting=lambda: bool(self.futures),
        )

    def end(self, error: WorkerLost) -> None:
        """Nothing more comes from the process: fail the samples, and ask nothing more for it."""
        self.channel.close()
        self._tasks.cancel()
        futures, self.futures = list(self.futures.values()), {}
        for future in futures:
            resolve_future(future, error)

    def _on_message(self, message: tuple[int, Scored | Exception] | PolicyQuestion | CancelQuestion) -> None:
        if isinstance(message, PolicyQuestion):
            self._questions[message.id] = task = self._tasks.begin(self._answer(message))
            task.add_done_callback(lambda _: self._questions.pop(message.id, None))
        elif isinstance(message, CancelQuestion):
            if (asking := self._questions.get(message.id)) is not None:
                asking.cancel()
        else:
            self._on_score(*message)

    async def _answer(self, question: PolicyQuestion) -> None:
        """Ask the policy for a reward in the process. There is always a reply, unless the reward cancels its question:
        a batch that waits for it holds other samples too."""
        answer: str | Exception
        try:
            if (sample := self.samples.get(question.request)) is None:
                raise LastingFault("the policy was asked about a sample that was cancelled meanwhile")
            answer = await self._ask_policy(
                sample, question.messages, max_tokens=question.max_tokens, temperature=question.temperature
            )
        except USER_CODE_ERRORS as error:  # it is raised where the question came from
            raise_if_cancelled(error)
            answer = portable(error)
        self.channel.send(PolicyAnswer(question.id, answer))

    def _on_score(self, id: int, answer: Scored | Exception) -> None:
        future = self.futures.pop(id, None)
        if future is not None:
            resolve_future(future, answer)


class RewardPool:
    """Processes that score samples; `score` opens the pool."""

    def __init__(
        self,
        rewards: RewardConfigs,
        size: int,
        backend: str,
        close_seconds: float,
        ask_policy: AskPolicy,
        shared: Sequence[WorkerHandle] = (),
    ) -> None:
        """`close_seconds` is how long the rewards of a process may take to close before it is ended. `shared` are
        processes of the run (`devices.reward`); without any, the pool starts `size` of its own."""
        self._rewards, self._size, self._backend = rewards, size, backend
        self._close_seconds = close_seconds
        self._ask_policy = ask_policy
        self._shared = shared
        self._client = f"reward-pool-{uuid.uuid4().hex[:12]}"
        self._workers: list[_PoolWorker] = []
        self._opening: asyncio.Task[None] | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        """One task for each process that is lost and not yet replaced."""
        self._fault = ""
        """Why the last process could not be replaced."""
        self._count = 0
        self._started = 0
        self._is_closed = False

    def reward(self, domain: str) -> PooledReward:
        """The reward of a domain, scored by the pool."""
        return PooledReward(self, domain)

    async def open(self) -> None:
        """Start the processes and open their rewards, or raise what prevents it; then no process is left."""
        if self._is_closed:
            raise RewardUnavailable("the reward pool was closed")
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._start_all(), name="reward pool")
            self._opening.add_done_callback(ignore_result)
        await asyncio.wait([self._opening])
        if self._opening.cancelled():
            raise RewardUnavailable("the reward pool was closed")
        self._opening.result()

    async def close(self) -> None:
        """End the processes; samples that are being scored fail."""
        self._is_closed = True
        starting = [*self._replacing] if self._opening is None else [*self._replacing, self._opening]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        workers, self._workers = self._workers, []
        await asyncio.gather(*[self._leave(worker) if self._shared else self._end(worker) for worker in workers])

    async def score(self, domain: str, sample: Sample) -> Scored:
        """What the reward of the domain says of the sample; raises what it raises."""
        await self.open()
        for _ in range(MAX_LOSSES):
            worker = await self._least_busy(domain)
            self._count += 1
            id = self._count
            future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
            worker.futures[id], worker.samples[id] = future, sample
            worker.channel.send(ScoreRequest(id, domain, sample))
            try:
                return await future
            except WorkerLost as error:
                lost = error
            finally:
                del worker.samples[id]
                if worker.futures.pop(id, None) is not None:
                    worker.channel.send(CancelScore(id))
        raise RewardUnavailable(f"{MAX_LOSSES} reward processes were lost under a sample of domain '{domain}': {lost}")

    async def _least_busy(self, domain: str) -> _PoolWorker:
        """The process with the fewest samples. Where none is left, wait for a new one, as long as one is on its way."""
        while not self._workers:
            if self._is_closed:
                raise RewardUnavailable("the reward pool was closed")
            if not self._replacing:
                tried = "" if self._shared else f", and {REPLACE_TRIES} tries to start another one failed"
                raise NoRewardProcess(
                    f"no reward process is left for a sample of domain '{domain}'{tried}: {self._fault}"
                )
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        return min(self._workers, key=lambda worker: len(worker.futures))

    async def _start_all(self) -> None:
        if self._backend == "embedded" and not self._shared:
            logger.warning("reward_workers starts no process on the embedded backend: rewards run in this process")
        joining = [asyncio.ensure_future(self._join(handle)) for handle in self._shared]
        starting = joining or [asyncio.ensure_future(self._start()) for _ in range(self._size)]
        try:
            self._workers = [worker for worker in await asyncio.gather(*starting) if worker is not None]
        except BaseException:
            for start in starting:
                start.cancel()
            outcomes = await asyncio.gather(*starting, return_exceptions=True)
            end = self._leave if self._shared else self._end
            await asyncio.gather(*[end(worker) for worker in outcomes if isinstance(worker, _PoolWorker)])
            raise

    async def _start(self) -> _PoolWorker:
        number, self._started = self._started, self._started + 1
        handle = await start_worker(self._backend, "reward", number, RewardProcess, {}, seconds=START_SECONDS)
        worker = _PoolWorker(handle, self._client, self._ask_policy, self._on_lost)
        try:
            await self._open_rewards(worker)
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _join(self, handle: WorkerHandle) -> _PoolWorker | None:
        """A process of the run; None if it died before."""
        worker = _PoolWorker(handle, self._client, self._ask_policy, self._on_lost)
        try:
            await self._open_rewards(worker)
        except WorkerLost as error:
            self._fault = str(error)
            logger.warning("'%s' is lost, and the others compute its rewards: %s", handle.role, error)
            return None
        return worker

    async def _open_rewards(self, worker: _PoolWorker) -> None:
        opening = worker.handle.call("open_rewards", self._client, self._rewards)
        await with_deadline(START_SECONDS, opening, "start_seconds")

    async def _leave(self, worker: _PoolWorker) -> None:
        """Let a process of the run forget this pool."""
        worker.end(WorkerLost("the reward pool was closed"))
        try:
            await with_deadline(self._close_seconds, worker.handle.call("leave", self._client), "close_seconds")
        except InfrastructureError as error:  # it ends with the run
            logger.warning("'%s' was not told that a reward pool is closed: %s", worker.handle.role, error)

    async def _end(self, worker: _PoolWorker) -> None:
        """Close the rewards of a process, in time, and end it. What goes wrong is logged, for it ends all the same."""
        worker.end(WorkerLost("the reward pool was closed"))
        name = worker.handle.role
        try:
            await with_deadline(self._close_seconds, worker.handle.call("close_rewards"), "close_seconds")
        except WorkerLost as error:
            logger.warning("'%s' was gone before its rewards were closed: %s", name, error)
        except DeadlinePassed as error:
            logger.warning("the rewards of '%s' did not close in time, it is ended: %s", name, error)
        except USER_CODE_ERRORS as error:
            raise_if_cancelled(error)
            logger.error("a reward of '%s' could not be closed, %s: %s", name, type(error).__name__, error)
        finally:
            worker.handle.kill()

    def _on_lost(self, worker: _PoolWorker, error: Exception) -> None:
        logger.warning("a reward process is lost, %d samples are scored again: %s", len(worker.futures), error)
        self._workers.remove(worker)
        self._fault = str(error)
        if not self._shared:
            worker.handle.kill()
        if not self._shared and not self._is_closed:
            replacing = asyncio.get_running_loop().create_task(self._replace(), name="reward process")
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)
        worker.end(WorkerLost(f"a reward process is lost: {error}"))

    async def _replace(self) -> None:
        for number in range(REPLACE_TRIES):
            if number:
                await asyncio.sleep(REPLACE_SECONDS * 2 ** (number - 1))
            try:
                worker = await self._start()
            except USER_CODE_ERRORS as error:  # a reward that cannot open, too, is one process less
                raise_if_cancelled(error)
                self._fault = f"{type(error).__name__}: {error}"
                tries = f"{number + 1} of {REPLACE_TRIES}"
                logger.error("a lost reward process, try %s to replace it: %s", tries, self._fault)
            else:
                self._workers.append(worker)
                return
        logger.error("a reward process is not replaced any more, %d are left", len(self._workers))


def make_reward_pool(
    rewards: RewardConfigs, config: EnvManagerConfig, settings: SlotSettings, ask_policy: AskPolicy
) -> RewardPool | None:
    """The pool that a config asks for, with `reward_workers` or `devices.reward`; None where rewards are computed
    beside the slots."""
    if not rewards or not (config.reward_workers or settings.reward_processes):
        return None
    return RewardPool(
        rewards,
        config.reward_workers,
        settings.backend,
        config.close_seconds,
        ask_policy,
        settings.reward_processes,
    )


class PooledReward:
    """The reward of one domain, scored by a pool."""

    def __init__(self, pool: RewardPool, domain: str) -> None:
        self._pool, self._domain = pool, domain

    async def open(self) -> None:
        await self._pool.open()

    async def close(self) -> None:
        """The pool is closed by its owner."""

    async def __call__(self, sample: Sample) -> Scored:
        return await self._pool.score(self._domain, sample)
