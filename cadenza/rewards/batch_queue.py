"""Gathers samples that wait at the same time into batches.

Invariant: one batch is scored at a time, and every waiter gets the result of its own sample, or the error of its batch.
There is no timer and no task: whoever holds the lock scores the oldest waiting samples, its own among them or not.

    score(sample) -> waits for the lock | scored meanwhile? -> its result
                                        | else: score a batch, hand out the results
    a waiter that is cancelled while it scores a batch leaves the others in the queue
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cadenza.rewards.sample import Sample

Entry = tuple[Sample, "asyncio.Future[Any]"]


class BatchQueue:
    """Scores samples by `score_batch`, at most `size` at once. It belongs to the event loop it is made in."""

    def __init__(self, score_batch: Callable[[Sequence[Sample]], Awaitable[Sequence[Any]]], size: int) -> None:
        self._score_batch = score_batch
        self._size = size
        self._waiting: deque[Entry] = deque()
        self._lock = asyncio.Lock()

    async def score(self, sample: Sample) -> Any:
        """What the batch that this sample gets into has for it."""
        entry = (sample, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            async with self._lock:
                await asyncio.sleep(0)  # those that are ready now get into the same batch
                while not entry[1].done():
                    await self._score_oldest()
            return entry[1].result()
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def _score_oldest(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
        try:
            results = await self._score_batch([sample for sample, _ in batch])
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to all waiters of the batch
            for _, future in batch:
                future.set_exception(error)
                future.exception()  # a waiter may be gone
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
