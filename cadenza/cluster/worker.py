"""One member of a cluster, and the host that makes it and calls it.

Invariant: the plain methods of a worker run one at a time, in the order in which they were called, off the loop; async
ones run side by side on it. A call that nobody waits for any more keeps its worker busy until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cadenza.cluster.placement import Place
from cadenza.cpu import limit_onednn
from cadenza.errors import USER_CODE_ERRORS, InfrastructureError, raise_if_cancelled
from cadenza.off_loop import as_async, is_async


class WorkerLost(InfrastructureError):
    """The process of a worker, its node, or the way to it is gone."""


class HeadLost(InfrastructureError):
    """The head of the Ray cluster does not answer."""


class WorkerError(Exception):
    """A worker failed with what cannot be raised elsewhere: an exit, or something that does not pickle."""


class VersionMismatch(RuntimeError):
    """Controller and worker run on versions that do not understand each other."""


class Worker:
    """The base of all workers. Its methods that the controller may call are marked with `dispatch`."""

    place: Place
    """Where it sits; there before `__init__` runs."""

    def close(self) -> None:
        """Let go of what outlives the worker. Called once, when its cluster shuts down."""


class WorkerHost:
    """Makes one worker in this process, and calls its methods."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._worker: Worker
        self._call_lock = asyncio.Lock()

    async def open(self, worker_class: type[Worker], init: Mapping[str, Any]) -> None:
        """Make the worker, off the loop: it may load a model."""

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
                return await as_async(function)()
        except USER_CODE_ERRORS as error:
            raise_if_cancelled(error)
            if isinstance(error, Exception):
                raise
            raise WorkerError(f"{type(error).__name__}({error}) was raised") from error
