"""Why the sandbox refuses."""

from __future__ import annotations

from cadenza.errors import InfrastructureError

INSTALL = "apt-get install bubblewrap"


class SandboxUnavailable(InfrastructureError):
    """Programs cannot be isolated on this machine, so none is run."""
