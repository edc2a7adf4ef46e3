"""The faults of a schedule: drawn from its seed, injected at their moments, counted when they take effect.

Invariant: a fault counts as injected only when it took effect: an env raised, a call failed, an abort was lost. When
most attempts are issued and no fault has taken effect, the injector lets the next env raise, so every schedule has one.

    ledger, controller --on_moment()--> FaultInjector --strike, after its delay--> replica
    env, reward --env_fault(), reward_fault()--> FaultInjector --> Fault | None
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

from cadenza.inference.replica import Generation, PauseMode, ReplicaError, ReplicaLost, Request
from cadenza.simulation.virtual_cluster.replica import SimReplica

ReplicaKind = Literal["kill", "hang", "slow", "flaky", "late_abort", "lost_abort", "failed_weight_update"]
EnvKind = Literal["env_exception", "env_hang", "env_slow"]
RewardKind = Literal["reward_exception", "reward_hang"]
FaultKind = Literal[ReplicaKind, EnvKind, RewardKind]

REPLICA_KINDS: tuple[ReplicaKind, ...] = get_args(ReplicaKind)
ENV_KINDS: tuple[EnvKind, ...] = get_args(EnvKind)
REWARD_KINDS: tuple[RewardKind, ...] = get_args(RewardKind)
KINDS: tuple[FaultKind, ...] = (*REPLICA_KINDS, *ENV_KINDS, *REWARD_KINDS)

Moment = Literal["issue", "suspend", "publish", "resume", "resize"]
"""The moments at which a fault can strike: an attempt is issued, or a control operation begins."""

CLOSE = -1
"""Call number of an env's `close`."""
FOREVER = 1e7
"""Virtual seconds that are longer than every deadline."""
FORCE_AFTER = 48
"""Attempts issued after which a fault is forced if none took effect."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a replica, an env or a reward."""

    kind: FaultKind
    target: int
    """Index of the replica, number of the env in the order of creation, or number of the judged trajectory."""
    after: int = 0
    """Replica: number of moments before the strike. Env: number of the call (0 is reset, CLOSE is close). Weight
    update: version."""
    moment: Moment = "issue"
    """Replica: the kind of moment that `after` counts."""
    delay: float = 0.0
    """Replica: seconds between the last of these moments and the strike."""
    amount: float = 1.0
    """slow: the factor; flaky, failed_weight_update, reward_hang: the calls; late_abort, env_slow: the seconds;
    hang: seconds until the replica continues."""
    version: int = 0
    """Replica: strikes only once this version is published."""

    @property
    def lethal(self) -> bool:
        """Whether the sampler may give up the replica because of this fault."""
        match self.kind:
            case "kill" | "lost_abort":
                return True
            case "hang":
                return self.amount >= 1.0
            case "flaky" | "failed_weight_update":
                return self.amount > 1
        return False


