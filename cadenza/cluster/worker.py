"""One worker of a cluster, and the host that makes the worker and calls it.

Invariant: the plain methods of a worker run off the event loop, one at a time, in the order in which they were called;
async methods run side by side on the loop. A plain method that its caller does not await any more keeps the worker busy
until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any

from cadenza.cluster.placement import Place
from cadenza.cpu import limit_onednn
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, raise_if_cancelled
from cadenza.off_loop import COMPUTE_POOL, as_async, is_async


class WorkerLost(InfrastructureError):
    """The process of a worker, its node, or the connection to it is gone."""


class HeadLost(InfrastructureError):
    """The head of the Ray cluster does not answer."""


class WorkerError(Exception):
    """A worker raised an error that cannot be raised in the caller: an exit, or one that does not pickle."""


class VersionMismatch(RuntimeError):
    """Controller and worker have different versions of a package that must agree."""


class Worker:
    """The base class of all workers. Methods that the controller may call are marked with `dispatch`."""

    place: Place
    """Role, rank and devices of this worker; set before `__init__` runs."""

    def close(self) -> Awaitable[None] | None:
        """Free what would outlive the worker, plain or async. Called once, when its cluster shuts down."""
        return None


class WorkerHost:
    """Makes one worker in this process, and calls its methods."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._worker: Worker
        self._call_lock = asyncio.Lock()

    async def open(self, worker_class: type[Worker], init: Mapping[str, Any]) -> None:
        """Make the worker off the loop, because it may load a model."""

        def make() -> Worker:
            limit_onednn()
            worker = worker_class.__new__(worker_class)
            worker.place = self.place
            worker.__init__(**init)  # type: ignore[misc]  # after its place is known
            return worker

        self._worker = await self._run(make)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._run(partial(getattr(self._worker, method), *args, **kwargs))

    async def close(self) -> None:
        if hasattr(self, "_worker"):
            await self._run(self._worker.close)

    async def _run(self, function: Any) -> Any:
        try:
            if is_async(function):
                return await function()
            async with self._call_lock:
                return await as_async(function, COMPUTE_POOL)()
        except USER_CODE_ERRORS as error:
            raise_if_cancelled(error)
            if isinstance(error, Exception):
                raise
            raise WorkerError(f"{type(error).__name__}({error}) was raised") from error
