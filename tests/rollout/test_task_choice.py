"""Where results choose the tasks: rows that rest, and a curriculum. Both over a restart too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from builders import build, fake, get, got, playing, simulate
from pydantic import ValidationError

from cadenza.datasets import RowError
from cadenza.datasets.jsonl import JsonLines
from cadenza.rewards import Scored
from cadenza.rollout.config import DomainConfig
from cadenza.rollout.records import Task, Trajectory
from cadenza.rollout.snapshot_format import SnapshotError
from cadenza.rollout.task_sources import open_tasks
from cadenza.rollout.tasks import Domain
from cadenza.run.rlvr_config import RlvrConfig

EQUAL, SPREAD = [1.0, 1.0], [0.0, 1.0]


def resting_domain(tmp_path: Path, **data: Any) -> Domain:
    """Four rows in order, which rest for an epoch."""
    path = tmp_path / "four.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(4)))
    config = DomainConfig(data={"path": str(path), "shuffle": False, **data}, reward="exact", rest=1)
    return Domain("a", config, open_tasks("train/a", "a", config, 0, 0, None))


def draw(domain: Domain, count: int) -> list[Task]:
    return [task for _ in range(count) if (task := domain.next()) is not None]


def test_a_row_rests_for_its_epochs_and_is_awake_when_it_is_drawn_again(tmp_path: Path) -> None:
    domain = resting_domain(tmp_path)
    first, *others = draw(domain, 4)
    domain.record(first, EQUAL, 1.0)
    for task in others:
        domain.record(task, SPREAD, 0.5)
    assert [task.row for task in draw(domain, 8)] == [1, 2, 3, 0, 1, 2, 3, 0]
    assert (domain.resting, domain.rested, domain.explain_rest(0)) == ({}, 1, "")


def test_rows_that_rest_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = resting_domain(tmp_path)
    for task in draw(domain, 3):
        domain.record(task, EQUAL, 1.0)
    domain.next()
    read: list[int] = []
    whole = JsonLines.__getitem__
    monkeypatch.setattr(JsonLines, "__getitem__", lambda self, number: read.append(number) or whole(self, number))
    assert draw(domain, 1)[0].row == 3
    assert read == [3]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1="}, "domains.a.tasks row 1: the field 'answer' is missing; the row has prompt"),
        ({"prompt": "1+1=", "answer": None}, "domains.a.tasks row 1: the field 'answer' is null"),
        ({"prompt": "1+1=", "answer": {}}, "domains.a.tasks row 1: the field 'answer' must be text"),
        (Task(id="x", seed=0, domain="a", data={"prompt": "1+1="}), "the field 'answer' is missing"),
        ("1+1=", "the field 'answer' is missing"),
    ],
)
def test_rows_of_the_config_without_an_answer_are_refused_before_the_run(row: Any, said: str) -> None:
    config = DomainConfig(tasks=[{"prompt": "2+2=", "answer": "4"}, row], reward="exact")
    with pytest.raises(RowError, match=said):
        open_tasks("train/a", "a", config, 0, 0, None)
    free = config.model_copy(update={"reward": None})
    assert open_tasks("train/a", "a", free, 0, 0, None).count == 2


def test_a_pass_that_begins_anew_lets_no_row_rest(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "x"}) + "\n" for i in range(2)))

    async def main() -> None:
        domains = {"a": {"data": {"path": str(rows), "epochs": 2}, "reward": "exact", "rest": 1}}
        async with playing([fake()], domains=domains, group_size=2, batch_size=4) as scheduler:
            await got(scheduler, 4)
            assert await get(scheduler, 4) is None, "all rows rest"
            await scheduler.reset()
            assert len(await got(scheduler, 4)) == 4

    simulate(main)


def test_rest_is_refused_where_no_row_comes_again() -> None:
    with pytest.raises(ValidationError, match=r"set data\.size, or remove rest"):
        DomainConfig(data="reasoning_gym:chain_sum", reward="exact", rest=1)
    assert DomainConfig(data={"path": "reasoning_gym:chain_sum", "size": 8}, reward="exact", rest=1).rest == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data": "sums.jsonl"}, True),
        ({"data": "sums.jsonl", "rest": 1}, False),
        ({"data": {"path": "reasoning_gym:chain_sum", "curriculum": {}}}, False),
    ],
)
def test_a_run_whose_results_choose_the_tasks_is_not_said_to_be_exact(settings: dict[str, Any], expected: bool) -> None:
    config = RlvrConfig.model_validate(
        {
            "steps": 1,
            "domains": {"a": {"reward": "exact", **settings}},
            "rollout": {"batch_size": 4, "group_size": 2},
            "validation": None,
        }
    )
    assert config.is_exact is expected


# -- curriculum --------------------------------------------------------------------------------------------------------


def curriculum(reward: Any = lambda sample: 0.5, **options: Any) -> dict[str, Any]:
    pytest.importorskip("reasoning_gym")
    settings = {"window": 4, "raise_at": 0.9}
    data = {"path": "reasoning_gym:chain_sum", "curriculum": settings}
    return {"domains": {"a": {"data": data, "reward": reward, **options}}, "group_size": 2, "slots": 4}


def state(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = scheduler.queue.domains.all["a"].tasks.state()
    return found


async def never(group: list[Trajectory]) -> bool:
    await asyncio.sleep(1000.0)
    return True


def test_rows_of_the_config_that_a_reward_cannot_score_are_refused() -> None:
    domain = DomainConfig(tasks=[{"answer": "A"}, {"answer": "E", "choices": ["1", "2"]}], reward="choice")
    with pytest.raises(
        ValueError, match=r"domains\.a\.tasks row 1: reward 'choice' cannot score it: the row has the ans"
    ):
        open_tasks("train/a", "a", domain, 0, 0, None)


def test_the_level_of_a_curriculum_is_a_metric() -> None:
    async def main() -> None:
        async with playing(**curriculum(lambda sample: 1.0)) as scheduler:
            await got(scheduler, 4)
            assert scheduler.metrics()["tasks/level/a"] == 0
            await got(scheduler, 4, 1)
            await got(scheduler, 4, 2)
            assert scheduler.metrics()["tasks/level/a"] > 0
        async with playing() as scheduler:
            assert not [name for name in scheduler.metrics() if name.startswith("tasks/level")]

    simulate(main)


async def saved_with(tmp_path: Path, options: dict[str, Any]) -> None:
    """Save a run when both groups of a batch are whole."""
    scheduler = build(**options)
    taking = asyncio.ensure_future(get(scheduler, 4))
    await asyncio.sleep(50.0)
    scheduler.save(tmp_path)
    taking.cancel()
    await scheduler.shutdown()


def test_a_group_that_is_saved_while_its_filter_looks_at_it_counts_once(tmp_path: Path) -> None:
    simulate(lambda: saved_with(tmp_path, curriculum(group_filter=never)))

    async def second() -> None:
        async with playing(**curriculum(group_filter=lambda group: True)) as scheduler:
            scheduler.restore(tmp_path)
            assert state(scheduler)["results"] == []
            await got(scheduler, 4)
            assert state(scheduler)["results"] == [0.5, 0.5]

    simulate(second)


def test_a_group_that_is_filtered_counts_too() -> None:
    async def main() -> None:
        rewards = iter([0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
        options = curriculum(lambda sample: next(rewards), difficulty=[0.1, 0.9])
        async with playing(**options | {"slots": 1}) as scheduler:
            await got(scheduler, 4)
            assert state(scheduler)["results"] == [0.0, 0.5, 0.5]

    simulate(main)


def test_a_curriculum_follows_success_and_not_the_score() -> None:
    async def main() -> None:
        async with playing(**curriculum(lambda sample: Scored(0.25, success=True))) as scheduler:
            await got(scheduler, 4)
            assert state(scheduler)["results"] == [1.0, 1.0]

    simulate(main)


def test_a_curriculum_that_a_resumed_run_did_not_have_is_refused(tmp_path: Path) -> None:
    options = curriculum()
    without = {**options, "domains": {"a": {"data": "reasoning_gym:chain_sum", "reward": lambda sample: 0.5}}}
    simulate(lambda: saved_with(tmp_path, without))

    async def second() -> None:
        async with playing(**options) as scheduler:
            with pytest.raises(SnapshotError, match="curriculum from level 0"):
                scheduler.restore(tmp_path)

    simulate(second)


def test_rest_and_the_level_go_on_in_the_next_life(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "x"}) + "\n" for i in range(4)))
    options = curriculum(lambda sample: 1.0)
    options["domains"]["b"] = {"data": {"path": str(rows)}, "reward": "exact", "rest": 1}
    options["batch_size"] = 16
    seen: list[Any] = []

    async def life(first: bool) -> None:
        async with playing(**options) as scheduler:
            if not first:
                scheduler.restore(tmp_path)
            else:
                await got(scheduler, 16)
                scheduler.save(tmp_path)
            resting = scheduler.queue.domains.all["b"]
            seen.append((state(scheduler), resting.resting, resting.rested))

    simulate(lambda: life(True))
    simulate(lambda: life(False))
    assert seen[0] == seen[1]
    assert [change[1] for change in seen[0][0]["changes"]] == [0, 1]
    assert seen[0][1] == dict.fromkeys(range(4), 2)
