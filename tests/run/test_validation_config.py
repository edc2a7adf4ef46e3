"""What a validation measures, and how it samples: in training, and in `cadenza play` and `cadenza eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.inference.replica import Sampling, SamplingChanges
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.group_queue import GroupQueue
from cadenza.run.config import ConfigError
from cadenza.run.config_file import build_config, dump_config
from cadenza.run.rollout_config import RolloutRunConfig
from cadenza.run.rollouts import validation_configs


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sums", "held"):
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(pipeline: str, **changes: Any) -> RolloutRunConfig:
    """A config as a run reads it, and as it is read again from the run's directory."""
    base = {"pipeline": pipeline, "steps": 2, "rollout": {"batch_size": 4, "group_size": 2}}
    built = build_config({**base, **changes})
    again = build_config(dump_config(built))
    assert dump_config(again) == dump_config(built)
    assert isinstance(again, RolloutRunConfig)
    return again


def rlvr(**domain: Any) -> RolloutRunConfig:
    rows = {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl", **domain}
    return config("rlvr", domains={"sums": rows})


def agentic(validation: Any = None, **domain: Any) -> RolloutRunConfig:
    envs = {"domains": {"sums": {"data": "sums.jsonl", "reward": "exact", **domain}}, "slots": 2}
    return config("agentic", envs=envs, validation=validation)


def measured(config: RolloutRunConfig) -> EnvManagerConfig:
    assert config.validation is not None
    return config.validation_env_manager(config.validation)


def tasks(config: RolloutRunConfig) -> list[str]:
    """The tasks of a validation, in their order."""
    queue = GroupQueue(*validation_configs(config), "val")
    queue.refuse_endless_tasks()
    found = []
    while (drawn := queue.domains.draw()) is not None:
        found.append(drawn[1].id)
    return found


ALL = [f"sums/{row}" for row in range(8)]
OWN = {"domains": {"sums": {"data": "held.jsonl", "reward": "exact"}}}


def test_a_validation_tries_all_rows_once_and_in_order_and_filters_none() -> None:
    filters = {"difficulty": [0.2, 0.8], "rest": 2, "group_filter": "cadenza.run.filters:has_variance"}
    env = config("agentic", envs={"domains": {"guess": {"env": "guess", "difficulty": [0.2, 0.8]}}, "slots": 2})
    for chosen in (rlvr(**filters), agentic(OWN, **filters), env):
        (domain,) = measured(chosen).domains.values()
        assert (domain.difficulty, domain.rest, domain.group_filter) == (None, 0, None)
    assert tasks(rlvr()) == tasks(agentic(OWN)) == ALL


def test_rows_that_are_trained_are_played_where_there_are_no_others() -> None:
    assert tasks(agentic().for_playing(3, greedy=False)) == ALL[:3]
    assert tasks(rlvr().for_playing(3, greedy=False)) == ALL[:3]


def test_only_the_domains_that_are_measured_in_training_are_played() -> None:
    rows = {"data": "sums.jsonl", "reward": "exact"}
    chosen = config("rlvr", domains={"sums": {**rows, "validation": "held.jsonl"}, "more": rows})
    assert tasks(chosen.for_playing(8, greedy=False)) == tasks(chosen) == ALL


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"path": "held.jsonl", "epochs": 2}, "epochs is 2, but a validation passes once over all rows"),
        ({"path": "held.jsonl", "shuffle": True}, "shuffle is True, but a validation passes once over all rows"),
        ({"path": "reasoning_gym:chain_sum"}, "reasoning_gym:chain_sum never ends: give it a size"),
    ],
)
def test_rows_that_cannot_be_passed_once_are_refused(rows: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"domains.sums.validation: {said}"):
        rlvr(validation=rows)
    with pytest.raises(ConfigError, match=f"sums.data: {said}"):
        agentic({"domains": {"sums": {"data": rows, "reward": "exact"}}})


