from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.datasets import DataConfig, DataError, Dataset, RowError, jsonl, open_dataset
from cadenza.datasets.order import EpochOrder


def write(path: Path, *rows: Any) -> Path:
    """A file with a line for each: an object as JSON, text as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def sums(path: Path, count: int) -> Path:
    return write(path / "sums.jsonl", *({"prompt": f"{i} + {i}?", "answer": str(2 * i)} for i in range(count)))


def opened(path: Path, *, key: str = "sums", seed: int = 0, as_of: str = "", **settings: Any) -> Dataset:
    config = DataConfig(path=str(path), **settings)
    return open_dataset(config, key=key, seed=seed, count_tokens=lambda m: len(m[-1]["content"]), as_of=as_of)


# -- order -------------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 60), epochs=st.integers(1, 4), seed=st.integers(0, 1 << 40), shuffle=st.booleans())
def test_every_row_stands_exactly_once_in_each_epoch(rows: int, epochs: int, seed: int, shuffle: bool) -> None:
    order = EpochOrder(rows, seed=seed, key="sums", shuffle=shuffle)
    found = [order.at(position) for position in range(rows * epochs)]
    for epoch in range(epochs):
        assert sorted(row for row, e in found if e == epoch) == list(range(rows))


@given(rows=st.integers(1, 60), seed=st.integers(0, 9), start=st.integers(0, 200))
def test_an_order_that_is_entered_anywhere_goes_on_as_the_one_that_was_followed(
    rows: int, seed: int, start: int
) -> None:
    followed = EpochOrder(rows, seed=seed, key="sums", shuffle=True)
    whole = [followed.at(position) for position in range(start + 2 * rows)]
    resumed = EpochOrder(rows, seed=seed, key="sums", shuffle=True)
    assert [resumed.at(position) for position in range(start, start + 2 * rows)] == whole[start:]


def test_the_order_depends_on_seed_key_and_epoch_alone() -> None:
    def order(seed: int, key: str, epoch: int) -> list[int]:
        entered = EpochOrder(100, seed=seed, key=key, shuffle=True)
        return [entered.at(100 * epoch + place)[0] for place in range(100)]

    assert order(0, "sums", 0)[:8] == [82, 48, 62, 86, 66, 89, 18, 52], (
        "runs of an older version would be shuffled anew"
    )
    orders = [order(0, "sums", 0), order(1, "sums", 0), order(0, "words", 0), order(0, "sums", 1)]
    assert len({tuple(o) for o in orders}) == 4


def test_a_dataset_ends_with_its_last_epoch_and_without_a_number_of_them_never(tmp_path: Path) -> None:
    twice = opened(sums(tmp_path, 3), epochs=2)
    assert twice.count == 6
    assert twice.at(6) is None
    endless = opened(sums(tmp_path, 3))
    assert endless.count is None
    number, epoch, row = endless.at(3_000_001) or pytest.fail("it ended")
    assert (epoch, row["answer"]) == (1_000_000, str(2 * number))


def test_without_shuffling_rows_keep_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = opened(sums(tmp_path, 4), shuffle=False, epochs=1)
    assert [found[0] for position in range(4) if (found := dataset.at(position))] == [0, 1, 2, 3]


def test_a_million_rows_are_drawn_from_without_being_loaded(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(1_000_000):
            file.write(f'{{"prompt": "What is {i} and one more?", "answer": {i + 1}}}\n')
    assert path.stat().st_size > 50e6
    tracemalloc.start()
    try:
        dataset = opened(path)
        assert len(dataset) == 1_000_000
        for position in (0, 999_999, 1_000_000, 7_654_321):
            number, _, row = dataset.at(position) or pytest.fail("it ended")
            assert row["answer"] == number + 1
        assert tracemalloc.get_traced_memory()[1] < 32e6, "8 MB of index, 4 MB for an epoch, and what makes them"
    finally:
        tracemalloc.stop()
        dataset.close()


# -- identity ----------------------------------------------------------------------------------------------------------


def test_a_source_says_the_same_as_long_as_its_rows_and_its_order_are_the_same(tmp_path: Path) -> None:
    path = sums(tmp_path, 10)
    words = opened(path).source
    assert opened(path).source == words
    assert opened(path, epochs=3).source == words, "more epochs go on with the same order"
    assert opened(path, seed=1).source != words
    assert opened(path, key="other").source != words
    assert opened(path, limit=9).source != words
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("5 + 5", "5 + 6"), encoding="utf-8")
    assert opened(path).source != words


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "row", "messages"),
    [
        ({}, {"prompt": "Hi"}, [("user", "Hi")]),
        ({}, {"messages": [{"role": "user", "content": "Hi"}]}, [("user", "Hi")]),
        ({}, {"prompt": [{"role": "user", "content": "Hi", "name": None}]}, [("user", "Hi")]),
        ({"fields": {"prompt": "q"}}, {"q": "Hi", "messages": "other"}, [("user", "Hi")]),
        ({"fields": {"prompt": "extra.q.0"}}, {"extra": {"q": ["Hi"]}}, [("user", "Hi")]),
        ({"fields": {"prompt": "q.-1.content"}}, {"q": [{"content": "Hi"}]}, [("user", "Hi")]),
        ({"fields": {"prompt": "a.b"}}, {"a.b": "Hi"}, [("user", "Hi")]),
        ({"template": "{a} + {b}? {{}}"}, {"a": 1, "b": [2]}, [("user", "1 + [2]? {}")]),
        ({"template": "{q}: {o[1]}", "fields": {"q": "text"}}, {"text": "Hi", "o": "AB"}, [("user", "Hi: B")]),
        ({"system": "Be brief."}, {"prompt": "Hi"}, [("system", "Be brief."), ("user", "Hi")]),
        (
            {"system": "Be brief."},
            {"messages": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Hi"}]},
            [("system", "Own."), ("user", "Hi")],
        ),
        (
            {"system": "Be brief.", "few_shot": [{"prompt": "1+1=", "answer": "2"}]},
            {"prompt": "2+2="},
            [("system", "Be brief."), ("user", "1+1="), ("assistant", "2"), ("user", "2+2=")],
        ),
    ],
)  # fmt: skip
def test_a_row_becomes_messages(
    tmp_path: Path, settings: dict[str, Any], row: dict[str, Any], messages: list[tuple[str, str]]
) -> None:
    found = opened(write(tmp_path / "a.jsonl", row), **settings).row(0)
    assert found["messages"] == [{"role": role, "content": content} for role, content in messages]


def test_all_fields_of_a_row_are_kept_beside_our_names_for_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "Hi", "solution": {"value": 3}, "level": 5})
    row = opened(path, fields={"prompt": "question", "answer": "solution.value"}).row(0)
    del row["messages"]
    assert row == {"prompt": "Hi", "question": "Hi", "answer": 3, "solution": {"value": 3}, "level": 5}


def test_empty_lines_are_no_rows_but_are_counted_as_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", "\ufeff" + '{"prompt": "a"}', "", ' {"prompt": "b"}\r', "  \t", '{"prompt": "c"}'
    )
    dataset = opened(path)
    assert [dataset.row(i)["prompt"] for i in range(len(dataset))] == ["a", "b", "c"]
    assert dataset.place(2) == f"{path} line 5"


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    for name, prompts in (("a", "xy"), ("b", "z"), ("c", "")):
        write(tmp_path / f"{name}.jsonl", *({"prompt": prompt} for prompt in prompts))
    dataset = opened(tmp_path / "*.jsonl")
    assert [dataset.row(i)["prompt"] for i in range(3)] == ["x", "y", "z"]
    assert dataset.place(2) == f"{tmp_path / 'b.jsonl'} line 1"


# -- parts and filters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"split": "[:30%]"}, [0, 1, 2]),
        ({"split": "train[70%:]"}, [7, 8, 9]),
        ({"split": "[-2:]"}, [8, 9]),
        ({"split": "[2:6]", "limit": 3}, [2, 3, 4]),
        ({"limit": 2}, [0, 1]),
        ({"limit": 20}, list(range(10))),
    ],
)
def test_a_part_of_the_rows_is_used(tmp_path: Path, settings: dict[str, Any], rows: list[int]) -> None:
    dataset = opened(sums(tmp_path, 10), epochs=1, **settings)
    assert sorted(found[0] for position in range(len(rows)) if (found := dataset.at(position))) == rows
    assert dataset.count == len(rows)


def test_rows_that_are_too_long_or_too_short_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "x" * size} for size in (1, 5, 6, 7, 20, 30)))
    dataset = opened(path, min_tokens=5, max_tokens=7, epochs=1)
    assert [len(dataset.row(i)["prompt"]) for i in range(len(dataset))] == [5, 6, 7]
    assert {found[0] for position in range(3) if (found := dataset.at(position))} == {1, 2, 3}
    assert dataset.refused_counts == {"too long": 2, "too short": 1}
    assert dataset.refused[1] == (f"{path} line 5", "the prompt has 20 tokens, more than max_tokens 7")
    with pytest.raises(DataError, match="the filters leave none of 6 rows: 6 are too short"):
        opened(path, min_tokens=50)


# -- bad input ---------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "Hi", "answer": "1"}
BAD_ROWS = {
    "malformed line": ('{"prompt": "Hi"', "line 2: the line is no JSON"),
    "no object": ("[1]", "line 2: a row is an object with fields, got a list"),
    "no answer": ({"prompt": "Hi", "anwser": "1"}, "line 2: the field 'answer' is missing; did you mean 'anwser'?"),
    "answer null": ({"prompt": "Hi", "answer": None}, "line 2: the field 'answer' is null"),
    "no prompt": ({"question": "Hi", "answer": "1"}, "line 2: the field 'prompt' is missing; the row has question"),
    "empty prompt": ({"prompt": " \n", "answer": "1"}, "line 2: the field 'prompt' is empty"),
    "no messages": ({"messages": [], "answer": "1"}, "line 2: the field 'messages' has no messages"),
    "empty message": ({"messages": [{"role": "user", "content": ""}], "answer": "1"}, "line 2: the messages of"),
    "prompt of wrong type": ({"prompt": 12, "answer": "1"}, "line 2: the field 'prompt' must be text or mess"),
    "no message": ({"messages": ["Hi"], "answer": "1"}, "line 2: messages.0 must be a message with role and content"),
    "content of wrong type": (
        {"messages": [{"role": "user", "content": 3}], "answer": "1"}, "line 2: messages.0.content must be text",
    ),
}  # fmt: skip


def test_parts_of_a_source_of_unique_rows_have_no_prompt_in_common(tmp_path: Path) -> None:
    """A row that repeats one of another part counts as repeated too, and the split takes the rows of the source."""
    prompts = ["a", "b", "a", "c", "b", "d", "d"]
    path = write(tmp_path / "a.jsonl", *({"prompt": prompt} for prompt in prompts))

    def used(split: str) -> list[str]:
        dataset = opened(path, unique=True, split=split)
        return [dataset.row(index)["prompt"] for index in range(len(dataset))]

    assert used("[:3]") == ["a", "b"]
    assert used("[3:]") == ["c", "d"]
    dataset = opened(path, unique=True, split="[3:]", max_tokens=9)
    assert dict(dataset.refused_counts) == {"repeated": 2}
    assert dataset.refused[0] == (f"{path} line 5", f"the prompt is that of {path} line 2")
    assert "4 of them used" in opened(path, unique=True).source


@pytest.mark.parametrize(("row", "said"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_file_line_and_field(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, row, GOOD)
    with pytest.raises(RowError) as raised:
        opened(path)
    assert str(raised.value).startswith(f"{path} {said}")


def test_a_bad_row_behind_the_ones_that_are_checked_raises_when_it_is_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *([GOOD] * 10_500), "{", GOOD)
    dataset = opened(path, shuffle=False)
    with pytest.raises(RowError, match="line 10501"):
        dataset.at(10_500)
    assert dataset.at(10_501)
    with pytest.raises(RowError, match="line 10501"):
        opened(path, max_tokens=5)  # a filter reads all rows


def test_an_examined_dataset_leaves_bad_rows_out_and_says_which(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "{", {"prompt": "", "answer": "1"}, GOOD)
    dataset = open_dataset(DataConfig(path=str(path)), key="a", seed=0, examine=True)
    assert len(dataset) == 2
    assert dataset.refused_counts == {"malformed": 1, "empty prompt": 1}
    assert [place for place, _ in dataset.refused] == [f"{path} line 2", f"{path} line 3"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": "none.jsonl"}, "there is no file none.jsonl"),
        ({"path": "none-*.jsonl"}, "no file matches"),
        ({"path": "empty.jsonl"}, "empty.jsonl has no rows"),
        ({"path": "a.txt"}, "is of no kind that is known"),
        ({"path": "./none"}, "there is no file or directory"),
        ({"path": "a.jsonl", "split": "test"}, "a file has no splits"),
        ({"path": "a.jsonl", "split": "[5:]"}, "has no rows in its part"),
        ({"path": "a.jsonl", "subset": "main"}, "is for a dataset of the hub"),
        ({"path": ["a.jsonl", "a.csv"]}, "files of one kind"),
    ],
)
def test_a_source_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", GOOD)
    for name in ("empty.jsonl", "a.txt", "a.csv"):
        write(tmp_path / name)
    with pytest.raises(DataError, match=said):
        open_dataset(DataConfig.model_validate(settings), key="a", seed=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": ""}, "names no source"),
        ({"max_tokens": 5}, "has no path; where the path stands alone in the file, write it as {path: ...}"),
        ({"path": "a.jsonl", "filds": {}}, "did you mean 'fields'"),
        ({"path": "a.jsonl", "template": "no fields"}, "must name the fields"),
        ({"path": "a.jsonl", "template": "{} + {}"}, "must name the fields"),
        ({"path": "a.jsonl", "template": r"\boxed{"}, "braces that stay are doubled"),
        ({"path": "a.jsonl", "split": "train[0.5]"}, "is no split"),
        ({"path": "a.jsonl", "size": 5}, "size is for procedural sources"),
        ({"path": "a.jsonl", "limit": 0}, "greater than 0"),
        ({"path": "reasoning_gym:chain_sum", "max_tokens": 5}, "give the procedural source a size"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataConfig.model_validate(settings)


def test_a_config_is_read_back_as_it_was_written() -> None:
    config = DataConfig(path=("a.jsonl", "b.jsonl"), fields={"prompt": "q"}, split="train[:90%]", max_tokens=9)
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config
    config = DataConfig(path="reasoning_gym:chain_sum", args={"max_terms": 2}, size=3)
    assert DataConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_path_alone_is_a_config() -> None:
    assert DataConfig.model_validate("a.jsonl") == DataConfig(path="a.jsonl")
    assert DataConfig.model_validate(["a.jsonl", "b.jsonl"]).paths == ("a.jsonl", "b.jsonl")


# -- lines -------------------------------------------------------------------------------------------------------------

Lines = st.lists(
    st.sampled_from(['{"prompt": "%d"}', ' {"prompt": "%d"} ', "", "  ", "\t", '{"prompt": "%dé"}']), max_size=12
)


@given(lines=Lines, piece=st.integers(1, 40), end=st.sampled_from(["", "\n", "\r\n", "\n\n", "\n "]))
def test_rows_are_the_lines_that_are_not_blank_wherever_the_file_is_cut_into_pieces(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], piece: int, end: str
) -> None:
    lines = [line % number if "%" in line else line for number, line in enumerate(lines)]
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(("\n".join(lines) + end).encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jsonl, "_PIECE", piece)
        source = jsonl.JsonLines([path])
    found = [(source[n]["prompt"], source.place(n)) for n in range(len(source))]
    source.close()
    rows = [(json.loads(line)["prompt"], f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    assert found == rows


@pytest.mark.parametrize("rows", [0, 3, 10, 40])
def test_a_file_that_is_written_anew_while_it_is_read_is_an_error_that_says_the_way_out(
    tmp_path: Path, rows: int
) -> None:
    path = sums(tmp_path, 10)
    dataset = opened(path)
    before = path.stat().st_size
    write(path, *({"prompt": f"{i} - {i}?", "answer": "0"} for i in range(rows)))
    said = rf"sums.jsonl was changed while it is read: .* {before} bytes .* now {path.stat().st_size} bytes.* resume"
    for _ in range(2):
        with pytest.raises(DataError, match=said) as caught:
            dataset.row(3)
        assert not isinstance(caught.value, RowError), "it is not this row that is bad"


def test_a_file_that_grows_all_the_time_is_not_read_whole_for_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sums(tmp_path, 20_000)
    dataset = opened(path)
    read: list[int] = []

    def count(descriptor: int, size: int, offset: int, pread: Any = os.pread) -> bytes:
        read.append(size)
        return bytes(pread(descriptor, size, offset))

    monkeypatch.setattr(jsonl.os, "pread", count)
    for index in range(10):
        with path.open("a") as file:
            file.write("{}\n")
        dataset.row(index * 1000)
    assert sum(read) < 10 * 3 * (1 << 16) < 10 * path.stat().st_size


def test_rows_as_of_a_run_are_those_that_a_file_had_before_it_grew(tmp_path: Path) -> None:
    path = sums(tmp_path, 10)
    then = opened(path)
    with path.open("a") as file:
        file.write('{"prompt": "new?", "answer": "0"}\n')
    assert len(opened(path)) == 11
    again = opened(path, as_of=then.source)
    assert again.source == then.source
    assert [again.at(position) for position in range(20)] == [then.at(position) for position in range(20)]
    write(path, *({"prompt": f"{i} - {i}?", "answer": "0"} for i in range(40)))
    assert opened(path, as_of=then.source).source != then.source


def test_a_file_that_grows_or_is_replaced_while_it_is_read_keeps_the_rows_that_it_had(tmp_path: Path) -> None:
    path = sums(tmp_path, 10)
    dataset = opened(path)
    rows = [dataset.row(index) for index in range(10)]
    with path.open("a") as file:
        file.write("{}\n")
    assert [dataset.row(index) for index in range(10)] == rows
    path.touch()
    assert [dataset.row(index) for index in range(10)] == rows
    write(tmp_path / "new.jsonl", {"prompt": "1 - 1?", "answer": "0"}).replace(path)
    assert [dataset.row(index) for index in range(10)] == rows
