"""How a program in the sandbox ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["exited", "killed", "wall_time", "cpu_time", "memory", "output", "files"]
"""`exited`: by itself. `killed`: by a signal, of itself or of the kernel. Others name the limit that ended it."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What a program did. It describes the program alone: where the sandbox itself breaks, `run` raises
    `InfrastructureError`."""

    outcome: Outcome
    exit_code: int | None
    """None unless the outcome is `exited`."""
    signal: int | None
    """The signal that killed it, if the outcome is `killed`. Exit codes above 128 are read as signals, as shells do."""
    stdout: bytes
    """At most `output_bytes` of it."""
    stderr: bytes
    """At most `output_bytes` of it."""
    stdout_truncated: bool
    stderr_truncated: bool
    wall_seconds: float
    cpu_seconds: float
    """Of all processes that it started, too, except children that it let the kernel reap (SIGCHLD ignored)."""

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.outcome == "exited" and self.exit_code == 0
