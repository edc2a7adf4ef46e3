"""Finished trajectories on their way: the tokens in one parcel of flat arrays, and a small record of each.

Invariant: the tokens are copied once, into the parcel, where they were made. The parcel stays there until a batch, a
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
    """Its place in the parcel that came with it."""
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
    """What is in a parcel."""

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
        np.concatenate([part for t in turns for part in (t.prompt, t.response)], dtype=np.int32),
        np.concatenate([t.logprobs for t in turns], dtype=np.float32),
        np.array(counts, np.int64),
        np.array([(t.asked, t.answered, t.reward) for t in turns], np.float64),
        np.array([span for t in turns for span in t.spans], np.int64).reshape(-1, 2),
        _offsets([len(trajectory.turns) for trajectory in trajectories]),
    )


class TokenBundle:
    """The turns of some trajectories, wherever they are."""

    __slots__ = ("_contents", "_starts", "handle", "later", "peer")

    def __init__(self, peer: WorkerHandle, handle: Any, later: float) -> None:
        self.peer = peer
        self.handle = handle
        self.later = later
        """What the clock here is ahead of the one there."""
        self._contents: BundleArrays | None = None
        self._starts: tuple[list[int], list[int], list[int]]

    @property
    def is_open(self) -> bool:
        return self._contents is not None

    def open(self, contents: BundleArrays) -> None:
        """It has come."""
        counts = contents.counts
        self._contents = contents
        self._starts = (
            _offsets(counts[:, :2].ravel()).tolist(),
            _offsets(counts[:, 1]).tolist(),
            _offsets(counts[:, 2]).tolist(),
        )
        self.handle = None

    def turns(self, row: int) -> list[Turn]:
        """Of one trajectory; the arrays are views of the parcel."""
        assert self._contents is not None
        tokens, logprobs, counts, times, spans, offsets = self._contents
        parts, responses, pieces = self._starts
        found = []
        for turn in range(int(offsets[row]), int(offsets[row + 1])):
            begin, middle, end = parts[2 * turn : 2 * turn + 3]
            asked, answered, reward = times[turn].tolist()
            written = tuple(Span(*span) for span in spans[pieces[turn] : pieces[turn + 1]].tolist())
            finish, fresh = _FINISH[int(counts[turn, 3])], bool(counts[turn, 4])
            found.append(
                Turn(
                    tokens[begin:middle],
                    tokens[middle:end],
                    logprobs[responses[turn] : responses[turn + 1]],
                    written,
                    finish,
                    fresh,
                    asked + self.later,
                    answered + self.later,
                    reward,
                )
            )
        return found


@dataclass(slots=True)
class LazyTrajectory(Trajectory):
    """A trajectory whose turns are in a parcel until they are wanted."""

    parcel: TokenBundle | None = None
    row: int = 0
    written: tuple[int, int] | None = None
    """Its versions."""

    @property
    def versions(self) -> tuple[int, int] | None:
        return self.written


async def load(trajectories: Iterable[Trajectory]) -> None:
    """Have the turns of these trajectories here."""
    stored = _closed(trajectories)
    for peer, parcels in _by_peer(stored):
        for parcel, contents in zip(parcels, await peer.fetch([p.handle for p in parcels]), strict=True):
            parcel.open(contents)
    _unpack(stored)


def load_now(trajectories: Iterable[Trajectory]) -> None:
    """The same for whoever cannot wait."""
    stored = _closed(trajectories)
    for peer, parcels in _by_peer(stored):
        for parcel, contents in zip(parcels, peer.fetch_blocking([p.handle for p in parcels]), strict=True):
            parcel.open(contents)
    _unpack(stored)


def _closed(trajectories: Iterable[Trajectory]) -> list[LazyTrajectory]:
    return [t for t in trajectories if isinstance(t, LazyTrajectory) and t.parcel is not None]


def _by_peer(stored: Sequence[LazyTrajectory]) -> list[tuple[WorkerHandle, list[TokenBundle]]]:
    """What has to be fetched. One peer fetches for all of its kind."""
    parcels = {id(t.parcel): t.parcel for t in stored if t.parcel is not None and not t.parcel.is_open}
    kinds: dict[type[WorkerHandle], list[TokenBundle]] = {}
    for parcel in parcels.values():
        kinds.setdefault(type(parcel.peer), []).append(parcel)
    return [(found[0].peer, found) for found in kinds.values()]


def _unpack(stored: Sequence[LazyTrajectory]) -> None:
    for trajectory in stored:
        if trajectory.parcel is not None:
            trajectory.turns = trajectory.parcel.turns(trajectory.row)
            trajectory.parcel = None


def _offsets(lengths: Any) -> Any:
    return np.concatenate(([0], np.cumsum(lengths)), dtype=np.int64)
