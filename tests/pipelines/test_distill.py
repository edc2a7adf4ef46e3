"""`pipeline: distill`: a student learns what a teacher says of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from example_cases import SUMS, config_file, trained, write_rows
from pipeline_cases import Done, cadenza, column, distance
from tokenizer_cases import byte_tokenizer
from training_cases import VOCAB, assert_same_parameters, parameters, random_batch, tiny_model

from cadenza.data import DataProto
from cadenza.run.agentic_roles import AgenticRoles
from cadenza.training import ModelConfig, load_model
from cadenza.training.distiller import DistillConfig, Distiller

VALIDATED: dict[str, Any] = {"validation": {"data": "held-out.jsonl", "every": 2}}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(SUMS)
    write_rows(SUMS[:7], "held-out.jsonl")


@pytest.fixture
def teacher() -> Path:
    """A model of another size that knows some of the sums."""
    run = trained(pipeline="sft", steps=40, name="teacher", model={"layers": 1, "hidden": 48, "heads": 2}).run
    return run / "checkpoints" / "last"


def plain_kl(student: Any, teacher: Any, tokens: torch.Tensor, first: int, kind: str, temperature: float) -> Any:
    """[K]: at the tokens from `first` on, by torch.distributions."""
    found = []
    for module in (student, teacher):
        logits = module(tokens[None]).logits[0, first - 1 : -1] / temperature
        found.append(torch.distributions.Categorical(logits=logits))
    s, t = found
    return torch.distributions.kl_divergence(*((t, s) if kind == "forward_kl" else (s, t)))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_the_loss_is_the_divergence_of_the_two_distributions(teacher: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor = {"lr": 1e-2, "batch_size": 8, "divergence": kind, "temperature": 2.0}
    done = trained(pipeline="distill", teacher=str(teacher), actor=actor, **VALIDATED)
    last = done.run / "checkpoints" / "last"
    student, master = (AutoModelForCausalLM.from_pretrained(path) for path in (last, teacher))
    tokenizer = AutoTokenizer.from_pretrained(last)
    losses, agreed = [], []
    for row in SUMS[:7]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = torch.tensor([*prompt, *tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            losses.append(plain_kl(student, master, tokens, len(prompt), kind, 2.0))
            likeliest = [m(tokens[None]).logits[0, len(prompt) - 1 : -1].argmax(-1) for m in (student, master)]
        agreed.append(likeliest[0] == likeliest[1])
    assert column(done.run, "val/loss")[6] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    assert column(done.run, "val/agreement")[6] == pytest.approx(float(torch.cat(agreed).float().mean()))
    assert column(done.run, "val/loss")[6] < column(done.run, "val/loss")[0]


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("limit", [VOCAB * 3, 1 << 24])
def test_an_update_is_that_of_its_formula(budget: int, limit: int) -> None:
    """However the rows are cut, and however few logits exist at once."""
    batch = random_batch(2)
    plain: Any = tiny_model(double=True)
    taught = load_model(ModelConfig(layers=1, hidden=24, heads=2), VOCAB, 5).double().requires_grad_(False)
    losses = []
    for ids, mask in zip(batch.batch.ragged("input_ids"), batch.batch.ragged("response_mask"), strict=True):
        tokens, trains = torch.from_numpy(ids.astype("int64")), torch.from_numpy(mask.astype(bool))
        losses.append(plain_kl(plain, taught, tokens, 1, "reverse_kl", 1.0)[trains[1:]])
    expected = torch.cat(losses).mean()
    expected.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.5 * parameter.grad
    settings: dict[str, Any] = {"optimizer": "SGD", "lr": 0.5, "max_grad_norm": None, "divergence": "reverse_kl"}
    learner = Distiller(tiny_model(double=True), taught, DistillConfig(token_budget=budget, **settings), 0)
    learner._learner.forward.logits_limit = limit
    assert learner.train(batch)["loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_parameters(parameters(learner.module), parameters(plain), atol=1e-6)


def test_a_run_with_a_teacher_resumes_exactly(teacher: Path) -> None:
    whole = trained(pipeline="distill", teacher=str(teacher), steps=6, name="whole", **VALIDATED)
    begun = trained(pipeline="distill", teacher=str(teacher), steps=4, name="begun", **VALIDATED)
    resumed = cadenza("resume", begun.run, "steps=6", "--json")
    assert resumed.code == 0, resumed.err
    assert distance(whole.run / "checkpoints" / "last", begun.run / "checkpoints" / "last") < 1e-6
    assert column(begun.run, "train/loss") == pytest.approx(column(whole.run, "train/loss"), abs=1e-6)


def test_a_teacher_of_another_vocabulary_is_refused(teacher: Path) -> None:
    byte_tokenizer().save_pretrained(teacher)
    done = cadenza("train", config_file(pipeline="distill", teacher=str(teacher)), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "has another vocabulary (263 tokens) than the built-in tokenizer (98 tokens)" in done.err


def test_a_teacher_that_is_not_there_is_named() -> None:
    done = cadenza("train", config_file(pipeline="distill", teacher="./nowhere/model"), "--json")
    assert (done.code, len(done.err.splitlines())) == (1, 1), done.err
    assert "teacher: model.path ./nowhere/model does not exist" in done.err


# -- on-policy ---------------------------------------------------------------------------------------------------------

ON_POLICY: dict[str, Any] = {
    "pipeline": "rlvr",
    "preset": "distill",
    "name": "tiny",
    "steps": 2,
    "domains": {"sums": {"data": {"path": "train.jsonl", "fields": {"answer": "response"}}, "reward": "exact"}},
    "sampling": {"max_tokens": 4},
    "rollout": {"batch_size": 8},
    "actor": {"lr": 1e-2},
    "validation": None,
    "trackers": [],
}


def on_policy(student: Path, **values: Any) -> Done:
    Path("on-policy.yaml").write_text(yaml.safe_dump({**ON_POLICY, "model": {"path": str(student)}, **values}))
    return cadenza("train", "on-policy.yaml", "--json")


def test_a_teacher_judges_what_the_student_wrote(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    student = trained(pipeline="sft", steps=10, name="student").run / "checkpoints" / "last"
    judged: list[DataProto] = []
    advantages = AgenticRoles.advantages

    async def spy(roles: AgenticRoles, batch: DataProto) -> Any:
        found = await advantages(roles, batch)
        judged.append(found[0])
        return found

    monkeypatch.setattr(AgenticRoles, "advantages", spy)
    done = on_policy(student, reference={"path": str(teacher)}, steps=30, rollout={"batch_size": 64})
    assert done.code == 0, done.err
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(path) for path in (teacher, student)]
    columns = (judged[0].batch.ragged(name) for name in ("input_ids", "response_mask", "advantages"))
    for ids, mask, found in zip(*columns, strict=True):
        tokens = torch.from_numpy(ids.astype("int64"))
        with torch.no_grad():
            taught, written = (m(tokens[None]).logits[0, :-1].log_softmax(-1) for m in models)
        expected = (taught - written).gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[mask.astype(bool)], expected[mask[1:].astype(bool)], atol=1e-4)
    means = list(column(done.run, "train/advantage_mean").values())
    assert np.mean(means[-5:]) > np.mean(means[:5]) / 2, (
        "the student comes nearer to the teacher: less is left of the KL"
    )


def test_a_student_that_is_its_teacher_has_nothing_to_learn(teacher: Path) -> None:
    for lora in (None, {"r": 2}):
        done = on_policy(teacher, reference={"path": str(teacher)}, steps=1, model={"path": str(teacher), "lora": lora})
        assert done.code == 0, done.err
        assert column(done.run, "train/advantage_abs_mean")[1] < 1e-4
    more = cadenza("resume", done.run, "steps=2", "--json")
    assert (more.code, more.figures["steps"]) == (0, 2), more.err


def test_on_policy_distillation_needs_a_teacher_of_the_same_vocabulary(teacher: Path) -> None:
    refused = on_policy(teacher)
    assert "estimator 'distill' learns from a teacher: name it with reference.path" in refused.err
    student = trained(pipeline="sft", steps=1, name="student").run / "checkpoints" / "last"
    byte_tokenizer().save_pretrained(teacher)
    assert "reference.path: the tokenizer of" in on_policy(student, reference={"path": str(teacher)}).err
