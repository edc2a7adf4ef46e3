"""One jail: a bubblewrap that waits for its one program, runs it, and ends with it.

    start:    bwrap > its init (process 1 inside) > a shell that says it is there and waits on a socket
    execute:  files, standard input and limits are set from outside; the shell is let go and becomes the program
    end:      the program exits, bwrap exits, its init is killed by the kernel, and with it everything inside

Invariant: when `execute` or `destroy` returns, no process of the jail is left, and its files are gone with them.
Killing process 1 of a namespace kills all others, however they were forked, before its own end can be seen.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import resource
import shlex
import signal
import socket
import struct
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from cadenza.sandbox import bubblewrap
from cadenza.sandbox.errors import SandboxUnavailable
from cadenza.sandbox.forwarding import forwarded, listen_in_directory, listen_in_network
from cadenza.sandbox.limits import SandboxLimits
from cadenza.sandbox.messages import Program
from cadenza.sandbox.probe import namespaces
from cadenza.sandbox.process import Output, Process
from cadenza.sandbox.result import Outcome, SandboxResult
from cadenza.sandbox.usage import JailFiles

START_SECONDS = 60.0
"""For bubblewrap on a busy machine."""
WATCH_SECONDS = 0.05
SCM_CREDENTIALS = 2
CREDENTIALS = struct.Struct("3i")
MEGABYTE = 1 << 20
PENDING_SIGNALS = 1024
DEFAULT_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD, signal.SIGXFSZ,
)  # fmt: skip
"""Python, or who started it, may ignore some of these; a program gets them as the system has them."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class JailSpec:
    """What all jails of a sandbox have in common."""

    bwrap: str
    options: tuple[str, ...]
    """Of bubblewrap; those that name open files come in front of them."""
    seccomp: bytes
    limits: SandboxLimits


