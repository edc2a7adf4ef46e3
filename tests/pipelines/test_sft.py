"""`pipeline: sft`: whole runs on a few sums, and what of a conversation trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_cases import SUMS, config_file, trained, write_rows
from pipeline_cases import Done, cadenza, column, distance, lines
from tokenizer_cases import CHATML, byte_tokenizer

from cadenza.datasets import DataConfig, RowError
from cadenza.inference.codec import load_codec
from cadenza.run.example_rows import PREFERENCE, SUPERVISED, RowForm, conversation, open_rows

CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Right or wrong?"},
    {"role": "assistant", "content": "Right"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "wrong"},
]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(SUMS)
    write_rows(SUMS[:7], "held-out.jsonl")


def sft(*overrides: str, **values: Any) -> Done:
    return trained(*overrides, pipeline="sft", **values)


def plain_loss(checkpoint: Path, rows: list[dict[str, str]]) -> tuple[float, float]:
    """By transformers alone: the mean cross-entropy of the tokens of the responses, and the share of the responses that
    greedy generation writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    loss = count = exact = 0.0
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        answer = tokenizer(row["response"], return_tensors="pt")["input_ids"]
        answer = torch.cat([answer, torch.tensor([[tokenizer.eos_token_id]])], 1)
        labels = torch.cat([torch.full_like(prompt, -100), answer], 1)
        with torch.no_grad():
            loss += float(model(torch.cat([prompt, answer], 1), labels=labels).loss) * answer.shape[1]
        count += answer.shape[1]
        written = model.generate(prompt, max_new_tokens=answer.shape[1], do_sample=False)[0, prompt.shape[1] :]
        exact += written.tolist() == answer[0].tolist()
    return loss / count, exact / len(rows)


def test_losses_are_those_of_transformers() -> None:
    done = sft(validation={"data": "held-out.jsonl", "every": 3}, checkpoint={"every": 1, "keep": 9}, steps=60)
    found = plain_loss(done.run / "checkpoints" / "last", SUMS[:7])
    losses, successes = column(done.run, "val/loss"), column(done.run, "val/success")
    assert (losses[60], successes[60]) == pytest.approx(found, abs=1e-5)
    assert done.figures["loss_last"] == losses[60] < losses[0] == done.figures["loss_first"]
    assert 0 < done.figures["success_last"] < 1, "both kinds of answers are there, or this shows nothing"
    all_rows = sft("steps=1", "actor.batch_size=25", "actor.lr=0", name="first").run
    expected, _ = plain_loss(all_rows / "checkpoints" / "last", SUMS)
    assert column(all_rows, "train/loss")[1] == pytest.approx(expected, abs=1e-5)


def test_a_run_that_is_resumed_goes_on_with_the_next_row() -> None:
    options: dict[str, Any] = {"validation": {"data": "held-out.jsonl", "every": 2}}
    whole = sft(steps=6, name="whole", **options)
    begun = sft(steps=4, name="begun", **options)
    resumed = cadenza("resume", begun.run, "steps=6", "--json")
    assert (resumed.code, resumed.figures["samples"]) == (0, 48), resumed.err
    assert distance(whole.run / "checkpoints" / "last", begun.run / "checkpoints" / "last") < 1e-6
    for name in ("train/loss", "val/loss"):
        assert column(begun.run, name) == pytest.approx(column(whole.run, name), abs=1e-6)
    assert column(whole.run, "train/epoch") == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}


def test_a_run_ends_with_its_rows() -> None:
    done = sft(data={"path": "train.jsonl", "epochs": 1}, steps=99)
    assert (done.figures["steps"], done.figures["samples"], done.figures["ended"]) == (4, 25, "the rows ran out")
    assert done.figures["success_last"] is None, "nothing is held out"
    shown = cadenza("train", config_file(pipeline="sft"))
    assert (shown.code, "25 rows" in shown.out or "48 rows" in shown.out, "play it" in shown.out) == (0, True, False)
    assert "play it" not in (done.run / "report.html").read_text()


