"""Weights from a trainer to replicas on a real Ray: on one node through shared memory, on two by a broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

ray = pytest.importorskip("ray")

from ray_cases import RayTestCluster  # noqa: E402

from cadenza import Cluster, ResourceManager  # noqa: E402
from cadenza.cluster import dispatch  # noqa: E402
from cadenza.cluster.remote_replica import RemoteReplica  # noqa: E402
from cadenza.cluster.weight_transfer import StoredWeights, WeightBroadcast, WeightLayout, WeightTransferError  # noqa: E402
from cadenza.inference.replica import Generation, Request, Sampling, Tokens  # noqa: E402
from cadenza.rollout.sampler import SamplerConfig  # noqa: E402
from cadenza.run.engines import EngineConfig  # noqa: E402
from cadenza.run.inference import BroadcastDelivery, Inference, InferenceSpec, ObjectStoreDelivery, open_inference  # noqa: E402
from cadenza.run.workers import ActorWorker, ModelSpec  # noqa: E402
from cadenza.training import ActorConfig, ModelConfig, ReferenceConfig  # noqa: E402
from cadenza.training.strategy import StrategyName  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROMPT = np.arange(3, 11, dtype=np.int32)
BUCKET = 5000
MODEL = ModelConfig(layers=2, hidden=32, heads=2)


class Trainer(ActorWorker):
    """Changes as if it had learned, and says what its module writes."""

    bucket_bytes = BUCKET

    @dispatch("broadcast")
    def nudge(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.learner.module.parameters():
                change = 0.3 * torch.randn(parameter.shape)
                if isinstance(parameter, DTensor):
                    change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
                parameter += change

    @dispatch("broadcast", gather=lambda texts: texts[0])
    def greedy(self, tokens: Tokens, count: int) -> list[int]:
        ids = torch.from_numpy(np.array(tokens)).long()[None]
        with torch.no_grad():
            for _ in range(count):
                token = self.learner.module(input_ids=ids).logits[0, -1].argmax()
                ids = torch.cat((ids, token[None, None]), 1)
        return ids[0, len(tokens) :].tolist()


Work = Callable[[Any, Inference, list[RemoteReplica]], Awaitable[None]]


def run(devices: str, work: Work, *, trainers: str = "0", strategy: StrategyName = "torch") -> None:
    """With trainers and replicas on these devices; 0 to 7 are one node, 8 to 11 another."""

    async def main() -> None:
        resources = ResourceManager.on_ray()
        try:
            places = resources.place({"actor": trainers, "inference": devices})
            codec: Any = SimpleNamespace(vocab_size=64, eos_token_ids=frozenset())  # texts do not end by themselves
            model_spec = ModelSpec(MODEL, codec.vocab_size, None, 0, 1)
            actor = Cluster(
                "actor", Trainer, places["actor"], model_spec=model_spec, config=ActorConfig(strategy=strategy),
                reference=ReferenceConfig(), failures=None,
            )  # fmt: skip
            async with actor:
                where = await actor.open_rendezvous() if actor.world_size > 1 else None
                await actor.build(where, [str(place) for place in actor.places])
                await actor.nudge(0)
                spec = InferenceSpec(actor, places, codec, model_spec, EngineConfig(), SamplerConfig(balance_seconds=0))
                async with open_inference(spec) as running:
                    assert isinstance(running.delivery, ObjectStoreDelivery | BroadcastDelivery)
                    await work(actor, running, list(running.delivery.replicas))
        finally:
            await resources.shutdown()

    asyncio.run(asyncio.wait_for(main(), 300))


def ask(id: int, count: int = 12) -> Request:
    return Request(id, (PROMPT,), len(PROMPT), count, Sampling(temperature=0.0), 0, 0, id, id, 0)


async def all_say(replicas: list[RemoteReplica], expected: list[int], version: int, id: int) -> None:
    for number, replica in enumerate(replicas):
        answer: Generation = await replica.generate(ask(id + number, len(expected)))
        assert answer.tokens.tolist() == expected
        assert {span.version for span in answer.spans} == {version}
        assert (await replica.stats()).version == version


@pytest.mark.parametrize("devices", ["1-2", "1,8,9"], ids=["near", "far"])
@pytest.mark.parametrize(("trainers", "strategy"), [("0", "torch"), ("0,2", "torch"), ("0,10", "fsdp2")])
def test_after_an_update_every_replica_writes_what_the_trainer_would(
    nodes: RayTestCluster, devices: str, trainers: str, strategy: StrategyName
) -> None:
    way = ObjectStoreDelivery if devices == "1-2" else BroadcastDelivery

    async def work(actor: Any, running: Inference, replicas: list[RemoteReplica]) -> None:
        assert type(running.delivery) is way
        before = await actor.greedy(PROMPT, 12)
        await all_say(replicas, before, 0, 100)
        for version in (1, 2):
            await actor.nudge(version)
            weights = await running.deliver_weights()
            assert isinstance(weights, StoredWeights) == (way is ObjectStoreDelivery)
            await all_say(replicas, before, version - 1, 1000 * version)  # they have it, and do not use it yet
            await running.sampler.load_weights(version, weights)
            after = await actor.greedy(PROMPT, 12)
            assert after != before
            await all_say(replicas, after, version, 1000 * version + 100)
            before = after

    run(devices, work, trainers=trainers, strategy=strategy)


def test_a_turn_that_runs_through_an_update_has_each_token_of_one_version(nodes: RayTestCluster) -> None:
    async def work(actor: Any, running: Inference, replicas: list[RemoteReplica]) -> None:
        (replica,) = replicas
        old = await actor.greedy(PROMPT, 400)
        turn = replica.generate(ask(1, 400))
        await actor.nudge(1)
        weights = await running.deliver_weights()
        while not (await replica.stats()).generated:  # noqa: ASYNC110 - it begins within some calls
            await asyncio.sleep(0)
        await running.sampler.load_weights(1, weights)
        answer: Generation = await turn
        first = sum(span.length for span in answer.spans if span.version == 0)
        written = answer.tokens.tolist()
        assert written[:first] == old[:first]
        assert written[first:] == await actor.greedy(np.append(PROMPT, answer.tokens[:first]), 400 - first)
        assert {span.version for span in answer.spans} in ({0, 1}, {0})  # it may have ended before

    run("1", work)


def test_an_update_that_fails_half_way_leaves_the_old_version_whole(nodes: RayTestCluster) -> None:
    async def work(actor: Any, running: Inference, replicas: list[RemoteReplica]) -> None:
        old = await actor.greedy(PROMPT, 12)
        await actor.nudge(1)
        good: StoredWeights = await actor.store_weights()
        assert len(good.refs) > 3
        torn = replace(good, refs=(*good.refs[:2], ray.put([np.zeros(3, np.uint8)]), *good.refs[3:]))
        for replica in replicas:
            with pytest.raises(WeightTransferError, match="bucket 2 of the weights"):
                await replica.prepare(torn)
            with pytest.raises(WeightTransferError, match="bucket 2 of the weights"):
                await replica.load_weights(1, torn)
        await all_say(replicas, old, 0, 100)
        await running.sampler.load_weights(1, good)
        await all_say(replicas, await actor.greedy(PROMPT, 12), 1, 200)

    run("1-2", work)


def test_a_broadcast_that_a_replica_misses_goes_through_the_object_store_and_the_dead_cost_themselves(
    nodes: RayTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(actor: Any, running: Inference, replicas: list[RemoteReplica]) -> None:
        await actor.nudge(1)
        dead, *living = replicas
        way = running.delivery
        assert isinstance(way, BroadcastDelivery)
        missed = way._last
        assert missed is not None
        entries = [
            entry._replace(shape=(1, *entry.shape)) if entry.name == "model.norm.weight" else entry
            for entry in missed[1].layout.entries
        ]
        other = WeightLayout(tuple(entries), BUCKET)
        way._last = missed[0], replace(missed[1], layout=other)  # the engines will not have it
        assert isinstance(await running.deliver_weights(), StoredWeights)
        assert "the broadcast of weights failed" in caplog.text
        dead.kill("for the test")
        weights = await running.deliver_weights()
        assert isinstance(weights, WeightBroadcast)
        assert weights.size == 1 + len(living)
        await running.sampler.load_weights(1, weights)
        assert list(running.sampler.lost) == [dead.name]
        await all_say(living, await actor.greedy(PROMPT, 12), 1, 100)

    run("1,8,9", work)
