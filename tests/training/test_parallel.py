"""Several ranks train what one would: the same weights, losses and metrics, and the same failures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from test_actor import EVERYTHING, PLAIN
from torch import Tensor
from training_cases import assert_same_parameters, parameters, random_batch, segments_batch, tiny_model, without

from cadenza.algorithms import TokenLoss, ppo_clip
from cadenza.data import DataProto, Ragged
from cadenza.errors import DeadlinePassed, OtherRanksLost
from cadenza.training import Actor, ActorConfig, Critic, CriticConfig, NonFiniteLoss, Supervised, SupervisedConfig
from cadenza.training.distiller import DistillConfig, Distiller
from cadenza.training.dpo import Dpo, DpoConfig
from cadenza.training.process_group import ProcessGroup, RankGroup, Rendezvous, RendezvousAddress, VersionsDiffer
from cadenza.training.strategy import ParallelStrategy, assign_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Weights = dict[str, Tensor]
ADAM = {"lr": 1e-2, "max_grad_norm": 0.05}
"""Every gradient is clipped."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def act(group: RankGroup, batches: list[DataProto], config: dict[str, Any]) -> tuple[Weights, list[dict[str, float]]]:
    actor = Actor(tiny_model(double=True), ActorConfig(**config), 0, strategy=ParallelStrategy(group))
    told = [actor.train(batch) for batch in batches]
    return parameters(actor.module), told


def criticise(
    group: RankGroup, batches: list[DataProto], config: dict[str, Any]
) -> tuple[Weights, list[dict[str, float]]]:
    critic = Critic(tiny_model(), CriticConfig(**config), 0, strategy=ParallelStrategy(group))
    told = [critic.train(batch) for batch in batches]
    heads = {name: tensor for name, tensor in critic.state().tensors.items() if name.startswith("head/")}
    return parameters(critic.module) | heads, told


def imitate(
    group: RankGroup, batches: list[DataProto], config: dict[str, Any]
) -> tuple[Weights, list[dict[str, float]]]:
    trainer = Supervised(tiny_model(double=True), SupervisedConfig(**config), 0, strategy=ParallelStrategy(group))
    told = [trainer.train(batch) for batch in batches]
    return parameters(trainer.module), told


def prefer(
    group: RankGroup, batches: list[DataProto], config: dict[str, Any]
) -> tuple[Weights, list[dict[str, float]]]:
    learner = Dpo(tiny_model(double=True), DpoConfig(**config), 0, strategy=ParallelStrategy(group))
    told = [learner.train(batch) for batch in batches]
    return parameters(learner.module), told


def distil(
    group: RankGroup, batches: list[DataProto], config: dict[str, Any]
) -> tuple[Weights, list[dict[str, float]]]:
    strategy, teacher = ParallelStrategy(group), tiny_model(7, double=True)
    learner = Distiller(tiny_model(double=True), teacher, DistillConfig(**config), 0, strategy=strategy)
    told = [learner.train(batch) for batch in batches]
    return parameters(learner.module), told


def assert_as_one(ranks: Ranks, work: Any, batches: list[DataProto], config: dict[str, Any], atol: float) -> None:
    """All ranks end with the same bits, which are those of one rank but for the order of sums."""
    weights, told = work(RankGroup(), batches, config)
    (first, metrics), *others = ranks.run(work, batches, config)
    assert_same_parameters(first, weights, atol=atol)
    for mine, alone in zip(metrics, told, strict=True):
        assert mine == pytest.approx(alone, abs=1e-6)
    for other, same in others:
        assert_same_parameters(other, first, atol=0)
        assert same == metrics


@pytest.mark.parametrize("optimizer", [PLAIN, ADAM])
@pytest.mark.parametrize("config", EVERYTHING)
def test_two_actors_learn_what_one_would(ranks: Ranks, config: dict[str, Any], optimizer: dict[str, Any]) -> None:
    batches = [without(random_batch(seed), "old_logprobs") for seed in (11, 12, 13)]
    assert_as_one(ranks, act, batches, {**optimizer, **config, "token_budget": 25}, 1e-7)


@pytest.mark.parametrize("config", [{"epochs": 2, "mini_batches": 3}, {"aggregation": "sequence_mean"}])
def test_two_critics_learn_what_one_would(ranks: Ranks, config: dict[str, Any]) -> None:
    batches = [random_batch(seed) for seed in (11, 12, 13)]
    assert_as_one(ranks, criticise, batches, {"value_clip": None, "lr": 1e-2, **config, "token_budget": 25}, 1e-5)


def test_two_imitators_learn_what_one_would(ranks: Ranks) -> None:
    assert_as_one(ranks, imitate, [random_batch(seed) for seed in (11, 12)], {**ADAM, "mini_batches": 2}, 1e-9)


def test_two_ranks_part_no_pair(ranks: Ranks) -> None:
    batches = []
    for seed in (11, 12):
        batch = random_batch(seed, groups=5, size=2)
        batch.batch["traj_id"] = np.repeat(np.arange(5), 2)
        batches.append(batch)
    assert_as_one(ranks, prefer, batches, {**ADAM, "mini_batches": 2, "token_budget": 25}, 1e-7)


