"""What the process that computes a reward has for it: a device of its own, and the policy of the run.

A reward that wants either has a method `use_host(host)`, which is called once, before `open`. One that asks the policy
also declares `asks_policy: ClassVar[bool] = True`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cadenza.errors import RewardError
from cadenza.rewards.sample import Sample


class AskPolicy(Protocol):
    """Asks the model that is trained, through the sampler of the run."""

    async def __call__(
        self, sample: Sample, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float
    ) -> str:
        """Returns what the policy answers to these messages. `sample` is the one that is being scored. The sampler
        keeps the deadlines: while the gate is closed the call waits."""
        ...


@dataclass(frozen=True, slots=True)
class RewardHost:
    """Where a reward is computed."""

    has_device: bool = False
    """Whether placement gave the process a device (`devices.reward`). On Ray it is the only one that the process
    sees."""
    policy: AskPolicy | None = None
    """None outside of a run, and for a reward that does not declare `asks_policy`."""

    @property
    def ask_policy(self) -> AskPolicy:
        """Asks the policy. A reward that takes it in `use_host` learns at the start of the run if there is none."""
        if self.policy is None:
            raise RewardError(
                "there is no policy to ask: a reward that asks it runs in a run, and declares "
                "`asks_policy: ClassVar[bool] = True`"
            )
        return self.policy
