"""The launcher: the process that starts jails, `python -m cadenza.sandbox.launcher`.

It is a process of its own because bubblewrap dies with the thread that started it, because forking a process that
holds a model is slow, and because it gives up rights that the user's process may need. It ends when its standard input
is closed or when the process that started it ends, and its jails end with it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import deque

import msgspec

from cadenza.sandbox import bubblewrap
from cadenza.sandbox.errors import SandboxUnavailable
from cadenza.sandbox.jail import Jail, JailSpec
from cadenza.sandbox.limits import SandboxLimits
from cadenza.sandbox.messages import Cancel, Ended, Program, Ready, Setup, frame, receive
from cadenza.sandbox.privileges import adopt_orphans, drop_root
from cadenza.sandbox.result import SandboxResult
from cadenza.sandbox.seccomp import seccomp_filter

STANDARD_FDS = 10
"""Jails get their descriptors under numbers below this; the launcher's own are above, so that none is overwritten."""


class JailPool:
    """Jails that wait for programs. Each is used once, and when it is taken the next one is started.

    At most `size` programs run at one time, and at most as many jails wait.
    """

    def __init__(self, spec: JailSpec, size: int, group: asyncio.TaskGroup) -> None:
        self._spec = spec
        self._group = group
        self._places = asyncio.Semaphore(size)
        self._waiting: deque[asyncio.Task[Jail | SandboxUnavailable]] = deque()
        for _ in range(size):
            self._start_one()

    async def execute(self, program: Program) -> SandboxResult:
        """Runs a program, in a jail of its own, as soon as there is a place."""
        async with self._places:
            jail = await self._take()
            if isinstance(jail, SandboxUnavailable):
                raise jail
            return await jail.execute(program)

    async def _take(self) -> Jail | SandboxUnavailable:
        """The next jail that is there. A call that is cancelled here leaves it to others."""
        while not (ready := [task for task in self._waiting if task.done()]):
            await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        self._waiting.remove(ready[0])
        self._start_one()
        return ready[0].result()

    async def close(self) -> None:
        """Ends the jails that have no program."""
        while self._waiting:
            jail = await self._waiting.popleft()
            if isinstance(jail, Jail):
                await jail.destroy()

    def _start_one(self) -> None:
        self._waiting.append(self._group.create_task(self._start()))

    async def _start(self) -> Jail | SandboxUnavailable:
        try:
            return await Jail.start(self._spec)
        except (SandboxUnavailable, OSError) as error:  # OSError: the host has no process or file left, or is too slow
            return SandboxUnavailable(str(error) or "bubblewrap does not start in time")


class Launcher:
    """Runs the programs that it is sent, and answers each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Returns when the other side has gone and no jail is left."""
        setup = await receive(self._reader, msgspec.msgpack.Decoder(Setup))
        try:
            spec = jail_spec(setup)
        except SandboxUnavailable as error:
            self._send(Ready(str(error)))
            return
        self._send(Ready())
        async with asyncio.TaskGroup() as group:
            pool = JailPool(spec, setup.concurrency, group)
            await self._serve_programs(pool, group)
            for task in self._tasks.values():
                task.cancel()
            await pool.close()

    async def _serve_programs(self, pool: JailPool, group: asyncio.TaskGroup) -> None:
        decoder: msgspec.msgpack.Decoder[Program | Cancel] = msgspec.msgpack.Decoder(Program | Cancel)
        while True:
            try:
                message = await receive(self._reader, decoder)
            except asyncio.IncompleteReadError:
                return
            if isinstance(message, Program):
                self._tasks[message.id] = group.create_task(self._run(pool, message))
            elif message.id in self._tasks:
                self._tasks[message.id].cancel()

    async def _run(self, pool: JailPool, program: Program) -> None:
        try:
            self._send(Ended(program.id, await pool.execute(program)))
        except (OSError, SandboxUnavailable) as error:
            self._send(Ended(program.id, error=str(error)))
        finally:
            del self._tasks[program.id]

    def _send(self, message: msgspec.Struct) -> None:
        self._writer.write(frame(message))


def jail_spec(setup: Setup) -> JailSpec:
    """Gives up what rights the launcher has too many of, and returns what jails are made from."""
    limits = SandboxLimits.model_validate(setup.limits)
    environment = bubblewrap.environment(setup.prefix)
    readable = bubblewrap.python_paths(setup.prefix) | {path: path for path in setup.visible}
    try:
        reached = drop_root(readable.values())
    except OSError as error:
        raise SandboxUnavailable(f"the sandbox's launcher cannot give up its rights: {error}") from error
    sources = {inside: reached.get(source, source) for inside, source in readable.items()}
    options = bubblewrap.options(environment, sources, limits.tmp_mb << 20)
    return JailSpec(setup.bwrap, tuple(options), seccomp_filter(), limits)


async def main() -> None:
    """Serve on standard input and output."""
    # A jail takes eleven of them.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    while os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) < STANDARD_FDS:
        pass
    adopt_orphans()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    # A process that the user's process forked may hold its end of the pipe open.
    loop.add_reader(os.pidfd_open(os.getppid()), reader.feed_eof)
    await Launcher(reader, writer).serve()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
