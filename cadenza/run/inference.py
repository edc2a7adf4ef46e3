"""The inference side of a run: its replicas behind their sampler, and how weights reach them.

Where the replicas are processes of their own, so is the sampler: `cadenza train` on Ray is made of the same pieces as a
program with its scheduler in a Ray actor (`ReplicaWorker`s, and an `InferenceService` over them). Replicas in this
process have their sampler here.

Invariant: `Inference.deliver_weights` brings what the actor has now to every replica, beside the generation, and
changes nothing that is generated; `sampler.load_weights` with its answer swaps it in between two steps of an engine. So
no step ever sees two versions, and an update that fails half way leaves the old one whole.
```
embedded          the engines read the actor's own tensors; one packed copy serves all of them
Ray, one node     the actor's process puts buckets into shared memory, and the replicas read them there
Ray, more nodes   the actor's process broadcasts buckets to the replicas
servers           each reads buckets in the shared memory of this node, when it loads them
```
The embedded engine is ready for the swap when weights have reached it. vLLM and servers take them in when they load
them, and generate nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cadenza.cluster import Cluster, DeviceMap
from cadenza.cluster.placement import DeviceSource
from cadenza.cluster.remote_replica import RemoteReplica
from cadenza.cluster.weight_transfer import StoredWeights, WeightBroadcast, WeightTransferError
from cadenza.inference.codec import TextCodec
from cadenza.inference.prepared_weights import PreparedWeights
from cadenza.inference.replica import Replica
from cadenza.inference.torch_engine import TorchReplica
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.sampler import Sampler, SamplerConfig
from cadenza.rollout.sampler_client import InferenceService
from cadenza.run.engines import EngineConfig, find_engine
from cadenza.run.role_names import ACTOR, INFERENCE
from cadenza.run.workers import ActorWorker, ModelSpec
from cadenza.user_code import named_user_code

logger = logging.getLogger("cadenza")


class WeightDelivery(Protocol):
    """How weights of the actor reach the replicas."""

    name: str

    async def deliver(self) -> object:
        """Bring the weights to the replicas; returns what `load_weights` takes."""
        ...


@dataclass(frozen=True, slots=True)
class Inference:
    """The replicas of a run behind their sampler, as a `RolloutScheduler` takes them (its `infer_cluster`)."""

    sampler: Sampler
    codec: TextCodec
    delivery: WeightDelivery
    resources: DeviceSource
    """Where it runs, and env workers too."""
    engine_kind: str
    """What `engine.kind` says."""

    async def deliver_weights(self) -> object:
        """What the actor has now, brought to the replicas; `sampler.load_weights` swaps it in."""
        with named_user_code("engine.kind", self.engine_kind):
            return await self.delivery.deliver()


@dataclass(frozen=True, slots=True)
class InferenceSpec:
    """What the replicas of a run are made from."""

    actor: Cluster[ActorWorker]
    devices: DeviceMap
    codec: TextCodec
    model_spec: ModelSpec
    engine: EngineConfig
    sampler: SamplerConfig


@asynccontextmanager
async def open_inference(spec: InferenceSpec) -> AsyncIterator[Inference]:
    """Replicas with the policy in them: one on each replica's share of the role's devices, or one for each server."""
    async with AsyncExitStack() as stack:
        sampler: Sampler
        delivery: WeightDelivery
        if spec.devices.resources.backend == "embedded":
            with named_user_code("engine.kind", spec.engine.kind):
                running = find_engine(spec.engine.kind).local_replicas(spec)
                replicas, delivery = await stack.enter_async_context(running)
                sampler = _local_sampler(spec, replicas, stack)
        else:
            remote = await _ray_replicas(spec, stack)
            delivery = ray_delivery_for(spec.devices)(spec.actor, remote)
            weights = await delivery.deliver()
            await asyncio.gather(*(replica.load_weights(0, weights) for replica in remote))
            sampler = await _ray_sampler(spec, remote, stack)
        logger.info("weights reach the replicas %s", delivery.name)
        yield Inference(sampler, spec.codec, delivery, spec.devices.resources, spec.engine.kind)


def _local_sampler(spec: InferenceSpec, replicas: Sequence[Replica], stack: AsyncExitStack) -> Sampler:
    """A sampler in this process."""
    sampler = LocalSampler(replicas, spec.sampler)
    stack.push_async_callback(sampler.close)
    return sampler


async def _ray_sampler(spec: InferenceSpec, replicas: Sequence[RemoteReplica], stack: AsyncExitStack) -> Sampler:
    """A sampler in a process of its own. What it gives up as lost gets no weights from here any more."""
    handles = [replica.worker_handle for replica in replicas]
    service = await InferenceService.start(handles, spec.codec, spec.sampler)
    stack.push_async_callback(service.shutdown)
    by_name = {replica.name: replica for replica in replicas}

    def on_lost(name: str, cause: str) -> None:
        if name in by_name:
            logger.warning("replica %s is given up: %s", name, cause)
            by_name[name].mark_lost(cause)

    service.sampler.on_lost.append(on_lost)
    await service.sampler.refresh()
    return service.sampler


async def _ray_replicas(spec: InferenceSpec, stack: AsyncExitStack) -> list[RemoteReplica]:
    """Each replica is a cluster of its own, so that one that dies costs itself alone. All of them start together."""
    with named_user_code("engine.kind", spec.engine.kind):
        engine = find_engine(spec.engine.kind)
        clusters = [engine.replica_cluster(spec, placement) for placement in spec.devices[INFERENCE].replicas()]
    for cluster in clusters:
        stack.push_async_exit(cluster)
    started = await asyncio.gather(*(cluster.start() for cluster in clusters), return_exceptions=True)
    for error in started:
        if isinstance(error, BaseException):
            raise error
    return [await RemoteReplica.of_single_worker(cluster) for cluster in clusters]


# -- weight deliveries -------------------------------------------------------------------------------------------------


class InProcessDelivery:
    """To replicas in the actor's own process, which share its weights."""

    name = "in the same process, without a copy on the way"

    def __init__(self, actor: Cluster[ActorWorker], replicas: Sequence[TorchReplica]) -> None:
        self._actor, self._replicas = actor, replicas

    async def deliver(self) -> PreparedWeights:
        return await self._replicas[0].prepare(await self._actor.module())


