"""What a caller gives to a program, refused here where a jail could not take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from cadenza.sandbox.limits import SandboxLimits

NAME_BYTES = 255
ARGUMENT_BYTES = 128 * 1024
"""What the kernel takes as one argument."""


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
        if any(len(part.encode()) > NAME_BYTES for part in path.parts):
            raise ValueError(f"file {name!r} has a name of more than {NAME_BYTES} bytes")
        if str(path) in contents:
            raise ValueError(f"file {name!r} is given twice")
        contents[str(path)] = content.encode() if isinstance(content, str) else bytes(content)
    for name in contents:
        if clash := [str(parent) for parent in PurePosixPath(name).parents if str(parent) in contents]:
            raise ValueError(f"file {clash[0]!r} is the directory of {name!r} too")
    if (size := sum(map(len, contents.values()))) > limits.tmp_mb << 20:
        raise ValueError(f"the files have {size} bytes; tmp_mb is {limits.tmp_mb}")
    return contents


def checked_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, or a ValueError that names one that no shell would take."""
    for name, value in environment.items():
        if not (name.isascii() and name.isidentifier()) or "\0" in value:
            raise ValueError(f"environment variable {name!r} has a name or a value that cannot be set")
    return dict(environment)


def checked_forward(forward: int | str | Path | None) -> int | str | None:
    """A port, the path of a socket, or a ValueError that names what is neither."""
    if forward is None:
        return None
    if isinstance(forward, int):
        if not 0 < forward < 1 << 16:
            raise ValueError(f"forward must be a port from 1 to 65535 or the path of a Unix socket, got {forward}")
        return forward
    if not Path(forward).is_socket():
        raise ValueError(f"forward must be a loopback port or the path of a Unix socket; '{forward}' is no socket")
    return str(Path(forward).absolute())
