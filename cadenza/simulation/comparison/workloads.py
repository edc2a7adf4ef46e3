"""What a simulated run has to generate: the workloads W1 to W6, and the trace of one seed.

Invariant: an episode is a pure function of (workload, seed, group number, member). It depends neither on the strategy
nor on who asked before, so every strategy replays the same trace; a member that is drawn for redundancy has its own
episode like all others. Random numbers are drawn for blocks of groups at once, each (block, member) from its own
stream of a counter-based generator.

    Workload --Trace(workload, seed)--> episode(group, member): lengths, observations, latencies, a failure perhaps
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.simulation.virtual_cluster.cost import H100_QWEN3_8B, H100_QWEN25_7B, CostModel

TRAIN_SECONDS_PER_TOKEN = 166e-6
"""Of one H100, for a model of 8B parameters."""
SYNC_SECONDS = 2.0
"""For how long a weight update keeps a replica from generating."""
SWITCH_SECONDS = 10.0
"""For how long a GPU does nothing while it changes from generating to training, or back; 2 to 5 are good ones."""
MAX_GPUS = 16_384
NEVER = -1
BLOCK = 128
"""Groups whose numbers are drawn together."""
_GROUP, _MEMBER = 0, 1

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(log median, sigma^2))."""

    median: float
    sigma: float

    def at(self, z: Numbers) -> Numbers:
        """The values of standard normals."""
        return self.median * np.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class SingleTurnSpec:
    """Lengths of one-turn answers: log-normal, correlated in a group, with a tail of runaways."""

    body: LogNormal
    longest: int
    """Where an answer is cut."""
    runaways: float = 0.0
    """Share of answers that draw U(0.25..1) of the longest, whatever their group."""
    hard_groups: float = 0.0
    """Share of groups half of whose members draw U(0.25..1.2) of the longest."""


@dataclass(frozen=True, slots=True)
class MultiTurnSpec:
    """Episodes of several turns."""

    low: int
    high: int
    """Turns are U{low..high} ..."""
    long_share: float = 0.0
    long_turns: LogNormal = LogNormal(1.0, 0.0)
    cap: int = 1
    """... or, in this share of groups, log-normal up to the cap and correlated in the group."""
    action: LogNormal = LogNormal(200.0, 0.0)
    longest_action: int = 4096
    observation: tuple[int, int] = (400, 400)
    """Tokens of each observation, the first prompt among them: U{low..high}."""
    step_mean: float = 0.0
    step_sigma: float = 0.0
    """Seconds of a step of the env: N(mean, sigma) clipped at 0 ..."""
    step: LogNormal | None = None
    """... or log-normal."""
    reset: LogNormal | None = None
    slow_resets: float = 0.0
    """Share of resets that take Pareto(1) times 10 s, up to `slowest_reset`."""
    slowest_reset: float = 600.0
    fail_stop: float = 0.0
    """Chance per turn that the env is gone; the next attempt at the member does not fail."""
    fail_slow: float = 0.0
    """Chance per episode that everything its env does takes `slow_factor` times as long."""
    slow_factor: float = 8.0

    @property
    def most(self) -> int:
        """The longest episode there can be, in turns."""
        return max(self.high, self.cap)


@dataclass(frozen=True, slots=True)
class RewardLatency:
    """Seconds until a reward is known."""

    body: LogNormal
    timeouts: float
    """Share of rewards that hit the time-out."""
    timeout: float


