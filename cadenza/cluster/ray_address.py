"""What answers at the address of a Ray head, asked before Ray is: Ray itself tries for minutes, says little about why
it failed, and may end the process.

A Ray head speaks gRPC, which HTTP/2 carries. One call without a token shows that the head is there, and whether it
wants one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from cadenza.cluster.worker import HeadLost

ANSWER_SECONDS = 3.0
DATA, HEADERS, SETTINGS = 0, 1, 4
"""Kinds of frames of HTTP/2. Both sides begin with their settings."""
END_STREAM, END_HEADERS = 1, 4
"""Flags of frames."""
CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/ray.rpc.NodeInfoGcsService/GetClusterId"),
    (":authority", "ray"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)
STATUS = b"grpc-status"
UNAUTHENTICATED = STATUS + b"\x0216"
"""The header as it travels: its name, the length of its value, its value."""


def check_ray_address(address: str | None) -> bool:
    """Raise `HeadLost` if no Ray head answers at an address. Returns whether the head wants a token; a missing one is
    an error here, a wrong one is Ray's to find out."""
    host, separator, port = (address or "").rpartition(":")
    if "://" in host:
        raise HeadLost(f"{address} is an address of Ray Client: run the controller on a node of the cluster instead")
    if not separator or not port.isdigit() or os.environ.get("RAY_USE_TLS", "0") != "0":
        return False
    try:
        answer = _call(host, int(port))
    except OSError as error:
        raise HeadLost(f"the Ray head at {address} does not answer: {error}") from error
    if answer[3:4] != bytes([SETTINGS]):
        raise HeadLost(f"what answers at {address} is not a Ray head: is that the port of another program?")
    wants_token = UNAUTHENTICATED in answer
    if wants_token and not _has_token():
        raise HeadLost(token_message(address))
    return wants_token


def token_message(address: str | None) -> str:
    """What to say of a head that refuses this process."""
    return (
        f"the Ray head at {address} wants a token, and this process has none or another one: set RAY_AUTH_MODE=token, "
        "and put the token of the cluster into RAY_AUTH_TOKEN, into a file that RAY_AUTH_TOKEN_PATH names, or into "
        "~/.ray/auth_token"
    )


def _has_token() -> bool:
    """Whether Ray finds a token in one of the places where it looks."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").exists()


def _call(host: str, port: int) -> bytes:
    """The bytes that a server answers to one call, up to its status."""
    fields = b"".join(b"\0" + _text(name) + _text(value) for name, value in CALL)
    request = _frame(SETTINGS, 0, 0, b"") + _frame(HEADERS, END_HEADERS, 1, fields)
    request += _frame(DATA, END_STREAM, 1, b"\0\0\0\0\0")  # an empty message
    answer = b""
    with socket.create_connection((host, port), ANSWER_SECONDS) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + request)
        while STATUS not in answer and len(answer) < 1 << 16:
            try:
                received = connection.recv(4096)
            except OSError:  # it is silent, or gone, after what it said
                if not answer:
                    raise
                break
            if not received:
                break
            answer += received
    return answer


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
