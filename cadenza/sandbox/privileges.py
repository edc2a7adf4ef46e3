"""The launcher's own rights: those of an ordinary user, also where root starts it.

The kernel bounds the number of processes of a user, but never root's, not even behind a user namespace. So the launcher
of root becomes a user that nobody else is. Files that only root can reach are bound first, in a mount namespace that
the launcher has for itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

UNPRIVILEGED_ID = 64_222
"""A user that the system's own tools do not give to anyone."""
STAGING = "/sys"
"""Covered by those files, for the launcher alone: nothing that it or bubblewrap needs lies there."""
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """The first process of a jail outlives bubblewrap by a moment; its CPU time is reported to whom it then belongs."""
    checked(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def drop_root(paths: Iterable[str]) -> dict[str, str]:
    """Returns where bubblewrap reaches each path, if not under its own name. Without root nothing changes."""
    if os.geteuid() != 0:
        return {}
    staged = _stage(list(paths))
    os.setgroups([])
    os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    return staged


def _stage(paths: list[str]) -> dict[str, str]:
    """Bind each path where every user reaches it."""
    if not paths:
        return {}
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", STAGING, "tmpfs", 0)
    staged = {}
    for number, path in enumerate(paths):
        place = staged[path] = f"{STAGING}/{number}"
        if os.path.isdir(path):
            os.mkdir(place, 0o755)
        else:
            os.close(os.open(place, os.O_CREAT, 0o644))
        _mount(path, place, None, MS_BIND | MS_REC)
    return staged


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    checked(libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def checked(code: int, what: str) -> None:
    """Raises the OSError of a system call that failed."""
    if code != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
