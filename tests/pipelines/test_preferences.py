"""`pipeline: dpo` and `pipeline: reward_model`: whole runs on a few pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_cases import PAIRS, SUMS, config_file, trained, write_rows
from pipeline_cases import cadenza, column, distance, weights

HELD_OUT = PAIRS[:6]
VALIDATED: dict[str, Any] = {"validation": {"data": "held-out.jsonl", "every": 2}}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(PAIRS)
    write_rows(HELD_OUT, "held-out.jsonl")


def answer_logprob(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """By transformers and torch alone."""
    begin = tokenizer(prompt)["input_ids"]
    end = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logprobs = model(torch.tensor([begin + end])).logits[0].log_softmax(-1)
    return sum(float(logprobs[len(begin) - 1 + n, token]) for n, token in enumerate(end))


def test_the_loss_of_dpo_is_that_of_its_formula() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = trained(pipeline="dpo", actor={"lr": 1e-3, "batch_size": 8, "beta": 0.4}, **VALIDATED)
    last = done.run / "checkpoints" / "last"
    tokenizer = AutoTokenizer.from_pretrained(last)
    policy, reference = (AutoModelForCausalLM.from_pretrained(path) for path in (last, done.run / "reference"))
    margins = torch.tensor(
        [
            0.4 * (sign * (answer_logprob(policy, tokenizer, row["prompt"], row[name])
            - answer_logprob(reference, tokenizer, row["prompt"], row[name])))
            for row in HELD_OUT
            for name, sign in (("chosen", 1), ("rejected", -1))
        ]
    ).view(-1, 2).sum(1)  # fmt: skip
    assert column(done.run, "val/loss")[6] == pytest.approx(float(-margins.sigmoid().log().mean()), abs=1e-5)
    assert column(done.run, "val/margin")[6] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert column(done.run, "val/success")[6] == pytest.approx(float((margins > 0).float().mean()))
    assert column(done.run, "val/success")[0] == 0.5, "the policy is the reference"
    assert column(done.run, "val/loss")[0] == pytest.approx(0.6931, abs=1e-4)


def test_a_reward_model_scores_as_transformers_does() -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = trained(pipeline="reward_model", **VALIDATED)
    last = done.run / "checkpoints" / "last"
    tokenizer, model = AutoTokenizer.from_pretrained(last), AutoModelForSequenceClassification.from_pretrained(last)
    texts = [row["prompt"] + row[name] for row in HELD_OUT for name in ("chosen", "rejected")]
    with torch.no_grad():
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        scores = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.view(-1, 2)
    margins = scores[:, 0] - scores[:, 1]
    assert model.config.num_labels == 1
    assert column(done.run, "val/loss")[6] == pytest.approx(float(-margins.sigmoid().log().mean()), abs=1e-5)
    assert column(done.run, "val/success")[6] == pytest.approx(float((margins > 0).float().mean()))


@pytest.mark.parametrize("pipeline", ["dpo", "reward_model"])
def test_a_run_on_pairs_learns_and_resumes_exactly(pipeline: str) -> None:
    whole = trained(pipeline=pipeline, steps=6, name="whole", **VALIDATED)
    losses = column(whole.run, "val/loss")
    assert losses[6] < losses[0]
    assert column(whole.run, "val/success")[6] == 1
    begun = trained(pipeline=pipeline, steps=4, name="begun", **VALIDATED)
    resumed = cadenza("resume", begun.run, "steps=6", "--json")
    assert (resumed.code, resumed.figures["samples"]) == (0, 48), resumed.err
    assert distance(whole.run / "checkpoints" / "last", begun.run / "checkpoints" / "last") < 1e-6
    for name in ("train/loss", "train/accuracy", "val/loss"):
        assert column(begun.run, name) == pytest.approx(column(whole.run, name), abs=1e-6)


def test_the_reference_of_an_adapter_is_the_model_under_it() -> None:
    base = trained(pipeline="sft", data="held-out-sums.jsonl", steps=1, **_sums()).run / "checkpoints" / "last"
    done = trained(
        pipeline="dpo", model={"path": str(base), "lora": {"r": 4}}, actor={"lr": 1e-2, "batch_size": 8}, **VALIDATED
    )
    assert not (done.run / "reference").exists()
    assert any("lora" in name for name in weights(done.run / "checkpoints" / "last", "adapter_model"))
    assert column(done.run, "val/loss")[6] < column(done.run, "val/loss")[0] == pytest.approx(0.6931, abs=1e-4)
    more = cadenza("resume", done.run, "steps=8", "--json")
    assert (more.code, more.figures["steps"]) == (0, 8), more.err


def test_a_reward_model_may_begin_with_a_policy() -> None:
    base = trained(pipeline="sft", data="held-out-sums.jsonl", steps=1, **_sums()).run / "checkpoints" / "last"
    for lora in (None, {"r": 4}):
        done = trained(pipeline="reward_model", model={"path": str(base), "lora": lora}, **VALIDATED)
        assert column(done.run, "val/loss")[6] < column(done.run, "val/loss")[0]
        more = cadenza("resume", done.run, "steps=8", "--json")
        assert (more.code, more.figures["steps"]) == (0, 8), more.err


def _sums() -> dict[str, Any]:
    write_rows(SUMS, "held-out-sums.jsonl")
    return {"name": "base"}


@pytest.mark.parametrize("pipeline", ["dpo", "reward_model"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1+1=", "chosen": "2"}, "the field 'rejected' is missing"),
        ({"prompt": "1+1=", "chosen": 2, "rejected": "3"}, "the field 'chosen' must be text"),
        ({"chosen": "2", "rejected": "3"}, "the field 'prompt' is missing"),
    ],
)
def test_a_bad_pair_is_named(pipeline: str, row: Any, said: str) -> None:
    write_rows([*PAIRS, row])
    values = {"pipeline": pipeline, "data": {"path": "train.jsonl", "shuffle": False}}
    done = cadenza("train", config_file(**values), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "train.jsonl line 26" in done.err
    assert said in done.err
