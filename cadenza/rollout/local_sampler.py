"""The sampler in its own process: the gate, the grants, the version, the devices.

Invariant: a request reaches a replica only with a grant of the current epoch. Closing the gate raises the epoch, and
each replica refuses what is older, so that when `suspend` returns no token is being generated, wherever a request
was on its way. A replica that does not answer a control call within its deadline is given up (replica_pool.py).

    grant() waits for: the gate (opened by resume), a replica (brought by expand), and KV-cache capacity (wait_queue.py)
    suspend, resume, load_weights, shrink, expand: one at a time, event-driven; none of them delays a grant to a
    replica it does not touch
    health check: woken by time; gives up replicas with work but without progress (replica_health.py)
    balance: woken by time; moves running requests from loaded replicas to others (balance.py)
    which replica: the rule that `sampler.routing` names (routing.py)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from cadenza.cluster.remote_replica import RemoteReplica
from cadenza.errors import InfrastructureError
from cadenza.inference.replica import PauseMode, Replica, ReplicaError, ReplicaStats
from cadenza.observe.events import Event, EventSink
from cadenza.rollout.balance import Balancer
from cadenza.rollout.failures import logger
from cadenza.rollout.replica_health import HealthCheck
from cadenza.rollout.replica_pool import ReplicaPool
from cadenza.rollout.router import ReplicaEntry, ReplicaState, Router, WaitReason
from cadenza.rollout.routing import make_rule
from cadenza.rollout.sampler import Grant, GrantRequest, NoReplicas, ReplicaAddress, RequestOutcome, SamplerConfig
from cadenza.rollout.wait_queue import Gate, WaitQueue

T = TypeVar("T")


class LocalSampler:
    """Decides which replica each request may go to, and when; sends no request itself. Replicas may be in other
    processes. It is the `Sampler` of the process in which it is made:

    sampler = LocalSampler([TorchReplica(model)])
    await sampler.resume()                                  # the gate is closed at first
    grant = await sampler.grant(GrantRequest(RouteRequest(session=0, group=0, context=12)))
    """

    def __init__(self, replicas: Sequence[Replica], config: SamplerConfig | None = None) -> None:
        if not replicas:
            raise ValueError("a sampler needs at least one replica, got none")
        self.config = config or SamplerConfig()
        self.version = 0
        self.epoch = 0
        self.router = Router(make_rule(self.config))
        self.balancer = Balancer(self.config.prefill_weight)
        self.on_version: list[Callable[[int], None]] = []
        self.on_lost: list[Callable[[str, str], None]] = []
        self.on_all_shrunk: list[Callable[[], None]] = []
        self.events: EventSink | None = None
        """Told of everything that happens to the gate, the version and the replicas."""
        self.has_live_client: Callable[[ReplicaEntry, float], bool] = lambda entry, since: True
        """`has_live_client(entry, since)`: whether a client that made a call at or after the time `since` holds a grant
        for this replica. Set where clients are in other processes, which may die (`SamplerProcess`)."""
        self.opened_at = 0.0
        self._pool = ReplicaPool(replicas, self.config, self.router, emit=self._emit, on_lost=self._on_lost)
        self._weights: object = None
        self._gate = Gate()
        self._replicas_paused = False
        """The replicas are paused; the gate is closed a little earlier and opened a little later."""
        self._shrunk_to_none = False
        """A shrink took the last active replica: the gate is closed until an expand brings one."""
        self._wait_queue = WaitQueue()
        self._holders: set[object] = set()
        """Callers that want the gate closed."""
        self._control = asyncio.Lock()
        self._ids = itertools.count()
        self._namespaces = itertools.count(0, 1 << 40)
        self._operations: set[asyncio.Task[Any]] = set()
        self._background_tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # -- clients -------------------------------------------------------------------------------------------------

    def allocate_ids(self) -> int:
        return next(self._namespaces)

    async def grant(self, grant_request: GrantRequest) -> Grant:
        waited = False
        while not isinstance(grant := self._try_grant(grant_request), Grant):
            if grant is WaitReason.CAPACITY:
                await self._wait_queue.wait(grant_request.route_request)
                waited = True
            elif grant is WaitReason.RULE:
                await self._wait_queue.wait_for_rule()
            else:
                await self._gate.opening()
                grant_request = grant_request._replace(interrupted=None)
        if waited:
            self._wait_queue.wake_next()
        return grant

    def grant_now(self, grant_request: GrantRequest) -> Grant | None:
        grant = self._try_grant(grant_request)
        return grant if isinstance(grant, Grant) else None

    def _try_grant(self, grant_request: GrantRequest) -> Grant | WaitReason:
        """A grant, or what it waits for."""
        if self._closed:
            raise InfrastructureError("the sampler is closed")
        if not self._gate.is_open:
            return WaitReason.GATE
        route_request, sticky, cached, interrupted = grant_request
        target = None if interrupted is None else self.balancer.take_target(interrupted)
        if target is not None and target.state is ReplicaState.ACTIVE:
            self.balancer.count_move(route_request.context)
            entry = target
        else:
            found: ReplicaEntry | WaitReason = WaitReason.CAPACITY
            home = sticky if sticky is not None and route_request.session in sticky.cached_contexts else None
            if not self._wait_queue.has_earlier(route_request) or (
                home is not None and not route_request.slices
            ):  # a session whose context is cached keeps its replica
                try:
                    found = self.router.admit(route_request, sticky, cached, asyncio.get_running_loop().time())
                except Exception as error:
                    self._close_for_good(f"routing '{self.config.routing}' failed: {error!r}", error)
                    raise InfrastructureError(f"routing '{self.config.routing}' failed: {error!r}") from error
            if isinstance(found, WaitReason):
                if self.router.is_empty:  # the last replica was given up; the gate opens when there is one again
                    self._gate.close()
                    found = WaitReason.GATE
                if home is not None and route_request.slices:
                    self.end_session(home, route_request.session)  # an answer that gives way keeps no cache
                return found
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
        entry, _, _, route_request = grant
        if outcome is RequestOutcome.SERVED:
            entry.failures = 0
            entry.served += 1
        elif outcome is RequestOutcome.REFUSED:
            entry.served += 1
        elif error is not None:
            self._pool.record_failure(entry, error)
        if cached:
            self.router.keep_context(
                entry, route_request.session, cached, route_request.group_number, asyncio.get_running_loop().time()
            )
        self.router.remove(entry, route_request.context)
        if self._wait_queue:
            self._wait_queue.wake_next()

    def end_session(self, entry: ReplicaEntry, session: int) -> None:
        if self.router.drop_context(entry, session) and self._wait_queue:
            self._wait_queue.wake_next()

    def observe_answer_length(self, tokens: int) -> None:
        self.router.observe_answer_length(tokens)

    # -- the gate ------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[ReplicaEntry]:
        return self._pool.entries

    @property
    def addresses(self) -> list[ReplicaAddress]:
        return [
            ReplicaAddress(r.name, r.devices, r.kv_capacity, r.worker_handle if isinstance(r, RemoteReplica) else r)
            for r in self._pool.replicas
        ]

    @property
    def lost(self) -> dict[str, str]:
        """Replicas given up, with the cause."""
        return self._pool.lost

    def counters(self) -> dict[str, float]:
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
        """Whether the gate is open."""
        return self._gate.is_open and not self._closed

    async def refresh(self) -> None:
        """Nothing to fetch here; creates the entries on first use, since a sampler may be built before the loop
        runs."""
        self._pool.create_entries()

    @property
    def is_held(self) -> bool:
        return bool(self._holders)

    @property
    def waits_for(self) -> str:
        if self._holders:
            return "resume"
        return "expand" if self._shrunk_to_none else ""

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        self._pool.create_entries()
        self._gate.close()
        self._holders.add(holder)
        await self._run_to_completion(self._suspend(mode))

    async def resume(self, holder: object = None) -> None:
        opening = self.begin_resume(holder)
        if opening is not None:
            await asyncio.shield(opening)

    def begin_resume(self, holder: object = None) -> asyncio.Task[None] | None:
        self._pool.create_entries()
        if not self._background_tasks:
            loop = asyncio.get_running_loop()
            self._background_tasks.append(
                loop.create_task(
                    HealthCheck(self._pool, self.config, self.has_live_client).run(), name="sampler health"
                )
            )
            if self.config.balance_seconds:
                self._background_tasks.append(loop.create_task(self._balance_loop(), name="sampler balance"))
            for task in self._background_tasks:
                task.add_done_callback(self._on_background_task_ended)
        self._holders.discard(holder)
        return None if self._gate.is_open else self._start_operation(self._resume())

    @property
    def holders(self) -> list[object]:
        """The callers that keep the gate closed."""
        return list(self._holders)

    def is_held_by(self, holder: object) -> bool:
        return holder in self._holders

    async def load_weights(self, version: int, weights: object = None) -> None:
        self._pool.create_entries()
        await self._run_to_completion(self._publish(version, weights))

    # -- devices -------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> dict[int, str]:
        return self._pool.device_states()

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        return await self._run_to_completion(self._shrink(devices))

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        return await self._run_to_completion(self._expand(devices, skip_load))

    async def close(self) -> None:
        self._closed = True
        self._gate.open()
        self._wait_queue.close()
        for task in self._background_tasks:
            task.cancel()
        if self._background_tasks:
            await asyncio.wait(self._background_tasks, timeout=self.config.control_seconds)

    async def stats(self) -> dict[str, ReplicaStats]:
        return await self._pool.all_stats()

    # -- inside --------------------------------------------------------------------------------------------------

    def _open_gate(self) -> None:
        if not self._pool.active():
            if any(entry.state is ReplicaState.ASLEEP for entry in self._pool.entries):
                self._tell_if_all_shrunk()
                return  # an expand brings one, and opens
            raise NoReplicas(f"no replica is left: {self._pool.loss_summary()}")
        self.opened_at = asyncio.get_running_loop().time()
        self._gate.open()
        self._wait_queue.wake_next()

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
            if self._replicas_paused or not self._holders:
                return
            self._gate.close()
            self._emit("suspend", "sampler", mode.value)
            self.epoch += 1
            epoch = self.epoch
            await self._pool.call_each(self._pool.active(), lambda entry: self._pool.pause(entry, epoch, mode))
            self._replicas_paused = True
            self._emit("suspended", "sampler", "")

    async def _resume(self) -> None:
        async with self._control:
            if self._holders:
                return
            if self._replicas_paused:
                await self._pool.call_each(self._pool.active(), self._pool.resume)
                self._replicas_paused = False
                self._emit("resume", "sampler", "")
            if not self._holders:  # a caller may have suspended meanwhile, and waits for the lock
                self._open_gate()

    async def _publish(self, version: int, weights: object) -> None:
        async with self._control:
            if version <= self.version:
                raise ValueError(f"version must grow: it is {self.version}, got {version}")
            active = self._pool.active()
            if self._replicas_paused:
                await self._pool.call_each(active, lambda entry: self._pool.load(entry, version, weights))
            else:
                for entry in active:
                    await self._pool.call_each(
                        [entry], lambda entry: self._pool.load_in_place(entry, version, weights, self.epoch)
                    )
            if not self._pool.active() and (active or not self._shrunk_to_none):
                raise NoReplicas(f"no replica took version {version}: {self._pool.loss_summary()}")
            self.version = version
            self._weights = weights
            self._emit("publish", "sampler", str(version))
        for callback in self.on_version:
            callback(version)

    async def _shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        started = asyncio.get_running_loop().time()
        async with self._control:
            leaving, unchanged = self._pool.entries_to_change(
                devices, ReplicaState.ACTIVE, ReplicaState.ASLEEP, "shrink"
            )
            moved = sum(entry.inflight for entry in leaving)
            moved_tokens = sum(entry.inflight_tokens for entry in leaving)
            if leaving:
                self.epoch += 1
                epoch = self.epoch
                for entry in leaving:
                    entry.state = ReplicaState.LEAVING
                self.router.rebuild(self._pool.entries)
                if not self._pool.active():
                    self._gate.close()
                    self._shrunk_to_none = True
                await self._pool.call_each(leaving, lambda entry: self._pool.put_to_sleep(entry, epoch))
                self._emit("shrink", "sampler", str(_devices_of(leaving)))
                self._tell_if_all_shrunk()
        report = self._report(leaving, ReplicaState.ASLEEP, unchanged, started)
        return report | {"moved": moved, "moved_tokens": moved_tokens}

    async def _expand(self, devices: Sequence[int], skip_load: bool) -> dict[str, Any]:
        started = asyncio.get_running_loop().time()
        async with self._control:
            coming, unchanged = self._pool.entries_to_change(
                devices, ReplicaState.ASLEEP, ReplicaState.ACTIVE, "expand"
            )
            if coming:
                await self._pool.call_each(coming, lambda entry: self._wake(entry, skip_load))
                self.router.rebuild(self._pool.entries)
                if self._pool.active():
                    self._shrunk_to_none = False
                behind = [entry for entry in coming if entry.state is ReplicaState.ASLEEP]
                if len(behind) < len(coming):
                    if not self._replicas_paused and not self._holders:
                        self._open_gate()
                        if self.config.balance_seconds:
                            self.balancer.spread(self._pool.active())
                    self._emit("expand", "sampler", str(_devices_of(coming)))
                if behind:
                    versions = {entry.replica.name: entry.version for entry in behind}
                    raise ValueError(
                        f"skip_load: {versions} do not have version {self.version}; expand without skip_load"
                    )
        return self._report(coming, ReplicaState.ACTIVE, unchanged, started)

    async def _wake(self, entry: ReplicaEntry, skip_load: bool) -> None:
        await self._pool.wake(entry)
        if skip_load:
            entry.version = (await self._pool.stats(entry, self.config.control_seconds)).version
        elif self.version > entry.version:
            await self._pool.load(entry, self.version, self._weights)
        if entry.version != self.version:
            await self._pool.put_to_sleep(entry, self.epoch)
            return
        if self._replicas_paused:
            await self._pool.pause(entry, self.epoch, PauseMode.ABORT)
        if entry.state is not ReplicaState.LOST:
            entry.state = ReplicaState.ACTIVE

    def _report(
        self, changed: list[ReplicaEntry], state: ReplicaState, unchanged: list[int], started: float
    ) -> dict[str, Any]:
        return {
            "replicas": [entry.replica.name for entry in changed if entry.state is state],
            "unchanged": unchanged,
            "lost": [entry.replica.name for entry in changed if entry.state is ReplicaState.LOST],
            "devices": self.devices,
            "seconds": asyncio.get_running_loop().time() - started,
        }

    def _on_lost(self, name: str, cause: str) -> None:
        for callback in self.on_lost:
            callback(name, cause)
        if not self._pool.active():
            self._gate.close()

    def _tell_if_all_shrunk(self) -> None:
        if self.waits_for == "expand":
            for callback in self.on_all_shrunk:
                callback()

    def _emit(self, kind: str, subject: str, detail: str) -> None:
        if self.events is not None:
            self.events(Event(asyncio.get_running_loop().time(), kind, subject, detail))

    def _on_background_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._close_for_good(f"'{task.get_name()}' died: {error!r}", error)

    def _close_for_good(self, cause: str, error: BaseException) -> None:
        """A bug, here or in a routing rule: every replica is given up, so that the schedulers end and name it."""
        logger.error("%s; the sampler closes", cause, exc_info=error)
        for entry in self._pool.entries:
            self._pool.give_up(entry, cause)
        self._closed = True
        self._gate.open()
        self._wait_queue.close()

    async def _balance_loop(self) -> None:
        """Move requests and let some give way, unless the gate is closed or a control operation is under way."""
        while True:
            await asyncio.sleep(self.config.balance_seconds)
            if self._gate.is_open and not self._control.locked():
                self.balancer.tick(self._pool.active(), self._wait_queue.first, len(self._wait_queue))


def _devices_of(entries: list[ReplicaEntry]) -> list[int]:
    return sorted(device for entry in entries for device in entry.replica.devices)
