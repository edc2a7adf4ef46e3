"""The sandbox: runs untrusted programs, each isolated from the host and from the others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType

from cadenza.errors import InfrastructureError
from cadenza.sandbox import inputs, probe
from cadenza.sandbox.bubblewrap import find_bwrap
from cadenza.sandbox.connection import LauncherConnection
from cadenza.sandbox.errors import INSTALL, SandboxUnavailable
from cadenza.sandbox.limits import SandboxLimits
from cadenza.sandbox.messages import Program, Setup
from cadenza.sandbox.result import SandboxResult

START_SECONDS = 120.0


class Sandbox:
    """Runs programs without network, without the host's files, and within limits.

        async with Sandbox(SandboxLimits(wall_seconds=5)) as sandbox:
            result = await sandbox.run(["python3", "main.py"], stdin=b"2 3", files={"main.py": source})
            correct = result.ok and result.stdout.split() == [b"5"]

    `async with` starts a process that keeps jails ready, and ends them all; a probe checks the isolation first and
    raises `SandboxUnavailable` if anything is wrong with it. Calls of `run` may overlap: `concurrency` programs (one
    for each CPU unless given) run at one time, others wait. Programs can read the directories `visible` too.
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, concurrency: int | None = None, visible: Sequence[str | Path] = ()
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.limits = limits or SandboxLimits()
        self._concurrency = concurrency or os.cpu_count() or 1
        self._visible = tuple(str(Path(path).resolve(strict=True)) for path in visible)
        self._launcher: LauncherConnection | None = None
        self._starting = asyncio.Lock()
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
        async with self._starting:
            if self._launcher is not None:
                raise RuntimeError("the sandbox is open already")
            self._launcher = await self._start()

    async def close(self) -> None:
        """Kills all programs and returns when nothing of them is left. Calls of `run` that wait raise
        `InfrastructureError`."""
        async with self._starting:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.close()

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        forward: int | str | Path | None = None,
    ) -> SandboxResult:
        """Runs a program in a new jail and returns how it ended, whatever it did.

        It starts in /tmp, where `files` are, under names relative to it. `python3` is the Python of this process
        without its virtual environment. `forward` is one address of the host that the program can reach: a loopback
        port, under the same number inside, or the path of a Unix socket, which is /tmp/forward.sock inside. A cancelled
        call kills the program. `InfrastructureError` means that the sandbox broke, which says nothing about the
        program.
        """
        program = Program(
            id=next(self._ids),
            argv=inputs.checked_argv(argv),
            stdin=stdin,
            files=inputs.checked_files(files or {}, self.limits),
            environment=inputs.checked_environment(environment or {}),
            forward=inputs.checked_forward(forward),
            wall_seconds=self.limits.wall_seconds,
            cpu_seconds=self.limits.cpu_seconds,
        )
        launcher = await self._living_launcher()
        return await launcher.execute(program)

    async def _living_launcher(self) -> LauncherConnection:
        """The launcher, or a new one where it has died: its programs are lost, the next ones are not."""
        async with self._starting:
            if self._launcher is None:
                raise RuntimeError("the sandbox is not open: use 'async with Sandbox(...) as sandbox'")
            if not self._launcher.alive:
                await self._launcher.close()
                self._launcher = await self._start()
            return self._launcher

    async def _start(self) -> LauncherConnection:
        setup = Setup(find_bwrap(), self._concurrency, sys.base_prefix, self._visible, self.limits.model_dump())
        try:
            async with asyncio.timeout(START_SECONDS):
                launcher = await LauncherConnection.start(setup)
                try:
                    await self._try_isolation(launcher)
                except BaseException:
                    await launcher.close()
                    raise
        except TimeoutError as error:
            raise SandboxUnavailable(f"the sandbox did not start in {START_SECONDS:.0f} seconds") from error
        return launcher

    async def _try_isolation(self, launcher: LauncherConnection) -> None:
        argv = ("python3", "-I", "-S", "-c", probe.PROGRAM)
        program = Program(
            next(self._ids), argv, b"", {}, {}, None, wall_seconds=START_SECONDS, cpu_seconds=START_SECONDS
        )
        try:
            result = await launcher.execute(program)
        except InfrastructureError as error:
            raise SandboxUnavailable(
                f"programs cannot be isolated here: {error}. The sandbox needs bubblewrap 0.8 or later ({INSTALL}) "
                "and user namespaces (sysctl user.max_user_namespaces above 0)"
            ) from error
        if not result.ok:
            text = result.stderr.decode("utf-8", "replace").strip()
            raise SandboxUnavailable(f"the probe of the isolation ended with '{result.outcome}': {text}")
        if wrong := probe.faults(result.stdout, probe.namespaces(), self.limits.processes):
            raise SandboxUnavailable(f"a program in the sandbox is not isolated: {'; '.join(wrong)}")