def test_two_students_learn_what_one_would(ranks: Ranks) -> None:
    assert_as_one(ranks, distil, [random_batch(seed) for seed in (11, 12)], {**ADAM, "token_budget": 25}, 1e-7)


def test_rows_of_one_trajectory_are_one_sequence_also_on_two_ranks(ranks: Ranks) -> None:
    batch = random_batch(11)
    batch.batch["traj_id"] = np.arange(len(batch)) // 4
    config = {**PLAIN, "aggregation": "sequence_mean", "sequence": "trajectory", "mini_batches": 2}
    assert_as_one(ranks, act, [batch], config, 1e-9)


def test_a_rank_without_rows_takes_part_in_every_update(ranks: Ranks) -> None:
    batch = segments_batch([[(False, [1, 2]), (True, [3, 4])]])
    batch.batch["advantages"] = np.ones(1, np.float32)
    assert_as_one(ranks, act, [batch, random_batch(3), batch], ADAM, 1e-9)


def test_two_ranks_agree_that_there_is_nothing_to_learn(ranks: Ranks) -> None:
    idle = without(random_batch(11), "old_logprobs")
    idle.batch["advantages"] = np.zeros(len(idle), np.float32)
    assert_as_one(ranks, act, [random_batch(12), idle], {**ADAM, "mini_batches": 2}, 1e-9)
    for weights, told in ranks.run(act, [random_batch(12), idle], ADAM):
        assert [metrics["updates_skipped"] for metrics in told] == [0.0, 1.0]
        assert_same_parameters(weights, ranks.run(act, [random_batch(12)], ADAM)[0][0], atol=0)


def test_ranks_step_together_where_one_alone_has_signal(ranks: Ranks) -> None:
    batch = without(random_batch(11), "old_logprobs")
    advantages = np.zeros(len(batch), np.float32)
    advantages[-1] = 1.0
    batch.batch["advantages"] = advantages
    assert_as_one(ranks, act, [random_batch(12), batch], {**ADAM, "skip_idle": False}, 1e-9)


def act_in_parts(group: RankGroup, batches: list[DataProto], config: dict[str, Any]) -> tuple[Weights, list[Any]]:
    actor = Actor(tiny_model(double=True), ActorConfig(**config), 0, strategy=ParallelStrategy(group))
    told = []
    for batch in batches:
        for part in (batch[:2], batch[2:3], batch[3:]):
            actor.add(part)
        told.append(actor.finish())
    return parameters(actor.module), told


@pytest.mark.parametrize("config", [config for config in EVERYTHING if "epochs" not in config])
def test_two_actors_learn_from_parts_what_one_would_from_the_whole(ranks: Ranks, config: dict[str, Any]) -> None:
    batches = [without(random_batch(seed), "old_logprobs") for seed in (11, 12)]
    config = {**ADAM, **config, "token_budget": 25}
    weights, told = act(RankGroup(), batches, config)
    (first, metrics), (second, same) = ranks.run(act_in_parts, batches, config)
    assert_same_parameters(first, weights, atol=1e-7)
    assert_same_parameters(second, first, atol=0)
    assert same == metrics
    for mine, alone in zip(metrics, told, strict=True):
        assert mine == pytest.approx(alone, abs=1e-6)


def other_weights(group: RankGroup) -> Weights:
    return parameters(Actor(tiny_model(group.data_rank), ActorConfig(), 0, strategy=ParallelStrategy(group)).module)


def test_all_ranks_begin_with_the_weights_of_the_first(ranks: Ranks) -> None:
    for weights in ranks.run(other_weights):
        assert_same_parameters(weights, parameters(tiny_model(0)), atol=0)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 8))
def test_shares_keep_neighbours_together_and_are_even(costs: list[int], count: int) -> None:
    found = assign_ranks(np.array(costs, np.int64), count)
    assert (np.diff(found) >= 0).all()
    assert ((found >= 0) & (found < count)).all()
    sums = np.bincount(found, weights=costs, minlength=count)
    assert sums.max(initial=0) <= sum(costs) / count + max(costs, default=0)


# -- failures ----------------------------------------------------------------------------------------------------------


def fail(group: RankGroup, batch: DataProto, config: dict[str, Any], failures: Path) -> None:
    actor = Actor(tiny_model(), ActorConfig(**config), 0, failures=failures, strategy=ParallelStrategy(group))
    before = parameters(actor.module)
    try:
        actor.train(batch)
    finally:
        assert_same_parameters(parameters(actor.module), before, atol=0)
        assert all(parameter.grad is None for parameter in actor.module.parameters())