class Jail:
    """Room for one program; see the head of this module."""

    def __init__(self, spec: JailSpec) -> None:
        self._limits = spec.limits
        self._outcome: Outcome | None = None
        self._files: JailFiles | None = None
        self._stdout = Output(spec.limits.output_bytes, lambda: self._kill("output"))
        self._stderr = Output(spec.limits.output_bytes, lambda: self._kill("output"))
        self._stdin, self._script = memory_file(), memory_file()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._bwrap = Process(self._spawn(spec, theirs.fileno()))
        except OSError:
            self._close_files()
            raise
        finally:
            theirs.close()
            os.close(self._stdout.writer)
            os.close(self._stderr.writer)
        self._init: Process | None = None
        self._shell = 0
        self._start_cpu = 0.0
        self._seen_cpu = 0.0

    @classmethod
    async def start(cls, spec: JailSpec) -> Jail:
        """Returns a jail that waits for its program; raises `SandboxUnavailable` with what bubblewrap says."""
        jail = cls(spec)
        try:
            await asyncio.wait_for(jail._open(), START_SECONDS)
        except BaseException:
            await jail.destroy()
            raise
        return jail

    async def execute(self, program: Program) -> SandboxResult:
        """Runs a program to its end, or to its limits. The jail cannot be used again."""
        assert self._files is not None
        try:
            if self._bwrap.ended.done():
                raise SandboxUnavailable("a jail was killed while it waited for a program")
            for name, content in program.files.items():
                self._files.write(name, content)
            fill(self._stdin, program.stdin)
            fill(self._script, script(program))
            self._set_limits(program)
            started = asyncio.get_running_loop().time()
            async with self._forwarded(program.forward):
                self._control.send(b"\n")
                await self._watch(started + program.wall_seconds, program.cpu_seconds)
            wall_seconds = asyncio.get_running_loop().time() - started
        finally:
            status, cpu_seconds, stdout, stderr = await self._end()
        cpu_used_up = cpu_seconds >= program.cpu_seconds
        outcome, exit_code, by = self._judge(os.waitstatus_to_exitcode(status), cpu_used_up)
        return SandboxResult(
            outcome=outcome, exit_code=exit_code, signal=by, stdout=stdout, stderr=stderr,
            stdout_truncated=self._stdout.truncated, stderr_truncated=self._stderr.truncated,
            wall_seconds=wall_seconds, cpu_seconds=cpu_seconds,
        )  # fmt: skip

    async def destroy(self) -> None:
        """Ends a jail that has run nothing."""
        if self._init is None:
            self._bwrap.kill()
        await self._end()

    # -- start ---------------------------------------------------------------------------------------------------------

    def _spawn(self, spec: JailSpec, control: int) -> int:
        etc = {name: memory_file(text.encode()) for name, text in bubblewrap.ETC.items()}
        seccomp = memory_file(spec.seccomp)
        # In a file, because a program can read the arguments of process 1.
        words = [*bubblewrap.file_options(seccomp, etc), *spec.options, ""]
        options = memory_file("\0".join(words).encode())
        passed = [*etc.values(), seccomp, options]
        for fd in passed:
            os.set_inheritable(fd, True)
        standard = (self._stdin, self._stdout.writer, self._stderr.writer, self._script, control)
        try:
            return os.posix_spawn(
                spec.bwrap,
                ["bwrap", "--args", str(options), "--", "/bin/sh", "-c", bubblewrap.WAIT],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(standard)],
                setsigmask=(),
                setsigdef=DEFAULT_SIGNALS,
            )
        finally:
            for fd in passed:
                os.close(fd)

    async def _open(self) -> None:
        await self._first_word()
        message, ancillary, _, _ = self._control.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        credentials = [data for _, kind, data in ancillary if kind == SCM_CREDENTIALS]
        if not message or not credentials:
            await self._bwrap.ended
            self._stderr.read()
            raise SandboxUnavailable(f"bubblewrap does not start: {self._stderr.text() or 'it says nothing'}")
        self._shell, _, _ = CREDENTIALS.unpack(credentials[0])
        theirs, ours = namespaces(self._shell), namespaces()
        if shared := [name for name in theirs if theirs[name] == ours[name]]:
            raise SandboxUnavailable(f"bubblewrap starts programs in the host's namespaces {', '.join(shared)}")
        self._init = Process(parent_of(self._shell))
        self._files = JailFiles(self._shell)
        self._start_cpu = sum(cpu_seconds_so_far(pid) for pid in (self._bwrap.pid, self._init.pid, self._shell))

    async def _first_word(self) -> None:
        """Returns when the shell has written to its socket, or the socket is closed."""
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._control, lambda: None if there.done() else there.set_result(None))
        try:
            await there
        finally:
            loop.remove_reader(self._control)

    # -- the program ---------------------------------------------------------------------------------------------------

    def _set_limits(self, program: Program) -> None:
        """From outside and only now: a limit on processes that bubblewrap has would count those of the whole user.
        Process 1 gets them too, for a program can make it do what it wants, as its debugger."""
        limits = self._limits
        assert self._init is not None
        for kind, value in (
            (resource.RLIMIT_AS, limits.memory_mb * MEGABYTE),
            (resource.RLIMIT_CPU, math.ceil(program.cpu_seconds) + 1),
            (resource.RLIMIT_NPROC, limits.processes + 1),  # bubblewrap's own process in the namespace counts
            (resource.RLIMIT_FSIZE, limits.file_mb * MEGABYTE),
            (resource.RLIMIT_NOFILE, limits.open_files),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_SIGPENDING, PENDING_SIGNALS),
        ):
            _, hard = resource.prlimit(self._shell, kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            for pid in (self._init.pid, self._shell):
                resource.prlimit(pid, kind, (value, value))

    def _forwarded(self, target: int | str | None) -> AbstractAsyncContextManager[None]:
        if target is None:
            return nullcontext()
        if isinstance(target, int):
            return forwarded(listen_in_network(self._shell, target), target)
        assert self._files is not None
        return forwarded(listen_in_directory(self._files.tmp), target)

    async def _watch(self, deadline: float, cpu_seconds: float) -> None:
        """Returns when the program has ended; ends it when it passes a limit that the kernel does not watch."""
        loop = asyncio.get_running_loop()
        while not self._bwrap.ended.done():
            pause = min(WATCH_SECONDS, max(0.0, deadline - loop.time()))
            await asyncio.wait([self._bwrap.ended], timeout=pause)
            if self._bwrap.ended.done() or self._outcome is not None:
                await self._bwrap.ended
            elif loop.time() >= deadline:
                self._kill("wall_time")
            elif (passed := self._passed_limit(cpu_seconds)) is not None:
                self._kill(passed)

    def _passed_limit(self, cpu_seconds: float) -> Outcome | None:
        assert self._files is not None
        used, limits = self._files.usage(), self._limits
        self._seen_cpu = used.cpu_seconds - self._start_cpu
        memory = limits.memory_mb * MEGABYTE
        if self._seen_cpu >= cpu_seconds:
            return "cpu_time"
        if used.memory_bytes > memory and self._files.exact_memory() > memory:
            return "memory"
        return "files" if used.files > limits.files else None

    def _kill(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        if self._init is not None and self._files is not None and not self._bwrap.ended.done():
            # The kernel reports no CPU time of processes that end because the first one of their namespace does.
            self._seen_cpu = self._files.usage().cpu_seconds - self._start_cpu
            self._init.kill()

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _end(self) -> tuple[int, float, bytes, bytes]:
        """Kills what is left and waits for it; returns bwrap's wait status, the CPU seconds, and both streams."""
        if self._init is not None:
            self._init.kill()
            await self._init.ended
        await self._bwrap.ended
        status, cpu_seconds = self._bwrap.reap()
        if self._init is not None:
            cpu_seconds += self._init.reap()[1]
        cpu_seconds = max(0.0, self._seen_cpu, cpu_seconds - self._start_cpu)
        return status, cpu_seconds, *self._close_files()

    def _close_files(self) -> tuple[bytes, bytes]:
        self._control.close()
        for fd in (self._stdin, self._script):
            os.close(fd)
        if self._files is not None:
            self._files.close()
        return self._stdout.finish(), self._stderr.finish()

    def _judge(self, code: int, cpu_used_up: bool) -> tuple[Outcome, int | None, int | None]:
        """The outcome, the exit code and the signal. bwrap exits with 128 and the signal's number, as shells do."""
        if self._outcome is not None:
            return self._outcome, None, None
        by = -code if code < 0 else code - 128
        if not 0 < by < signal.NSIG:
            return "exited", code, None
        if by in (signal.SIGKILL, signal.SIGXCPU) and cpu_used_up:
            return "cpu_time", None, by
        return "killed", None, by


def script(program: Program) -> bytes:
    """What the waiting shell does: it becomes the program, with no file open but the standard ones."""
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in program.environment.items()]
    descriptors = f"{bubblewrap.SCRIPT_FD}<&- {bubblewrap.CONTROL_FD}<&-"
    text = f"{''.join(exports)}exec {shlex.join(program.argv)} {descriptors}\n"
    return text.encode("utf-8", "surrogateescape")


def memory_file(content: bytes | None = None) -> int:
    """A file that has no name, at its beginning."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if content is not None:
        fill(fd, content)
    return fd


def fill(fd: int, content: bytes) -> None:
    """Write a file that others hold open at its beginning; nobody can change it then."""
    view = memoryview(content)
    written = 0
    while written < len(view):
        written += os.pwrite(fd, view[written:], written)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def parent_of(pid: int) -> int:
    """The parent of a process, in our own numbering."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def cpu_seconds_so_far(pid: int) -> float:
    """CPU time of the first thread of a process; 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return 0.0
