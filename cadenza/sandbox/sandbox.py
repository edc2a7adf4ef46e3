"""The sandbox: runs untrusted programs, each isolated from the host and from the others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from types import TracebackType

import msgspec

from cadenza.errors import InfrastructureError
from cadenza.sandbox import probe
from cadenza.sandbox.bubblewrap import find_bwrap
from cadenza.sandbox.errors import INSTALL, SandboxUnavailable
from cadenza.sandbox.limits import SandboxLimits
from cadenza.sandbox.messages import Cancel, Ended, Program, Ready, Setup, frame, receive
from cadenza.sandbox.result import SandboxResult

ARGUMENT_BYTES = 128 * 1024
"""What the kernel takes as one argument."""
START_SECONDS = 120.0
CLOSE_SECONDS = 30.0


class Sandbox:
    """Runs programs without network, without the host's files, and within limits.

        async with Sandbox(SandboxLimits(wall_seconds=5)) as sandbox:
            result = await sandbox.run(["python3", "main.py"], stdin=b"2 3", files={"main.py": source})
            correct = result.ok and result.stdout.split() == [b"5"]

    `async with` starts a process that keeps jails ready and ends them all; a probe checks the isolation first and raises
    `SandboxUnavailable` if anything is wrong with it. Calls of `run` may overlap: `concurrency` programs (one for each CPU
    unless given) run at one time, others wait. Programs can read the directories `visible` too.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, concurrency: int | None = None, visible: Sequence[str | Path] = ()
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.limits = limits or SandboxLimits()
        self._concurrency = concurrency or os.cpu_count() or 1
        self._visible = tuple(str(Path(path).resolve(strict=True)) for path in visible)
        self._launcher: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[SandboxResult]] = {}
        self._ids = count()

    async def __aenter__(self) -> Sandbox:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Starts the launcher and tries the isolation; raises `SandboxUnavailable` where there is none."""
        if self._launcher is not None:
            raise RuntimeError("the sandbox is open already")
        bwrap = find_bwrap()
        try:
            await asyncio.wait_for(self._start(bwrap), START_SECONDS)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kills all programs and returns when nothing of them is left. Calls of `run` that wait raise."""
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        assert launcher.stdin is not None
        launcher.stdin.close()
        try:
            await asyncio.wait_for(launcher.wait(), CLOSE_SECONDS)
        except TimeoutError:
            launcher.kill()
            await launcher.wait()
        if self._listener is not None:
            await self._listener

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs a program in a new jail and returns how it ended, whatever it did.

        It starts in /tmp, where `files` are, under names relative to it. `python3` is the Python of this process without
        its virtual environment. A cancelled call kills the program. `InfrastructureError` means that the sandbox broke,
        which says nothing about the program.
        """
        if self._launcher is None:
            raise RuntimeError("the sandbox is not open: use 'async with Sandbox(...) as sandbox'")
        contents = checked_files(files or {}, self.limits)
        program = Program(
            next(self._ids), checked_argv(argv), stdin, contents, checked_environment(environment or {}),
            None,
        )  # fmt: skip
        answer: asyncio.Future[SandboxResult] = asyncio.get_running_loop().create_future()
        self._answers[program.id] = answer
        try:
            self._send(program)
            return await answer
        except asyncio.CancelledError:
            self._send(Cancel(program.id))
            raise
        finally:
            del self._answers[program.id]

    # -- the launcher --------------------------------------------------------------------------------------------------

    async def _start(self, bwrap: str) -> None:
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._launcher = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "cadenza.sandbox.launcher",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        assert self._launcher.stdout is not None
        self._send(Setup(bwrap, self._concurrency, sys.base_prefix, self._visible, self.limits.model_dump()))
        try:
            ready = await receive(self._launcher.stdout, msgspec.msgpack.Decoder(Ready))
        except asyncio.IncompleteReadError as error:
            raise SandboxUnavailable("the sandbox's launcher ended; its error is above") from error
        if ready.error:
            raise SandboxUnavailable(f"the sandbox's launcher cannot give up its rights: {ready.error}")
        self._listener = asyncio.create_task(self._listen(self._launcher.stdout), name="sandbox answers")
        await self._try_isolation()

    async def _try_isolation(self) -> None:
        try:
            result = await self.run(["python3", "-I", "-S", "-c", probe.PROGRAM])
        except InfrastructureError as error:
            raise SandboxUnavailable(
                f"programs cannot be isolated here: {error}. The sandbox needs bubblewrap 0.8 or later ({INSTALL}) "
                "and user namespaces (sysctl user.max_user_namespaces above 0)"
            ) from error
        if not result.ok:
            text = result.stderr.decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"the probe of the isolation ended with {result.outcome}: {text}")
        if wrong := probe.faults(result.stdout, probe.host_namespaces(), self.limits.processes):
            raise SandboxUnavailable(f"a program in the sandbox is not isolated: {'; '.join(wrong)}")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        decoder: msgspec.msgpack.Decoder[Ended] = msgspec.msgpack.Decoder(Ended)
        while True:
            try:
                ended = await receive(reader, decoder)
            except asyncio.IncompleteReadError:
                break
            answer = self._answers.get(ended.id)
            if answer is None or answer.done():
                continue
            if ended.result is not None:
                answer.set_result(ended.result)
            else:
                answer.set_exception(InfrastructureError(f"the sandbox could not run a program: {ended.error}"))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(
                    InfrastructureError("the sandbox was closed, or its launcher died, during a program")
                )

    def _send(self, message: msgspec.Struct) -> None:
        if self._launcher is not None and self._launcher.stdin is not None:
            self._launcher.stdin.write(frame(message))


def checked_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The arguments of a program, or a ValueError that says which one the kernel would refuse."""
    if isinstance(argv, str) or not argv:
        raise ValueError(f"argv must be a list of a program and its arguments, got {argv!r}")
    for number, word in enumerate(argv):
        if "\0" in word:
            raise ValueError(f"argument {number} has a zero byte")
        if len(word.encode("utf-8", "surrogateescape")) >= ARGUMENT_BYTES:
            raise ValueError(f"argument {number} has {len(word)} characters; put what is long into files={{...}}")
    return tuple(argv)


def checked_files(files: Mapping[str, str | bytes], limits: SandboxLimits) -> dict[str, bytes]:
    """The files as bytes; a ValueError names one that would not be in the program's directory, or is too large."""
    contents = {}
    for name, content in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"file {name!r} must have a name relative to the program's directory")
        contents[str(path)] = content.encode() if isinstance(content, str) else bytes(content)
    if (size := sum(map(len, contents.values()))) > limits.tmp_mb << 20:
        raise ValueError(f"the files have {size} bytes; tmp_mb is {limits.tmp_mb}")
    return contents


def checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, or a ValueError that names one that no shell would take."""
    for name, value in environment.items():
        if not (name.isascii() and name.isidentifier()) or "\0" in value:
            raise ValueError(f"environment variable {name!r} has a name or a value that cannot be set")
    return dict(environment)
