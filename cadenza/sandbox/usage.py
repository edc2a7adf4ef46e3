"""What the processes of a jail use, read from the /proc of their own namespace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
CPU_FIELDS = slice(11, 15)
"""utime, stime, cutime and cstime, counted from the state, which follows the name of the program."""


class Usage(NamedTuple):
    """What a jail uses at one moment."""

    cpu_seconds: float
    memory_bytes: int
    """Never less than it is: pages that processes share count once for each."""
    files: int


class JailFiles:
    """The files of a jail, seen from outside: its root is held open, so that nothing inside can move it."""

    def __init__(self, pid: int) -> None:
        """`pid` is the process, in our own numbering, that waits for its program."""
        self._root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._proc = os.open("proc", flags, dir_fd=self._root)
        self.tmp = os.open("tmp", flags, dir_fd=self._root)
        self._shm = os.open("dev/shm", flags, dir_fd=self._root)

    def close(self) -> None:
        for fd in (self._shm, self.tmp, self._proc, self._root):
            os.close(fd)

    def write(self, name: str, content: bytes) -> None:
        """Makes a file in /tmp, and the directories that it is in. Only before the program runs: links are followed."""
        path = Path(name)
        for parent in reversed(path.parents[:-1]):
            try:
                os.mkdir(parent, 0o755, dir_fd=self.tmp)
            except FileExistsError:
                continue
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(path, flags, 0o755, dir_fd=self.tmp), "wb") as file:
            file.write(content)

    def usage(self) -> Usage:
        """What the jail uses now; a process that ends meanwhile is left out."""
        ticks = memory = 0
        for pid in self._pids():
            if stat := self._read(f"{pid}/stat"):
                ticks += sum(map(int, stat.rpartition(b")")[2].split()[CPU_FIELDS]))
                memory += _kilobytes(self._read(f"{pid}/status"), (b"RssAnon:", b"RssShmem:"))
        used, files = self._stored()
        return Usage(ticks / TICKS, memory * 1024 + used + self._queued(), files)

    def exact_memory(self) -> int:
        """Bytes of memory, where what processes share counts once; costs more to find out than `usage`."""
        total = 0
        for pid in self._pids():
            shared_out = _kilobytes(self._read(f"{pid}/smaps_rollup"), (b"Pss_Anon:", b"Pss_Shmem:"))
            # A program may close this file to us, and then all of its memory counts.
            total += shared_out or _kilobytes(self._read(f"{pid}/status"), (b"RssAnon:", b"RssShmem:"))
        return total * 1024 + self._stored()[0] + self._queued()

    def _stored(self) -> tuple[int, int]:
        """Bytes and files in /tmp and /dev/shm."""
        stored = [os.fstatvfs(fd) for fd in (self.tmp, self._shm)]
        used = sum((found.f_blocks - found.f_bfree) * found.f_frsize for found in stored)
        return used, sum(found.f_files - found.f_ffree - 1 for found in stored)  # each has one for its root

    def _queued(self) -> int:
        """Bytes in the buffers of TCP connections, which can be large and belong to no process."""
        tables = [self._read(f"1/net/{name}") for name in ("tcp", "tcp6")]
        lengths = [line.split()[4].split(b":") for table in tables for line in table.splitlines()[1:]]
        return sum(int(sending, 16) + int(received, 16) for sending, received in lengths)

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(self._proc) if name.isdigit()]

    def _read(self, name: str) -> bytes:
        try:
            with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc), "rb") as file:
                return file.read()
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended; a zombie has no memory to show
            return b""


def _kilobytes(text: bytes, fields: tuple[bytes, ...]) -> int:
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(fields))