class ServerDelivery:
    """To HTTP servers, which are sent the weights of this process when they load them."""

    name = "over the shared memory of this node"

    def __init__(self, actor: Cluster[ActorWorker]) -> None:
        self._actor = actor

    async def deliver(self) -> dict[str, Tensor]:
        """The live tensors: they are loaded before the next train step."""
        weights: dict[str, Tensor] = (await self._actor.module()).state_dict()
        return weights


class ObjectStoreDelivery:
    """Through Ray's object store: shared memory, which Ray copies once for each further node."""

    name = "through shared memory"

    def __init__(self, actor: Cluster[ActorWorker], replicas: Sequence[RemoteReplica]) -> None:
        self._actor, self.replicas = actor, replicas

    async def deliver(self) -> StoredWeights:
        """A replica that cannot prepare them fetches them again when it loads them, or is lost then."""
        stored: StoredWeights = await self._actor.store_weights()
        living = [replica for replica in self.replicas if not replica.is_lost]
        await asyncio.gather(*(replica.prepare(stored) for replica in living), return_exceptions=True)
        return stored


class BroadcastDelivery:
    """By a collective broadcast of the actor to all replicas; if it fails, through the object store."""

    name = "by a collective broadcast"

    def __init__(self, actor: Cluster[ActorWorker], replicas: Sequence[RemoteReplica]) -> None:
        self._actor, self.replicas = actor, replicas
        self._object_store = ObjectStoreDelivery(actor, replicas)
        self._last: tuple[Sequence[RemoteReplica], WeightBroadcast] | None = None

    async def deliver(self) -> StoredWeights | WeightBroadcast:
        living = [replica for replica in self.replicas if not replica.is_lost]
        if self._last is None or self._last[0] != living:
            self._last = living, await self._actor.open_broadcast(len(living))
        broadcast = self._last[1].with_new_id()
        sent, *failures = await asyncio.gather(
            self._actor.send_weights(broadcast),
            *(replica.prepare(broadcast.for_rank(rank)) for rank, replica in enumerate(living, 1)),
            return_exceptions=True,
        )
        if sent is None and not any(failures):
            self._last = living, broadcast
            return broadcast
        if sent is not None and not isinstance(sent, WeightTransferError):
            raise sent
        self._last = None
        reason = sent or next(failure for failure in failures if failure)
        logger.warning("the broadcast of weights failed, they go through the object store: %s", reason)
        return await self._object_store.deliver()


def ray_delivery_for(devices: DeviceMap) -> type[ObjectStoreDelivery] | type[BroadcastDelivery]:
    """Shared memory where all replicas are on the node of the actor's first rank."""
    home = devices[ACTOR].places[0].node
    is_near = all(place.node == home for place in devices[INFERENCE].places)
    return ObjectStoreDelivery if is_near else BroadcastDelivery