@dataclass(frozen=True, slots=True)
class TraceEpisode:
    """What one member of a group does, turn by turn."""

    lengths: tuple[int, ...]
    """Tokens that the model writes."""
    observations: tuple[int, ...]
    """Tokens it is shown before each of these answers; the first is the prompt that the group shares."""
    steps: tuple[float, ...] = (0.0,)
    """Seconds of the env step after each answer."""
    reset: float = 0.0
    reward: float = 0.0
    """Seconds until the reward is known, after the last step."""
    fails_at: int = NEVER
    """The turn after which the env of the first attempt is gone."""
    fresh: bool = False
    """Every turn begins a context of its own."""

    @property
    def response(self) -> int:
        """Tokens written."""
        return sum(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of the row that is trained."""
        return sum(self.lengths) + sum(self.observations)

    @property
    def context(self) -> int:
        """Tokens of its longest context."""
        turns = zip(self.observations, self.lengths, strict=True)
        return max(shown + written for shown, written in turns) if self.fresh else self.tokens

    @property
    def env_seconds(self) -> float:
        return self.reset + sum(self.steps)


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of run: what is generated, in which batches, on which GPUs."""

    name: str
    like: str
    """What it resembles."""
    cost: CostModel
    gpus: int
    """All of them, those that train among them."""
    groups: int
    """Of a batch."""
    group_size: int
    prompt: int = 512
    responses: SingleTurnSpec | None = None
    turns: MultiTurnSpec | None = None
    rewards: RewardLatency | None = None
    rho: float = 0.6
    """Correlation of log lengths in a group."""
    train_seconds: float = TRAIN_SECONDS_PER_TOKEN
    sync_seconds: float = SYNC_SECONDS
    switch_seconds: float = SWITCH_SECONDS
    """A GPU changes from generating to training, or back."""
    recorded: tuple[tuple[TraceEpisode, ...], ...] = ()
    """Groups of a user's own trace, replayed over and over, in an order that the seed shuffles."""

    def __post_init__(self) -> None:
        sources = [self.responses is not None, self.turns is not None, bool(self.recorded)]
        if sum(sources) != 1:
            raise ValueError(f"workload {self.name} needs responses, turns or a recorded trace, exactly one of them")
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho must be from 0 to 1, got {self.rho}")
        if min(self.gpus, self.groups, self.group_size) < 1:
            raise ValueError(
                f"gpus, groups and group_size must be >= 1, got {self.gpus}, {self.groups} and {self.group_size}"
            )
        if self.gpus > MAX_GPUS:
            raise ValueError(f"at most {MAX_GPUS} GPUs can be simulated, got {self.gpus}")
        for name in ("train_seconds", "sync_seconds", "switch_seconds"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, got {seconds}")

    @property
    def batch(self) -> int:
        """Trajectories of a batch."""
        return self.groups * self.group_size

    @property
    def longest_context(self) -> int | None:
        """Tokens that the longest context may have; None where it depends on what envs say."""
        if self.responses is not None:
            return self.prompt + self.responses.longest
        return max((episode.context for group in self.recorded for episode in group), default=None)

    def scaled(self, gpus: int) -> Workload:
        """The same work per GPU on more or fewer of them."""
        groups = self.groups * gpus / self.gpus
        if gpus < 1 or groups != int(groups) or not groups:
            raise ValueError(f"{self.name} has {self.groups} groups on {self.gpus} GPUs: {gpus} GPUs give {groups:g}")
        return replace(self, gpus=gpus, groups=int(groups))


class TraceLike(Protocol):
    """Where episodes come from."""

    def episode(self, group: int, member: int) -> TraceEpisode: ...

    def mean_response(self, first: int, last: int) -> float:
        """Mean tokens that the members of the groups first..last (exclusive) write."""
        ...


def trace_of(workload: Workload, seed: int) -> TraceLike:
    """The trace of a seed."""
    return RecordedTrace(workload, seed) if workload.recorded else Trace(workload, seed)


class Trace:
    """Episodes drawn from the distributions of a workload."""

    def __init__(self, workload: Workload, seed: int) -> None:
        if workload.recorded:
            raise ValueError(f"workload {workload.name} is recorded: use RecordedTrace")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.workload = workload
        self.seed = seed
        self._member_blocks: dict[tuple[int, int], _MemberBlock] = {}
        self._shared: dict[int, _GroupDraws] = {}

    def episode(self, group: int, member: int) -> TraceEpisode:
        block, row = divmod(group, BLOCK)
        return self._member_block(block, member).episode(row)

    def mean_response(self, first: int, last: int) -> float:
        total = 0
        for block in range(first // BLOCK, (last - 1) // BLOCK + 1):
            rows = slice(max(first - block * BLOCK, 0), last - block * BLOCK)
            for member in range(self.workload.group_size):
                total += int(self._member_block(block, member).responses[rows].sum())
        return total / ((last - first) * self.workload.group_size)

    def _member_block(self, block: int, member: int) -> _MemberBlock:
        member_block = self._member_blocks.get((block, member))
        if member_block is None:
            shared = self._shared.get(block)
            if shared is None:
                shared = self._shared[block] = _GroupDraws(self._stream(_GROUP, block, 0))
            stream = self._stream(_MEMBER, block, member)
            block_type = _SingleTurnBlock if self.workload.responses is not None else _MultiTurnBlock
            member_block = self._member_blocks[block, member] = block_type(self.workload, shared, member, stream)
        return member_block

    def _stream(self, kind: int, block: int, member: int) -> np.random.Generator:
        """Random numbers that nobody else draws: the counter has 2^64 places for each of them."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, kind, member, block]))


class _GroupDraws:
    """What the members of a group have in common, for a block of groups."""

    def __init__(self, stream: np.random.Generator) -> None:
        self.z = stream.standard_normal(BLOCK)
        self.kind = stream.random(BLOCK)
        """Which kind of task it is."""


class _MemberBlock(Protocol):
    """One member of a block of groups."""

    responses: NDArray[Any]
    """[BLOCK] tokens written."""

    def __init__(self, workload: Workload, shared: _GroupDraws, member: int, stream: np.random.Generator) -> None: ...

    def episode(self, row: int) -> TraceEpisode: ...


def _correlated(rho: float, shared: Numbers, own: Numbers) -> Numbers:
    return math.sqrt(rho) * shared + math.sqrt(1 - rho) * own


def _reward_seconds(rewards: RewardLatency | None, stream: np.random.Generator) -> list[float]:
    if rewards is None:
        return [0.0] * BLOCK
    seconds = np.minimum(rewards.body.at(stream.standard_normal(BLOCK)), rewards.timeout)
    late = stream.random(BLOCK) < rewards.timeouts
    return [rewards.timeout if is_late else float(own) for is_late, own in zip(late, seconds, strict=True)]


class _SingleTurnBlock:
    """Episodes of one answer."""

    def __init__(self, workload: Workload, shared: _GroupDraws, member: int, stream: np.random.Generator) -> None:
        spec = workload.responses
        assert spec is not None
        lengths = spec.body.at(_correlated(workload.rho, shared.z, stream.standard_normal(BLOCK)))
        chance, share = stream.random(BLOCK), stream.random(BLOCK)
        lengths = np.where(chance < spec.runaways, (0.25 + 0.75 * share) * spec.longest, lengths)
        if spec.hard_groups and member % 2:
            lengths = np.where(shared.kind < spec.hard_groups, (0.25 + 0.95 * share) * spec.longest, lengths)
        self.responses: NDArray[Any] = np.clip(lengths.round(), 1, spec.longest).astype(np.int64)
        self._lengths = self.responses.tolist()
        self._rewards = _reward_seconds(workload.rewards, stream)
        self._observations = (workload.prompt,)

    def episode(self, row: int) -> TraceEpisode:
        return TraceEpisode((self._lengths[row],), self._observations, reward=self._rewards[row])


class _MultiTurnBlock:
    """Episodes of several turns."""

    def __init__(self, workload: Workload, shared: _GroupDraws, member: int, stream: np.random.Generator) -> None:
        spec = workload.turns
        assert spec is not None
        shape = (BLOCK, spec.most)
        turns = stream.integers(spec.low, spec.high, BLOCK, endpoint=True)
        own = stream.standard_normal(BLOCK)
        long = np.clip(spec.long_turns.at(_correlated(workload.rho, shared.z, own)).round(), 1, spec.cap)
        self._turns = np.where(shared.kind < spec.long_share, long, turns).astype(np.int64)
        actions = np.clip(spec.action.at(stream.standard_normal(shape)).round(), 1, spec.longest_action)
        self._actions = actions.astype(np.int32)
        low, high = spec.observation
        self._observations = stream.integers(low, high, shape, np.int32, endpoint=True)
        if spec.step is None:
            steps = np.maximum(spec.step_mean + spec.step_sigma * stream.standard_normal(shape), 0.0)
        else:
            steps = spec.step.at(stream.standard_normal(shape))
        reset = np.zeros(BLOCK) if spec.reset is None else spec.reset.at(stream.standard_normal(BLOCK))
        pareto = np.minimum(10.0 / (1.0 - stream.random(BLOCK)), spec.slowest_reset)
        reset = np.where(stream.random(BLOCK) < spec.slow_resets, pareto, reset)
        slow = np.where(stream.random(BLOCK) < spec.fail_slow, spec.slow_factor, 1.0)
        self._steps = steps * slow[:, None]
        self._reset = (reset * slow).tolist()
        gone = stream.random(shape) < spec.fail_stop
        self._fails_at = np.where(gone.any(axis=1), gone.argmax(axis=1), NEVER).tolist()
        self._rewards = _reward_seconds(workload.rewards, stream)
        written = np.arange(spec.most) < self._turns[:, None]
        self.responses: NDArray[Any] = (self._actions * written).sum(axis=1)

    def episode(self, row: int) -> TraceEpisode:
        turns = int(self._turns[row])
        fails_at = self._fails_at[row]
        return TraceEpisode(
            tuple(self._actions[row, :turns].tolist()),
            tuple(self._observations[row, :turns].tolist()),
            tuple(self._steps[row, :turns].tolist()),
            self._reset[row],
            self._rewards[row],
            fails_at if fails_at < turns else NEVER,
        )


class RecordedTrace:
    """The groups of a user's own trace, again and again, each time in another order."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.workload = workload
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    @cached_property
    def _responses(self) -> list[float]:
        size = self.workload.group_size
        return [sum(group[m % len(group)].response for m in range(size)) / size for group in self.workload.recorded]

    def episode(self, group: int, member: int) -> TraceEpisode:
        recorded = self.workload.recorded[self._index(group)]
        return recorded[member % len(recorded)]

    def mean_response(self, first: int, last: int) -> float:
        return sum(self._responses[self._index(group)] for group in range(first, last)) / (last - first)

    def _index(self, group: int) -> int:
        lap, index = divmod(group, len(self.workload.recorded))
        if lap not in self._orders:
            stream = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, _GROUP, 0, lap]))
            self._orders[lap] = stream.permutation(len(self.workload.recorded)).tolist()
        return self._orders[lap][index]


