"""Finished trajectories on their way: the tokens in one bundle of flat arrays, and a small record of each.

Invariant: the tokens are copied once, into the bundle, where they were made. The bundle stays there until a batch, a
filter or a checkpoint wants the turns; the scheduler goes by the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.inference.replica import Finish, Span
from cadenza.rollout.records import Trajectory, Turn

_FINISH = tuple(Finish)
_NUMBER = {finish: number for number, finish in enumerate(_FINISH)}


class TrajectoryRecord(NamedTuple):
    """A finished episode without its tokens."""

    id: int
    row: int
    """Its row in the bundle that came with it."""
    score: float
    terminated: bool
    truncated: bool
    info: dict[str, object] | None
    final: str | None
    started: float
    ended: float
    """Times are of the clock where it ran."""
    versions: tuple[int, int] | None


class BundleArrays(NamedTuple):
    """The flat arrays of a `TokenBundle`."""

    tokens: Any
    """Prompt and response of every turn, int32."""
    logprobs: Any
    """Of the responses, float32."""
    counts: Any
    """[turns, 5]: length of the prompt, length of the response, spans, finish reason, fresh."""
    times: Any
    """[turns, 3]: asked, answered, reward."""
    spans: Any
    """[spans, 2]: version, length."""
    turns: Any
    """[trajectories + 1]: where the turns of each begin."""


def pack(trajectories: Sequence[Trajectory]) -> BundleArrays:
    """The turns of these trajectories, flat."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    counts = [(len(t.prompt), len(t.response), len(t.spans), _NUMBER[t.finish], t.fresh) for t in turns]
    return BundleArrays(
        np.concatenate([tokens for t in turns for tokens in (t.prompt, t.response)], dtype=np.int32),
        np.concatenate([t.logprobs for t in turns], dtype=np.float32),
        np.array(counts, np.int64),
        np.array([(t.asked, t.answered, t.reward) for t in turns], np.float64),
        np.array([span for t in turns for span in t.spans], np.int64).reshape(-1, 2),
        _offsets([len(trajectory.turns) for trajectory in trajectories]),
    )


class TokenBundle:
    """The tokens of some trajectories, in the process that made them until they are fetched."""

    __slots__ = ("_arrays", "_starts", "clock_offset", "handle", "worker")

    def __init__(self, worker: WorkerHandle, handle: Any, clock_offset: float) -> None:
        self.worker = worker
        self.handle = handle
        self.clock_offset = clock_offset
        """What the clock here is ahead of the one there."""
        self._arrays: BundleArrays | None = None
        self._starts: tuple[list[int], list[int], list[int]]

    @property
    def is_loaded(self) -> bool:
        return self._arrays is not None

    def receive(self, arrays: BundleArrays) -> None:
        """Its arrays have come."""
        counts = arrays.counts
        self._arrays = arrays
        self._starts = (
            _offsets(counts[:, :2].ravel()).tolist(),
            _offsets(counts[:, 1]).tolist(),
            _offsets(counts[:, 2]).tolist(),
        )
        self.handle = None

    def turns(self, row: int) -> list[Turn]:
        """Of one trajectory; the arrays are views of the bundle."""
        assert self._arrays is not None
        tokens, logprobs, counts, times, spans, offsets = self._arrays
        token_starts, logprob_starts, span_starts = self._starts
        found = []
        for turn in range(int(offsets[row]), int(offsets[row + 1])):
            begin, middle, end = token_starts[2 * turn : 2 * turn + 3]
            asked, answered, reward = times[turn].tolist()
            spans_of_turn = tuple(Span(*span) for span in spans[span_starts[turn] : span_starts[turn + 1]].tolist())
            finish, fresh = _FINISH[int(counts[turn, 3])], bool(counts[turn, 4])
            found.append(
                Turn(
                    tokens[begin:middle],
                    tokens[middle:end],
                    logprobs[logprob_starts[turn] : logprob_starts[turn + 1]],
                    spans_of_turn,
                    finish,
                    fresh,
                    asked + self.clock_offset,
                    answered + self.clock_offset,
                    reward,
                )
            )
        return found


@dataclass(slots=True)
class LazyTrajectory(Trajectory):
    """A trajectory whose turns are in a bundle until they are wanted."""

    bundle: TokenBundle | None = None
    row: int = 0
    version_range: tuple[int, int] | None = None
    """Its versions."""

    @property
    def versions(self) -> tuple[int, int] | None:
        return self.version_range


async def load(trajectories: Iterable[Trajectory]) -> None:
    """Have the turns of these trajectories here."""
    lazy = _not_loaded(trajectories)
    for worker, bundles in _by_worker(lazy):
        for bundle, arrays in zip(bundles, await worker.fetch([p.handle for p in bundles]), strict=True):
            bundle.receive(arrays)
    _unpack(lazy)


def load_now(trajectories: Iterable[Trajectory]) -> None:
    """`load` for callers outside a coroutine: blocks until the tokens are here."""
    lazy = _not_loaded(trajectories)
    for worker, bundles in _by_worker(lazy):
        for bundle, arrays in zip(bundles, worker.fetch_blocking([p.handle for p in bundles]), strict=True):
            bundle.receive(arrays)
    _unpack(lazy)


def _not_loaded(trajectories: Iterable[Trajectory]) -> list[LazyTrajectory]:
    return [t for t in trajectories if isinstance(t, LazyTrajectory) and t.bundle is not None]


def _by_worker(lazy: Sequence[LazyTrajectory]) -> list[tuple[WorkerHandle, list[TokenBundle]]]:
    """What has to be fetched. One worker fetches for all of its kind."""
    bundles = {id(t.bundle): t.bundle for t in lazy if t.bundle is not None and not t.bundle.is_loaded}
    kinds: dict[type[WorkerHandle], list[TokenBundle]] = {}
    for bundle in bundles.values():
        kinds.setdefault(type(bundle.worker), []).append(bundle)
    return [(found[0].worker, found) for found in kinds.values()]


def _unpack(lazy: Sequence[LazyTrajectory]) -> None:
    for trajectory in lazy:
        if trajectory.bundle is not None:
            trajectory.turns = trajectory.bundle.turns(trajectory.row)
            trajectory.bundle = None


def _offsets(lengths: Any) -> Any:
    return np.concatenate(([0], np.cumsum(lengths)), dtype=np.int64)
