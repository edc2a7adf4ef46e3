"""One reward of a domain, called with patience: off the loop, in time, again after an infrastructure fault.

Invariant: an infrastructure fault (a time-out, a lost process, a server that is down) is tried again and then raised as
an InfrastructureError that names the reward and its domain; it never becomes a value. Everything else that the reward
raises goes to the caller as it is, at once.

    score(sample) -> cache? | -> limit of calls at once -> call, in time -> checked value -> cache
                            | -> batch queue -> call of a batch, in time -> checked values
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from cadenza.errors import DeadlinePassed, InfrastructureError, RewardError
from cadenza.off_loop import as_async, with_deadline
from cadenza.rewards.base import LastingFault, as_scored
from cadenza.rewards.batch_queue import BatchQueue
from cadenza.rewards.cache import RewardCache, cache_key
from cadenza.rewards.config import RewardConfig
from cadenza.rewards.host import RewardHost
from cadenza.rewards.registry import build_reward
from cadenza.rewards.sample import Sample, Scored

T = TypeVar("T")


class RewardUnavailable(InfrastructureError):
    """A reward met an infrastructure fault as often as it was tried."""


class LateReward(DeadlinePassed):
    """A reward did not return in time, however often it was asked."""


class RewardWorker:
    """Scores samples by one reward. `open` it before, and `close` it after, in the same event loop."""

    def __init__(self, config: RewardConfig, key: str, domain: str, host: RewardHost) -> None:
        self.config = config
        self.key = key
        self.place = f"reward '{key}' of domain '{domain}'"
        self._reward = build_reward(config.name, config.settings)
        if hasattr(self._reward, "use_host"):
            self._use_host(host if config.asks_policy else RewardHost(has_device=host.has_device))
        self._call = as_async(self._reward)
        self._cache = RewardCache(config.cache) if config.cache else None
        self._batches: BatchQueue | None = None
        self._limit: asyncio.Semaphore | None = None
        self._is_open = False

    def _use_host(self, host: RewardHost) -> None:
        try:
            self._reward.use_host(host)  # type: ignore[attr-defined]
        except Exception as error:
            error.add_note(f"while the {self.place} was made")
            raise

    async def open(self) -> None:
        """Let the reward make what it needs."""
        concurrency = getattr(self._reward, "concurrency", None)
        if (batch_size := getattr(self._reward, "batch_size", 1)) > 1 and hasattr(self._reward, "score_batch"):
            self._batches = BatchQueue(self._score_batch, batch_size, concurrency or 1)
        elif concurrency is not None:
            self._limit = asyncio.Semaphore(concurrency)
        if hasattr(self._reward, "open"):
            try:
                await as_async(self._reward.open)()
            except Exception as error:
                error.add_note(f"while the {self.place} was opened")
                raise
        self._is_open = True

    async def close(self) -> None:
        """Let the reward give up what it has, if it was opened."""
        if not self._is_open:
            return
        self._is_open = False
        if self._batches is not None:
            await self._batches.close()
        if hasattr(self._reward, "close"):
            await as_async(self._reward.close)()

    async def score(self, sample: Sample) -> Scored:
        """What the reward says, checked."""
        if self._cache is None:
            return await self._compute(sample)
        key = cache_key(sample)
        scored = self._cache.get(key)
        if scored is None:
            scored = await self._compute(sample)
            self._cache.put(key, scored)
        return scored

    async def _compute(self, sample: Sample) -> Scored:
        if self._batches is not None:
            return as_scored(await self._batches.score(sample), self.place)
        async with self._limit or nullcontext():
            return as_scored(await self._with_tries(self._call, sample), self.place)

    async def _score_batch(self, samples: Sequence[Sample]) -> Sequence[Any]:
        values = await self._with_tries(as_async(self._reward.score_batch), samples)  # type: ignore[attr-defined]
        if len(values) != len(samples):
            raise RewardError(f"{self.place} returned {len(values)} values for a batch of {len(samples)} samples")
        return list(values)

    async def _with_tries(self, call: Callable[[Any], Awaitable[T]], argument: Any) -> T:
        fault: InfrastructureError | None = None
        for attempt in range(self.config.tries):
            if attempt and not isinstance(fault, DeadlinePassed):  # one that was late was waited for already
                await asyncio.sleep(self.config.retry_seconds * 2 ** (attempt - 1))
            try:
                return await self._in_time(call, argument)
            except InfrastructureError as error:
                fault = error
                if isinstance(error, LastingFault):
                    break
        times = f", asked {attempt + 1} times" if attempt else ""
        if isinstance(fault, DeadlinePassed):
            raise LateReward(
                f"the {self.place} did not return within reward_seconds ({self.config.seconds:g} s){times}"
            ) from fault
        raise RewardUnavailable(f"{self.place}: {fault}{times}") from fault

    async def _in_time(self, call: Callable[[Any], Awaitable[T]], argument: Any) -> T:
        if self.config.seconds is None:
            return await self._without_exit(call, argument)
        return await with_deadline(self.config.seconds, self._without_exit(call, argument), "reward_seconds")

    async def _without_exit(self, call: Callable[[Any], Awaitable[T]], argument: Any) -> T:
        try:
            return await call(argument)
        except SystemExit as error:  # it would end the event loop, and the run with it
            raise RewardError(f"{self.place} called sys.exit({error.code!r}); return a value or raise") from error
