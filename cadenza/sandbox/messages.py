"""What the user's process and the launcher say to each other: msgpack behind a length of four bytes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from cadenza.sandbox.result import SandboxResult

HEADER = 4
Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to the launcher."""

    bwrap: str
    concurrency: int
    """Programs that run at one time; as many jails wait for theirs."""
    prefix: str
    """Of the Python that programs find as python3."""
    visible: tuple[str, ...]
    """Directories of the host that programs can read, each under its own path."""
    limits: dict[str, float]
    """The fields of `SandboxLimits`."""


class Program(msgspec.Struct, frozen=True, tag=True):
    """Run this."""

    id: int
    argv: tuple[str, ...]
    stdin: bytes
    files: dict[str, bytes]
    environment: dict[str, str]
    forward: int | str | None
    wall_seconds: float
    cpu_seconds: float


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this program any more; kill it."""

    id: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a program ended, or why it could not be run."""

    id: int
    result: SandboxResult | None = None
    error: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first message of the launcher: a jail waits for a program, or there is an error."""

    error: str = ""


_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over a pipe."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "big") + body


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """The next message; raises `asyncio.IncompleteReadError` where the other side has gone."""
    size = int.from_bytes(await reader.readexactly(HEADER), "big")
    return decoder.decode(await reader.readexactly(size))
