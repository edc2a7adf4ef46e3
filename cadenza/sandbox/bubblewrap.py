"""The command line of bubblewrap: what a program sees of the machine.

A program gets new namespaces for users, processes, network, IPC, host name and cgroups, no capabilities, and a root
that it cannot write to: /usr and what links into it, the prefix of a Python, a made-up /etc, /proc and /dev of its own.
It can write to /tmp and /dev/shm, which live in memory and end with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cadenza.sandbox.errors import INSTALL, SandboxUnavailable

USER_ID = 65534
"""The user and group that a program is, inside."""
PYTHON = "/opt/python"
"""Where the interpreter is inside, unless it lies in /usr."""
HOME = "/tmp"
SCRIPT_FD, CONTROL_FD = 3, 4
WAIT = f"echo >&{CONTROL_FD} && read -r go <&{CONTROL_FD} && . /dev/fd/{SCRIPT_FD}"
"""The shell in a jail reports that it is there, waits, and then becomes the program that the script names."""
ETC = {
    "passwd": f"sandbox:x:{USER_ID}:{USER_ID}::{HOME}:/bin/sh\n",
    "group": f"sandbox:x:{USER_ID}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def find_bwrap() -> str:
    """The path of bubblewrap; raises `SandboxUnavailable` with the command that installs it."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(f"the sandbox needs bubblewrap, and there is no bwrap on PATH: {INSTALL}")
    return found


def environment(prefix: str) -> dict[str, str]:
    """All that a program finds in its environment."""
    python = python_inside(prefix)
    paths = dict.fromkeys([f"{python}/bin", "/usr/local/bin", "/usr/bin", "/bin"])
    values = {"PATH": ":".join(paths), "HOME": HOME, "USER": "sandbox", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    # A Python with a shared library looks for it where it was built.
    if python == PYTHON and list(Path(prefix, "lib").glob("libpython*.so*")):
        values["LD_LIBRARY_PATH"] = f"{PYTHON}/lib"
    return values


def python_inside(prefix: str) -> str:
    """The prefix of Python as programs see it."""
    return prefix if Path(prefix).is_relative_to("/usr") else PYTHON


def python_paths(prefix: str) -> dict[str, str]:
    """What programs need of a Python outside /usr: path inside, path of the host. Not the whole prefix, for that may be
    somebody's home directory."""
    if python_inside(prefix) == prefix:
        return {}
    program = Path(prefix, "bin", "python3").resolve()
    libraries = [name for name in ("lib", "lib64") if Path(prefix, name).is_dir()]
    return {f"{PYTHON}/bin/python3": str(program), **{f"{PYTHON}/{name}": f"{prefix}/{name}" for name in libraries}}


def options(environment: Mapping[str, str], readable: Mapping[str, str], tmp_bytes: int) -> list[str]:
    """What bubblewrap is told for every jail; `readable` is what can be read besides /usr: path inside, source."""
    words = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    words += ["--cap-drop", "ALL", "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in LINKED:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", file, file]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for directory in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", directory]
    for inside, source in readable.items():
        words += ["--ro-bind", source, inside]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME]


def file_options(seccomp: int, etc: Mapping[str, int]) -> list[str]:
    """What differs between jails: open files with the filter of system calls and with what is in /etc. These come
    first, before the root becomes read-only."""
    words = ["--seccomp", str(seccomp)]
    for name, fd in etc.items():
        words += ["--perms", "0444", "--file", str(fd), f"/etc/{name}"]
    return words
