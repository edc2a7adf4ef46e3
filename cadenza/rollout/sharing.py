"""Devices that generate and train alternately: when they are lent to generation, and when they are taken back.

Invariant: while the actor has the shared devices, no replica on them is granted to or generates, and its requests go on
elsewhere from the tokens they had; while they are lent, the actor's states are out of the way. Both are done to their
end before the other side begins.
```
train -> publish -> lend, if it pays -> all devices generate -> the batch is whole -> take back -> train
                       no: the shared devices wait for the batch with the actor's states on them
```
Where no other replica is alive, those on the shared devices generate beside the actor: a run that has one goes on.

The batch is whole when the buffer holds what the next train step needs. Whether lending pays is decided from what was
measured at the same point of earlier steps. With m tokens to be written until then, at a rate g without the shared
devices and G with them, it does if
```
lend + (m - g * lend) / G + take back  <  m / g        (seconds; while the devices change hands, the others write)
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from cadenza.rollout.failures import logger
from cadenza.rollout.router import ReplicaState
from cadenza.rollout.sampler import Sampler

DECAY = 0.8
"""What is left of the weight of a measurement when the next one is made."""
TRY_EVERY = 20
"""Decisions after which the other choice is made once: what is never done is not measured, and things change."""


class DecayingRate:
    """An amount per second, group or time, over the last measurements: the newest counts most."""

    __slots__ = ("_amount", "_per")

    def __init__(self) -> None:
        self._amount = self._per = 0.0

    def add(self, amount: float, per: float = 1.0, weight: float = 1.0) -> None:
        kept = DECAY**weight
        self._amount = kept * self._amount + weight * amount
        self._per = kept * self._per + weight * per

    @property
    def value(self) -> float | None:
        """None before the first measurement."""
        return self._amount / self._per if self._per > 0 else None


class LendingRule:
    """Decides whether lending pays. It only counts; `SharedDevices` reports what each loan brought."""

    def __init__(self) -> None:
        self.lend_seconds = DecayingRate()
        self.take_seconds = DecayingRate()
        self.rates = {False: DecayingRate(), True: DecayingRate()}
        """Tokens per second while a batch is waited for, with the shared devices lent (True) and not."""
        self.group_tokens = DecayingRate()
        """Written until the batch is whole, for each group that is missing when the wait begins."""
        self.refusals = 0
        self._since = {False: 0, True: 0}
        """Decisions since each choice was last made."""

    def expected_wait(self, missing: int, *, lent: bool) -> float:
        """Seconds until the actor can train, with so many groups missing now; 0 while nothing is known of it."""
        tokens, alone = missing * (self.group_tokens.value or 0.0), self.rates[False].value or 0.0
        if not lent:
            return tokens / alone if alone else 0.0
        lending, taking = self.lend_seconds.value or 0.0, self.take_seconds.value or 0.0
        together = self.rates[True].value
        return lending + max(tokens - alone * lending, 0.0) / together + taking if together else 0.0

    def should_lend(self, missing: int) -> bool:
        """Whether to lend now, with so many groups of the next batch missing in the buffer."""
        if missing <= 0:
            self.refusals += 1  # they would be taken back at once; that is no choice
            return False
        yes = self._choice(missing)
        self._since[yes] = 0
        self._since[not yes] += 1
        self.refusals += not yes
        return yes

    def _choice(self, missing: int) -> bool:
        """Each way is tried before they are compared."""
        for lent in (True, False):
            if not self.rates[lent].value:
                return lent
        better = self.expected_wait(missing, lent=True) < self.expected_wait(missing, lent=False)
        return better if self._since[not better] < TRY_EVERY else not better


class GroupBuffer(Protocol):
    """What is needed of the group queue: how many groups it holds."""

    @property
    def ready_groups(self) -> int:
        """Whole groups that no batch has taken."""
        ...


class ResizableScheduler(Protocol):
    """What is needed of the scheduler: its sampler can shrink and expand."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def queue(self) -> GroupBuffer: ...

    async def shrink_sampler(self, target_gpus: Sequence[int]) -> dict[str, Any]: ...

    async def expand_sampler(self, target_gpus: Sequence[int], skip_load: bool = False) -> dict[str, Any]: ...


async def do_nothing() -> None:
    """An actor that is never in the way."""