def test_messages_of_the_assistant_train_and_nothing_else(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    codec = load_codec(tmp_path / "tokenizer")
    found = conversation(CHAT, codec)
    rendered = codec.tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert codec.tokenizer.decode(found.tokens) == rendered.removesuffix("\n"), "nothing behind the last end token"
    assert found.tokens.tolist() == codec.tokenizer.encode(rendered.removesuffix("\n"), add_special_tokens=False)
    starts = np.flatnonzero(np.diff(found.trains.astype(int), prepend=0) == 1)
    stops = [*(np.flatnonzero(np.diff(found.trains.astype(int)) == -1) + 1), len(found.tokens)]
    answers = [codec.tokenizer.decode(found.tokens[a:b]) for a, b in zip(starts, stops, strict=True)]
    assert answers == ["Right<|end|>", "wrong<|end|>"]


FEW_SHOT: dict[str, Any] = {"few_shot": [{"prompt": "2+2?", "answer": "an example"}]}


def trained_texts(tmp_path: Path, row: dict[str, Any], form: RowForm, **data: Any) -> list[str]:
    """What is trained of each example of a row."""
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    codec = load_codec(tmp_path / "tokenizer")
    config = DataConfig(path=str(write_rows([row])), **data)
    batch = open_rows("data", config, form, codec, seed=0).at(0, 1)
    assert batch is not None
    columns = [batch.batch.ragged(name) for name in ("input_ids", "response_mask")]
    return [
        codec.tokenizer.decode(np.asarray(columns[0][i])[np.asarray(columns[1][i])]) for i in range(len(columns[0]))
    ]


@pytest.mark.parametrize(
    ("row", "form", "trains"),
    [
        ({"prompt": "1+1=", "response": "2"}, SUPERVISED, ["2<|end|>"]),
        ({"messages": CHAT}, SUPERVISED, ["Right<|end|>wrong<|end|>"]),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, PREFERENCE, ["2<|end|>", "3<|end|>"]),
    ],
)
def test_worked_examples_of_the_config_are_prompt_and_train_nothing(
    tmp_path: Path, row: dict[str, Any], form: RowForm, trains: list[str]
) -> None:
    assert trained_texts(tmp_path, row, form) == trains
    for system in (None, "Be brief."):
        assert trained_texts(tmp_path, row, form, **FEW_SHOT, system=system) == trains


def test_a_prompt_with_worked_examples_has_the_tokens_that_a_rollout_shows(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    codec = load_codec(tmp_path / "tokenizer")
    messages = [*CHAT[1:3], CHAT[3]]
    found = conversation([*messages, CHAT[4]], codec, given=2)
    assert found.tokens[~found.trains].tolist() == codec.encode(messages, first=True).tolist()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1="}, "the field 'response' is missing, and no message is the assistant's"),
        ({"messages": CHAT[2:3]}, "an assistant message must follow one of another role"),
    ],
)
def test_worked_examples_hide_no_error_of_a_row(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    for data in ({}, FEW_SHOT):
        with pytest.raises(RowError, match=said):
            trained_texts(tmp_path, row, SUPERVISED, **data)


def test_rows_may_be_conversations(tmp_path: Path) -> None:
    write_rows([{"messages": CHAT}, {"messages": CHAT[:3]}])
    done = sft(steps=2, actor={"batch_size": 2, "lr": 1e-2})
    codec = load_codec(None)
    tokens = sum(int(conversation(chat, codec).trains.sum()) for chat in (CHAT, CHAT[:3]))
    assert column(done.run, "train/tokens") == {1: tokens, 2: tokens}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1=", "response": 2}, "the field 'response' must be text"),
        ({"prompt": "1+1=", "response": ""}, "the field 'response' is empty"),
        ({"prompt": "", "response": "2"}, "the field 'prompt' is empty"),
        ({"response": "2"}, "the field 'prompt' is missing"),
        ({"prompt": "1+1="}, "the field 'response' is missing"),
        ({"messages": CHAT[:4]}, "the last message must be the assistant's, got one of 'user'"),
        ({"messages": CHAT[2:3]}, "an assistant message must follow one of another role"),
        ({"messages": [CHAT[1], {"role": "assistant"}]}, "messages.1.content must be text"),
        ("{'prompt': 1}", "train.jsonl"),
    ],
)
def test_a_bad_row_is_named(row: Any, said: str) -> None:
    write_rows([*SUMS, row])
    done = cadenza("train", config_file(pipeline="sft", data={"path": "train.jsonl", "shuffle": False}), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "train.jsonl" in done.err
    assert "26" in done.err
    assert said in done.err


def test_what_was_learned_before_a_bad_row_is_kept() -> None:
    write_rows([*SUMS, {"prompt": "1+1="}])
    done = cadenza("train", config_file(pipeline="sft", data={"path": "train.jsonl", "shuffle": False}), "--json")
    assert done.code == 1
    assert [line["step"] for line in lines(Path("runs/tiny"))] == [1, 2, 3]
    assert Path("runs/tiny/checkpoints/last").resolve().name == "step-000003"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"target": 0.5}, "target 0.5 is a success in validation: add validation"),
        ({"data": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"validation": {"data": "nowhere.jsonl"}}, "validation.data: there is no file nowhere.jsonl"),
        ({"rollout": {"batch_size": 4}}, "SftConfig has no key 'rollout'"),
    ],
)
def test_a_run_that_cannot_be(values: dict[str, Any], said: str) -> None:
    done = cadenza("train", config_file(pipeline="sft", **values), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert said in done.err
