"""A random schedule, drawn from one integer.

Invariant: a schedule is a function of its scenario, and the scenario is a function of its seed. It varies what users
vary: shapes, latencies, the order of the program, a second scheduler on the sampler, and faults. Times are small, often
multiples of a grid, so that many events happen at the same instant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal, NamedTuple, get_args

from cadenza.simulation.fuzzing.deadlines import DEADLINES
from cadenza.simulation.fuzzing.keyed_random import hash64
from cadenza.simulation.virtual_cluster.faults import Fault, draw_faults

ALPHAS = (0.0, 0.5, 1.0, 2.0, 4.0)
MIN_TRAJECTORIES = 64
"""Fewest attempts that a schedule issues and, unless it ends in an error, trains."""
MIN_VERSIONS = 3
VERSIONS_BEFORE_DOOM = 4
"""Versions that are published before all replicas may be killed."""

Order = Literal["resume_first", "resume_last", "no_resume", "rolling", "colocated", "prefetch"]
"""suspend-update-resume-get_batch-train; suspend-update-get_batch-train-resume; suspend-update-get_batch-train;
update-get_batch-train with the gate open; update-get_batch-suspend-train; the next get_batch under way all the time."""
ORDERS: tuple[Order, ...] = get_args(Order)[:-1]
"""Orders that fit every scenario."""
Size = Literal["same", "double", "twice", "halves"]
"""The request of one step: a batch, one of twice the size, two batches for one version, or one batch in two calls."""
Staleness = Literal["wait", "drop"]
FilterKind = Literal["none", "instant", "slow", "off_loop"]
RewardForm = Literal["none", "async", "sync"]


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """One kind of task and its envs."""

    name: str
    weight: float
    max_envs: int | None
    tasks: int | None
    turns: int
    """Turns of the longest episode."""
    sync: bool
    """The env has plain methods, which run off the loop."""
    seconds: float
    """Mean seconds of a reset or a step."""
    grid: float
    """Latencies are multiples of it; 0 is continuous."""
    close_seconds: float
    reward: RewardForm
    reward_seconds: float
    outage: tuple[float, float] | None = None
    """From when to when the rewards of the domain are out of service, in virtual seconds. No seed draws one."""


@dataclass(frozen=True, slots=True)
class ValidationSpec:
    """A second scheduler on the same sampler."""

    domain: DomainSpec
    group_size: int
    groups: int | None
    """Groups of one batch; None asks for everything."""
    every: int
    """Steps between two validations."""
    slots: int
    abrupt: bool
    """The scheduler is shut down in the middle of a batch."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A shrink of the sampler, and the expand that brings the devices back."""

    after: int
    """Attempts issued before it."""
    delay: float
    """Seconds between the last of these attempts and the shrink."""
    devices: tuple[int, ...]
    away: float
    """Seconds between shrink and expand."""
    skip_load: bool
    """The first expand asks for the replicas without new weights."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a schedule depends on."""

    seed: int
    shuffle: int | None
    """Seed of the order in which callbacks that are ready together run; None keeps the order of asyncio."""
    replicas: int
    protected: int
    """Index of the replica that no fault kills, unless the schedule is doomed."""
    balance_seconds: float
    """Seconds between two rounds of balancing; 0 is never."""
    slice_tokens: int | None
    """Tokens after which an answer yields to waiting ones; 0 is never, None the default."""
    step_seconds: float
    """Seconds of one decode step."""
    load_cost: float
    """Factor of the other costs of the cost model; 0 keeps all times on the grid."""
    kv_capacity: int
    max_running: int
    length: float
    """Mean tokens of a response."""
    arrival_delay: float
    """Longest time between client and engine."""
    load_seconds: float
    wake_seconds: float
    keep_kv: bool
    slots: int
    group_size: int
    groups: int
    """Groups of a batch."""
    steps: int
    alpha: float
    staleness: Staleness
    extra_members: int
    extra_after: float
    extra_groups: int
    max_attempts: int
    filter: FilterKind
    filter_rate: float
    filter_seconds: float
    domains: tuple[DomainSpec, ...]
    play: Literal["trajectory", "step"]
    suspend_mode: Literal["abort", "drain", "keep"]
    order: Order
    repeated: bool
    """Every suspend and resume is called twice."""
    prefetch: int
    """Batches that are fetched ahead, in the order 'prefetch'."""
    odd_step: int
    """The one step that asks for `odd_size`."""
    odd_size: Size
    chunks: int
    """Calls of `get_batch` in which any other step takes its batch; it trains between them."""
    patience: float
    """Seconds after which the controller withdraws a `get_batch` and asks again; 0 is never."""
    train_seconds: float
    validation: ValidationSpec | None
    resizes: tuple[Resize, ...]
    take_all: bool
    """The last call of `get_batch` asks for everything that is left."""
    doomed: bool
    """All replicas are killed in the end."""
    faults: tuple[Fault, ...]
    workers: int = 0
    """Env workers that share the slots; 0 runs them in the scheduler."""

    @property
    def batch_size(self) -> int:
        return self.group_size * self.groups

    @property
    def bound(self) -> int:
        """Largest staleness that may be trained."""
        return math.ceil(self.alpha)

    @property
    def time_limit(self) -> float:
        """Virtual seconds that suffice: all work in sequence at the lowest speed, and the deadlines of all faults and
        control calls."""
        turns = max(domain.turns for domain in self.domains)
        env = max(5 * domain.seconds + domain.close_seconds + 5 * domain.reward_seconds for domain in self.domains)
        turn = 8 * (5 * self.length + 1) * (self.step_seconds + 1e-3) + self.arrival_delay + env
        attempts = 2 * (self.steps + self.bound + 2) * self.batch_size + 100
        step = 2 * DEADLINES.control + 2 * DEADLINES.load + 2 * self.train_seconds + 5 * self.filter_seconds
        return attempts * turns * turn + self.steps * step + (len(self.faults) + 1) * DEADLINES.fault

    @property
    def tasks(self) -> int | None:
        """Groups until the tasks run out; None when they never do."""
        tasks = [domain.tasks for domain in self.domains]
        return None if None in tasks else sum(task for task in tasks if task is not None)

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        return _draw(seed, Random(seed))


