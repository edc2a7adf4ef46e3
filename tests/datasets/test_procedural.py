from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.datasets import CurriculumConfig, DataConfig, DataError, Dataset, open_dataset
from cadenza.datasets.curriculum import Curriculum

pytest.importorskip("reasoning_gym")


def opened(name: str = "chain_sum", *, key: str = "sums", seed: int = 0, **settings: Any) -> Dataset:
    return open_dataset(DataConfig(path=f"reasoning_gym:{name}", **settings), key=key, seed=seed)


def drawn(dataset: Dataset, position: int) -> dict[str, Any]:
    found = dataset.at(position)
    assert found is not None
    return found[2]


# pool_matrix seeds the global random numbers, list_functions draws from them
@pytest.mark.parametrize("name", ["chain_sum", "pool_matrix", "list_functions"])
def test_a_row_depends_on_seed_and_number_alone_and_leaves_no_trace(name: str) -> None:
    random.seed(1)
    np.random.seed(1)
    outside = random.getstate()[1], np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    once, again = opened(name), opened(name)
    rows = [once.row(number) for number in (0, 700, 3)]
    assert (random.getstate()[1], np.random.get_state()[1].tolist()) == outside  # type: ignore[index, union-attr]
    random.seed(2)
    assert [again.row(number) for number in (3, 700, 0)] == rows[::-1]


def test_a_row_has_prompt_answer_and_all_that_the_generator_says() -> None:
    row = opened(args={"max_terms": 2, "max_digits": 1}).row(0)
    left, sign, right = row["metadata"]["expression"].split()
    assert row["answer"] == str(int(left) + int(right) if sign == "+" else int(left) - int(right))
    assert row["messages"] == [{"role": "user", "content": row["question"]}]


def test_rows_never_run_out_and_never_repeat_their_number_unless_there_is_a_size() -> None:
    endless = opened()
    assert endless.count is None
    assert [found[:2] for position in (0, 1, 123_456_789) if (found := endless.at(position))] == [
        (0, 0), (1, 0), (123_456_789, 0),
    ]  # fmt: skip
    twice = opened(size=3, epochs=2)
    numbers = [found[:2] for position in range(6) if (found := twice.at(position))]
    assert sorted(numbers) == [(n, epoch) for n in range(3) for epoch in range(2)]
    assert [twice.row(n) for n in range(3)] == [endless.row(n) for n in range(3)], "the size changes no row"


def test_another_key_or_seed_is_another_set_of_rows_and_a_seed_in_the_config_fixes_them() -> None:
    prompts = {opened(key=key, seed=seed).row(0)["prompt"] for key, seed in (("a", 0), ("b", 0), ("a", 1))}
    assert len(prompts) == 3
    fixed = [opened(key=key, seed=seed, args={"seed": 7}) for key, seed in (("a", 0), ("b", 1))]
    assert fixed[0].row(5) == fixed[1].row(5)
    assert fixed[0].source == fixed[1].source


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("chian_sum", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"args": {"max_term": 3}}, "did you mean 'max_terms'"),
        ("chain_sum", {"args": {"max_terms": 0}}, "refuses {'max_terms': 0}: max_terms must be >= min_terms"),
        ("chain_sum", {"args": {"seed": "x"}}, "args.seed must be a number"),
        ("chain_sum", {"args": {"max_terms": 3}, "curriculum": {}}, "sets max_terms itself"),
        ("acre", {"curriculum": {}}, "has no curriculum"),
        ("caesar_cipher", {"curriculum": {"level": 2}}, r"level 2 is none of .*; it has \[0, 1\]"),
    ],
)
def test_what_a_generator_does_not_take_is_refused_before_a_run(name: str, settings: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        opened(name, **settings)


# -- curriculum --------------------------------------------------------------------------------------------------------


def test_the_level_goes_up_with_success_and_down_without_it() -> None:
    dataset = opened(curriculum={"window": 4, "max_level": 1})
    assert drawn(dataset, 0)["level"] == dataset.level == 0
    for _ in range(4):
        dataset.record(0, 1.0)
    assert drawn(dataset, 1)["level"] == dataset.level == 1
    for success in (1.0, 1.0, 1.0, 0.9):
        dataset.record(1, success)
    assert dataset.level == 1, "there is none above max_level"
    for success in (0.0, 0.5, 0.0, 0.0):
        dataset.record(1, success)
    assert dataset.level == 0


def test_results_of_rows_of_an_earlier_level_do_not_count() -> None:
    dataset = opened(curriculum={"window": 2})
    for position in range(4):
        dataset.at(position)
    dataset.record(0, 1.0)
    dataset.record(1, 1.0)
    assert dataset.level == 1
    dataset.record(2, 0.0)
    dataset.record(3, 0.0)
    assert dataset.level == 1


Events = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), max_size=60)


@given(before=Events, after=Events)
def test_a_restored_curriculum_has_the_level_of_every_position_and_goes_on_alike(
    before: list[tuple[int, float]], after: list[tuple[int, float]]
) -> None:
    def follow(curriculum: Curriculum, events: list[tuple[int, float]], position: int) -> tuple[list[int], int]:
        levels = []
        for draws, success in events:
            for _ in range(draws):
                curriculum.draw(position)
                levels.append(curriculum.level_at(position))
                position += 1
            curriculum.record(max(position - 1, 0), success)
        return levels, position

    config = CurriculumConfig(window=2, level=1)
    lived = Curriculum(config, range(5))
    levels, position = follow(lived, before, 0)
    restored = Curriculum(config, range(5))
    restored.load_state(lived.state())
    assert [restored.level_at(p) for p in range(position)] == levels, "a drawn position keeps its level"
    assert follow(restored, after, position) == follow(lived, after, position)
    assert restored.state() == lived.state()


def test_a_state_is_refused_by_a_dataset_without_curriculum() -> None:
    state = opened(curriculum={}).state()
    with pytest.raises(DataError, match="with curriculum"):
        opened().load_state(state)
