"""A process of a jail and the streams that it writes, as the launcher's loop sees them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

CHUNK = 1 << 16


class Output:
    """One stream of a program, kept up to a limit."""

    def __init__(self, limit: int, on_excess: Callable[[], None]) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._limit = limit
        self._on_excess = on_excess
        self._kept = bytearray()
        self.truncated = False
        asyncio.get_running_loop().add_reader(self._reader, self.read)

    def read(self) -> None:
        """Take what is there."""
        while True:
            try:
                chunk = os.read(self._reader, CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                asyncio.get_running_loop().remove_reader(self._reader)
                return
            room = self._limit - len(self._kept)
            self._kept += chunk[:room]
            if len(chunk) > room:
                self.truncated = True
                self._on_excess()
                return

    def text(self) -> str:
        """What was kept so far, as people read it."""
        return self._kept.decode("utf-8", "replace").strip()

    def finish(self) -> bytes:
        """All that was kept. Nobody can write any more."""
        if not self.truncated:
            self.read()
        asyncio.get_running_loop().remove_reader(self._reader)
        os.close(self._reader)
        return bytes(self._kept)


class Process:
    """A process that is known by a descriptor, so that its number can be used by nobody else."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._fd, self._see_end)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def reap(self) -> tuple[int, float]:
        """The wait status and the CPU seconds of a process that has ended; zeros if another process reaped it."""
        os.close(self._fd)
        try:
            _, status, used = os.wait4(self.pid, 0)
        except ChildProcessError:
            return 0, 0.0
        return status, used.ru_utime + used.ru_stime

    def _see_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        if not self.ended.done():
            self.ended.set_result(None)