class _BatchDraw(NamedTuple):
    """What a scenario trains, drawn before everything else."""

    group_size: int
    alpha: float
    odd_size: Size
    steps: int
    groups: int
    doomed: bool
    staleness: Staleness
    extra_groups: int
    filter: FilterKind
    filter_rate: float
    finite: bool
    """The tasks run out after the last step."""

    @property
    def tasks(self) -> int | None:
        """Tasks that suffice for all batches, the filtered groups included; None when they never run out."""
        if not self.finite:
            return None
        cut = self.steps * self.groups + (self.groups if self.odd_size in ("double", "twice") else 0)
        filtered = math.ceil(3 * self.filter_rate * cut)
        return cut + filtered + self.extra_groups * self.steps // 2 + 1 + 12 // self.group_size

    @classmethod
    def draw(cls, rng: Random) -> _BatchDraw:
        group_size = rng.randint(1, 8)
        alpha = rng.choice(ALPHAS)
        odd_size: Size = rng.choice(("same", "same", "same", "double", "twice", "halves"))
        steps, groups = rng.choice(_shapes(group_size, math.ceil(alpha), odd_size in ("double", "twice")))
        doomed = rng.random() < 0.03
        staleness: Staleness = "wait" if rng.random() < 0.8 else "drop"
        extra_groups = rng.choice((0, 0, 0, 0, 1, 2))
        filter_kind: FilterKind = rng.choice(("none", "none", "instant", "slow", "off_loop"))
        return cls(
            group_size=group_size,
            alpha=alpha,
            odd_size=odd_size,
            steps=steps + (VERSIONS_BEFORE_DOOM if doomed else 0),
            groups=groups,
            doomed=doomed,
            staleness=staleness,
            extra_groups=extra_groups,
            filter=filter_kind,
            filter_rate=0.0 if filter_kind == "none" else rng.choice((0.0, 0.1, 0.2)),
            finite=not doomed and staleness == "wait" and rng.random() < 0.8,
        )


def _draw(seed: int, rng: Random) -> Scenario:
    """Draw a scenario. The order of the draws is what a seed means: a new draw goes to the end, or uses `hash64`."""
    batches = _BatchDraw.draw(rng)
    group_size, groups, steps, alpha = batches.group_size, batches.groups, batches.steps, batches.alpha
    domains = _domains(rng, batches.tasks)
    replicas = rng.choice((1, 2, 2, 3, 3, 4, 6))
    protected = rng.randrange(replicas)
    slots = max(2, int(group_size * groups * rng.choice((0.3, 0.7, 1.0, 1.5, 2.5))))
    on_grid = rng.random() < 0.4
    faults = _faults(rng, replicas, protected, domains, doomed=batches.doomed)
    return Scenario(
        seed=seed,
        shuffle=rng.getrandbits(32) if rng.random() < 0.5 else None,
        replicas=replicas,
        protected=protected,
        balance_seconds=(0.0, 0.25, 1.0)[hash64(seed, 2) % 3],
        slice_tokens=(None, 0, 3, 20)[hash64(seed, 5) % 4],
        step_seconds=2.0**-5 if on_grid else rng.uniform(0.01, 0.1),
        load_cost=0.0 if on_grid else 1.0,
        kv_capacity=rng.choice((320, 640, 4096)),
        max_running=rng.choice((4, 8, 64)),
        length=rng.choice((4.0, 12.0, 30.0)),
        arrival_delay=rng.choice((0.0, 0.0, 0.01, 0.3)),
        load_seconds=rng.choice((0.0, 0.1, 0.5)),
        wake_seconds=rng.choice((0.0, 0.3)),
        keep_kv=rng.random() < 0.7,
        slots=slots,
        group_size=group_size,
        groups=groups,
        steps=steps,
        alpha=alpha,
        staleness=batches.staleness,
        extra_members=min(rng.choice((0, 0, 0, 0, 1, 2)), (group_size + 1) // 2),
        extra_after=rng.choice((0.0, 0.0, 0.1, 0.5)),
        extra_groups=batches.extra_groups,
        max_attempts=rng.choice((1, 2, 3)),
        filter=batches.filter,
        filter_rate=batches.filter_rate,
        filter_seconds=rng.choice((0.0, 0.25, 1.0)),
        domains=domains,
        play=rng.choice(("trajectory", "trajectory", "step")),
        suspend_mode=rng.choice(("abort", "abort", "drain", "keep")),
        order=_order(rng, seed, prefetch=alpha > 0 and batches.odd_size == "same"),
        repeated=rng.random() < 0.15,
        prefetch=1 + hash64(seed, 1) % max(1, math.ceil(alpha)),
        odd_step=rng.randrange(steps),
        odd_size=batches.odd_size,
        chunks=(1, 1, 1, 2, 4)[hash64(seed, 3) % 5],
        patience=rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.5)),
        train_seconds=rng.choice((0.0, 0.25, 0.5, 1.0, 4.0)),
        validation=_validation(rng) if rng.random() < 0.25 else None,
        resizes=_resizes(rng, replicas, protected),
        take_all=batches.finite and rng.random() < 0.5,
        doomed=batches.doomed,
        faults=faults,
        workers=(0, 0, 0, 1 + hash64(seed, 4) % 3)[hash64(seed, 3) % 4],
    )