@pytest.mark.parametrize("row", [0, 8])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_is_told_alike(
    ranks: Ranks, row: int, tmp_path: Path
) -> None:
    batch = random_batch(11)
    values = batch.batch.ragged("advantages").values.copy()
    offsets = batch.batch.ragged("advantages").offsets
    values[offsets[row] : offsets[row + 1]] = np.nan
    batch.batch["advantages"] = Ragged(values, offsets)
    errors = ranks.errors(fail, batch, {**ADAM, "token_budget": 1}, tmp_path)
    for error in errors:
        assert isinstance(error, NonFiniteLoss)
        assert str(
            error
        ) == f"the loss is nan at update 0, rows {row}; the weights were not changed; the batch is in " + (
            str(tmp_path / "update-0-0")
        )
    assert len(list(tmp_path.iterdir())) == 1


def steep(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    return TokenLoss((logprobs - logprobs.detach()).abs().sqrt(), {}, int(mask.sum()))


def test_a_gradient_that_is_not_finite_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    batch = random_batch(11)
    errors = ranks.errors(fail, batch, {**ADAM, "loss": steep}, tmp_path)
    for error in errors:
        assert isinstance(error, NonFiniteLoss)
        assert error.rows == tuple(range(len(batch)))
    assert len({str(error) for error in errors}) == len(list(tmp_path.iterdir())) == 1


class Unspeakable(Exception):
    """Does not come back from pickling."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def unlucky(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    if torch.distributed.get_rank() == 1:
        raise Unspeakable("bad", "luck")
    return ppo_clip(logprobs, old, advantages, mask)


def test_a_loss_that_raises_on_one_rank_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.errors(hear, random_batch(11), tmp_path)
    assert str(first) == "RuntimeError Unspeakable: bad luck ['it happened on rank 1']"
    assert str(second) == "Unspeakable bad luck []"
    assert ranks.run(act, [random_batch(11)], PLAIN)


def fail_in_parts(group: RankGroup, batch: DataProto, failures: Path) -> Weights:
    """The last part is unlucky on one rank; then all learn from the parts before it."""
    actor = Actor(
        tiny_model(),
        ActorConfig(**PLAIN, loss=unlucky_when_told),
        0,
        failures=failures,
        strategy=ParallelStrategy(group),
    )
    for part in (batch[:4], batch[4:]):
        actor.add(part)
    with pytest.raises(Exception, match="bad luck"):
        actor.add(bad_luck(batch))
    assert all(parameter.grad is None for parameter in actor.module.parameters())
    actor.add(batch)
    actor.finish()
    return parameters(actor.module)


def bad_luck(batch: DataProto) -> DataProto:
    told = batch.select()
    told.batch["advantages"] = np.full(len(batch), 1e9, np.float32)
    return told


def unlucky_when_told(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    return (unlucky if float(advantages.max()) > 1e8 else ppo_clip)(logprobs, old, advantages, mask)


def test_a_part_that_raises_on_one_rank_drops_the_parts_of_all(ranks: Ranks, tmp_path: Path) -> None:
    batch = random_batch(11)
    first, second = ranks.run(fail_in_parts, batch, tmp_path)
    alone = Actor(tiny_model(), ActorConfig(**PLAIN), 0)
    alone.train(batch)
    assert_same_parameters(first, parameters(alone.module), atol=1e-5)
    assert_same_parameters(second, first, atol=0)


def hear(group: RankGroup, batch: DataProto, failures: Path) -> None:
    try:
        fail(group, batch, {**PLAIN, "loss": unlucky}, failures)
    except Exception as error:  # noqa: BLE001 - notes do not travel
        text = f"{type(error).__name__} {error} {getattr(error, '__notes__', [])}"
        raise AssertionError(text) from None


def die(group: RankGroup, rank: int) -> None:
    if group.data_rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_gather(None)


def test_the_death_of_a_rank_is_heard_by_the_others() -> None:
    with Ranks(2) as ranks, pytest.raises(OtherRanksLost, match="rank 0 lost the connection to another rank"):
        ranks.run(die, 1)


# -- the rendezvous ----------------------------------------------------------------------------------------------------

NAMES = ["actor rank 0 on here, device 0", "actor rank 1 on there, device 8"]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(DeadlinePassed, match="rank 0 on here, device 0 waits for actor rank 1 on there, device 8"):
        ProcessGroup(Rendezvous("127.0.0.1"), 0, NAMES, seconds=0.2)


def test_a_rendezvous_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(
        DeadlinePassed, match=r"rank 1 on there, device 8 cannot reach actor rank 0 on here.*127.0.0.1:1 "
    ):
        ProcessGroup(RendezvousAddress("127.0.0.1", 1), 1, NAMES, seconds=0.2)


def test_ranks_with_other_versions_of_torch_are_refused_with_both() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    rendezvous.store.set("here/1", '{"torch": "1.13.1"}')
    with pytest.raises(VersionsDiffer) as caught:
        ProcessGroup(rendezvous, 0, NAMES, seconds=1)
    said = f"torch 1.13.1 in {NAMES[1]}, but torch {torch.__version__} in {NAMES[0]}: install the same on all nodes"
    assert str(caught.value) == said
