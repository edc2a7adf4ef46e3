"""The user's end of a launcher: starts its process, sends it programs, hands each answer to the call that waits."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from cadenza.errors import InfrastructureError
from cadenza.sandbox.errors import SandboxUnavailable
from cadenza.sandbox.messages import Cancel, Ended, Program, Ready, Setup, frame, receive
from cadenza.sandbox.result import SandboxResult

CLOSE_SECONDS = 30.0


class LauncherConnection:
    """A launcher process. Every `execute` ends: with the launcher's answer, or with an error when it has gone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._writer = process.stdin
        self._reader = process.stdout
        self._answers: dict[int, asyncio.Future[SandboxResult]] = {}
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, setup: Setup) -> LauncherConnection:
        """Returns when the launcher has given up its rights; raises `SandboxUnavailable` if it cannot."""
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "cadenza.sandbox.launcher",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        connection = cls(process)
        try:
            await connection._greet(setup)
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def alive(self) -> bool:
        """Whether programs can be sent."""
        return self._listener is not None and not self._listener.done()

    async def execute(self, program: Program) -> SandboxResult:
        """Runs a program; a cancelled call kills it."""
        if not self.alive:
            raise InfrastructureError("the sandbox is closed, or its launcher has died")
        answer: asyncio.Future[SandboxResult] = asyncio.get_running_loop().create_future()
        self._answers[program.id] = answer
        try:
            self._writer.write(frame(program))
            return await answer
        except asyncio.CancelledError:
            self._writer.write(frame(Cancel(program.id)))
            raise
        finally:
            del self._answers[program.id]

    async def close(self) -> None:
        """Returns when the launcher and all its jails have ended."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._listener is not None:
            await self._listener

    async def _greet(self, setup: Setup) -> None:
        self._writer.write(frame(setup))
        try:
            ready = await receive(self._reader, msgspec.msgpack.Decoder(Ready))
        except asyncio.IncompleteReadError as error:
            raise SandboxUnavailable("the sandbox's launcher ended at once; its own error is on stderr") from error
        if ready.error:
            raise SandboxUnavailable(ready.error)
        self._listener = asyncio.create_task(self._listen(), name="answers of a sandbox")

    async def _listen(self) -> None:
        decoder: msgspec.msgpack.Decoder[Ended] = msgspec.msgpack.Decoder(Ended)
        while True:
            try:
                ended = await receive(self._reader, decoder)
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
                    InfrastructureError("the sandbox was closed, or its launcher died, while a program ran")
                )
