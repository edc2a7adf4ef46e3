"""Nothing of a program is left, however it ends: cancelled, closed, or without its launcher or its caller."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from sandbox_cases import CONNECT, Listener, marked, needs_bwrap, processes, wait_until_ended

from cadenza.errors import InfrastructureError
from cadenza.sandbox import Sandbox, SandboxLimits

pytestmark = needs_bwrap
LIMITS = SandboxLimits(wall_seconds=100, cpu_seconds=50)


def test_a_cancelled_call_kills_its_program() -> None:
    async def cancel() -> None:
        mark = uuid4().hex
        async with Listener() as listener, Sandbox(LIMITS, concurrency=1) as sandbox:
            code = CONNECT.format(port=listener.port, word=mark) + "time.sleep(1000)"
            program = asyncio.create_task(sandbox.run(["python3", "-c", code], forward=listener.port))
            await listener.connections.get()
            running = marked(mark)
            program.cancel()
            with pytest.raises(asyncio.CancelledError):
                await program
            assert running
            await asyncio.to_thread(wait_until_ended, running)

    asyncio.run(cancel())


def test_closing_ends_what_runs_and_says_so() -> None:
    async def close() -> None:
        mark = uuid4().hex
        async with Listener() as listener:
            async with Sandbox(LIMITS) as sandbox:
                code = CONNECT.format(port=listener.port, word=mark) + "time.sleep(1000)"
                program = asyncio.create_task(sandbox.run(["python3", "-c", code], forward=listener.port))
                await listener.connections.get()
                running = marked(mark)
            assert running
            assert not marked(mark)
            with pytest.raises(InfrastructureError, match="closed"):
                await program
            for fd in running.values():
                os.close(fd)

    asyncio.run(close())


def test_a_launcher_that_dies_takes_its_programs_along_and_is_replaced() -> None:
    async def die() -> None:
        mark = uuid4().hex
        async with Listener() as listener, Sandbox(LIMITS, concurrency=1) as sandbox:
            code = CONNECT.format(port=listener.port, word=mark) + "time.sleep(1000)"
            program = asyncio.create_task(sandbox.run(["python3", "-c", code], forward=listener.port))
            await listener.connections.get()
            running = marked(mark)
            launchers = [
                pid
                for pid, text in processes().items()
                if b"cadenza.sandbox.launcher" in text and parent(pid) == os.getpid()
            ]
            os.kill(max(launchers), signal.SIGKILL)
            with pytest.raises(InfrastructureError, match="died"):
                await program
            assert running
            await asyncio.to_thread(wait_until_ended, running)
            assert (await sandbox.run(["true"])).ok

    asyncio.run(die())


def test_programs_end_when_the_process_that_wants_them_is_killed() -> None:
    caller = (
        "import asyncio, sys\nfrom cadenza.sandbox import Sandbox, SandboxLimits\n"
        "async def main():\n    async with Sandbox(SandboxLimits(wall_seconds=1000)) as sandbox:\n"
        "        await sandbox.run(['python3', '-c', sys.argv[1]], forward=int(sys.argv[2]))\nasyncio.run(main())\n"
    )

    async def kill() -> None:
        mark = uuid4().hex
        async with Listener() as listener:
            code = CONNECT.format(port=listener.port, word=mark) + "time.sleep(1000)"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", caller, code, str(listener.port), env=environment
            )
            await listener.connections.get()
            running = marked(mark)
            process.kill()
            await process.wait()
            assert len(running) > 1, "the caller and its program"
            await asyncio.to_thread(wait_until_ended, running)

    asyncio.run(kill())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
