"""What a batch of episodes says in numbers, and some of them as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    judged: int
    """Episodes of which an env or a reward says whether they are a success."""
    successes: int
    turns: float
    response_tokens: float
    tokens: int
    """Response tokens of all episodes."""
    oldest_versions: tuple[int, ...]
    """The oldest version in each of them that has a token."""
    rewards: Mapping[str, tuple[float, int]]
    """Of each reward that the score is made of, the sum and how many episodes have it: behind a gate not all do."""
    tries: tuple[tuple[int, int], ...]
    """Of each group the episodes that are judged, and the successes among them."""
    domains: Mapping[str, EpisodeStats]
    """The same for each domain, without domains of their own."""
    shown: tuple[Trajectory, ...]
    """Those that are written out."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], shown: int) -> EpisodeStats:
        """The statistics of these episodes; the first few of them are `shown`."""
        domains: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            domains.setdefault(t.task.domain, []).append(t)
        return cls._of(trajectories, shown, {name: cls._of(own, 0, {}) for name, own in domains.items()})

    @classmethod
    def _of(cls, trajectories: Sequence[Trajectory], shown: int, domains: Mapping[str, EpisodeStats]) -> EpisodeStats:
        count = len(trajectories)
        tokens = sum(t.response_tokens for t in trajectories)
        groups: dict[int, list[bool]] = {}
        rewards: dict[str, tuple[float, int]] = {}
        for t in trajectories:
            if (success := t.success) is not None:
                groups.setdefault(t.group, []).append(success)
            for name, value in rewards_of(t).items():
                total, having = rewards.get(name, (0.0, 0))
                rewards[name] = (total + value, having + 1)
        return cls(
            count=count,
            score=sum(t.score for t in trajectories) / count,
            judged=sum(map(len, groups.values())),
            successes=sum(map(sum, groups.values())),
            turns=sum(len(t.turns) for t in trajectories) / count,
            response_tokens=tokens / count,
            tokens=tokens,
            oldest_versions=tuple(versions[0] for t in trajectories if (versions := t.versions) is not None),
            rewards=rewards,
            tries=tuple((len(group), sum(group)) for group in groups.values()),
            domains=domains,
            shown=tuple(trajectories[:shown]),
        )

    @classmethod
    def merge(cls, chunks: Sequence[EpisodeStats], shown: int) -> EpisodeStats:
        """The statistics of a batch that came in chunks."""
        if len(chunks) == 1:
            return chunks[0]
        count = sum(chunk.count for chunk in chunks)
        tokens = sum(chunk.tokens for chunk in chunks)
        names = {name: None for chunk in chunks for name in chunk.domains}
        rewards: dict[str, tuple[float, int]] = {}
        for name, (own_total, own_count) in (item for chunk in chunks for item in chunk.rewards.items()):
            total, having = rewards.get(name, (0.0, 0))
            rewards[name] = (total + own_total, having + own_count)
        return cls(
            count=count,
            score=sum(chunk.score * chunk.count for chunk in chunks) / count,
            judged=sum(chunk.judged for chunk in chunks),
            successes=sum(chunk.successes for chunk in chunks),
            turns=sum(chunk.turns * chunk.count for chunk in chunks) / count,
            response_tokens=tokens / count,
            tokens=tokens,
            oldest_versions=tuple(version for chunk in chunks for version in chunk.oldest_versions),
            rewards=rewards,
            tries=tuple(tries for chunk in chunks for tries in chunk.tries),
            domains={
                name: cls.merge([chunk.domains[name] for chunk in chunks if name in chunk.domains], 0) for name in names
            },
            shown=tuple(trajectory for chunk in chunks for trajectory in chunk.shown)[:shown],
        )

    @property
    def success(self) -> float | None:
        """Share of the judged episodes that are a success; None where none is judged."""
        return self.successes / self.judged if self.judged else None

    def staleness(self, version: int) -> dict[str, float]:
        """How old the episodes are when this version learns from them."""
        ages = [version - oldest for oldest in self.oldest_versions]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}

    def metrics(self, mode: RolloutMode) -> dict[str, float]:
        """'mode/name' for all episodes, and where there are several domains 'mode/domain/name' for each of them."""
        found = {f"{mode}/{name}": value for name, value in self._figures(mode).items()}
        for domain, own in self.domains.items() if len(self.domains) > 1 else ():
            found |= {f"{mode}/{domain}/{name}": value for name, value in own._figures(mode).items()}
            found[f"{mode}/{domain}/share"] = own.count / self.count
        return found

    def _figures(self, mode: RolloutMode) -> dict[str, float]:
        found = {
            "score": self.score,
            "turns": self.turns,
            "response_tokens": self.response_tokens,
            "episodes": float(self.count),
        }
        if self.success is not None:
            found["success"] = self.success
        if mode == "val" and self.tries and (most := min(n for n, _ in self.tries)) > 1:
            found[f"avg@{most}"] = self.successes / self.judged
            found |= {f"pass@{k}": pass_at_k(self.tries, k) for k in _powers_of_two(most)}
        return found | {f"reward/{name}": total / count for name, (total, count) in self.rewards.items()}


def pass_at_k(tries: Sequence[tuple[int, int]], k: int) -> float:
    """The probability that one of k tries succeeds, estimated without bias from n >= k tries at each task of which c
    succeeded: the mean of 1 - C(n - c, k) / C(n, k)."""
    return sum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in tries) / len(tries)


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4 .. up to the most, which is the last one itself."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most)})


def rewards_of(trajectory: Trajectory) -> Mapping[str, float]:
    """The rewards that the score is made of, by their names."""
    rewards = (trajectory.info or {}).get("rewards")
    return rewards if isinstance(rewards, Mapping) else {}


def sample_of(trajectory: Trajectory, codec: Codec, *, step: int, mode: RolloutMode) -> SampleRecord:
    """An episode as text."""
    sample: SampleRecord = {
        "step": step,
        "mode": mode,
        "task": trajectory.task.id,
        "domain": trajectory.task.domain,
        "score": trajectory.score,
        "success": trajectory.success,
        "versions": trajectory.versions or (),
        "turns": [
            {"prompt": codec.decode(t.prompt), "response": codec.decode(t.response), "reward": t.reward}
            for t in trajectory.turns
        ],
    }
    if trajectory.final is not None:
        sample["final"] = trajectory.final
    return sample
