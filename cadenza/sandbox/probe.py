"""A program that tries its own walls: it runs in the first jail of every sandbox, before any other."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mnt")
ENVIRONMENT = {"PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}
PROGRAM = (
    f"NAMESPACES = {NAMESPACES}"
    + """
import json, os, resource
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES},
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "user": os.getuid(),
    "written": [path for path in ("/canary", "/usr/canary", "/etc/canary", "/dev/canary") if writes(path)],
    "interfaces": sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "environment": sorted(os.environ),
    "process_limit": resource.getrlimit(resource.RLIMIT_NPROC)[1],
}))
"""
)


class Report(msgspec.Struct, frozen=True):
    """What the probe prints."""

    namespaces: dict[str, str]
    capabilities: int
    no_new_privileges: int
    seccomp: int
    user: int
    written: list[str]
    interfaces: list[str]
    processes: int
    environment: list[str]
    process_limit: int


def namespaces(pid: int | None = None) -> dict[str, str]:
    """The namespaces of a process, of this one unless another is given."""
    return {name: os.readlink(f"/proc/{pid or 'self'}/ns/{name}") for name in NAMESPACES}


def faults(printed: bytes, host: Mapping[str, str], processes: int) -> list[str]:
    """What is wrong with the isolation that a probe reports; nothing if it is as it must be."""
    try:
        report = msgspec.json.decode(printed, type=Report)
    except msgspec.DecodeError:
        return [f"the probe printed {printed[:200]!r}"]
    shared = [name for name in NAMESPACES if report.namespaces.get(name) in (None, host[name])]
    strange = sorted(set(report.environment) - ENVIRONMENT)
    checks = {
        f"it shares the host's namespaces {', '.join(shared)}": bool(shared),
        "it has capabilities": report.capabilities != 0,
        "it can gain privileges": report.no_new_privileges != 1,
        "no system call is filtered": report.seccomp != 2,
        "it is root": report.user == 0,
        f"it can write {', '.join(report.written)}": bool(report.written),
        f"it has network interfaces {', '.join(report.interfaces)}": report.interfaces != ["lo"],
        f"it sees {report.processes} processes": report.processes > 2,
        f"its environment has {', '.join(strange)}": bool(strange),
        "the number of its processes is not limited": not 0 < report.process_limit <= processes + 1,
    }
    return [fault for fault, wrong in checks.items() if wrong]
