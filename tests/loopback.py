"""A server on the loopback that answers POST requests as a function tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Thread
from typing import Any

Answer = Callable[[Any], tuple[int, Any]]
"""Of a body, the status and the JSON (or the text) that it gets."""


class Loopback:
    """What was asked, and where."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.paths: list[str] = []
        self.bodies: list[Any] = []
        self.authorizations: list[str | None] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers: dict[str, str] = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                self.paths.append(line.decode().split()[1])
                self.bodies.append(json.loads(await reader.readexactly(int(headers.get("content-length", 0)))))
                self.authorizations.append(headers.get("authorization"))
                status, said = self._answer(self.bodies[-1])
                content = (said if isinstance(said, str) else json.dumps(said)).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[Loopback]:
    """The server, until the context is left."""
    loopback = Loopback(answer)
    server = await asyncio.start_server(loopback.serve, "127.0.0.1", 0)
    loopback.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield loopback
    finally:
        server.close()


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server in a thread of its own, until the context is left."""
    address: Future[str] = Future()
    left = Event()

    async def serve() -> None:
        async with listening(answer) as loopback:
            address.set_result(loopback.url)
            await asyncio.to_thread(left.wait, 60)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield address.result(10)
    finally:
        left.set()
        thread.join(10)


async def nowhere() -> str:
    """The address of a server that is gone."""
    async with listening(lambda body: (200, 0)) as loopback:
        return loopback.url
