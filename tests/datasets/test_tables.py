from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza.datasets import DataConfig, DataError, Dataset, open_dataset

datasets = pytest.importorskip("datasets")
ROWS = [{"question": f"{i} + {i}?", "solution": {"value": str(2 * i)}, "level": i} for i in range(5)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def opened(path: Path | str, **settings: Any) -> Dataset:
    fields = {"prompt": "question", "answer": "solution.value"}
    return open_dataset(DataConfig(path=str(path), **{"fields": fields, **settings}), key="sums", seed=0)


def stored(kind: str, directory: Path) -> Path:
    table = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        table.to_parquet(directory / "sums.parquet")
        return directory / "sums.parquet"
    if kind == "json.gz":
        table.to_json(directory / "sums.jsonl.gz", compression="gzip")
        return directory / "sums.jsonl.gz"
    path = directory / kind
    if kind == "saved":
        table.save_to_disk(path)
    elif kind == "saved splits":
        datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(path)
    else:
        path.mkdir()
        table.to_parquet(path / "train.parquet")
    return path


@pytest.mark.parametrize("kind", ["parquet", "json.gz", "saved", "saved splits", "directory of files"])
def test_rows_are_the_same_whatever_they_are_stored_as(kind: str, tmp_path: Path, capfd: Any) -> None:
    dataset = opened(stored(kind, tmp_path), epochs=1)
    assert [dataset.row(i)["answer"] for i in range(len(dataset))] == ["0", "2", "4", "6", "8"]
    assert dataset.row(3)["messages"] == [{"role": "user", "content": "3 + 3?"}]
    assert {found[0] for position in range(5) if (found := dataset.at(position))} == set(range(5))
    assert dataset.source == opened(tmp_path / dataset.config.paths[0]).source


def test_a_csv_file_is_text_and_an_empty_cell_is_a_missing_field(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text('question,answer\n"1, 2?",007\nNA,NA\n', encoding="utf-8")
    dataset = opened(path, fields={"prompt": "question"})
    assert [(dataset.row(i)["prompt"], dataset.row(i)["answer"]) for i in range(2)] == [("1, 2?", "007"), ("NA", "NA")]
    path.write_text("question\tanswer\n1?\t1\n2?\t\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"sums.tsv row 2: the field 'answer' is null"):
        opened(path.rename(tmp_path / "sums.tsv"), fields={"prompt": "question"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"split": "dev"}, "has no split 'dev'; it has train, test"),
        ({"subset": "main"}, "has no subsets"),
        ({"fields": {"prompt": "questoin"}}, r"row 1: the field 'questoin' .* did you mean 'question'"),
    ],
)
def test_what_a_saved_dataset_does_not_have_is_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        opened(stored("saved splits", tmp_path), **settings)


def test_a_split_and_a_part_of_it_are_used(tmp_path: Path) -> None:
    path = stored("saved splits", tmp_path)
    assert [opened(path, split="test").row(i)["level"] for i in range(2)] == [0, 1]
    assert [opened(path, split="train[60%:]").row(i)["level"] for i in range(2)] == [3, 4]


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no table", encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read by datasets"):
        opened(tmp_path / "bad.parquet")


def test_a_name_on_the_hub_without_a_network_is_an_error_that_says_the_way_out() -> None:
    with pytest.raises(DataError, match=r"nobody/nothing cannot be read .* give a directory or files"):
        opened("nobody/nothing")
