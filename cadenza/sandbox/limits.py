"""What a program in the sandbox may use."""

from __future__ import annotations

from pydantic import Field

from cadenza.config import Config


class SandboxLimits(Config):
    """Limits of one program and of all processes that it starts. Those that say so hold for each process alone."""

    wall_seconds: float = Field(default=10.0, gt=0)
    """From the start of the program until it is killed; waiting for a free place before that does not count."""
    cpu_seconds: float = Field(default=10.0, gt=0)
    """CPU time of all processes together."""
    memory_mb: int = Field(default=512, ge=32)
    """Memory of all processes together, with files in /tmp and /dev/shm and what waits in TCP connections; also the
    address space of each process."""
    processes: int = Field(default=32, ge=1)
    """Processes and threads at one time. Another one cannot be started; the program goes on."""
    file_mb: int = Field(default=32, ge=1)
    """The size of one file."""
    open_files: int = Field(default=64, ge=16)
    """Open files of each process."""
    files: int = Field(default=10_000, ge=1)
    """Files and directories in /tmp and /dev/shm together."""
    output_bytes: int = Field(default=1 << 20, ge=4096)
    """Bytes on standard output, and as many on standard error. A program that writes more is killed."""
    tmp_mb: int = Field(default=64, ge=1)
    """The size of /tmp, where a program starts and has its files, and that of /dev/shm."""
