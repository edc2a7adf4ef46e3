"""A program that tries its own walls: it runs in the first jail of every sandbox, before any other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mnt")
PROGRAM = """
import json, os, resource
def writes(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in %(namespaces)r},
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "seccomp": int(status["Seccomp"]),
    "user": os.getuid(),
    "written": [path for path in ("/canary", "/usr/canary", "/etc/canary", "/dev/canary", "/proc/canary") if writes(path)],
    "interfaces": sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "environment": sorted(os.environ),
    "limit": resource.getrlimit(resource.RLIMIT_NPROC)[1],
}))
""" % {"namespaces": NAMESPACES}
ENVIRONMENT = {"PATH", "HOME", "USER", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "PWD", "LC_CTYPE"}


def host_namespaces() -> dict[str, str]:
    """The namespaces of this process."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


def faults(report: bytes, host: Mapping[str, str], processes: int) -> list[str]:
    """What is wrong with the isolation that a probe reports; nothing if it is as it must be."""
    try:
        seen: dict[str, Any] = msgspec.json.decode(report, type=dict[str, Any])
    except msgspec.DecodeError:
        return [f"the probe printed {report[:200]!r}"]
    found = [
        f"the {name} namespace is that of the host" for name in NAMESPACES if seen["namespaces"][name] == host[name]
    ]
    checks = {
        "it has capabilities": seen["capabilities"] != 0,
        "it can gain privileges": seen["no_new_privileges"] != 1,
        "no system call is filtered": seen["seccomp"] != 2,
        "it is root": seen["user"] == 0,
        f"it can write {', '.join(seen['written'])}": bool(seen["written"]),
        f"it has network interfaces {', '.join(seen['interfaces'])}": seen["interfaces"] != ["lo"],
        f"it sees {seen['processes']} processes": seen["processes"] > 2,
        f"its environment has {', '.join(seen['environment'])}": not ENVIRONMENT.issuperset(seen["environment"]),
        "its processes are not limited": not 0 < seen["limit"] <= processes + 1,
    }
    return found + [fault for fault, wrong in checks.items() if wrong]
