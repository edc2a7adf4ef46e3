"""What the tests of the sandbox share: the skip where bubblewrap is missing, and a host that shows damage."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not here: apt-get install bubblewrap"
)
SECRET = "a secret of the host"
CONNECT = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', {port})); s.sendall(b'{word}');"
"""A program that says through its forwarded port that it runs."""


class WatchedHost:
    """A host with things that programs must neither see nor change. Each program carries the mark in its text, and the
    names of the files that it makes have it too, so that both are found wherever they turn up."""

    def __init__(self, directory: Path) -> None:
        self.mark = f"hostile-{uuid4().hex}"
        self.canary = directory / "canary"
        self.canary.write_text(SECRET)
        self.canary.chmod(0o666)
        directory.chmod(0o777)
        self.socket_path = str(directory / "socket")
        self.listeners = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for listener, address in zip(
            self.listeners, [("127.0.0.1", 0), self.socket_path, f"\0{self.mark}"], strict=True
        ):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        os.chmod(self.socket_path, 0o666)
        os.environ["CADENZA_CANARY"] = SECRET

    def close(self) -> None:
        del os.environ["CADENZA_CANARY"]
        for listener in self.listeners:
            listener.close()

    def names(self) -> str:
        """The assignments that tell a program where to attack."""
        values = {
            "CANARY": str(self.canary), "HOST_PID": os.getpid(), "MARK": self.mark, "HOST_HOME": str(Path.home()),
            "PORT": self.listeners[0].getsockname()[1], "SOCKET": self.socket_path, "ABSTRACT": self.mark,
        }  # fmt: skip
        return "".join(f"{name} = {value!r}\n" for name, value in values.items())

    def damage(self) -> list[str]:
        """All that has changed."""
        found = [f"process {pid}: {text[:80]!r}" for pid, text in processes().items() if self.mark.encode() in text]
        for place in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/", str(Path.home()), os.getcwd()}:
            found += [f"file {place}/{name}" for name in os.listdir(place) if self.mark in name]
        if not self.canary.is_file() or self.canary.read_text() != SECRET:
            found.append("the canary has changed")
        for listener in self.listeners:
            try:
                listener.accept()
            except BlockingIOError:
                continue
            found.append(f"a connection to {listener.getsockname()!r}")
        return found


def processes() -> dict[int, bytes]:
    """The command lines of all processes of this machine."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found[int(name)] = Path("/proc", name, "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


class Listener:
    """A server of the host that keeps its connections open."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.connections.put_nowait((reader, writer))


def marked(mark: str) -> dict[int, int]:
    """Descriptors of the processes that have this mark in their command lines."""
    return {pid: os.pidfd_open(pid) for pid, text in processes().items() if mark.encode() in text}


def wait_until_ended(descriptors: dict[int, int]) -> None:
    for fd in descriptors.values():
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(60_000), "the process ends"
        os.close(fd)
