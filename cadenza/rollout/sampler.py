"""The pool of inference replicas: the gate, the version, the devices.

Invariant: a request reaches a replica only with a grant of the current epoch. Closing the gate raises the epoch, and
each replica refuses what is older, so that when `suspend` returns no token is being generated, wherever a request
was on its way. A replica that does not answer a control call within its deadline is given up: killed, out of the
routing table for good, its requests routed again with the tokens they had.

    grant() waits for: the gate (opened by resume), a replica (brought by expand), and KV-cache capacity (wait_queue.py)
    suspend, resume, load_weights, shrink, expand: one at a time, event-driven; none of them delays a grant to a
    replica it does not touch
    health check: woken by time; gives up replicas with work but without progress
    balance: woken by time; moves running requests from loaded replicas to others (balance.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from pydantic import Field

from cadenza.config import Config
from cadenza.errors import InfrastructureError, raise_if_cancelled
from cadenza.inference.replica import PauseMode, Replica, ReplicaError, ReplicaLost, ReplicaStats
from cadenza.observe.events import Event, EventSink
from cadenza.rollout.balance import Balancer
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.router import PREFILL_WEIGHT, ReplicaEntry, ReplicaState, Router, RouteRequest
from cadenza.rollout.wait_queue import Gate, WaitQueue


class SamplerConfig(Config):
    """How patient the sampler is."""

    control_seconds: float = Field(default=60.0, gt=0)
    """Deadline of a control call to a replica: pause, resume, sleep, wake."""
    load_seconds: float = Field(default=600.0, gt=0)
    """Deadline of loading weights into one replica."""
    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Between two looks at the replicas that answered nothing."""
    max_strikes: int = Field(default=3, gt=0)
    """Looks without progress, or requests failed in a row, after which a replica is given up."""
    balance_seconds: float = Field(default=5.0, ge=0)
    """Between two looks at which running requests should change replicas, or give way to others (balance.py); 0 leaves
    them where they are."""
    prefill_weight: float = Field(default=PREFILL_WEIGHT, ge=0)
    """What the prefill of a token costs, in decode steps over a token of context: how dear it is to leave a prefix."""


T = TypeVar("T")


class RequestOutcome(Enum):
    """How a request ended, as far as it speaks for or against its replica."""

    SERVED = "served"
    """It answered."""
    REFUSED = "refused"
    """It answered that it will not: alive, but not therefore well."""
    FAILED = "failed"
    LOST = "lost"
    UNSENT = "unsent"
    """Nothing: the request was given up, or never sent."""


class ReplicaTimeout(ReplicaError):
    """A replica let the deadline of a call pass."""


class NoReplicas(RolloutError):
    """No replica is left to generate."""


class Grant(NamedTuple):
    """The right to send one request to one replica. Its holder gives it back with `release`, exactly once."""

    entry: ReplicaEntry
    """The replica that serves the request."""
    request_id: int
    """For the request. When the request comes back interrupted, the next grant of its turn `continues` this id: the
    sampler knows whether it moved the request, and where to."""
    epoch: int
    """The gate epoch, for the request: the replica refuses an older one."""
    route_request: RouteRequest
    """What was asked for."""