def test_a_filter_of_a_validation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sums.difficulty: a validation tries every task"):
        agentic({"domains": {"sums": {"data": "held.jsonl", "reward": "exact", "difficulty": [0.1, 0.9]}}})


@pytest.mark.parametrize("pipeline", ["rlvr", "agentic"])
def test_validation_changes_single_keys_of_the_sampling_of_each_domain(pipeline: str) -> None:
    changes = {"sampling": {"top_k": 5}}
    own = {"sampling": {"max_tokens": 3, "stop": [10]}}
    if pipeline == "rlvr":
        chosen = config(
            "rlvr",
            domains={
                "plain": {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl"},
                "own": {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl", **own},
            },
            sampling={"max_tokens": 7},
            validation=changes,
        )
    else:
        domains = {"plain": {"env": "guess"}, "own": {"env": "guess", **own}}
        chosen = config(
            "agentic", envs={"domains": domains, "slots": 2, "sampling": {"max_tokens": 7}}, validation=changes
        )
    for plan in (chosen, chosen.for_playing(4, greedy=False)):
        manager = measured(plan)
        assert manager.sampling == Sampling(max_tokens=7, top_k=5)
        assert manager.sampling_of("plain") == manager.sampling
        assert manager.sampling_of("own") == Sampling(max_tokens=3, stop=(10,), top_k=5)
    greedy = measured(chosen.for_playing(4, greedy=True))
    assert greedy.sampling == Sampling(max_tokens=7, top_k=5, temperature=0)
    assert greedy.sampling_of("own") == Sampling(max_tokens=3, stop=(10,), top_k=5, temperature=0)


@pytest.mark.parametrize("engine", ["torch", "http"])
@pytest.mark.parametrize(("key", "value"), [("top_p", 0.9), ("top_k", 5)])
def test_tokens_that_are_trained_are_drawn_from_the_whole_distribution(engine: str, key: str, value: float) -> None:
    limited = {"sampling": {key: value}}
    rows = {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl"}
    servers = {"kind": "http", "servers": [{"url": "http://localhost:8000"}]}
    served = {"engine": servers, "model": {"path": "some/model"}} if engine == "http" else {}
    said = rf"{key} {value}: tokens that are trained are drawn from the whole.*validation\.sampling\.{key} limits"
    for place, changes in (("sampling", limited), (r"domains\.sums\.sampling", {"domains": {"sums": rows | limited}})):
        with pytest.raises(ConfigError, match=rf"{place}\.{said}"):
            config("rlvr", **({"domains": {"sums": rows}} | changes | served))
    with pytest.raises(ConfigError, match=rf"envs\.sampling\.{said}"):
        config("agentic", envs={"domains": {"guess": {"env": "guess"}}, "slots": 2, **limited})
    unlimited = rows | {"sampling": {"top_p": 1.0, "top_k": 0}}
    assert config("rlvr", domains={"sums": unlimited}, validation=limited).validation is not None


def test_a_domain_changes_single_keys_of_the_sampling_of_all() -> None:
    rows = {"data": "sums.jsonl", "reward": "exact", "validation": "held.jsonl"}
    own = {"own": {**rows, "sampling": {"max_tokens": 3}}, "cut": {**rows, "sampling": {"stop": []}}}
    sampling = {"max_tokens": 7, "temperature": 0.7, "stop": [10]}
    chosen = config("rlvr", domains={"plain": rows, **own}, sampling=sampling)
    for manager in (chosen.env_manager, measured(chosen)):
        assert manager.sampling_of("plain") == Sampling(max_tokens=7, temperature=0.7, stop=(10,))
        assert manager.sampling_of("own") == Sampling(max_tokens=3, temperature=0.7, stop=(10,))
        assert manager.sampling_of("cut") == Sampling(max_tokens=7, temperature=0.7)
        assert manager.longest_answer == 7


def test_every_key_of_sampling_can_be_changed() -> None:
    assert SamplingChanges.model_fields.keys() == Sampling.model_fields.keys()
