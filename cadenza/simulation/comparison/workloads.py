"""What a simulated run has to generate: the workloads W1 to W6, and the records that describe a workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cadenza.simulation.virtual_cluster.cost import H100_QWEN3_8B, H100_QWEN25_7B, CostModel

TRAIN_SECONDS_PER_TOKEN = 166e-6
"""Seconds that one H100 trains on a token, for a model of 8B parameters."""
SYNC_SECONDS = 2.0
"""Seconds for which a weight update keeps a replica from generating."""
SWITCH_SECONDS = 10.0
"""Seconds that a GPU is idle while it changes from generating to training, or back; good systems need 2 to 5."""
MAX_GPUS = 16_384
NEVER = -1
"""`fails_at` of an env that does not fail."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(log median, sigma^2))."""

    median: float
    sigma: float

    def at(self, z: Numbers) -> Numbers:
        """Map standard normals to values of the distribution."""
        return self.median * np.exp(self.sigma * z)


@dataclass(frozen=True, slots=True)
class SingleTurnSpec:
    """Lengths of one-turn answers: log-normal, correlated in a group, with a tail of runaways."""

    body: LogNormal
    longest: int
    """Tokens at which an answer is cut."""
    runaways: float = 0.0
    """Share of answers that draw U(0.25..1) of the longest, independent of their group."""
    hard_groups: float = 0.0
    """Share of groups half of whose members draw U(0.25..1.2) of the longest."""


@dataclass(frozen=True, slots=True)
class MultiTurnSpec:
    """Episodes of several turns."""

    low: int
    """Fewest turns; the turns of most groups are U{low..high}."""
    high: int
    """Most turns of these groups."""
    long_share: float = 0.0
    """Share of groups whose turns are log-normal instead, and correlated in the group."""
    long_turns: LogNormal = LogNormal(1.0, 0.0)
    cap: int = 1
    """Most turns of a long group."""
    action: LogNormal = LogNormal(200.0, 0.0)
    longest_action: int = 4096
    observation: tuple[int, int] = (400, 400)
    """Tokens of each observation, the first prompt among them: U{low..high}."""
    step_mean: float = 0.0
    """Seconds of a step of the env are N(step_mean, step_sigma), clipped at 0, unless `step` is given."""
    step_sigma: float = 0.0
    step: LogNormal | None = None
    """Seconds of a step of the env, log-normal."""
    reset: LogNormal | None = None
    slow_resets: float = 0.0
    """Share of resets that take Pareto(1) times 10 s, up to `slowest_reset`."""
    slowest_reset: float = 600.0
    fail_stop: float = 0.0
    """Chance per turn that the env fails; the next attempt at the member does not fail."""
    fail_slow: float = 0.0
    """Chance per episode that its env takes `slow_factor` times as long for everything."""
    slow_factor: float = 8.0

    @property
    def most(self) -> int:
        """Turns of the longest possible episode."""
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
    """One member of a group, turn by turn."""

    lengths: tuple[int, ...]
    """Tokens that the model writes in each turn."""
    observations: tuple[int, ...]
    """Tokens that the model is shown before each of these; the first is the prompt that the group shares."""
    steps: tuple[float, ...] = (0.0,)
    """Seconds of the env step after each answer."""
    reset: float = 0.0
    reward: float = 0.0
    """Seconds until the reward is known, after the last step."""
    fails_at: int = NEVER
    """Turn after which the env of the first attempt fails."""
    fresh: bool = False
    """Every turn begins with an empty context."""

    @property
    def response(self) -> int:
        """Tokens that the model writes."""
        return sum(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of the trained row: shown and written."""
        return sum(self.lengths) + sum(self.observations)

    @property
    def context(self) -> int:
        """Tokens of the longest context."""
        turns = zip(self.observations, self.lengths, strict=True)
        return max(shown + written for shown, written in turns) if self.fresh else self.tokens

    @property
    def env_seconds(self) -> float:
        return self.reset + sum(self.steps)


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of run: its episodes, its batches and its GPUs."""

    name: str
    like: str
    """The published workload that it resembles, for the title of a table."""
    cost: CostModel
    gpus: int
    """All GPUs, those that train included."""
    groups: int
    """Groups of a batch."""
    group_size: int
    prompt: int = 512
    responses: SingleTurnSpec | None = None
    turns: MultiTurnSpec | None = None
    rewards: RewardLatency | None = None
    rho: float = 0.6
    """Correlation of log lengths in a group."""
    train_seconds: float = TRAIN_SECONDS_PER_TOKEN
    """Seconds that one GPU trains on a token."""
    sync_seconds: float = SYNC_SECONDS
    """Seconds for which a weight update keeps a replica from generating."""
    switch_seconds: float = SWITCH_SECONDS
    """Seconds that a GPU needs to change from generating to training, or back."""
    recorded: tuple[tuple[TraceEpisode, ...], ...] = ()
    """Groups of a user's own trace, repeated in an order that the seed shuffles."""

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
        """Tokens of the longest possible context; None where it depends on drawn observations."""
        if self.responses is not None:
            return self.prompt + self.responses.longest
        return max((episode.context for group in self.recorded for episode in group), default=None)

    def scaled(self, gpus: int) -> Workload:
        """Return the workload with as much work per GPU on another number of GPUs."""
        groups = self.groups * gpus / self.gpus
        if gpus < 1 or groups != int(groups) or not groups:
            raise ValueError(f"{self.name} has {self.groups} groups on {self.gpus} GPUs: {gpus} GPUs give {groups:g}")
        return replace(self, gpus=gpus, groups=int(groups))


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
    """Return W4 with this standard deviation of the env's seconds."""
    if sigma < 0:
        raise ValueError(f"sigma must be >= 0, got {sigma}")
    assert _W4.turns is not None
    return replace(_W4, name=f"W4:{sigma:g}", turns=replace(_W4.turns, step_sigma=sigma))


def find_workload(name: str) -> Workload:
    """Return the workload of a name: W1 to W6, 'W4:3' for another sigma, 'W2x1024' on 1024 GPUs."""
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
