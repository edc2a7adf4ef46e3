"""Keeps oneDNN away from AMX where the CPU announces it and cannot use it.

Some virtual machines pass the CPU flags of AMX on to their guests but not the right to use its registers. A bfloat16
product of oneDNN then kills the process with SIGILL, and torch's own checks for AMX do not notice. `limit_onednn` tries
such a product in a child process, once per machine, and if the child dies sets `ONEDNN_MAX_CPU_ISA` for this process
and all that it starts.

oneDNN reads the variable when it is first used, so `limit_onednn` must be called before torch computes anything.
`cadenza.cluster` calls it in every process that gets a worker, and `cadenza.training.models` before it makes a model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The best instruction set of oneDNN below AMX."""
PROBE_SECONDS = 300.0
"""For the child to import torch on a busy machine."""
PROBE = "import torch; torch.nn.Linear(64, 64, dtype=torch.bfloat16)(torch.ones(8, 64, dtype=torch.bfloat16))"

logger = logging.getLogger("cadenza")


@cache
def limit_onednn() -> None:
    """Sets `ONEDNN_MAX_CPU_ISA` in the environment if AMX is announced but kills a process that uses it, and logs one
    line. Does nothing where the user has set the variable. Later calls in the same process cost nothing."""
    if VARIABLE in os.environ or "DNNL_MAX_CPU_ISA" in os.environ:
        return
    if announces_amx() and not _amx_works_here():
        os.environ[VARIABLE] = WITHOUT_AMX
        logger.warning(
            "this CPU announces AMX, but a bfloat16 product that uses it dies: %s=%s is set for this run",
            VARIABLE, WITHOUT_AMX,
        )  # fmt: skip


def announces_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU says that it has AMX for bfloat16."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "amx_bf16" in flags.split()


def amx_works(command: Sequence[str] = (sys.executable, "-c", PROBE)) -> bool:
    """Whether a child process survives a bfloat16 product. Only a child that a signal killed counts as a failure: a
    missing torch or a time-out says nothing about the CPU."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    try:
        child = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("whether AMX works could not be tried: %s", error)
        return True
    return child.returncode >= 0 and child.returncode != 128 + 4  # a shell reports SIGILL as 132


def _amx_works_here() -> bool:
    """`amx_works`, remembered in a file for as long as the machine runs."""
    answer = _answer_file()
    try:
        known = answer.read_text(encoding="utf-8")
    except OSError:
        known = ""
    if known in ("works", "dies"):
        return known == "works"
    works = amx_works()
    try:
        answer.parent.mkdir(parents=True, exist_ok=True)
        partial = answer.with_suffix(f".{os.getpid()}")
        partial.write_text("works" if works else "dies", encoding="utf-8")
        partial.replace(answer)
    except OSError as error:
        logger.info("whether AMX works is not remembered: %s", error)
    return works


def _answer_file() -> Path:
    """Named after the machine since its start and the torch that was tried: home directories may be shared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = "unknown"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    name = hashlib.sha256(f"{boot} {torch}".encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "cadenza" / f"amx-{name}"
