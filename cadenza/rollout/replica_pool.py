"""The replicas of a sampler: their states, and control calls with a deadline.

Invariant: a replica that fails a control call, or lets its deadline pass, is given up: killed, out of the routing table
for good, its requests routed again with the tokens they had. The other replicas of the same call go on.

    call_each(entries, call): one task per replica -> done, or give_up(entry, cause) -> on_lost(name, cause)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cadenza.errors import raise_if_cancelled
from cadenza.inference.replica import PauseMode, Replica, ReplicaError, ReplicaLost, ReplicaStats
from cadenza.off_loop import done_before, ignore_result
from cadenza.rollout.failures import logger
from cadenza.rollout.router import ReplicaEntry, ReplicaState, Router
from cadenza.rollout.sampler import SamplerConfig

T = TypeVar("T")


class ReplicaTimeout(ReplicaError):
    """A replica let the deadline of a call pass."""


class ReplicaPool:
    """The entries of all replicas, and what is done to one replica at a time."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        config: SamplerConfig,
        router: Router,
        *,
        emit: Callable[[str, str, str], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self.replicas = tuple(replicas)
        self.entries: list[ReplicaEntry] = []
        """In the order of the replicas; empty until `create_entries`."""
        self.lost: dict[str, str] = {}
        """Replicas given up, with the cause."""
        self._config = config
        self._router = router
        self._emit = emit
        self._on_lost = on_lost

    def create_entries(self) -> None:
        """Entries are made when the loop runs: a sampler may be built before it."""
        if self.entries:
            return
        loop = asyncio.get_running_loop()
        self.entries = [
            ReplicaEntry(index, replica, loop.create_future()) for index, replica in enumerate(self.replicas)
        ]
        self._router.rebuild(self.entries)

    def active(self) -> list[ReplicaEntry]:
        return [entry for entry in self.entries if entry.state is ReplicaState.ACTIVE]

    def device_states(self) -> dict[int, str]:
        """Every device and the state of its replica."""
        self.create_entries()
        return {device: entry.state.value for entry in self.entries for device in entry.replica.devices}

    def entries_to_change(
        self, devices: Sequence[int], before: ReplicaState, after: ReplicaState, what: str
    ) -> tuple[list[ReplicaEntry], list[int]]:
        """Returns the entries on exactly these devices that are in the state `before`, and the devices that are in
        `after` already. Any other state is refused, as is a device without a replica, or half a replica."""
        wanted, known = set(devices), self.device_states()
        if not wanted:
            raise ValueError(f"{what} needs at least one device, got none; the sampler has {known}")
        if unknown := sorted(wanted - known.keys()):
            raise ValueError(f"{what}: no replica on devices {unknown}; the sampler has {sorted(known)}")
        entries = [entry for entry in self.entries if wanted & set(entry.replica.devices)]
        for entry in entries:
            if missing := sorted(set(entry.replica.devices) - wanted):
                raise ValueError(
                    f"{what}: replica {entry.replica.name} sits on devices {list(entry.replica.devices)}; "
                    f"name {missing} too, a replica moves as a whole"
                )
        possible = (before.value, after.value)
        if wrong := {device: known[device] for device in sorted(wanted) if known[device] not in possible}:
            raise ValueError(f"{what}: devices {wrong} cannot change; the sampler has {known}")
        unchanged = [device for device in sorted(wanted) if known[device] == after.value]
        return [entry for entry in entries if entry.state is before], unchanged

    def loss_summary(self) -> str:
        return "; ".join(f"{name}: {cause}" for name, cause in self.lost.items()) or "all are asleep"

    # -- control calls -------------------------------------------------------------------------------------------

    async def call_each(
        self, entries: list[ReplicaEntry], call: Callable[[ReplicaEntry], Coroutine[Any, Any, None]]
    ) -> None:
        """Call all at once; a replica that fails or is late is given up, and the others go on."""

        async def one(entry: ReplicaEntry) -> None:
            try:
                await _while_alive(entry, call(entry))
            except ReplicaError as error:
                self.give_up(entry, str(error) or type(error).__name__)
            except asyncio.CancelledError as error:
                raise_if_cancelled(error)
                self.give_up(entry, "was cancelled in a control call")
            except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; it costs itself
                self.give_up(entry, f"raised {type(error).__name__}: {error}")

        async with asyncio.TaskGroup() as group:
            for entry in entries:
                group.create_task(one(entry), name=f"sampler control of {entry.replica.name}")

    async def pause(self, entry: ReplicaEntry, epoch: int, mode: PauseMode) -> None:
        """Pause one replica. A drain may take as long as its requests do, and the health check watches over those; its
        deadline counts from the last of them."""
        seconds = self._config.control_seconds
        pausing = asyncio.ensure_future(entry.replica.pause(epoch, mode))
        try:
            while True:
                busy = mode is PauseMode.DRAIN and entry.inflight > 0
                done, _ = await asyncio.wait([pausing], timeout=seconds)
                if done:
                    return pausing.result()
                if not busy:
                    raise ReplicaTimeout(f"did not answer 'pause' within {seconds} s")
        finally:
            pausing.cancel()
            pausing.add_done_callback(ignore_result)

    async def load(self, entry: ReplicaEntry, version: int, weights: object) -> None:
        """Load into a replica that does not generate; a failure is tried once more."""
        seconds = self._config.load_seconds
        entry.loading_weights = True
        try:
            await _call_with_deadline(seconds, "load_weights", entry.replica.load_weights(version, weights))
        except (ReplicaLost, ReplicaTimeout):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the engine raised, the second time is given up
            logger.warning("replica %s failed to load version %d, once more: %s", entry.replica.name, version, error)
            await _call_with_deadline(seconds, "load_weights", entry.replica.load_weights(version, weights))
        finally:
            entry.loading_weights = False
        entry.version = version

    async def load_in_place(self, entry: ReplicaEntry, version: int, weights: object, epoch: int) -> None:
        """Load into a replica that generates: its requests are kept and go on with the new weights."""
        await self.pause(entry, epoch, PauseMode.KEEP)
        await self.load(entry, version, weights)
        await self.resume(entry)

    async def put_to_sleep(self, entry: ReplicaEntry, epoch: int) -> None:
        seconds = self._config.control_seconds
        await self.pause(entry, epoch, PauseMode.ABORT)
        await _call_with_deadline(seconds, "sleep", entry.replica.sleep())
        if entry.state is not ReplicaState.LOST:
            entry.state = ReplicaState.ASLEEP

    async def wake(self, entry: ReplicaEntry) -> None:
        await _call_with_deadline(self._config.control_seconds, "wake", entry.replica.wake())

    async def resume(self, entry: ReplicaEntry) -> None:
        await _call_with_deadline(self._config.control_seconds, "resume", entry.replica.resume())

    async def stats(self, entry: ReplicaEntry, seconds: float) -> ReplicaStats:
        return await _call_with_deadline(seconds, "stats", entry.replica.stats())

    async def all_stats(self) -> dict[str, ReplicaStats]:
        """Of every replica that answers, the dead ones too where they still can."""
        found: dict[str, ReplicaStats] = {}
        for entry in self.entries:
            with contextlib.suppress(ReplicaError):
                found[entry.replica.name] = await self.stats(entry, self._config.control_seconds)
        return found

    # -- giving up -----------------------------------------------------------------------------------------------

    def record_failure(self, entry: ReplicaEntry, error: ReplicaError) -> None:
        """A request failed there; after `max_strikes` of them in a row the replica is given up."""
        if isinstance(error, ReplicaLost):
            self.give_up(entry, str(error) or "lost")
            return
        entry.failures += 1
        if entry.failures >= self._config.max_strikes:
            self.give_up(entry, f"{entry.failures} requests failed in a row: {error}")

    def give_up(self, entry: ReplicaEntry, cause: str) -> None:
        """The replica is out of use for good, and killed; its requests find another."""
        if entry.state is ReplicaState.LOST:
            return
        logger.warning("replica %s is given up: %s", entry.replica.name, cause)
        entry.state = ReplicaState.LOST
        self._emit("lost", entry.replica.name, cause)
        self.lost[entry.replica.name] = cause
        self._router.rebuild(self.entries)
        entry.replica.kill("replica_lost")
        if not entry.gone.done():
            entry.gone.set_result(cause)
        self._on_lost(entry.replica.name, cause)


async def _call_with_deadline(seconds: float, what: str, call: Awaitable[T]) -> T:
    """A call to a replica with a deadline."""
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        raise ReplicaTimeout(f"did not answer '{what}' within {seconds} s") from None


async def _while_alive(entry: ReplicaEntry, call: Coroutine[Any, Any, None]) -> None:
    """Await a call to a replica, but not longer than the replica lives."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(ignore_result)  # the replica may end, or this be cancelled, at the moment at which it fails
    if not await done_before(entry.gone, task):
        raise ReplicaLost(entry.gone.result())
    task.result()
