"""`cadenza data CONFIG`, with a pipeline of the test that reads rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_cases import cadenza, config_file
from tokenizer_cases import byte_tokenizer

from cadenza.datasets import DataConfig
from cadenza.run.data_sources import DataSource

PROGRAM = """
from cadenza.config import Config
from cadenza.datasets import DataConfig
from cadenza.run.config import RunConfig
from cadenza.run.pipeline import Pipeline


class DomainConfig(Config):
    data: DataConfig
    weight: float = 1.0


class ValidationConfig(Config):
    domains: dict[str, DomainConfig]


class ReadingConfig(RunConfig):
    domains: dict[str, DomainConfig]
    validation: ValidationConfig | None = None


class Reading(Pipeline):
    config_class = ReadingConfig
"""
THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "reading", raising=False)
    (tmp_path / "reading.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


def write_rows(path: Path, *prompts: str) -> None:
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts), encoding="utf-8")


def write_config(path: Path, **settings: Any) -> Path:
    path.write_text(yaml.safe_dump({"pipeline": "reading:Reading", "steps": 1, **settings}), encoding="utf-8")
    return path


def test_every_domain_is_shown_with_its_rows_lengths_prompts_and_share(directory: Path) -> None:
    write_rows(directory / "a.jsonl", *("x" * size for size in range(1, 101)))
    write_rows(directory / "b.jsonl", "Hi [you]")
    config = write_config(
        directory / "c.yaml", domains={"a": {"data": "a.jsonl", "weight": 3}, "b": {"data": {"path": "b.jsonl"}}}
    )
    done = cadenza("data", config, "domains.b.data.epochs=2", "--json")
    assert done.code == 0, done.err
    first, second = done.figures["datasets"]["domains.a.data"], done.figures["datasets"]["domains.b.data"]
    assert first["lengths"] == {"min": 1, "median": 50, "p95": 95, "max": 100, "total": 5050}
    assert (first["rows"], first["share"], first["epochs"]) == (100, 0.75, None)
    assert (second["rows"], second["share"], second["epochs"]) == (1, 0.25, 2)
    assert [prompt["text"] for prompt in first["prompts"]] == ["x", "xx", "xxx"]
    (prompt,) = second["prompts"]
    assert prompt["place"] == "b.jsonl line 1"
    assert (len(prompt["tokens"]), "".join(prompt["pieces"])) == (8, "Hi [you]")
    assert prompt["fields"] == {"answer": "1"}
    shown = cadenza("data", config)
    assert shown.code == 0
    assert "Hi [you]" in shown.out
    assert "b.jsonl line 1: 8 tokens, answer '1'" in shown.out


def test_refused_and_repeated_rows_are_counted_and_named(directory: Path) -> None:
    write_rows(directory / "a.jsonl", "one", "two", "one", "much too long", "", "two", "three")
    with (directory / "a.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": \n')
    domains = {"a": {"data": {"path": "a.jsonl", "max_tokens": 6}}}
    config = write_config(
        directory / "c.yaml", domains=domains, validation={"domains": {"a": {"data": {"path": "a.jsonl", "limit": 2}}}}
    )
    done = cadenza("data", config, "--json")
    assert done.code == 1, "bad rows stop a run"
    found = done.figures["datasets"]["domains.a.data"]
    assert (found["rows"], found["duplicates"]) == (5, 2)
    assert found["duplicate_places"] == [["a.jsonl line 3", "a.jsonl line 1"], ["a.jsonl line 6", "a.jsonl line 2"]]
    assert found["refused"] == {"too long": 1, "empty prompt": 1, "malformed": 1}
    assert found["also_in"] == {"validation.domains.a.data": 4}
    shown = cadenza("data", config)
    assert "a.jsonl line 4: the prompt has 13 tokens, more than max_tokens 6" in shown.out
    assert "a.jsonl line 3 is a.jsonl line 1" in shown.out


def test_rows_that_are_only_too_long_are_no_error(directory: Path) -> None:
    write_rows(directory / "a.jsonl", "one", "much too long")
    config = write_config(directory / "c.yaml", domains={"a": {"data": {"path": "a.jsonl", "max_tokens": 6}}})
    assert cadenza("data", config).code == 0


@pytest.mark.parametrize(("options", "tail"), [({}, ""), ({"enable_thinking": False}, "<think></think>")])
def test_the_chat_template_is_shown_with_generation_prompt_and_thinking_switch(
    directory: Path, options: dict[str, Any], tail: str
) -> None:
    byte_tokenizer(THINKING).save_pretrained(directory / "tokenizer")
    write_rows(directory / "a.jsonl", "Hi")
    tokenizer = {"path": str(directory / "tokenizer"), "template_options": options}
    domains = {"a": {"data": {"path": "a.jsonl", "system": "Be brief."}}}
    config = write_config(directory / "c.yaml", domains=domains, tokenizer=tokenizer)
    done = cadenza("data", config, "--json")
    assert done.code == 0, done.err
    shown = done.figures["format"]
    assert (shown["generation_prompt"], shown["answer_end"]) == (f"<|start|>assistant\n{tail}", "<|end|>")
    assert (shown["switches"], shown["options"]) == (["enable_thinking"], options)
    (prompt,) = done.figures["datasets"]["domains.a.data"]["prompts"]
    assert prompt["text"] == f"<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n{tail}"
    assert prompt["pieces"][0] == "<|start|>"


def test_an_option_that_the_template_does_not_know_is_said_to_change_nothing(directory: Path) -> None:
    byte_tokenizer(THINKING).save_pretrained(directory / "tokenizer")
    write_rows(directory / "a.jsonl", "Hi")
    tokenizer = {"path": str(directory / "tokenizer"), "template_options": {"thinking": True}}
    config = write_config(directory / "c.yaml", domains={"a": {"data": "a.jsonl"}}, tokenizer=tokenizer)
    done = cadenza("data", config)
    assert "template_options.thinking changes nothing" in done.out
    assert "enable_thinking=(not set)" in done.out


def test_prompts_that_leave_no_room_in_the_context_are_counted(directory: Path) -> None:
    write_rows(directory / "a.jsonl", "x" * 15, "x" * 16, "x" * 17)
    model = {"layers": 1, "hidden": 32, "heads": 2, "max_positions": 16}
    config = write_config(directory / "c.yaml", domains={"a": {"data": "a.jsonl"}}, model=model)
    found = cadenza("data", config, "--json").figures
    assert (found["context"], found["datasets"]["domains.a.data"]["over_context"]) == (16, 2)
    assert "2 prompts leave no room in a context of 16 tokens" in cadenza("data", config).out


def test_rows_that_never_end_are_sampled(directory: Path) -> None:
    pytest.importorskip("reasoning_gym")
    config = write_config(directory / "c.yaml", domains={"a": {"data": "reasoning_gym:chain_sum"}})
    done = cadenza("data", config, "--json")
    found = done.figures["datasets"]["domains.a.data"]
    assert (found["rows"], found["examined"]) == (None, 1000)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("domains.math.data", "train/math"),
        ("envs.domains.math.data", "train/math"),
        ("domains.math.validation", "val/math"),
        ("validation.domains.math.data", "val/math"),
        ("cold_start.data", "cold_start.data"),
        ("data", "data"),
    ],
)
def test_rows_are_shown_under_the_key_of_the_run(path: str, key: str) -> None:
    assert DataSource(path, DataConfig(path="a.jsonl"), None).key == key


def test_rows_that_validate_are_shown_as_taken_once_in_their_order(directory: Path) -> None:
    write_rows(directory / "a.jsonl", "one", "two", "three")
    domains = {"a": {"data": "a.jsonl", "validation": "a.jsonl", "reward": "exact"}}
    start = {"data": {"path": "a.jsonl", "fields": {"response": "answer"}}, "passes": 3}
    config = write_config(
        directory / "c.yaml",
        pipeline="rlvr",
        domains=domains,
        rollout={"batch_size": 2, "group_size": 2},
        cold_start=start,
    )
    done = cadenza("data", config, "--json")
    assert done.code == 0, done.err
    assert done.figures["datasets"]["cold_start.data"]["epochs"] == 3, "its passes"
    trained, validated = (done.figures["datasets"][f"domains.a.{key}"] for key in ("data", "validation"))
    assert (trained["epochs"], trained["share"], "shuffled" in trained["source"]) == (None, 1.0, True)
    assert (validated["epochs"], validated["share"], "shuffled" in validated["source"]) == (1, None, False)


def test_what_cannot_be_opened_is_named_by_its_key(directory: Path) -> None:
    config = write_config(directory / "c.yaml", domains={"a": {"data": "none.jsonl"}})
    done = cadenza("data", config)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("cadenza: domains.a.data: there is no file none.jsonl")


def test_a_config_without_datasets_is_told_so(directory: Path) -> None:
    done = cadenza("data", config_file(directory))
    assert done.code == 1
    assert "names no dataset: the tasks of pipeline 'agentic' come from elsewhere" in done.err
