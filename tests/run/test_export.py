"""`cadenza export`: what transformers loads computes what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_cases import PAIRS, SUMS, trained, write_rows
from pipeline_cases import cadenza, files


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(SUMS)
    write_rows(PAIRS, "pairs.jsonl")


def base() -> Path:
    return trained(pipeline="sft", steps=2, name="base").run / "checkpoints" / "last"


TEXT = torch.arange(2, 22)[None]


def test_a_whole_model_is_copied_without_the_state_of_the_run() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = base()
    done = cadenza("export", checkpoint.parents[1], "--to", "out", "--json")
    assert (done.code, done.figures["version"]) == (0, 2), done.err
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files(Path("out"))
    assert not any("training" in name for name in files(Path("out")))
    one, two = (AutoModelForCausalLM.from_pretrained(path)(TEXT).logits for path in ("out", checkpoint))
    torch.testing.assert_close(one, two, atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained("out").eos_token == "<eos>"


@pytest.mark.parametrize("pipeline", ["sft", "reward_model"])
def test_an_adapter_can_be_merged(pipeline: str) -> None:
    import peft
    import transformers

    model = {"path": str(base()), "lora": {"r": 4}}
    data = "train.jsonl" if pipeline == "sft" else "pairs.jsonl"
    run = trained(pipeline=pipeline, name="adapted", model=model, data=data, actor={"lr": 5e-2, "batch_size": 8}).run
    done = cadenza("export", run, "--to", "out", "--merged", "--json")
    assert done.code == 0, done.err
    assert not any(name.startswith("adapter") for name in files(Path("out")))
    name = "CausalLM" if pipeline == "sft" else "SequenceClassification"
    load: Any = getattr(transformers, f"AutoModelFor{name}").from_pretrained
    plain = load(model["path"], **({} if pipeline == "sft" else {"num_labels": 1}))
    before = plain(TEXT).logits if pipeline == "sft" else None
    trained_policy = peft.PeftModel.from_pretrained(plain, str(run / "checkpoints" / "last")).eval()
    trained_policy.config.pad_token_id = 0
    found = load("out").eval()(TEXT).logits
    torch.testing.assert_close(found, trained_policy(TEXT).logits, atol=1e-4, rtol=1e-4)
    assert before is None or float((found - before).detach().abs().max()) > 1e-2, "something was learned"
    assert "README.md" not in files(Path("out")), "peft's form for an adapter"


ADAPTED: dict[str, Any] = {"pipeline": "sft", "actor": {"lr": 5e-2, "batch_size": 8}}


def adapter_run(path: str, name: str = "adapted") -> Path:
    """A run that trained an adapter to the model at a path."""
    return trained(**ADAPTED, name=name, steps=2, model={"path": path, "lora": {"r": 4}}).run


def loads(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(path).eval()(TEXT).logits
    return logits.detach()


def test_an_exported_adapter_loads_from_any_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    base()
    run = adapter_run("runs/base/checkpoints/last").absolute()
    assert cadenza("export", run, "--to", "adapter", "--json").code == 0
    assert cadenza("export", run, "--to", "whole", "--merged", "--json").code == 0
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files(Path("adapter"))
    here = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for adapter in (here / "adapter", run / "checkpoints" / "last"):
        torch.testing.assert_close(loads(adapter), loads(here / "whole"), atol=1e-4, rtol=1e-4)


def test_an_adapter_to_an_adapter_is_exported_merged() -> None:
    one = adapter_run(str(base()))
    two = adapter_run(str(one / "checkpoints" / "last"), "again")
    for run, to in ((one, "one"), (two, "two")):
        done = cadenza("export", run, "--to", to, "--merged", "--json")
        assert done.code == 0, done.err
    steps = loads(Path("one")) - loads(base()), loads(Path("two")) - loads(Path("one"))
    assert min(float(step.abs().max()) for step in steps) > 1e-2, "each learned something, and nothing is lost"
    done = cadenza("export", two, "--to", "adapter")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "which is an adapter too, and peft loads only one: add --merged" in done.err
    with pytest.raises((OSError, ValueError)):
        loads(two / "checkpoints" / "last")  # not the base with the second adapter alone


def test_a_failed_export_leaves_nothing_behind() -> None:
    run = adapter_run(str(base()))
    (run / "checkpoints" / "last" / "adapter_model.safetensors").write_bytes(b"")
    done = cadenza("export", run, "--to", "out", "--merged")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "could not be exported to out" in done.err
    assert not Path("out").exists()


def test_what_cannot_be_exported() -> None:
    run = base().parents[1]
    Path("full").mkdir()
    Path("full/notes").write_text("mine")
    for arguments, said in (
        (("--to", "full"), "--to full is not empty"),
        (("--to", "out", "--merged"), "has no adapter to merge: it is a whole model, leave --merged out"),
        (("--to", "out", "--checkpoint", "step-7"), "has no checkpoint 'step-7'"),
    ):
        done = cadenza("export", run, *arguments)
        assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
        assert said in done.err
    assert not Path("out").exists()
    assert Path("full/notes").read_text() == "mine"
