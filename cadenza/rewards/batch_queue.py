"""Gathers samples that wait at the same time into batches.

Invariant: a sample waits in the queue, or is in one running batch, or its waiter has its result or the error of its
batch. A batch that fails as infrastructure after the waiter of one of its samples was cancelled is scored again without
that sample, which may be why it failed. There is no timer: a batch starts as soon as one may run, with all samples that
wait then.

    score(sample) -> waits -> a batch starts -> its result
    wakes the queue: a new sample (once those that are ready with it have come too), the end of a batch
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from cadenza.errors import InfrastructureError
from cadenza.rewards.sample import Sample

Entry: TypeAlias = "tuple[Sample, asyncio.Future[Any]]"


class BatchQueue:
    """Scores samples by `score_batch`: up to `size` in a batch, up to `batches` of these at once.

    It belongs to the event loop that uses it. A waiter that is cancelled leaves its batch as it is.
    """

    def __init__(
        self, score_batch: Callable[[Sequence[Sample]], Awaitable[Sequence[Any]]], size: int, batches: int = 1
    ) -> None:
        self._score_batch = score_batch
        self._size = size
        self._batches = batches
        self._waiting: deque[Entry] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Any:
        """What the batch that this sample gets into has for it."""
        loop = asyncio.get_running_loop()
        entry = (sample, loop.create_future())
        self._waiting.append(entry)
        loop.call_soon(self._start)
        try:
            return await entry[1]
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def close(self) -> None:
        """End what runs. Whoever waits gets an InfrastructureError."""
        for _, future in self._waiting:
            _settle(future, error=InfrastructureError("the reward is closed"))
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._batches:
            batch = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            task = asyncio.get_running_loop().create_task(self._run(batch), name=f"batch of {len(batch)} rewards")
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    async def _run(self, batch: Sequence[Entry]) -> None:
        try:
            results = await self._score_batch([sample for sample, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                _settle(future, error=InfrastructureError("the batch of this sample was cancelled"))
        except Exception as error:  # noqa: BLE001 - it belongs to all waiters of the batch
            wanted = [entry for entry in batch if not entry[1].done()]
            if isinstance(error, InfrastructureError) and len(wanted) < len(batch):
                self._waiting.extendleft(reversed(wanted))  # `_ended` starts them
                return
            for _, future in batch:
                _settle(future, error=error)
        else:
            for (_, future), result in zip(batch, results, strict=True):
                _settle(future, result)


def _settle(future: asyncio.Future[Any], result: Any = None, error: Exception | None = None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
