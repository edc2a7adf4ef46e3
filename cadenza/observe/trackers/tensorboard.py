"""TensorBoard's event files, written by hand."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Scalars in an event file, which TensorBoard reads.

    The format is a handful of fields, so that no package is needed, a step is one record instead of one per metric,
    and it is on disk at once: tensorboardX takes 25 times the CPU time and keeps up to two minutes of it in memory.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        directory = path / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(directory.glob(f"{stem}.*")))
        self._file = (directory / f"{stem}.{number}").open("xb")
        self._tags: dict[str, bytes] = {}
        self._write(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        if resume is not None:
            start = _bytes(7, _varint(1, 1))  # of a session: what older files say of this step and later is void
            self._write(_double(1, time.time()) + _varint(2, resume + 1) + start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = b"".join(_bytes(1, self._tag(name) + _float(2, value)) for name, value in metrics.items())
        self._write(_double(1, time.time()) + _varint(2, step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _tag(self, name: str) -> bytes:
        if name not in self._tags:
            self._tags[name] = _bytes(1, name.encode("utf-8", "replace"))
        return self._tags[name]

    def _write(self, event: bytes) -> None:
        """A record of TFRecord: length and content, each with its checksum."""
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _varint(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _number(value)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    if math.isfinite(value) and abs(value) > _LARGEST:
        value = math.copysign(math.inf, value)
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _number(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = [_crc(byte) for byte in range(256)]
_LARGEST = 3.4028234e38
"""The largest number that four bytes hold."""