def draw_faults(
    rng: Random, *, replicas: int, protected: int, versions: int, envs: int, turns: int, rewards: bool
) -> tuple[Fault, ...]:
    """Draw one to three faults. Lethal ones never hit the protected replica."""
    kinds: list[FaultKind] = [*REPLICA_KINDS, "hang", "lost_abort", *ENV_KINDS]
    if rewards:
        kinds += [*REWARD_KINDS, *REWARD_KINDS]
    faults: list[Fault] = []
    wanted = rng.choice((1, 1, 2, 2, 3))
    while len(faults) < wanted:
        kind = rng.choice(kinds)
        if kind in ENV_KINDS:
            fault = _env_fault(rng, kind, envs, turns)
        elif kind in REWARD_KINDS:
            calls = 1.0 if kind == "reward_exception" else float(rng.randint(1, 3))
            fault = Fault(kind, rng.randrange(envs * 3 // 4), amount=calls)
        else:
            fault = _replica_fault(rng, kind, replicas, versions, envs)
        twice = any(fault.kind == other.kind and fault.target == other.target for other in faults)
        if twice or (fault.lethal and fault.target == protected):
            continue
        faults.append(fault)
    return tuple(faults)


def _env_fault(rng: Random, kind: FaultKind, envs: int, turns: int) -> Fault:
    calls = [CLOSE, 0, 1, *range(1, turns + 1)] if kind == "env_hang" else [0, 1, *range(1, turns + 1)]
    return Fault(kind, rng.randrange(envs), after=rng.choice(calls), amount=rng.choice((1.0, 2.5, 5.0)))


def _replica_fault(rng: Random, kind: FaultKind, replicas: int, versions: int, envs: int) -> Fault:
    amount = {
        "slow": rng.choice((2.0, 4.0, 8.0)),
        "flaky": float(rng.choice((1, 2, 4))),
        "late_abort": rng.choice((0.05, 0.25, 1.0)),
        "hang": rng.choice((0.3, FOREVER, FOREVER, FOREVER)),
        "failed_weight_update": float(rng.choice((1, 1, 2))),
    }.get(kind, 1.0)
    moment: Moment = rng.choice(("issue", "issue", "suspend", "publish", "resume", "resize"))
    if kind == "failed_weight_update":
        moment = "publish"
    after = rng.randrange(1, envs) if moment == "issue" else 1 if moment == "resize" else rng.randint(1, versions)
    delay = rng.choice((0.0, rng.random() * 0.1, rng.random()))
    return Fault(kind, rng.randrange(replicas), after, moment, delay, amount)


class FaultInjector:
    """Injects the faults of a scenario at their moments, and counts those that took effect."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.injected: Counter[FaultKind] = Counter()
        self.replicas: Sequence[FaultyReplica] = ()
        self._waiting = [fault for fault in faults if fault.kind in REPLICA_KINDS]
        self._envs = {(fault.target, fault.after): fault for fault in faults if fault.kind in ENV_KINDS}
        self._rewards = {fault.target: fault for fault in faults if fault.kind in REWARD_KINDS}
        self._moments: Counter[Moment] = Counter()
        self._version = 0

    def on_moment(self, moment: Moment) -> None:
        """Count a moment, and start the faults that are due."""
        self._moments[moment] += 1
        if self._waiting:
            self._strike_due()

    def on_published(self, version: int) -> None:
        self._version = version
        self._strike_due()

    def env_fault(self, env: int, call: int) -> Fault | None:
        """Return the fault of this call of this env, and count it: the caller must let it happen."""
        fault = self._envs.get((env, call))
        if fault is None and call == 0 and self._moments["issue"] >= FORCE_AFTER and not self.injected:
            fault = Fault("env_exception", env)
        if fault is not None:
            self.injected[fault.kind] += 1
        return fault

    def reward_fault(self, trajectory: int, call: int) -> Fault | None:
        """Return the fault of this call for this judged trajectory, and count it."""
        fault = self._rewards.get(trajectory)
        if fault is None or call >= fault.amount:
            return None
        self.injected[fault.kind] += 1
        return fault

    def _strike_due(self) -> None:
        due = [f for f in self._waiting if f.after <= self._moments[f.moment] and f.version <= self._version]
        for fault in due:
            self._waiting.remove(fault)
            if fault.kind == "failed_weight_update":
                self._strike(fault)
            else:
                asyncio.get_running_loop().call_later(fault.delay, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        replica = self.replicas[fault.target]
        if replica.dead:
            return
        match fault.kind:
            case "kill":
                self.injected["kill"] += 1
                replica.crash()
            case "hang":
                self.injected["hang"] += 1
                replica.hang()
                if fault.amount < FOREVER:
                    asyncio.get_running_loop().call_later(fault.amount, replica.unhang)
            case "slow":
                self.injected["slow"] += 1
                replica.slow(fault.amount)
            case "flaky":
                replica.flaky(int(fault.amount))
            case "late_abort":
                replica.late_abort(fault.amount)
            case "lost_abort":
                replica.lost_abort()
            case "failed_weight_update":
                replica.fail_load(int(fault.amount))


OnRequest = Callable[["FaultyReplica", Request, "asyncio.Future[Generation]"], None]


class FaultyReplica(SimReplica):
    """A simulated replica that reports its requests, and the faults of it that take effect."""

    def __init__(self, injector: FaultInjector, on_request: OnRequest, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dead = False
        self.asleep = False
        self.moving: set[int] = set()
        """Requests that the sampler aborted to move them, or because others waited."""
        self._injector = injector
        self._on_request = on_request
        self._counted_late = False

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        flaky = self._flaky
        future = super().generate(request)
        if self._flaky < flaky:
            self._injector.injected["flaky"] += 1
        self._on_request(self, request, future)
        return future

    def abort(self, request_id: int, cause: str) -> None:
        losing = self._lost_aborts
        if cause in ("moved", "gave_way"):
            self.moving.add(request_id)
        super().abort(request_id, cause)
        self._count_aborts(losing)

    async def pause(self, epoch: int, mode: PauseMode) -> None:
        losing = self._lost_aborts
        try:
            await super().pause(epoch, mode)
        finally:
            self._count_aborts(losing)

    async def load_weights(self, version: int, weights: object) -> None:
        try:
            await super().load_weights(version, weights)
        except ReplicaLost:
            raise
        except ReplicaError:
            self._injector.injected["failed_weight_update"] += 1
            raise

    async def sleep(self) -> None:
        await super().sleep()
        self.asleep = True

    async def wake(self) -> None:
        await super().wake()
        self.asleep = False

    def kill(self, cause: str) -> None:
        self.dead = True
        super().kill(cause)

    def crash(self) -> None:
        self.dead = True
        super().crash()

    def _count_aborts(self, losing: int) -> None:
        if self._lost_aborts < losing:
            self._injector.injected["lost_abort"] += 1
        elif self._abort_delay > 0 and not self._counted_late:
            self._counted_late = True
            self._injector.injected["late_abort"] += 1
