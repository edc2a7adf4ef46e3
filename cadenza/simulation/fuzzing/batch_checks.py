"""Checks of the rows of one batch: whole groups, true tokens, true rewards, and the staleness bound.

Invariant: a batch is compared with what the simulated envs, rewards and replicas did. The first token of a row is the
number of its env, which leads to the record of the episode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cadenza.data import DataProto

if TYPE_CHECKING:
    from cadenza.simulation.fuzzing.scheduler_view import SchedulerView


class _TrajectoryRow(NamedTuple):
    """The first row of one trajectory in a batch."""

    row: int
    id: int
    key: str
    task: str
    group: int
    env: int
    """Number of the env that made it, as its first token says."""


class BatchChecks:
    """Checks every batch that one scheduler returns."""

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self.seen: set[int] = set()
        """Trajectories that came back in batches so far."""
        self.max_staleness = 0

    def check(self, batch: DataProto) -> list[int]:
        """Check a batch; returns its groups in the order of its rows."""
        rows = _trajectories(batch)
        groups = self._check_groups(rows)
        self._check_truth(batch, rows)
        self._check_staleness(batch, rows)
        view, metrics = self._view, batch.meta_info["metrics"]
        counted = "length_bias" in metrics and metrics.get("fate/stale") == view.fates["stale"]
        if view.staleness == "drop" and view.name == "train" and not counted:
            view.violate(3, f"loss or length bias are missing in the metrics under 'drop': {sorted(metrics)}")
        return groups

    def _check_groups(self, rows: list[_TrajectoryRow]) -> list[int]:
        view = self._view
        members: dict[int, list[tuple[str, str]]] = {}
        for row in rows:
            members.setdefault(row.group, []).append((row.key, row.task))
            if row.id in self.seen:
                view.violate(2, f"trajectory {row.id} came back twice")
            self.seen.add(row.id)
        for group, found in members.items():
            different = {key.partition("#")[0] for key, _ in found}
            if not len(found) == len(different) == view.group_size or len({task for _, task in found}) != 1:
                view.violate(2, f"g{group} is not {view.group_size} different members of one task: {found}")
        return list(members)

    def _check_staleness(self, batch: DataProto, rows: list[_TrajectoryRow]) -> None:
        view, versions = self._view, batch.batch.ragged("versions")
        offsets = versions.offsets.tolist()
        written = np.where(versions.values < 0, np.iinfo(np.int32).max, versions.values)
        oldest = np.minimum.reduceat(written, [offsets[row.row] for row in rows]).tolist()
        published = view.monitor.version
        for row, version in zip(rows, oldest, strict=True):
            staleness = published - version
            self.max_staleness = max(self.max_staleness, staleness)
            if view.name == "train" and staleness > view.bound:
                view.violate(3, f"{row.key} was trained with staleness {staleness}, above {view.bound}")
        if batch.meta_info.get("version") != published:
            view.violate(3, f"cut for version {batch.meta_info.get('version')}, published {published}")

    def _check_truth(self, batch: DataProto, rows: list[_TrajectoryRow]) -> None:
        """Check that tokens, versions and rewards of each trajectory are those that the world made."""
        view, monitor, columns = self._view, self._view.monitor, batch.batch
        pieces: list[Any] = []
        spans: list[tuple[int, int]] = []
        for row in rows:
            if not 0 <= row.env < len(monitor.world.episodes):
                view.violate(7, f"{row.key} begins with token {row.env}, which no env said")
                return
            self._check_rewards(batch, row)
            observations = monitor.world.episodes[row.env].observations
            for turn, observation in zip(monitor.turns(row.env), observations, strict=False):
                pieces.append(observation)
                spans.append((-1, len(observation)))
                for generation in turn:
                    pieces.append(generation.tokens)
                    spans.extend((span.version, span.length) for span in generation.spans)
        counts = [count for _, count in spans]
        if not np.array_equal(columns.ragged("input_ids").values, np.concatenate(pieces)):
            view.violate(7, "the tokens of the batch are not those of env and replica")
        written = np.repeat([version for version, _ in spans], counts)
        if not np.array_equal(columns.ragged("versions").values, written):
            view.violate(3, "the versions of the batch are not those with which the replicas wrote")

    def _check_rewards(self, batch: DataProto, row: _TrajectoryRow) -> None:
        """Check that the row is the episode of its env, that no fault broke it, and that its rewards are true."""
        view, world, columns = self._view, self._view.monitor.world, batch.batch
        episode = world.episodes[row.env]
        if episode.attempt != row.key or episode.scheduler != view.name:
            view.violate(7, f"{row.key} holds the episode of {episode.scheduler} {episode.attempt}")
        if episode.broken or world.faults_hit.get((view.name, row.key)) == "reward_exception":
            view.violate(7, f"{row.key} is in a batch, but it met {episode.broken or 'reward_exception'}")
        total = sum(episode.rewards)
        truth = (episode.rewards, total, world.scores.get((view.name, row.id), total))
        steps = columns.ragged("step_scores")[row.row].tolist()
        paid = (steps, float(columns.numpy("episode_scores")[row.row]), float(columns.numpy("scores")[row.row]))
        if paid != truth:
            view.violate(7, f"{row.key} has steps, sum and score {paid}, the world gave {truth}")


def _trajectories(batch: DataProto) -> list[_TrajectoryRow]:
    """Return the first row of each trajectory: with single steps as rows, a trajectory has several."""
    columns, names = batch.batch, batch.non_tensor_batch
    ids, groups = columns.numpy("traj_id").tolist(), columns.numpy("traj_group_id").tolist()
    keys, tasks = names["traj_key"].tolist(), names["task_id"].tolist()
    tokens = columns.ragged("input_ids")
    offsets = tokens.offsets.tolist()
    return [
        _TrajectoryRow(row, ids[row], keys[row], tasks[row], groups[row], int(tokens.values[offsets[row]]))
        for row in range(len(ids))
        if row == 0 or ids[row] != ids[row - 1]
    ]