class Sampler:
    """Inference replicas behind one gate and one router. Train and validation schedulers share it."""

    def __init__(self, replicas: Sequence[Replica], config: SamplerConfig | None = None) -> None:
        if not replicas:
            raise ValueError("a sampler needs at least one replica, got none")
        self.config = config or SamplerConfig()
        self.version = 0
        """Newest version that every active replica has."""
        self.epoch = 0
        self.router = Router(self.config.prefill_weight)
        self.balancer = Balancer(self.config.prefill_weight)
        self.lost: dict[str, str] = {}
        """Replicas given up, with the cause."""
        self.on_version: list[Callable[[int], None]] = []
        """Called when a version is fully published."""
        self.on_lost: list[Callable[[str, str], None]] = []
        """Called when a replica is given up."""
        self.events: EventSink | None = None
        """Told of everything that happens to the gate, the version and the replicas."""
        self.opened_at = 0.0
        """When the gate was last opened."""
        self.replicas = tuple(replicas)
        self._entries: list[ReplicaEntry] = []
        self._weights: object = None
        self._gate = Gate()
        self._suspended = False
        """The replicas are paused; the gate is closed a little earlier and opened a little later."""
        self._wait_queue = WaitQueue()
        self._holders: set[object] = set()
        """Who wants the gate closed."""
        self._control = asyncio.Lock()
        self._ids = itertools.count()
        self._namespaces = itertools.count(0, 1 << 40)
        self._operations: set[asyncio.Task[Any]] = set()
        self._background_tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # -- clients -------------------------------------------------------------------------------------------------

    def namespace(self) -> int:
        """A range of ids for one scheduler, so that the sessions and groups of two of them do not mix."""
        return next(self._namespaces)

    async def grant(
        self,
        route_request: RouteRequest,
        sticky: ReplicaEntry | None = None,
        cached: int = 0,
        continues: int | None = None,
    ) -> Grant:
        """Returns a grant for this request once the gate is open and a KV cache has capacity. `sticky` is the replica
        that may hold `cached` tokens of the session. `continues` is the id of the interrupted request that this one
        goes on from: if the sampler moved that one, the grant is for the target of the move, unless the gate is
        closed meanwhile. The caller must pass the grant to `release`."""
        waited = False
        while (grant := self.grant_now(route_request, sticky, cached, continues)) is None:
            if self._gate.is_open:
                await self._wait_queue.wait(route_request)
                waited = True
            else:
                await self._gate.opening()
                continues = None
        if waited:
            self._wait_queue.wake_next()
        return grant

    def grant_now(
        self,
        route_request: RouteRequest,
        sticky: ReplicaEntry | None = None,
        cached: int = 0,
        continues: int | None = None,
    ) -> Grant | None:
        """`grant` without the wait: returns None when the gate is closed, or when no KV cache has capacity.
        An answer that has had a slice and gets None gives up the cache that it had."""
        if self._closed:
            raise InfrastructureError("the sampler is closed")
        if not self._gate.is_open:
            return None
        target = None if continues is None else self.balancer.take_target(continues)
        if target is not None and target.state is ReplicaState.ACTIVE:
            self.balancer.count_move(route_request.context)
            entry = target
        else:
            found = None
            home = sticky if sticky is not None and route_request.session in sticky.cached_contexts else None
            if not self._wait_queue.has_earlier(route_request) or (
                home is not None and not route_request.slices
            ):  # who has its context cached keeps it
                found = self.router.admit(route_request, sticky, cached, asyncio.get_running_loop().time())
            if found is None:
                if self.router.is_empty:  # the last replica was given up; the gate opens when there is one again
                    self._gate.close()
                if home is not None and route_request.slices:
                    self.end_session(home, route_request.session)  # an answer that gives way keeps no cache
                return None
            entry = found
        if sticky is not None:
            self.router.drop_context(sticky, route_request.session)
        self.router.add(entry, route_request.context)
        return Grant(entry, next(self._ids), self.epoch, route_request)

    def release(
        self,
        grant: Grant,
        outcome: RequestOutcome = RequestOutcome.UNSENT,
        error: ReplicaError | None = None,
        cached: int = 0,
    ) -> None:
        """The request of this grant is over, whatever came of it. The session goes on later, behind `cached` tokens
        that this replica has of it now; 0 if it does not."""
        entry, _, _, route_request = grant
        if outcome is RequestOutcome.SERVED:
            entry.failures = 0
            entry.served += 1
        elif outcome is RequestOutcome.REFUSED:
            entry.served += 1
        elif error is not None:
            self._record_failure(entry, error)
        if cached:
            self.router.keep_context(
                entry, route_request.session, cached, route_request.group_number, asyncio.get_running_loop().time()
            )
        self.router.remove(entry, route_request.context)
        if self._wait_queue:
            self._wait_queue.wake_next()

    def end_session(self, entry: ReplicaEntry, session: int) -> None:
        """The session is over."""
        if self.router.drop_context(entry, session) and self._wait_queue:
            self._wait_queue.wake_next()

    def observe_answer_length(self, tokens: int) -> None:
        """An answer had so many tokens."""
        self.router.observe_answer_length(tokens)

    def _record_failure(self, entry: ReplicaEntry, error: ReplicaError) -> None:
        if isinstance(error, ReplicaLost):
            self._give_up(entry, str(error) or "lost")
            return
        entry.failures += 1
        if entry.failures >= self.config.max_strikes:
            self._give_up(entry, f"{entry.failures} requests failed in a row: {error}")

    # -- the gate ------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[ReplicaEntry]:
        """Of all replicas, in their order."""
        return self._entries

    def counters(self) -> dict[str, float]:
        """For metrics."""
        return {
            "sampler/version": self.version,
            "sampler/replicas_lost": len(self.lost),
            "sampler/escapes": self.router.escapes,
            "sampler/moves": self.balancer.moved,
            "sampler/moved_tokens": self.balancer.moved_tokens,
            "sampler/gave_way": self.balancer.gave_way,
        }

    @property
    def is_open(self) -> bool:
        """Whether a grant can be had now."""
        return self._gate.is_open and not self._closed

    async def refresh(self) -> None:
        """What is known here is what is; a client of a sampler elsewhere has to ask."""
        self._create_entries()

    @property
    def suspended(self) -> bool:
        """Whether somebody keeps the gate closed."""
        return bool(self._holders)

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        """Close the gate; returns when no token is being generated. It stays closed until `holder`, and whoever
        else holds it, resumes."""
        self._create_entries()
        self._gate.close()
        self._holders.add(holder)
        await self._run_to_completion(self._suspend(mode))

    async def resume(self, holder: object = None) -> None:
        """Let go of the gate; it opens when nobody else holds it."""
        opening = self.begin_resume(holder)
        if opening is not None:
            await asyncio.shield(opening)

    def begin_resume(self, holder: object = None) -> asyncio.Task[None] | None:
        """`resume` for whoever does not want to wait: the task that opens the gate, None when it is open."""
        self._create_entries()
        if not self._background_tasks:
            loop = asyncio.get_running_loop()
            self._background_tasks.append(loop.create_task(self._health_check_loop(), name="sampler health"))
            if self.config.balance_seconds:
                self._background_tasks.append(loop.create_task(self._balance_loop(), name="sampler balance"))
            for task in self._background_tasks:
                task.add_done_callback(self._on_background_task_ended)
        self._holders.discard(holder)
        return None if self._gate.is_open else self._start_operation(self._resume())

    @property
    def holders(self) -> list[object]:
        """Who keeps the gate closed."""
        return list(self._holders)

    def is_held_by(self, holder: object) -> bool:
        """Whether this one keeps the gate closed."""
        return holder in self._holders

    async def load_weights(self, version: int, weights: object = None) -> None:
        """Publish a version. Behind a closed gate all replicas load at once; with the gate open they are updated
        one by one, and what runs on them is kept in place."""
        self._create_entries()
        await self._run_to_completion(self._publish(version, weights))

    # -- devices -------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> dict[int, str]:
        """Every device and the state of its replica."""
        self._create_entries()
        return {device: entry.state.value for entry in self._entries for device in entry.replica.devices}

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        """Take replicas off these devices; their requests move, with their tokens, to the others."""
        return await self._run_to_completion(self._shrink(devices))

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        """Bring replicas back on these devices. `skip_load` says that they have the current weights already."""
        return await self._run_to_completion(self._expand(devices, skip_load))

    async def close(self) -> None:
        """End the health check and the balance, and wake whoever waits at the gate."""
        self._closed = True
        self._gate.open()
        self._wait_queue.close()
        for task in self._background_tasks:
            task.cancel()
        if self._background_tasks:
            await asyncio.wait(self._background_tasks, timeout=self.config.control_seconds)

    async def stats(self) -> dict[str, ReplicaStats]:
        """What every replica that answers says about itself, the dead ones too where they still can."""
        found: dict[str, ReplicaStats] = {}
        for entry in self._entries:
            with contextlib.suppress(ReplicaError, TimeoutError):
                seconds = self.config.control_seconds
                found[entry.replica.name] = await asyncio.wait_for(entry.replica.stats(), seconds)
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    def _create_entries(self) -> None:
        """Entries are made when the loop runs: a sampler may be built before it."""
        if self._entries:
            return
        loop = asyncio.get_running_loop()
        self._entries = [
            ReplicaEntry(index, replica, loop.create_future()) for index, replica in enumerate(self.replicas)
        ]
        self.router.rebuild(self._entries)

    def _active(self) -> list[ReplicaEntry]:
        return [entry for entry in self._entries if entry.state is ReplicaState.ACTIVE]

    def _open_gate(self) -> None:
        if not self._active():
            if any(entry.state is ReplicaState.ASLEEP for entry in self._entries):
                return  # an expand brings one, and opens
            raise NoReplicas(f"no replica is left: {self._loss_summary()}")
        self.opened_at = asyncio.get_running_loop().time()
        self._gate.open()
        self._wait_queue.wake_next()

    def _loss_summary(self) -> str:
        return "; ".join(f"{name}: {cause}" for name, cause in self.lost.items()) or "all are asleep"

    async def _run_to_completion(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run a control operation as a whole, also when its caller gives up: nothing is left half-changed."""
        return await asyncio.shield(self._start_operation(operation))

    def _start_operation(self, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(operation, name="sampler control")
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return task

    async def _suspend(self, mode: PauseMode) -> None:
        async with self._control:
            if self._suspended or not self._holders:
                return
            self._gate.close()
            self._emit("suspend", "sampler", mode.value)
            self.epoch += 1
            epoch = self.epoch
            await self._call_each(self._active(), lambda entry: self._pause(entry, epoch, mode))
            self._suspended = True
            self._emit("suspended", "sampler", "")

    async def _resume(self) -> None:
        async with self._control:
            if self._holders:
                return
            if self._suspended:
                seconds = self.config.control_seconds
                await self._call_each(
                    self._active(), lambda entry: _call_with_deadline(seconds, "resume", entry.replica.resume())
                )
                self._suspended = False
                self._emit("resume", "sampler", "")
            if not self._holders:  # somebody may have suspended meanwhile, and waits for the lock
                self._open_gate()

    async def _publish(self, version: int, weights: object) -> None:
        async with self._control:
            if version <= self.version:
                raise ValueError(f"version must grow: it is {self.version}, got {version}")
            if self._suspended:
                await self._call_each(self._active(), lambda entry: self._load(entry, version, weights))
            else:
                for entry in self._active():
                    await self._call_each([entry], lambda entry: self._load_in_place(entry, version, weights))
            if not self._active():
                raise NoReplicas(f"no replica took version {version}: {self._loss_summary()}")
            self.version = version
            self._weights = weights
            self._emit("publish", "sampler", str(version))
        for callback in self.on_version:
            callback(version)

    async def _shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        started = asyncio.get_running_loop().time()
        async with self._control:
            leaving = self._on_devices(devices, ReplicaState.ACTIVE, "shrink")
            if len(leaving) == len(self._active()):
                raise ValueError(
                    f"shrink of devices {sorted(devices)} would leave no replica; keep at least one of "
                    f"{[entry.replica.devices for entry in self._active()]}, or suspend instead"
                )
            self.epoch += 1
            epoch = self.epoch
            moved, moved_tokens = (
                sum(entry.inflight for entry in leaving),
                sum(entry.inflight_tokens for entry in leaving),
            )
            for entry in leaving:
                entry.state = ReplicaState.LEAVING
            self.router.rebuild(self._entries)
            await self._call_each(leaving, lambda entry: self._put_to_sleep(entry, epoch))
            self._emit("shrink", "sampler", str(sorted(devices)))
        return self._report(leaving, ReplicaState.ASLEEP, started, moved=moved, moved_tokens=moved_tokens)

    async def _expand(self, devices: Sequence[int], skip_load: bool) -> dict[str, Any]:
        started = asyncio.get_running_loop().time()
        async with self._control:
            coming = self._on_devices(devices, ReplicaState.ASLEEP, "expand")
            await self._call_each(coming, lambda entry: self._wake(entry, skip_load))
            self.router.rebuild(self._entries)
            if behind := [entry for entry in coming if entry.state is ReplicaState.ASLEEP]:
                versions = {entry.replica.name: entry.version for entry in behind}
                raise ValueError(f"skip_load: {versions} do not have version {self.version}; expand without skip_load")
            if not self._suspended and not self._holders:
                self._open_gate()
                if self.config.balance_seconds:
                    self.balancer.spread(self._active())
            self._emit("expand", "sampler", str(sorted(devices)))
        return self._report(coming, ReplicaState.ACTIVE, started)

    async def _call_each(
        self, entries: list[ReplicaEntry], call: Callable[[ReplicaEntry], Coroutine[Any, Any, None]]
    ) -> None:
        """Call all at once; a replica that fails or is late is given up, and the others go on."""

        async def one(entry: ReplicaEntry) -> None:
            try:
                await _while_alive(entry, call(entry))
            except ReplicaError as error:
                self._give_up(entry, str(error) or type(error).__name__)
            except asyncio.CancelledError as error:
                raise_if_cancelled(error)
                self._give_up(entry, "was cancelled in a control call")
            except Exception as error:  # noqa: BLE001 - an engine may raise whatever it likes; it costs itself
                self._give_up(entry, f"raised {type(error).__name__}: {error}")

        async with asyncio.TaskGroup() as group:
            for entry in entries:
                group.create_task(one(entry), name=f"sampler control of {entry.replica.name}")

    async def _pause(self, entry: ReplicaEntry, epoch: int, mode: PauseMode) -> None:
        """Pause one replica. A drain may take as long as its requests do, and the health check watches over those; its
        deadline counts from the last of them."""
        seconds = self.config.control_seconds
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
            pausing.add_done_callback(_ignore_result)

    async def _load(self, entry: ReplicaEntry, version: int, weights: object) -> None:
        """Load into a replica that does not generate; a failure is tried once more."""
        seconds = self.config.load_seconds
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

    async def _load_in_place(self, entry: ReplicaEntry, version: int, weights: object) -> None:
        seconds = self.config.control_seconds
        await self._pause(entry, self.epoch, PauseMode.KEEP)
        await self._load(entry, version, weights)
        await _call_with_deadline(seconds, "resume", entry.replica.resume())

    async def _put_to_sleep(self, entry: ReplicaEntry, epoch: int) -> None:
        seconds = self.config.control_seconds
        await self._pause(entry, epoch, PauseMode.ABORT)
        await _call_with_deadline(seconds, "sleep", entry.replica.sleep())
        if entry.state is not ReplicaState.LOST:
            entry.state = ReplicaState.ASLEEP

    async def _wake(self, entry: ReplicaEntry, skip_load: bool) -> None:
        seconds = self.config.control_seconds
        await _call_with_deadline(seconds, "wake", entry.replica.wake())
        if skip_load:
            entry.version = (await _call_with_deadline(seconds, "stats", entry.replica.stats())).version
        elif self.version > entry.version:
            await self._load(entry, self.version, self._weights)
        if entry.version != self.version:
            await self._put_to_sleep(entry, self.epoch)
            return
        if self._suspended:
            await self._pause(entry, self.epoch, PauseMode.ABORT)
        if entry.state is not ReplicaState.LOST:
            entry.state = ReplicaState.ACTIVE

    def _on_devices(self, devices: Sequence[int], state: ReplicaState, what: str) -> list[ReplicaEntry]:
        """The entries on exactly these devices, all in the state that the operation needs."""
        self._create_entries()
        wanted = set(devices)
        known = self.devices
        if not wanted:
            raise ValueError(f"{what} needs at least one device, got none; the sampler has {known}")
        if unknown := sorted(wanted - known.keys()):
            raise ValueError(f"{what}: no replica on devices {unknown}; the sampler has {sorted(known)}")
        entries = [entry for entry in self._entries if wanted & set(entry.replica.devices)]
        for entry in entries:
            if missing := sorted(set(entry.replica.devices) - wanted):
                raise ValueError(
                    f"{what}: replica {entry.replica.name} sits on devices {list(entry.replica.devices)}; "
                    f"name {missing} too, a replica moves as a whole"
                )
        if wrong := {device: known[device] for device in sorted(wanted) if known[device] != state.value}:
            raise ValueError(f"{what} needs devices that are {state.value}, got {wrong}; the sampler has {known}")
        return entries

    def _report(self, entries: list[ReplicaEntry], state: ReplicaState, started: float, **more: int) -> dict[str, Any]:
        return {
            "replicas": [entry.replica.name for entry in entries if entry.state is state],
            "lost": [entry.replica.name for entry in entries if entry.state is ReplicaState.LOST],
            "devices": self.devices,
            "seconds": asyncio.get_running_loop().time() - started,
            **more,
        }

    def _give_up(self, entry: ReplicaEntry, cause: str) -> None:
        """The replica is dead to us, and is made dead in fact; its requests find another."""
        if entry.state is ReplicaState.LOST:
            return
        logger.warning("replica %s is given up: %s", entry.replica.name, cause)
        entry.state = ReplicaState.LOST
        self._emit("lost", entry.replica.name, cause)
        self.lost[entry.replica.name] = cause
        self.router.rebuild(self._entries)
        entry.replica.kill("replica_lost")
        if not entry.gone.done():
            entry.gone.set_result(cause)
        for callback in self.on_lost:
            callback(entry.replica.name, cause)
        if not self._active():
            self._gate.close()

    def _emit(self, kind: str, subject: str, detail: str) -> None:
        if self.events is not None:
            self.events(Event(asyncio.get_running_loop().time(), kind, subject, detail))

    async def _health_check_loop(self) -> None:
        """Give up replicas that have work and make no progress."""
        while True:
            await asyncio.sleep(self.config.heartbeat_seconds)
            quiet = []
            for entry in self._entries:
                working = entry.state in (ReplicaState.ACTIVE, ReplicaState.LEAVING) and (entry.inflight or entry.sent)
                if working and not entry.served and not entry.loading_weights:
                    quiet.append(entry)
                else:
                    entry.strikes = 0
                entry.sent = entry.served = 0
            if quiet:
                await self._call_each(quiet, self._check_progress)

    def _on_background_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("'%s' died, the sampler closes", task.get_name(), exc_info=error)
            for entry in self._entries:
                self._give_up(entry, f"'{task.get_name()}' died: {error!r}")
            self._closed = True
            self._gate.open()
            self._wait_queue.close()

    async def _balance_loop(self) -> None:
        """Move requests and let some give way, unless the gate is closed or a control operation is under way."""
        while True:
            await asyncio.sleep(self.config.balance_seconds)
            if self._gate.is_open and not self._control.locked():
                self.balancer.tick(self._active(), self._wait_queue.first, len(self._wait_queue))

    async def _check_progress(self, entry: ReplicaEntry) -> None:
        try:
            stats = await _call_with_deadline(self.config.heartbeat_seconds, "stats", entry.replica.stats())
        except ReplicaTimeout:
            moves = False
        else:
            moves = stats.paused or stats.progress != entry.progress
            entry.progress = stats.progress
        entry.strikes = 0 if moves else entry.strikes + 1
        if entry.strikes >= self.config.max_strikes:
            self._give_up(entry, f"no progress in {entry.strikes} looks, {self.config.heartbeat_seconds} s apart")


async def _call_with_deadline(seconds: float, what: str, call: Awaitable[T]) -> T:
    """A call to a replica with a deadline."""
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        raise ReplicaTimeout(f"did not answer '{what}' within {seconds} s") from None


async def _while_alive(entry: ReplicaEntry, call: Coroutine[Any, Any, None]) -> None:
    """Await a call to a replica, but not longer than the replica lives."""
    task = asyncio.ensure_future(call)
    task.add_done_callback(_ignore_result)  # the replica may end, or this be cancelled, at the moment at which it fails
    either: list[asyncio.Future[Any]] = [task, entry.gone]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise ReplicaLost(entry.gone.result())
    task.result()


def _ignore_result(task: asyncio.Future[Any]) -> None:
    """Nobody need hear what it says."""
    if not task.cancelled():
        task.exception()
