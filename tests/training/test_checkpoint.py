"""Checkpoints: whole or not at all, and a run goes on as if it had not stopped."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_cases import adapted_model, assert_same_parameters, parameters, random_batch, tiny_model

from cadenza.training import (
    Actor,
    ActorConfig,
    CheckpointError,
    Checkpoints,
    Critic,
    CriticConfig,
    Supervised,
    SupervisedConfig,
)
from cadenza.training.checkpoint import latest, load, save

CONFIG = ActorConfig(lr=1e-2, schedule="cosine", total_steps=20, epochs=2, mini_batches=2, entropy_coef=0.01)


def actor_on(module: Any) -> Actor:
    return Actor(module, CONFIG, 5)


def losses(actor: Actor, steps: range) -> list[float]:
    return [actor.train(random_batch(step))["loss"] for step in steps]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    actor, critic = actor_on(tiny_model()), Critic(tiny_model(1), CriticConfig(), 0)
    losses(actor, range(3))
    critic.train(random_batch())
    save(tmp_path / "step-3", {"actor": actor, "critic": critic}, user={"step": 3, "note": [1, "two", None]})
    randoms = (torch.rand(2), random.random(), np.random.rand())
    expected = losses(actor, range(3, 6)), critic.train(random_batch(1)), critic.values(random_batch(2))

    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    again, critic_again = actor_on(tiny_model(7)), Critic(tiny_model(8), CriticConfig(), 0)
    user = load(tmp_path / "step-3", {"actor": again, "critic": critic_again})
    assert user == {"step": 3, "note": [1, "two", None]}
    assert again.version == 3
    resumed = (torch.rand(2), random.random(), np.random.rand())
    assert torch.equal(randoms[0], resumed[0])
    assert randoms[1:] == resumed[1:]
    assert losses(again, range(3, 6)) == expected[0]
    assert critic_again.train(random_batch(1)) == expected[1]
    assert critic_again.values(random_batch(2)) == expected[2]
    assert_same_parameters(parameters(actor.module), parameters(again.module), atol=0)


def test_dropout_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    def learner() -> Supervised:
        return Supervised(adapted_model(tmp_path / "base", dropout=0.3), SupervisedConfig(lr=0.0), 5)

    def losses() -> list[float]:
        return [first.train(random_batch())["loss"] for _ in range(3)]

    first = learner()
    save(tmp_path / "step-0", {"policy": first})
    expected = losses()
    assert len(set(expected)) == 3
    first = learner()
    load(tmp_path / "step-0", {"policy": first})
    assert losses() == expected


def test_a_checkpoint_is_a_model_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    actor = actor_on(tiny_model())
    losses(actor, range(1))
    save(tmp_path / "step-1", {"actor": actor}, extra=lambda path: (path / "codec.json").write_text("{}") and None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert_same_parameters(parameters(loaded), parameters(actor.module), atol=0)
    assert (tmp_path / "step-1" / "codec.json").is_file()
    assert not [path for path in (tmp_path / "step-1").rglob("*") if path.suffix in {".bin", ".pt", ".pkl"}]


def test_an_adapter_is_saved_without_its_base(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    actor = actor_on(adapted_model(tmp_path / "base"))
    losses(actor, range(1))
    save(tmp_path / "step-1", {"actor": actor})
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    ids = torch.tensor([[1, 2, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    torch.testing.assert_close(loaded(ids).logits, actor.module.eval()(ids).logits)


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Call it, and no file can become larger than 20 kB: the nearest thing to a full disk that needs no mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_error_while_saving_leaves_the_old_checkpoint_and_says_so(
    tmp_path: Path, small_files: Callable[[], None]
) -> None:
    actor = actor_on(tiny_model(hidden=32))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"actor": actor}, user={"n": 1})
    saved = parameters(actor.module)
    losses(actor, range(1))
    small_files()
    with pytest.raises(CheckpointError, match=r"step-000002 could not be saved.*File too large") as caught:
        checkpoints.save(2, {"actor": actor}, user={"n": 2})
    assert f"{tmp_path / 'step-000001'} is intact" in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000001", "last"}
    assert checkpoints.load(tmp_path / "last", {"actor": actor}) == {"n": 1}
    assert_same_parameters(parameters(actor.module), saved, atol=0)


def test_files_of_the_user_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise KeyError("user code")

    with pytest.raises(KeyError, match="user code"):
        save(tmp_path / "step-1", {"actor": actor_on(tiny_model())}, extra=fail)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path / "step-1", {"actor": actor_on(tiny_model())}, user={"x": object()})
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    checkpoints, parts = Checkpoints(tmp_path, keep=2), {"actor": actor_on(tiny_model())}
    first = checkpoints.save(1, parts)
    (tmp_path / ".unfinished-step-000002").mkdir()
    (tmp_path / ".unfinished-step-000002" / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == first
    second = checkpoints.save(2, parts)
    assert latest(tmp_path) == second
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_kill_while_old_ones_are_deleted_leaves_only_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **options: Any) -> None:
        if path.exists():
            (path / "training" / "user.json").unlink()
            raise KeyboardInterrupt

    checkpoints, parts = Checkpoints(tmp_path), {"actor": actor_on(tiny_model())}
    checkpoints.save(1, parts, score=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, parts, score=0.2)
    assert checkpoints.best == checkpoints.latest == tmp_path / "step-000002"
    checkpoints.save(3, parts, score=0.3)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000003", "best", "last"}


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    checkpoints, parts = Checkpoints(tmp_path), {"actor": actor_on(tiny_model())}
    assert checkpoints.latest is None
    assert checkpoints.best is None
    for step, score in ((1, 0.1), (2, 0.9), (10, 0.9), (11, None), (12, 0.8)):
        checkpoints.save(step, parts, score=score)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000010", "step-000012", "best", "last"}
    assert (tmp_path / "best").resolve().name == "step-000010", "the newest of equal ones"
    assert (tmp_path / "last").resolve().name == "step-000012"
    assert Checkpoints(tmp_path).latest == tmp_path / "step-000012"


def test_a_step_that_is_saved_again_outlives_the_first(tmp_path: Path) -> None:
    checkpoints, parts = Checkpoints(tmp_path), {"actor": actor_on(tiny_model())}
    checkpoints.save(3, parts, user={"try": 1})
    second = checkpoints.save(3, parts, user={"try": 2})
    assert checkpoints.latest == second
    assert checkpoints.load(tmp_path / "last", parts) == {"try": 2}
    assert not (tmp_path / "step-000003").exists()


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    parts = {"actor": actor_on(tiny_model())}
    with pytest.raises(CheckpointError, match="is not a checkpoint of cadenza"):
        load(tmp_path, parts)
    assert latest(tmp_path / "nowhere") is None
    path = Checkpoints(tmp_path).save(1, parts)
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=f"the weights of the checkpoint {path} do not fit"):
        load(path, parts)
    (path / "training" / "user.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        load(path, parts)
