"""Rewards in processes of their own, so that they slow down neither the scheduler nor the envs.

Invariant: every sample that is given to the pool gets one answer: what its reward says or raises. A process that dies
or falls silent costs no sample: another one scores it, and a new process takes its place. Where none is left, samples
wait for the new one. No process outlives `close`, also none that is being started.
```
pool.score(domain, sample) --> process with the fewest samples: Channel --> RewardProcess --> DomainReward
future <-- Channel <-------------- each sample as soon as it is scored <-- Mailbox
```
The process that runs the slots owns the pool, and the processes of the pool end with it. Processes are Ray's: on the
embedded backend the pool is a rehearsal in the process that owns it.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cadenza.cluster.channel import Channel, Mailbox
from cadenza.cluster.worker import Worker, WorkerLost
from cadenza.cluster.worker_handle import WorkerHandle, start_worker
from cadenza.errors import USER_CODE_ERRORS, DeadlinePassed, RewardError, raise_if_cancelled
from cadenza.off_loop import ignore_result, with_deadline
from cadenza.rewards import DomainReward, RewardConfig, RewardUnavailable, Sample, Scored
from cadenza.rollout.failures import logger

START_SECONDS = 600.0
MAX_LOSSES = 3
"""Processes that may be lost under one sample: it may be what kills them."""
REPLACE_TRIES = 5
REPLACE_SECONDS = 5.0
"""The wait before the second try to replace a process; it doubles with every further one."""

RewardConfigs = Mapping[str, Mapping[str, RewardConfig]]
"""By domain, then by the name of the reward."""


class ScoreRequest(NamedTuple):
    """Asks for the reward of a sample."""

    id: int
    domain: str
    sample: Sample


class CancelScore(NamedTuple):
    """The caller does not wait for it any more."""

    id: int


class RewardProcess(Worker):
    """Scores samples of all domains, side by side."""

    def __init__(self, rewards: RewardConfigs) -> None:
        self._rewards = {domain: DomainReward(configs, domain) for domain, configs in rewards.items()}
        self._mailbox = Mailbox(self._on_message)
        self._scoring: dict[int, asyncio.Task[None]] = {}

    async def exchange(self, number: int, messages: Sequence[Any]) -> tuple[int, list[Any]]:
        """See channel.py."""
        return await self._mailbox.exchange(number, messages)

    async def open_rewards(self) -> None:
        """Open all, so that one that cannot work refuses the run at its start. Some may be open if it raises."""
        try:
            for reward in self._rewards.values():
                await reward.open()
        except USER_CODE_ERRORS as error:  # it is raised in another process
            raise_if_cancelled(error)
            raise _portable(error) from None

    async def close_rewards(self) -> None:
        for reward in self._rewards.values():
            await reward.close()

    def _on_message(self, message: ScoreRequest | CancelScore) -> None:
        if isinstance(message, ScoreRequest):
            scoring = asyncio.get_running_loop().create_task(self._score(message), name=message.domain)
            self._scoring[message.id] = scoring
            scoring.add_done_callback(lambda _: self._scoring.pop(message.id, None))
        elif (running := self._scoring.get(message.id)) is not None:
            running.cancel()

    async def _score(self, request: ScoreRequest) -> None:
        answer: Scored | Exception
        try:
            answer = await self._rewards[request.domain](request.sample)
        except USER_CODE_ERRORS as error:  # it is raised where the sample came from
            raise_if_cancelled(error)
            answer = _portable(error)
        self._mailbox.send((request.id, answer))


class _PoolWorker:
    """One process of the pool, as its owner knows it."""

    def __init__(self, handle: WorkerHandle, on_lost: Any) -> None:
        self.handle = handle
        self.futures: dict[int, asyncio.Future[Scored]] = {}
        self.channel = Channel(
            partial(handle.call_small, "exchange"),
            self._on_answer,
            partial(on_lost, self),
            is_expecting=lambda: bool(self.futures),
        )

    def _on_answer(self, message: tuple[int, Scored | Exception]) -> None:
        id, answer = message
        future = self.futures.pop(id, None)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class RewardPool:
    """Processes that score samples; `score` opens the pool."""

    def __init__(self, rewards: RewardConfigs, size: int, backend: str, close_seconds: float) -> None:
        """`close_seconds` is how long the rewards of a process may take to close before it is ended."""
        self._rewards, self._size, self._backend = rewards, size, backend
        self._close_seconds = close_seconds
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
        await asyncio.gather(*[self._end(worker) for worker in workers])

    async def score(self, domain: str, sample: Sample) -> Scored:
        """What the reward of the domain says of the sample; raises what it raises."""
        await self.open()
        for _ in range(MAX_LOSSES):
            worker = await self._least_busy(domain)
            self._count += 1
            id = self._count
            future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
            worker.futures[id] = future
            worker.channel.send(ScoreRequest(id, domain, sample))
            try:
                return await future
            except WorkerLost as error:
                lost = error
            finally:
                if worker.futures.pop(id, None) is not None:
                    worker.channel.send(CancelScore(id))
        raise RewardUnavailable(f"{MAX_LOSSES} reward processes were lost under a sample of domain '{domain}': {lost}")

    async def _least_busy(self, domain: str) -> _PoolWorker:
        """The process with the fewest samples. Where none is left, wait for a new one, as long as one is on its way."""
        while not self._workers:
            if self._is_closed:
                raise RewardUnavailable("the reward pool was closed")
            if not self._replacing:
                raise RewardUnavailable(
                    f"no reward process is left for a sample of domain '{domain}', and {REPLACE_TRIES} tries to start "
                    f"another one failed: {self._fault}"
                )
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        return min(self._workers, key=lambda worker: len(worker.futures))

    async def _start_all(self) -> None:
        if self._backend == "embedded":
            logger.warning("reward_workers starts no process on the embedded backend: rewards run in this process")
        starting = [asyncio.ensure_future(self._start()) for _ in range(self._size)]
        try:
            self._workers = list(await asyncio.gather(*starting))
        except BaseException:
            for start in starting:
                start.cancel()
            outcomes = await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*[self._end(worker) for worker in outcomes if isinstance(worker, _PoolWorker)])
            raise

    async def _start(self) -> _PoolWorker:
        number, self._started = self._started, self._started + 1
        handle = await start_worker(
            self._backend, "reward", number, RewardProcess, {"rewards": self._rewards}, seconds=START_SECONDS
        )
        worker = _PoolWorker(handle, self._on_lost)
        try:
            await with_deadline(START_SECONDS, handle.call("open_rewards"), "start_seconds")
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _end(self, worker: _PoolWorker) -> None:
        """Close the rewards of a process, in time, and end it. What goes wrong is logged, for it ends all the same."""
        worker.channel.close()
        _fail(worker, WorkerLost("the reward pool was closed"))
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
        worker.handle.kill()
        if not self._is_closed:
            replacing = asyncio.get_running_loop().create_task(self._replace(), name="reward process")
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)
        _fail(worker, WorkerLost(f"a reward process is lost: {error}"))

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


def _fail(worker: _PoolWorker, error: WorkerLost) -> None:
    futures, worker.futures = list(worker.futures.values()), {}
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _portable(error: BaseException) -> Exception:
    """The error itself if it can travel, else its text."""
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - user code decides what a pickle raises
            pass
        else:
            return error
    return RewardError(f"{type(error).__name__}: {error}")
