"""What a batch of episodes says in numbers, and some of them as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cadenza.observe.run import SampleRecord
from cadenza.rollout.model import Codec
from cadenza.rollout.records import Trajectory

RolloutMode = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class EpisodeStats:
    """Statistics of a batch of episodes, and the few trajectories that are written out."""

    count: int
    score: float
    success: float | None
    """Share of the episodes that the env calls a success; None where none of them is called anything."""
    judged: int
    """Episodes that are called something."""
    turns: float
    response_tokens: float
    tokens: int
    """Response tokens of all episodes."""
    oldest_versions: tuple[int, ...]
    """The oldest version in each of them that has a token."""
    shown: tuple[Trajectory, ...]
    """Those that are written out."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], shown: int) -> EpisodeStats:
        count = len(trajectories)
        successes = [success for t in trajectories if (success := success_of(t)) is not None]
        tokens = sum(t.response_tokens for t in trajectories)
        return cls(
            count=count,
            score=sum(t.score for t in trajectories) / count,
            success=sum(successes) / len(successes) if successes else None,
            judged=len(successes),
            turns=sum(len(t.turns) for t in trajectories) / count,
            response_tokens=tokens / count,
            tokens=tokens,
            oldest_versions=tuple(versions[0] for t in trajectories if (versions := t.versions) is not None),
            shown=tuple(trajectories[:shown]),
        )

    @classmethod
    def merge(cls, chunks: Sequence[EpisodeStats], shown: int) -> EpisodeStats:
        """The statistics of a batch that came in chunks."""
        if len(chunks) == 1:
            return chunks[0]
        count, judged = sum(chunk.count for chunk in chunks), sum(chunk.judged for chunk in chunks)
        tokens = sum(chunk.tokens for chunk in chunks)
        return cls(
            count=count,
            score=sum(chunk.score * chunk.count for chunk in chunks) / count,
            success=sum((chunk.success or 0.0) * chunk.judged for chunk in chunks) / judged if judged else None,
            judged=judged,
            turns=sum(chunk.turns * chunk.count for chunk in chunks) / count,
            response_tokens=tokens / count,
            tokens=tokens,
            oldest_versions=tuple(version for chunk in chunks for version in chunk.oldest_versions),
            shown=tuple(trajectory for chunk in chunks for trajectory in chunk.shown)[:shown],
        )

    def staleness(self, version: int) -> dict[str, float]:
        """How old the episodes are when this version learns from them."""
        ages = [version - oldest for oldest in self.oldest_versions]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}

    def metrics(self, mode: RolloutMode) -> dict[str, float]:
        found = {
            "score": self.score,
            "turns": self.turns,
            "response_tokens": self.response_tokens,
            "episodes": float(self.count),
        }
        if self.success is not None:
            found["success"] = self.success
        return {f"{mode}/{name}": value for name, value in found.items()}


def success_of(trajectory: Trajectory) -> bool | None:
    """What the env says of the episode; None when it says nothing."""
    success = (trajectory.info or {}).get("success")
    return None if success is None else bool(success)


def sample_of(trajectory: Trajectory, codec: Codec, *, step: int, mode: RolloutMode) -> SampleRecord:
    """An episode as text."""
    sample: SampleRecord = {
        "step": step,
        "mode": mode,
        "task": trajectory.task.id,
        "domain": trajectory.task.domain,
        "score": trajectory.score,
        "success": success_of(trajectory),
        "versions": trajectory.versions or (),
        "turns": [
            {"prompt": codec.decode(t.prompt), "response": codec.decode(t.response), "reward": t.reward}
            for t in trajectory.turns
        ],
    }
    if trajectory.final is not None:
        sample["final"] = trajectory.final
    return sample