def _faults(
    rng: Random, replicas: int, protected: int, domains: tuple[DomainSpec, ...], *, doomed: bool
) -> tuple[Fault, ...]:
    faults = draw_faults(
        rng,
        replicas=replicas,
        protected=protected,
        versions=MIN_VERSIONS,
        envs=MIN_TRAJECTORIES - 16,
        turns=min(domain.turns for domain in domains),
        rewards=any(domain.reward != "none" for domain in domains),
    )
    if doomed:
        faults += tuple(
            Fault(
                "kill", index, MIN_TRAJECTORIES, delay=rng.choice((0.0, rng.random() * 2)), version=VERSIONS_BEFORE_DOOM
            )
            for index in range(replicas)
        )
    return faults


def _order(rng: Random, seed: int, *, prefetch: bool) -> Order:
    order = rng.choice(ORDERS)
    return "prefetch" if prefetch and hash64(seed) % 6 == 0 else order


@lru_cache
def _shapes(group_size: int, bound: int, odd: bool) -> list[tuple[int, int]]:
    """Return pairs of steps and groups of a batch that train hardly more trajectories than a schedule needs."""
    return [
        (steps, groups)
        for steps in range(max(MIN_VERSIONS, bound + 1), 10)
        for groups in range(1, 20)
        if MIN_TRAJECTORIES <= (steps + odd) * groups * group_size < MIN_TRAJECTORIES + 12
    ]


def _domains(rng: Random, tasks: int | None) -> tuple[DomainSpec, ...]:
    count = rng.choice((1, 1, 2, 3))
    share = None if tasks is None else tasks // count + 1
    return tuple(_domain(rng, f"d{number}", share) for number in range(count))


def _domain(rng: Random, name: str, tasks: int | None) -> DomainSpec:
    return DomainSpec(
        name=name,
        weight=rng.choice((1.0, 1.0, 2.0, 0.5)),
        max_envs=rng.choice((None, None, None, 3, 8)),
        tasks=tasks,
        turns=rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4)),
        sync=rng.random() < 0.15,
        seconds=rng.choice((0.0, 0.1, 0.5, 1.0)),
        grid=rng.choice((0.0, 0.25, 0.5)),
        close_seconds=rng.choice((0.0, 0.0, 0.25)),
        reward=rng.choice(("none", "none", "none", "async", "sync")),
        reward_seconds=rng.choice((0.0, 0.25, 1.0)),
    )


def _validation(rng: Random) -> ValidationSpec:
    group_size = rng.choice((1, 1, 2))
    everything = rng.random() < 0.4
    domain = _domain(rng, "val", rng.randint(2, 6) if everything else None)
    return ValidationSpec(
        domain=domain,
        group_size=group_size,
        groups=None if everything else rng.randint(1, 4),
        every=rng.randint(1, 3),
        slots=rng.randint(1, 6),
        abrupt=rng.random() < 0.3,
    )


def _resizes(rng: Random, replicas: int, protected: int) -> tuple[Resize, ...]:
    movable = [index for index in range(replicas) if index != protected]
    if not movable or rng.random() < 0.6:
        return ()
    return tuple(
        Resize(
            after=rng.randrange(1, MIN_TRAJECTORIES),
            delay=rng.choice((0.0, rng.random())),
            devices=tuple(sorted(rng.sample(movable, rng.randint(1, len(movable))))),
            away=rng.choice((0.0, 0.5, 3.0)),
            skip_load=rng.random() < 0.3,
        )
        for _ in range(rng.choice((1, 1, 2)))
    )
