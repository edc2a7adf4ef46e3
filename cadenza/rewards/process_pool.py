"""Processes that answer requests in JSON, and can be killed.

Invariant: a process is idle in the pool, or lent to one caller. One that is late, or breaks, is killed and never lent
again; one that its caller is done with goes back, or is ended where there are enough. None outlives the pool: it is
killed with it, and reads the end of its pipe if this process is killed.

    ask(request) -> an idle process, or a new one -> reply   -> idle again
                                                  -> late    -> killed, DeadlinePassed
                                                  -> no more -> killed, ProcessLost
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from cadenza.errors import DeadlinePassed, InfrastructureError

START_SECONDS = 120.0
"""To import what it needs, on a machine that is busy."""


class ProcessLost(InfrastructureError):
    """A process ended before it answered."""


class JsonProcess:
    """One process: `python -m MODULE FILE_DESCRIPTOR ARGUMENTS`, which says `ready`, then answers one by one."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; we end them
                env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            )
        self._connection = Connection(ours.detach())
        self._is_ready = False

    @property
    def id(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Its reply; raises an InfrastructureError, and has killed the process then."""
        try:
            if not self._is_ready:
                self._receive(START_SECONDS)
                self._is_ready = True
            self._connection.send_bytes(json.dumps(request).encode(errors="surrogatepass"))
            return json.loads(self._receive(seconds))
        except (EOFError, OSError) as error:
            self.kill()
            raise ProcessLost(
                f"a process ended with exit code {self._process.returncode} before it answered"
            ) from error
        except DeadlinePassed:
            self.kill()
            raise

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise DeadlinePassed(f"a process was killed after {seconds:g} s without an answer")
        return self._connection.recv_bytes()


class ProcessPool:
    """Keeps up to `size` idle processes of one kind. It may be used by several threads."""

    def __init__(self, module: str, arguments: Sequence[str], size: int) -> None:
        self._start = (module, tuple(arguments))
        self._size = size
        self._idle: list[JsonProcess] = []
        self._lent: set[JsonProcess] = set()
        self._lock = Lock()
        self._closing = weakref.finalize(self, _kill_all, self._idle, self._lent, self._lock)

    @property
    def ids(self) -> list[int]:
        """The ids of all its processes."""
        with self._lock:
            return [process.id for process in (*self._idle, *self._lent)]

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """The reply of any process; blocks the thread, not longer than the seconds and the start of a process."""
        process = self._lend()
        try:
            reply = process.ask(request, seconds)
        except BaseException:
            with self._lock:
                self._lent.discard(process)
            process.kill()
            raise
        self._take_back(process)
        return reply

    def close(self) -> None:
        """Kill all. What is asked after this gets new processes."""
        _kill_all(self._idle, self._lent, self._lock)

    def _lend(self) -> JsonProcess:
        with self._lock:
            process = self._idle.pop() if self._idle else JsonProcess(*self._start)
            self._lent.add(process)
            return process

    def _take_back(self, process: JsonProcess) -> None:
        with self._lock:
            is_ours = process in self._lent
            self._lent.discard(process)
            if is_ours and len(self._idle) < self._size:
                self._idle.append(process)
                return
        process.kill()


def _kill_all(idle: list[JsonProcess], lent: set[JsonProcess], lock: Lock) -> None:
    with lock:
        processes = [*idle, *lent]
        idle.clear()
        lent.clear()
    for process in processes:
        process.kill()
