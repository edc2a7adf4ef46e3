"""A sandbox for untrusted programs, as models write them: `Sandbox.run` isolates each with bubblewrap."""

from cadenza.sandbox.errors import SandboxUnavailable
from cadenza.sandbox.limits import SandboxLimits
from cadenza.sandbox.result import Outcome, SandboxResult
from cadenza.sandbox.sandbox import Sandbox

__all__ = ["Outcome", "Sandbox", "SandboxLimits", "SandboxResult", "SandboxUnavailable"]
