"""A run that is killed and resumed goes on with the same tasks and the rollouts that were finished."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    FOREVER,
    OneStepEnv,
    build,
    causes,
    chain,
    check_after_shutdown,
    column,
    get,
    got,
    now,
    playing,
    publish,
    responses,
    rows,
    simulate,
    stepping,
)

from cadenza import DataProto, RolloutScheduler
from cadenza.inference.replica import Request
from cadenza.rollout.failures import NothingFinished, SchedulerClosed
from cadenza.rollout.ledger import GroupState
from cadenza.rollout.records import Fate, Task, Trajectory
from cadenza.rollout.snapshot_format import SnapshotError
from cadenza.testing import FakeReplica

# -- a model whose words depend on the key of the request, and nothing else ------------------------------------------


def words(request: Request) -> list[int]:
    draw = random.Random(request.seed)
    return [draw.randrange(65, 91) for _ in range(draw.randint(3, 20))]


def keyed(name: str = "r0", device: int = 0) -> FakeReplica:
    return FakeReplica(words, seconds=lambda request: len(words(request)) / 5.0, name=name, devices=(device,))


def told(batch: DataProto) -> list[Any]:
    """Everything in a batch that a resumed run must repeat."""
    names = ("task_id", "domain", "traj_key", "traj_id", "traj_group_id", "seed", "attempt", "scores", "finish_reason")
    versions = [row.tolist() for row in rows(batch, "versions")]
    return [[column(batch, name) for name in names], responses(batch), versions]


async def steps(scheduler: RolloutScheduler, first: int, last: int, size: int = 4) -> list[DataProto]:
    """The plain program: publish, take, train."""
    batches = []
    for step in range(first, last):
        await publish(scheduler, step + 1)
        batches.append(await got(scheduler, size, step))
        await asyncio.sleep(1.0)
    return batches


def restart(tmp_path: Path, **options: Any) -> RolloutScheduler:
    scheduler = build([keyed()], **options)
    scheduler.restore(tmp_path)
    return scheduler


# -- the same run ------------------------------------------------------------------------------------------------------

SAME_RUN: dict[str, dict[str, Any]] = {
    "groups": {"group_size": 2},
    "several turns": {"group_size": 2, "env": chain(3)},
    "contexts": {"group_size": 2, "env": chain(3), "rollout": "step"},
    "two domains": {
        "group_size": 2,
        "domains": {
            "a": {"env": OneStepEnv, "weight": 2},
            "b": {"env": chain(2), "tasks": [f"row {i}" for i in range(9)]},
        },
    },
    "filter": {"group_size": 2, "group_filter": lambda group: group[0].task.seed % 3 > 0},
    "redundancy": {"group_size": 2, "extra_members": 1, "extra_groups": 1},
}


@pytest.mark.parametrize("kind", SAME_RUN)
@pytest.mark.parametrize("killed", [0, 1, 3])
def test_at_alpha_0_two_lives_give_the_batches_of_one(tmp_path: Path, kind: str, killed: int) -> None:
    options = SAME_RUN[kind]

    async def whole() -> list[Any]:
        async with playing([keyed()], **options) as scheduler:
            return [told(batch) for batch in await steps(scheduler, 0, 5)]

    async def first() -> list[Any]:
        async with playing([keyed()], **options) as scheduler:
            batches = await steps(scheduler, 0, killed)
            scheduler.save(tmp_path)
            await steps(scheduler, killed, killed + 1)  # it lived on for a while before it was killed
            return [told(batch) for batch in batches]

    async def second() -> list[Any]:
        scheduler = restart(tmp_path, **options)
        batches = [told(batch) for batch in await steps(scheduler, killed, 5)]
        await scheduler.shutdown()
        check_after_shutdown(scheduler)
        return batches

    uninterrupted, two_lives = simulate(whole), simulate(first) + simulate(second)
    if kind == "redundancy":  # who is late, and is surplus, moves the numbers of attempts
        assert [batch[1] for batch in two_lives] == [batch[1] for batch in uninterrupted]
    else:
        assert two_lives == uninterrupted


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 3.5, 4.5, 6.0])
def test_a_kill_in_the_middle_of_a_batch_changes_only_the_members_that_ran(tmp_path: Path, seconds: float) -> None:
    """They are tried again under the next number, if others of their group had finished."""
    options: dict[str, Any] = {"group_size": 4, "batch_size": 16, "slots": 6}

    async def whole() -> list[DataProto]:
        async with playing([keyed()], **options) as scheduler:
            return await steps(scheduler, 0, 3, 16)

    async def first() -> None:
        async with playing([keyed()], **options) as scheduler:
            await steps(scheduler, 0, 1, 16)
            program = asyncio.ensure_future(steps(scheduler, 1, 2, 16))
            await asyncio.wait([program], timeout=seconds)
            assert scheduler.queue.consumed == 4
            scheduler.save(tmp_path)
            program.cancel()
            await asyncio.wait([program])

    async def second() -> list[DataProto]:
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            return await steps(scheduler, 1, 3, 16)

    def episodes(batch: DataProto) -> dict[tuple[str, str], tuple[int, list[int]]]:
        members = [key.partition(".")[2].partition("#")[0] for key in column(batch, "traj_key")]
        values = zip(column(batch, "attempt"), responses(batch), strict=True)
        return dict(zip(zip(column(batch, "task_id"), members, strict=True), values, strict=True))

    simulate(first)
    for one, two in zip(simulate(whole)[1:], simulate(second), strict=True):
        expected, found = episodes(one), episodes(two)
        assert len(found) == 16
        assert found.keys() == expected.keys()
        again = {key for key, (attempt, _) in found.items() if attempt == 1}
        assert len(again) <= 6
        assert all(found[key] == expected[key] for key in found if key not in again)


def test_the_counters_go_on(tmp_path: Path) -> None:
    async def first() -> dict[str, float]:
        async with playing([keyed()], group_size=2, alpha=1) as scheduler:
            await steps(scheduler, 0, 3)
            scheduler.save(tmp_path)
            return scheduler.metrics()

    async def second() -> tuple[dict[str, float], dict[str, int]]:
        scheduler = restart(tmp_path, group_size=2, alpha=1)
        metrics, restarted = scheduler.metrics(), causes(scheduler, Fate.CANCELLED)
        await steps(scheduler, 3, 4)
        await scheduler.shutdown()
        check_after_shutdown(scheduler)
        assert sum(scheduler.ledger.fates.values()) == scheduler.ledger.issued
        return metrics, restarted

    before = simulate(first)
    after, restarted = simulate(second)
    assert before["fate/trained"] == after["fate/trained"] == 12
    for name in ("attempts/issued", "groups/opened", "groups/consumed", "tokens/trained", "staleness/mean"):
        assert before[name] == after[name]
    assert after["fate/cancelled"] == restarted["restart"] > 0


# -- what comes back ---------------------------------------------------------------------------------------------------


def one_hangs(member: int) -> Callable[[Request], float]:
    """The attempts of this number never end; groups of 2, the n-th attempt is member n % 2."""
    return lambda request: FOREVER if request.session == member else 1.0


async def save_at(seconds: float, directory: Path, replica: FakeReplica, **options: Any) -> None:
    async with playing([replica], **options) as scheduler:
        await scheduler.resume()
        await asyncio.sleep(seconds)
        scheduler.save(directory)


def test_finished_members_are_kept_and_only_the_missing_ones_run_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": 2, "batch_size": 4}
    replica = FakeReplica(words, seconds=one_hangs(1))
    simulate(lambda: save_at(5.0, tmp_path, replica, **options))

    async def second() -> None:
        fresh = keyed()
        async with playing([fresh], **options) as scheduler:
            scheduler.restore(tmp_path)
            batch = await got(scheduler, 4)
            assert [request.session for request in fresh.requests] == [4]
            assert column(batch, "traj_key") == ["g0.0#0", "g0.1#1", "g1.0#0", "g1.1#0"]
            assert column(batch, "traj_id") == [0, 4, 2, 3]
            assert causes(scheduler, Fate.CANCELLED) == {"restart": 1}
            assert "g0.1#0 (traj_id 1)" in scheduler.why("toy/0")
            assert "cancelled (restart)" in scheduler.why("g0.1#0")

    simulate(second)


def test_a_group_without_finished_members_is_drawn_again_with_the_same_randomness(tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": 2, "batch_size": 4}
    replica = FakeReplica(words, seconds=lambda request: FOREVER if request.group == 0 else 1.0)
    simulate(lambda: save_at(5.0, tmp_path, replica, **options))

    async def second() -> Any:
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            assert [group.id for group in scheduler.ledger.open_groups()] == [1]
            batch = await got(scheduler, 4)
            assert column(batch, "traj_key") == ["g1.0#0", "g1.1#0", "g2.0#0", "g2.1#0"]
            assert column(batch, "task_id") == ["toy/1", "toy/1", "toy/0", "toy/0"]
            assert "cancelled at" in scheduler.why("g0")
            assert "(restart)" in scheduler.why("g0")
            return by_task(batch)

    async def uninterrupted() -> Any:
        async with playing([keyed()], **options) as scheduler:
            return by_task(await got(scheduler, 4))

    assert simulate(second) == simulate(uninterrupted)


def by_task(batch: DataProto) -> list[Any]:
    return sorted(zip(column(batch, "task_id"), column(batch, "seed"), responses(batch), strict=True))


def test_a_group_keeps_its_age_only_with_its_tokens(tmp_path: Path) -> None:
    """Of three groups that were begun one has a finished member, and stays as old as it is."""
    options: dict[str, Any] = {"group_size": 2, "batch_size": 2, "alpha": 2}

    async def first() -> None:
        replica = FakeReplica(words, seconds=lambda r: FOREVER if r.session in (3, 4, 5) else 1.0)
        async with playing([replica], **options) as scheduler:
            await publish(scheduler, 1)
            await got(scheduler, 2)
            await asyncio.sleep(3.0)
            await publish(scheduler, 2)
            assert [group.begun_version for group in scheduler.ledger.open_groups()] == [1, 1, 2]
            scheduler.save(tmp_path)

    async def second() -> dict[str, int]:
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            assert scheduler.queue.version == 2
            assert {group.task.id: group.begun_version for group in scheduler.ledger.open_groups()} == {"toy/1": 1}
            await scheduler.sampler.load_weights(2)
            await scheduler.resume()
            assert column(await got(scheduler, 2), "task_id") == ["toy/1", "toy/1"]
            return {group.task.id: group.begun_version for group in scheduler.ledger.open_groups()}

    simulate(first)
    assert simulate(second) == {"toy/2": 2, "toy/3": 2}


def test_a_group_that_was_being_filtered_is_filtered_again(tmp_path: Path) -> None:
    async def slow(group: list[Trajectory]) -> bool:
        await asyncio.sleep(100.0)
        return True

    asked: list[int] = []

    async def quick(group: list[Trajectory]) -> bool:
        asked.append(group[0].task.seed)
        return True

    options: dict[str, Any] = {"group_size": 2, "batch_size": 4}
    simulate(lambda: save_at(10.0, tmp_path, keyed(), group_filter=slow, **options))

    async def second() -> None:
        fresh = keyed()
        async with playing([fresh], group_filter=quick, **options) as scheduler:
            scheduler.restore(tmp_path)
            await got(scheduler, 4)
            assert sorted(asked) == [0, 1]
            assert not fresh.requests

    simulate(second)


def test_a_filter_that_is_gone_keeps_what_it_had_not_judged(tmp_path: Path) -> None:
    async def never(group: list[Trajectory]) -> bool:
        await asyncio.sleep(100.0)
        return False

    simulate(lambda: save_at(10.0, tmp_path, keyed(), group_size=2, group_filter=never))

    async def second() -> None:
        async with playing([keyed()], group_size=2) as scheduler:
            scheduler.restore(tmp_path)
            assert column(await got(scheduler, 4), "task_id") == ["toy/0", "toy/0", "toy/1", "toy/1"]

    simulate(second)


def test_a_batch_that_no_collator_could_collate_is_not_lost(tmp_path: Path) -> None:
    def broken(trajectories: list[Trajectory]) -> DataProto:
        raise ValueError("no")

    async def first() -> None:
        async with playing([keyed()], group_size=2, collator=broken) as scheduler:
            await publish(scheduler, 1)
            with pytest.raises(ValueError, match="no"):
                await got(scheduler, 4)
            scheduler.save(tmp_path)

    async def second() -> None:
        async with playing([keyed()], group_size=2) as scheduler:
            scheduler.restore(tmp_path)
            await publish(scheduler, 1)
            batch = await got(scheduler, 4)
            assert column(batch, "task_id") == ["toy/0", "toy/0", "toy/1", "toy/1"]
            assert batch.meta_info["version"] == 1
            assert scheduler.metrics()["fate/trained"] == 4

    simulate(first)
    simulate(second)


def test_a_trajectory_comes_back_as_it_was(tmp_path: Path) -> None:
    class Env:
        async def reset(self, seed: int) -> str:
            self.turn = 0
            return f"task {seed}"

        async def step(self, action: str) -> tuple[Any, ...]:
            await asyncio.sleep(1.0)
            self.turn += 1
            info = {"success": np.bool_(True), "board": np.arange(3), "at": (1, 2), "handle": object()}
            return f"turn {self.turn}", 0.1 * self.turn, self.turn == 2, False, info

    options: dict[str, Any] = {"batch_size": 1, "env": Env, "tasks": [{"row": object()}], "reward": score}

    def finished(scheduler: RolloutScheduler) -> Trajectory:
        (group,) = scheduler.ledger.open_groups()
        assert group.state is GroupState.READY
        trajectory = group.finished[0].trajectory
        assert trajectory is not None
        return trajectory

    async def first() -> Trajectory:
        async with playing([keyed()], **options) as scheduler:
            await publish(scheduler, 3)
            await scheduler.resume()
            await asyncio.sleep(50.0)
            scheduler.save(tmp_path)
            return finished(scheduler)

    async def second() -> tuple[Trajectory, float]:
        await asyncio.sleep(7.0)
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            return finished(scheduler), now()

    saved = simulate(first)
    restored, later = simulate(second)
    shift = later - 50.0
    assert restored.task == saved.task
    assert restored.task.data is saved.task.data
    for name in ("id", "group", "member", "attempt", "slot", "seed", "terminated", "truncated", "score", "versions"):
        assert getattr(restored, name) == getattr(saved, name)
    assert restored.info == {"success": True, "board": [0, 1, 2], "at": [1, 2]}
    assert (restored.started, restored.ended) == pytest.approx((saved.started + shift, saved.ended + shift))
    assert len(restored.turns) == 2
    for old, new in zip(saved.turns, restored.turns, strict=True):
        for name in ("prompt", "response", "logprobs"):
            assert getattr(old, name).tolist() == getattr(new, name).tolist()
            assert getattr(old, name).dtype == getattr(new, name).dtype
        assert (old.spans, old.finish, old.fresh, old.reward) == (new.spans, new.finish, new.fresh, new.reward)
        assert (new.asked, new.answered) == pytest.approx((old.asked + shift, old.answered + shift))


async def score(trajectory: Trajectory) -> float:
    return 1 / 3


def test_tasks_of_a_list_are_found_again_by_their_place(tmp_path: Path) -> None:
    tasks = [Task(f"q-{i}", seed=100 - i, domain="toy", data=object()) for i in range(6)]
    options: dict[str, Any] = {"batch_size": 2, "alpha": 1, "tasks": tasks}

    async def first() -> list[str]:
        async with playing([keyed()], **options) as scheduler:
            await publish(scheduler, 1)
            batch = await got(scheduler, 2)
            await asyncio.sleep(0.3)
            scheduler.save(tmp_path)
            return column(batch, "task_id")

    async def second() -> list[str]:
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            await publish(scheduler, 1)
            again = [a.task for a in scheduler.ledger.open_groups()] + list(
                scheduler.queue.domains.all["toy"].to_redraw
            )
            assert all(any(task is known for known in tasks) for task in again)
            return column(await got(scheduler, -1), "task_id")

    assert sorted(simulate(first) + simulate(second)) == [task.id for task in tasks]


def test_a_state_that_was_restored_can_be_saved_before_it_starts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": 2, "batch_size": 4}
    copy = tmp_path / "copy"
    copy.mkdir()
    replica = FakeReplica(words, seconds=lambda request: FOREVER if request.session in (0, 1, 3) else 1.0)
    simulate(lambda: save_at(5.0, tmp_path, replica, **options))

    async def second() -> None:
        async with playing([keyed()], **options) as scheduler:
            scheduler.restore(tmp_path)
            scheduler.save(copy)

    async def third() -> Any:
        scheduler = restart(copy, **options)
        batch = await got(scheduler, 4)
        await scheduler.shutdown()
        check_after_shutdown(scheduler)
        return column(batch, "traj_key"), column(batch, "task_id")

    simulate(second)
    assert simulate(third) == (["g1.0#0", "g1.1#1", "g2.0#0", "g2.1#0"], ["toy/1", "toy/1", "toy/0", "toy/0"])


def test_nothing_is_saved_before_the_first_call_and_that_can_be_restored(tmp_path: Path) -> None:
    async def first() -> None:
        build([keyed()]).save(tmp_path)

    async def second() -> list[int]:
        scheduler = restart(tmp_path)
        batch = await got(scheduler, 4)
        await scheduler.shutdown()
        return column(batch, "traj_id")

    simulate(first)
    assert simulate(second) == [0, 1, 2, 3]


# -- random lives ------------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """A run over all its lives, and what it trained."""

    seed: int
    alpha: float
    group_size: int
    groups: int
    tasks: dict[str, int]
    filtered: bool
    extra_members: int
    extra_groups: int
    staleness: str
    prefetch: bool
    batches: list[DataProto] = field(default_factory=list)

    @classmethod
    def draw(cls, seed: int, alpha: float) -> Life:
        draw = random.Random(f"{seed} {alpha}")
        domains = {name: draw.randint(4, 30) for name in "abc"[: draw.randint(1, 3)]}
        redundant = draw.random() < 0.3
        return cls(
            seed, alpha, draw.randint(1, 4), draw.randint(1, 4), domains, draw.random() < 0.5,
            draw.choice([0, 1, 2]) if redundant else 0, draw.choice([0, 1, 2]) if redundant else 0,
            draw.choice(["wait", "wait", "wait", "drop"]), alpha >= 1 and draw.random() < 0.4,
        )  # fmt: skip

    @property
    def size(self) -> int:
        return self.group_size * self.groups

    def build(self, draw: random.Random) -> RolloutScheduler:
        async def fails_once(seed: int, number: int) -> Any:
            await asyncio.sleep(draw.choice([0.0, 0.5, 5.0]))
            if seed % 5 == 0 and number == 0:
                raise ValueError("the first try is in vain")
            return None

        async def keep(group: list[Trajectory]) -> bool:
            await asyncio.sleep(draw.choice([0.0, 1.0]))
            return kept(group[0].task.id)

        domains = {
            name: {
                "env": stepping(fails_once),
                "tasks": count,
                "weight": 1 + number,
                "max_envs": draw.choice([None, 3]),
            }
            for number, (name, count) in enumerate(self.tasks.items())
        }
        return build(
            [keyed(f"r{i}", i) for i in range(draw.randint(1, 3))], domains=domains, batch_size=self.size,
            group_size=self.group_size, alpha=self.alpha, extra_members=self.extra_members,
            extra_groups=self.extra_groups, staleness=self.staleness, group_filter=keep if self.filtered else None,
            slots=draw.choice([1, 3, 16]), seed=self.seed, max_attempts=10, error_budget=1000,
        )  # fmt: skip

    async def program(self, scheduler: RolloutScheduler, draw: random.Random) -> None:
        """Publish, take, train, until the tasks run out."""
        saved = scheduler.queue.version
        if saved > len(self.batches) - draw.randint(0, 1) and saved:  # else the next one is published at once
            await scheduler.sampler.load_weights(saved)
        await (self.ahead(scheduler, draw) if self.prefetch else self.in_turn(scheduler, draw))

    async def in_turn(self, scheduler: RolloutScheduler, draw: random.Random) -> None:
        while True:
            if scheduler.sampler.version < len(self.batches) + 1:
                await publish(scheduler, len(self.batches) + 1)
                if draw.random() < 0.5:
                    await scheduler.resume()
            if await self.take(scheduler) is None:
                return
            await asyncio.sleep(draw.choice([0.0, 2.0, 10.0]))

    async def ahead(self, scheduler: RolloutScheduler, draw: random.Random) -> None:
        """The next batch is asked for while this one is trained."""
        if scheduler.sampler.version < max(len(self.batches), 1):
            await publish(scheduler, max(len(self.batches), 1))
        while True:
            taking = asyncio.ensure_future(self.take(scheduler))
            try:
                if len(self.batches) >= scheduler.sampler.version:
                    await asyncio.sleep(draw.choice([0.0, 2.0, 10.0]))
                    await publish(scheduler, scheduler.sampler.version + 1)
                    await scheduler.resume()
                if await taking is None:
                    return
            finally:
                taking.cancel()

    async def take(self, scheduler: RolloutScheduler) -> DataProto | None:
        batch = await get(scheduler, self.size, len(self.batches))
        if batch is not None:
            self.batches.append(batch)
        return batch


def kept(task: str) -> bool:
    return int(task.partition("/")[2]) % 4 != 1


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2])
@pytest.mark.parametrize("chunk", range(5))
def test_random_lives_lose_nothing_and_train_nothing_twice(tmp_path: Path, alpha: float, chunk: int) -> None:
    for seed in range(10 * chunk, 10 * chunk + 10):
        check(lived(Life.draw(seed, alpha), tmp_path / str(seed)))


def lived(life: Life, graves: Path) -> Life:
    """Three to five lives, the last one to the end of the tasks."""
    draw = random.Random(f"lives of {life.seed} {life.alpha}")
    saved: Path | None = None
    for number in range(draw.randint(2, 4)):
        grave = graves / str(number)
        grave.mkdir(parents=True)
        simulate(partial(one_life, life, draw, saved, grave), shuffle=draw.randrange(99))
        saved = grave
    simulate(partial(one_life, life, draw, saved, None))
    return life


async def one_life(life: Life, draw: random.Random, born: Path | None, grave: Path | None) -> None:
    """From a saved state to the next one, or to the end of the tasks."""
    await asyncio.sleep(draw.random() * 100)
    scheduler = life.build(draw)
    if born is not None:
        scheduler.restore(born)
    program = asyncio.ensure_future(life.program(scheduler, draw))
    if grave is None:
        await program
    else:
        await asyncio.wait([program], timeout=draw.choice([0.0, 1.0, 7.3, 20.0, 60.0]) * draw.random())
        if program.done():
            program.result()
        scheduler.ledger.check()
        scheduler.save(grave)
        program.cancel()
        await asyncio.wait([program])
    await scheduler.shutdown()
    check_after_shutdown(scheduler)
    if grave is None:
        assert scheduler.metrics()["fate/trained"] == sum(len(batch) for batch in life.batches)
        assert scheduler.ledger.issued == sum(scheduler.ledger.fates.values())


def check(life: Life) -> None:
    trained: Counter[str] = Counter()
    ids: list[int] = []
    keys: list[str] = []
    for number, batch in enumerate(life.batches):
        tasks = column(batch, "task_id")
        groups = Counter(column(batch, "traj_group_id"))
        assert set(groups.values()) == {life.group_size}
        assert len(batch) == life.size or number >= len(life.batches) - 1
        trained.update(tasks[:: life.group_size])
        ids += column(batch, "traj_id")
        keys += column(batch, "traj_key")
        for versions in rows(batch, "versions"):
            oldest = min(version for version in versions.tolist() if version >= 0)
            assert batch.meta_info["version"] - oldest <= math.ceil(life.alpha)
    assert len(ids) == len(set(ids))
    assert len(keys) == len(set(keys))
    wanted = {f"{name}/{i}" for name, count in life.tasks.items() for i in range(count)}
    wanted = {task for task in wanted if kept(task) or not life.filtered}
    assert set(trained.values()) <= {1}
    if (
        life.extra_groups or life.staleness == "drop"
    ):  # what a batch did not need is surplus, what is too old is dropped
        assert set(trained) <= wanted
    else:
        assert set(trained) == wanted


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture(name="saved")
def _saved(tmp_path: Path) -> Path:
    simulate(lambda: save_at(50.0, tmp_path, keyed(), group_size=2, tasks=10))
    return tmp_path


def refused(saved: Path, message: str, **options: Any) -> None:
    async def second() -> None:
        with pytest.raises(SnapshotError, match=message):
            restart(saved, **{"group_size": 2, "tasks": 10} | options)

    simulate(second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 4}, "group_size was 2 and is 4"),
        ({"batch_size": 8}, "batch_size was 4 and is 8"),
        ({"alpha": 1}, "alpha was 0.0 and is 1.0"),
        ({"staleness": "drop"}, "staleness was wait and is drop"),
        ({"extra_groups": 1}, "extra_groups was 0 and is 1"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"mode": "val"}, "mode was train and is val"),
        ({"tasks": 11}, "domains.toy.tasks was 10 seeds from 0 and is 11 seeds from 0"),
        ({"tasks": None}, "domains.toy.tasks was 10 seeds from 0 and is endless seeds from 0"),
        ({"tasks": [1] * 10}, "domains.toy.tasks was 10 seeds from 0 and is 10 rows"),
        ({"first_seed": 3}, "domains.toy.tasks was 10 seeds from 0 and is 10 seeds from 3"),
        ({"domains": {"other": {"env": OneStepEnv}}}, "domains.toy.tasks was 10 seeds from 0 and is not there"),
        (
            {"domains": {"toy": {"env": OneStepEnv, "tasks": 10}, "more": {"env": OneStepEnv, "tasks": 3}}},
            "domains.more.tasks was not there and is 3 seeds from 0",
        ),
    ],
)
def test_another_config_is_refused_with_both_values(saved: Path, options: dict[str, Any], message: str) -> None:
    refused(saved, message, **options)


def test_another_order_of_the_tasks_is_refused(tmp_path: Path) -> None:
    tasks = [Task(f"q-{i}", seed=i, domain="toy") for i in range(6)]
    simulate(lambda: save_at(50.0, tmp_path, keyed(), group_size=2, tasks=tasks))
    refused(
        tmp_path, r"domains.toy.tasks\[\d\] was 'q-\d' when the run was saved, and is 'q-\d' now", tasks=tasks[::-1]
    )


def change(path: Path, act: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    act(document)
    path.write_text(json.dumps(document))


def test_a_number_that_points_nowhere_is_refused(saved: Path) -> None:
    change(saved / "rollouts.json", lambda state: state["groups"][0]["finished"][0].__setitem__(0, 77))
    refused(saved, "rollouts.json is damaged")


def test_a_scheduler_that_has_begun_cannot_be_restored(saved: Path) -> None:
    async def main() -> None:
        async with playing([keyed()], group_size=2, tasks=10) as scheduler:
            await scheduler.resume()
            with pytest.raises(RuntimeError, match="restore goes before the first call"):
                scheduler.restore(saved)

    simulate(main)


def test_after_the_end_there_is_nothing_to_save(tmp_path: Path) -> None:
    async def main() -> None:
        scheduler = build([keyed()])
        await got(scheduler, 4)
        await scheduler.shutdown()
        with pytest.raises(SchedulerClosed, match="nothing is left to save"):
            scheduler.save(tmp_path)

    simulate(main)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [lambda s: got(s, 4), lambda s: s.resume()])
def test_the_saved_version_is_published_before_the_first_batch(
    tmp_path: Path, call: Callable[[RolloutScheduler], Coroutine[Any, Any, Any]]
) -> None:
    async def first() -> None:
        async with playing([keyed()], group_size=2) as scheduler:
            await steps(scheduler, 0, 2)
            scheduler.save(tmp_path)

    async def second() -> None:
        async with playing([keyed()], group_size=2) as scheduler:
            scheduler.restore(tmp_path)
            with pytest.raises(RuntimeError, match=r"saved at version 2, but the replicas have version 0: publish"):
                await call(scheduler)
            await scheduler.sampler.load_weights(2)
            await steps(scheduler, 2, 3)

    simulate(first)
    simulate(second)


def test_a_pass_that_fails_as_a_whole_is_an_error_also_over_a_restart(tmp_path: Path) -> None:
    async def step(seed: int, number: int) -> Any:
        if number:
            raise ValueError("worn out")

    options: dict[str, Any] = {"env": stepping(step), "tasks": 2, "batch_size": 2, "slots": 1, "max_attempts": 1}

    async def first() -> None:
        async with playing(**options) as scheduler:
            assert len(await got(scheduler, 2)) == 2
            await scheduler.reset()
            await publish(scheduler, 1)
            scheduler.save(tmp_path)

    async def second() -> None:
        async with playing(**options) as scheduler:
            scheduler.restore(tmp_path)
            await scheduler.sampler.load_weights(1)
            with pytest.raises(NothingFinished, match=r"2 attempts failed.*ValueError: worn out"):
                await get(scheduler, 2)

    simulate(first)
    simulate(second)