class SharedDevices:
    """The devices that change hands. They begin with the actor, and with replicas that take requests: the first `lend`
    only takes the actor's states out of the way."""

    def __init__(
        self,
        rollouts: ResizableScheduler,
        devices: Sequence[int],
        batch_groups: int,
        *,
        offload: Callable[[], Awaitable[object]] = do_nothing,
        reload: Callable[[], Awaitable[object]] = do_nothing,
    ) -> None:
        """A batch has `batch_groups` groups; `offload` and `reload` take the actor's states off the devices and
        back."""
        self.devices = tuple(devices)
        self.is_lent = False
        self.times_lent = 0
        """How often."""
        self.moved = 0
        """Requests that left the shared devices with their tokens."""
        self.moved_tokens = 0
        """Of context when they were granted; with what was written since, others had to prefill it again."""
        self._rollouts = rollouts
        self._lock = asyncio.Lock()
        self._waking: set[asyncio.Task[None]] = set()
        rollouts.sampler.on_lost.append(self._lost)
        self._batch_groups = batch_groups
        self._offload, self._reload = offload, reload
        self.lending_rule = LendingRule()
        self._began = 0.0
        self._written = 0
        """When the wait for the batch began, with the devices as they are now, and what was written before."""
        self._missing = self._before = 0
        """Groups that were missing when it was decided about them, and what was written before."""

    async def take_back(self) -> None:
        """The batch is there: the actor gets its devices, and their requests move. At most once between two `lend`."""
        async with self._lock:
            await self._take_back()

    async def lend(self) -> bool:
        """The train step is over and its weights are published: the devices generate, if that pays."""
        async with self._lock:
            return await self._lend()

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return {
            "sharing/lent": self.times_lent,
            "sharing/refused": self.lending_rule.refusals,
            "sharing/moved": self.moved,
            "sharing/moved_tokens": self.moved_tokens,
        }

    async def _take_back(self) -> None:
        if self._missing > 0:
            written = await self._tokens()
            weight = self._missing / self._batch_groups  # a short wait says little: more runs in it than in a long one
            self.lending_rule.rates[self.is_lent].add(max(written - self._written, 0), _now() - self._began, weight)
            self.lending_rule.group_tokens.add(max(written - self._before, 0), self._missing, weight)
            self._missing = 0
        leaving = self._in_state(ReplicaState.ACTIVE)
        if not self.is_lent and not leaving:
            return
        began = _now()
        if leaving and set(self._states(ReplicaState.ACTIVE)) > set(leaving):
            report = await self._rollouts.shrink_sampler(leaving)
            self.moved += report["moved"]
            self.moved_tokens += report["moved_tokens"]
        elif leaving:
            logger.warning("replicas on devices %s go on beside the actor: no other is alive", leaving)
        if self.is_lent:
            await self._reload()
            self.is_lent = False
        self.lending_rule.take_seconds.add(_now() - began)

    async def _lend(self) -> bool:
        self._missing = max(self._batch_groups - self._rollouts.queue.ready_groups, 0)
        self._before = await self._tokens()
        if not self.is_lent and self.lending_rule.should_lend(self._missing):
            began = _now()
            await self._offload()
            self.is_lent = True
            if coming := self._in_state(ReplicaState.ASLEEP):
                await self._rollouts.expand_sampler(coming)
                self.lending_rule.lend_seconds.add(_now() - began)
            self.times_lent += 1
        self._began, self._written = _now(), await self._tokens()
        return self.is_lent

    def _lost(self, name: str, cause: str) -> None:
        task = asyncio.get_running_loop().create_task(self._wake(), name="wake shared replicas")
        self._waking.add(task)
        task.add_done_callback(self._woken)

    async def _wake(self) -> None:
        async with self._lock:  # what changes hands has done so before
            if (coming := self._in_state(ReplicaState.ASLEEP)) and not self._states(ReplicaState.ACTIVE):
                logger.warning("replicas on devices %s generate beside the actor: no other is alive", coming)
                await self._rollouts.expand_sampler(coming)

    def _woken(self, task: asyncio.Task[None]) -> None:
        self._waking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("replicas on the shared devices %s do not wake: %s", list(self.devices), error)

    def _states(self, state: ReplicaState) -> list[int]:
        return [device for device, found in self._rollouts.sampler.devices.items() if found == state.value]

    def _in_state(self, state: ReplicaState) -> list[int]:
        """Those of them whose replica is in this state; one that died stays out."""
        return [device for device in self._states(state) if device in self.devices]

    async def _tokens(self) -> int:
        """Written by all replicas since the start; less when one of them is lost."""
        return sum(stats.generated for stats in (await self._rollouts.sampler.stats()).values())


def _now() -> float:
    return asyncio.get_running_loop().time()
