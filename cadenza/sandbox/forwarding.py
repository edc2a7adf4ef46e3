"""One address of the host that a program can reach, through the launcher.

The jail keeps its own network namespace, in which nothing answers but a listening socket that the launcher put there.
The launcher carries bytes between that socket and the one address; a program cannot name another.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cadenza.sandbox.privileges import checked, libc

SOCKET_NAME = "forward.sock"
CONNECTIONS = 64
"""At one time; others wait until one is closed."""
CHUNK = 1 << 16
HELPER_SECONDS = 30.0
NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


@asynccontextmanager
async def forwarded(listener: socket.socket, target: int | str) -> AsyncIterator[None]:
    """Carries connections to `target`, a loopback port or the path of a Unix socket, until the block is left."""
    carrying = asyncio.create_task(_carry_all(listener, target), name=f"forward {target}")
    try:
        yield
    finally:
        carrying.cancel()
        await asyncio.wait([carrying])
        listener.close()


def listen_in_directory(directory: int) -> socket.socket:
    """A listening Unix socket in an open directory of a jail."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
    listener.listen()
    listener.setblocking(False)
    return listener


def listen_in_network(pid: int, port: int) -> socket.socket:
    """A socket that listens on a loopback port in the network namespace of a process.

    A child enters that namespace and sends the socket back, because the way in is the way out of ours.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(HELPER_SECONDS)
        child = os.fork()
        if child == 0:
            os._exit(_send_listener(theirs, pid, port))
        theirs.close()
        try:
            message, fds, _, _ = socket.recv_fds(ours, 256, 1)
        finally:
            os.waitpid(child, 0)
    if not fds:
        raise OSError(f"port {port} cannot be opened in a sandbox: {message.decode() or 'its helper died'}")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener


def _send_listener(channel: socket.socket, pid: int, port: int) -> int:
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        owner = fcntl.ioctl(network, NS_GET_USERNS)
        checked(libc.setns(owner, CLONE_NEWUSER), "setns user")
        checked(libc.setns(network, CLONE_NEWNET), "setns net")
        listener = socket.socket()
        listener.bind(("127.0.0.1", port))
        listener.listen()
        socket.send_fds(channel, [b"+"], [listener.fileno()])
    except OSError as error:
        channel.send(str(error).encode()[:256])
        return 1
    return 0


async def _carry_all(listener: socket.socket, target: int | str) -> None:
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(CONNECTIONS)
    async with asyncio.TaskGroup() as group:
        while True:
            await places.acquire()
            connection, _ = await loop.sock_accept(listener)
            task = group.create_task(_carry(connection, target))
            task.add_done_callback(lambda _: places.release())


async def _carry(connection: socket.socket, target: int | str) -> None:
    """One connection, until both sides have closed it or one of them is lost."""
    with suppress(OSError):
        inner, to_inner = await asyncio.open_connection(sock=connection)
        try:
            if isinstance(target, int):
                outer, to_outer = await asyncio.open_connection("127.0.0.1", target)
            else:
                outer, to_outer = await asyncio.open_unix_connection(target)
            try:
                await asyncio.gather(_copy(inner, to_outer), _copy(outer, to_inner))
            finally:
                to_outer.close()
        finally:
            to_inner.close()


async def _copy(source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK):
        drain.write(chunk)
        await drain.drain()
    if drain.can_write_eof():
        drain.write_eof()
