"""Several replicas in one process: they share the weights, and one run is the same whatever their number."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import ask, greedy, prompt, tiny
from pipeline_cases import TINY, cadenza, column, config_file, distance, lines, texts, trained
from torch import Tensor

from cadenza.cluster import PlacementError, ResourceManager
from cadenza.inference.torch_engine import TorchReplica


def test_a_run_is_the_same_whatever_the_number_of_its_replicas(tmp_path: Path) -> None:
    one, three = (
        trained(tmp_path, "steps=3", "samples=8", f"name={name}", f"devices={{inference: {devices}}}").run
        for name, devices in (("one", "0"), ("three", "0-2"))
    )
    assert texts(one) == texts(three)
    for name in {name for line in lines(one) for name in line if name.startswith("train/")}:
        assert column(three, name) == pytest.approx(column(one, name), abs=1e-4), name


def test_a_run_with_shared_devices_is_the_same_run_and_it_resumes(tmp_path: Path) -> None:
    asked = ("samples=8", "preset=ppo", "checkpoint.every=1")
    apart = trained(tmp_path, "steps=4", *asked, "name=apart", "devices={actor: 0, inference: 1-2}").run
    shared = trained(tmp_path, "steps=2", *asked, "name=shared", "devices={actor: 0, inference: 0-1}").run
    resumed = cadenza("resume", shared, "steps=4", "--json")
    assert resumed.code == 0, resumed.err
    assert texts(apart) == texts(shared)
    for name in {name for line in lines(apart) for name in line if name.startswith("train/")}:
        assert column(shared, name) == pytest.approx(column(apart, name), abs=1e-4), name
    assert distance(*(run / "checkpoints" / "last" for run in (apart, shared))) < 1e-6
    told = lines(shared)[-1]
    assert {"sharing/lent", "sharing/refused", "sharing/moved", "sharing/moved_tokens"} <= told.keys()
    assert column(shared, "sharing/lent")[2] + column(shared, "sharing/refused")[2] == 2


def test_a_run_with_shared_devices_ends_early_with_all_its_weights(tmp_path: Path) -> None:
    domains = {"lake": {"env": "frozenlake", "env_args": {"map": ["SF", "FG"], "max_steps": 4}, "tasks": 4}}
    envs = {**TINY["envs"], "domains": domains}
    apart, shared = (
        trained(tmp_path, "steps=9", f"name={name}", f"devices={{actor: 0, inference: {devices}}}", envs=envs).run
        for name, devices in (("apart", "1-2"), ("shared", "0-1"))
    )
    assert len(column(shared, "train/loss")) == 2
    assert distance(*(run / "checkpoints" / "last" for run in (apart, shared))) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_twins_share_their_weights_before_and_after_an_update(kind: str) -> None:
    async def main() -> None:
        first = TorchReplica(tiny(kind), name="one")
        second = first.clone(name="two", devices=(1,))
        replicas = [first, second]
        try:
            for version in (0, 1):
                model = tiny(kind, seed=version)
                if version:
                    prepared = await first.prepare(model)
                    for replica in replicas:
                        await replica.load_weights(version, prepared)
                answers = await asyncio.gather(*(replica.generate(ask(id=7)) for replica in replicas))
                for answer in answers:
                    assert answer.tokens.tolist() == greedy(model, prompt(10, 7), 20)
                    assert [span.version for span in answer.spans] == [version]
                ours, theirs = (memory(replica) for replica in replicas)
                assert ours == theirs
        finally:
            for replica in replicas:
                replica.close()

    asyncio.run(main())


def memory(replica: TorchReplica) -> set[int]:
    """Where the weights of a replica lie."""
    decoder = replica._engine.decoder
    if isinstance(module := getattr(decoder, "_module", None), torch.nn.Module):
        return {tensor.data_ptr() for tensor in module.parameters()}
    weights = decoder._weights  # type: ignore[attr-defined]
    found = [weights.embedding, weights.head, *(tensor for layer in weights.layers for tensor in layer)]
    return {tensor.data_ptr() for tensor in found if isinstance(tensor, Tensor)}


def test_preparing_changes_nothing_until_it_is_loaded_and_what_is_wrong_changes_nothing_at_all() -> None:
    async def main() -> None:
        replica = TorchReplica(tiny())
        old, new = (greedy(tiny(seed=seed), prompt(10, 7), 20) for seed in (0, 1))
        try:
            prepared = await replica.prepare(tiny(seed=1).state_dict())
            assert (await replica.generate(ask(id=7))).tokens.tolist() == old
            with pytest.raises(ValueError, match=r"model\.norm\.weight must be \[64\], got \[3\]"):
                await replica.prepare({"model.norm.weight": torch.zeros(3)})
            assert (await replica.generate(ask(id=7))).tokens.tolist() == old
            await replica.load_weights(1, prepared)
            assert (await replica.generate(ask(id=7))).tokens.tolist() == new
        finally:
            replica.close()

    asyncio.run(main())


def test_the_replicas_of_a_role_are_placed_apart() -> None:
    places = ResourceManager([2, 4]).place({"inference": {"devices": "0-5", "tensor_parallel": 2}})["inference"]
    parts = places.replicas()
    assert [part.devices for part in parts] == [(0, 1), (2, 3), (4, 5)]
    assert [[place.rank for place in part.places] for part in parts] == [[0, 1]] * 3
    assert str(parts[2].places[1]) == "inference rank 1 of replica 2 on node-1, device 5"
    assert np.unique([place.world_size for part in parts for place in part.places]).tolist() == [2]
    with pytest.raises(PlacementError, match="5 devices are not a whole number of replicas of 2"):
        ResourceManager(6).place({"inference": {"devices": "0-4", "tensor_parallel": 2}})


def test_the_torch_engine_refuses_several_devices_for_one_replica(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), "devices={inference: {devices: 0-1, tensor_parallel: 2}}")
    assert done.code == 1
    assert "devices.inference: the torch engine runs on one device" in done.err