_W1 = Workload(
    name="W1",
    like="short answers with a heavy tail (RollPacker)",
    cost=H100_QWEN25_7B,
    gpus=32,
    groups=128,
    group_size=8,
    responses=SingleTurnSpec(LogNormal(570, 0.73), longest=16_384, runaways=0.01),
)
_W4 = Workload(
    name="W4",
    like="agentic, Gaussian env (ROLL Flash, RollArt)",
    cost=H100_QWEN3_8B,
    gpus=32,
    groups=64,
    group_size=8,
    turns=MultiTurnSpec(25, 30, step_mean=10.0, step_sigma=10.0),
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        _W1,
        Workload(
            name="W2",
            like="thinking (ROLL Flash, AReaL)",
            cost=H100_QWEN3_8B,
            gpus=32,
            groups=64,
            group_size=16,
            responses=SingleTurnSpec(LogNormal(9000, 0.75), longest=32_768),
        ),
        Workload(
            name="W3",
            like="bound by the KV cache (Seer)",
            cost=CostModel(a=12e-3, b=6e-6, c=90e-9, p=40e-6, kv_capacity=400_000),
            gpus=16,
            groups=300,
            group_size=16,
            prompt=1024,
            responses=SingleTurnSpec(LogNormal(5600, 0.9), longest=40_960, hard_groups=0.02),
        ),
        _W4,
        Workload(
            name="W5",
            like="agentic, production (RollArt)",
            cost=H100_QWEN3_8B,
            gpus=32,
            groups=128,
            group_size=8,
            turns=MultiTurnSpec(
                1,
                4,
                long_share=0.5,
                long_turns=LogNormal(18, 0.8),
                cap=100,
                action=LogNormal(120, 1.0),
                observation=(300, 2000),
                step=LogNormal(1.5, 1.0),
                reset=LogNormal(8.0, 0.9),
                slow_resets=0.005,
                fail_stop=0.001,
                fail_slow=0.005,
            ),
        ),
        replace(
            _W1,
            name="W6",
            like="W1 with slow rewards (RollPacker)",
            rewards=RewardLatency(LogNormal(0.5, 0.8), 0.05, 30.0),
        ),
    )
}


def w4(sigma: float) -> Workload:
    """W4 with this standard deviation of the env's seconds."""
    if sigma < 0:
        raise ValueError(f"sigma must be >= 0, got {sigma}")
    assert _W4.turns is not None
    return replace(_W4, name=f"W4:{sigma:g}", turns=replace(_W4.turns, step_sigma=sigma))


def find_workload(name: str) -> Workload:
    """The workload that a name means: W1 to W6, 'W4:3' for another sigma, 'W2x1024' on so many GPUs."""
    base, _, sigma = name.partition(":")
    base, _, gpus = base.partition("x")
    known = WORKLOADS.get(base.upper())
    try:
        if known is None:
            raise ValueError(f"workload '{name}' is not known")
        if sigma:
            if known.name != "W4":
                raise ValueError(f"only W4 has a sigma, got '{name}'")
            known = w4(float(sigma))
        return replace(known.scaled(int(gpus)), name=name) if gpus else known
    except ValueError as error:
        raise ValueError(
            f"{error}; take one of {', '.join(WORKLOADS)}, 'W4:3', 'W2x64', a trace file or a run"
        ) from None
