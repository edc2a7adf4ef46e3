"""The episodes of a workload: the trace of one seed.

Invariant: an episode is a pure function of (workload, seed, group number, member). It depends neither on the strategy
nor on the order of the calls, so every strategy replays the same trace, and a member that is started for redundancy has
an episode of its own. Random numbers are drawn for blocks of groups at once, each (block, member) from its own stream
of a counter-based generator.

    trace_of(workload, seed) --> episode(group, member): lengths, observations, latencies, perhaps a failure
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.simulation.comparison.workloads import NEVER, Numbers, RewardLatency, TraceEpisode, Workload

BLOCK = 128
"""Groups whose numbers are drawn together."""
_GROUP, _MEMBER = 0, 1


class TraceLike(Protocol):
    """A source of episodes."""

    def episode(self, group: int, member: int) -> TraceEpisode: ...

    def mean_response(self, first: int, last: int) -> float:
        """Return the mean tokens that the members of the groups first..last (exclusive) write."""
        ...


def trace_of(workload: Workload, seed: int) -> TraceLike:
    """Return the trace of a seed: recorded groups if the workload has them, else drawn ones."""
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
        """Return a stream of its own for (kind, block, member): each has 2^64 values of the counter."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, kind, member, block]))


class _GroupDraws:
    """Random numbers that the members of a group share, for a block of groups."""

    def __init__(self, stream: np.random.Generator) -> None:
        self.z = stream.standard_normal(BLOCK)
        self.kind = stream.random(BLOCK)
        """[BLOCK] uniform number that decides which kind of task the group is."""


class _MemberBlock(Protocol):
    """The episodes of one member, for a block of groups."""

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
    """Episodes of one turn."""

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
            lengths=tuple(self._actions[row, :turns].tolist()),
            observations=tuple(self._observations[row, :turns].tolist()),
            steps=tuple(self._steps[row, :turns].tolist()),
            reset=self._reset[row],
            reward=self._rewards[row],
            fails_at=fails_at if fails_at < turns else NEVER,
        )


class RecordedTrace:
    """The groups of a user's own trace, repeated, each time in another order."""

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
