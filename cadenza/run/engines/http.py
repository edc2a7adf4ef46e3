"""OpenAI-compatible servers that run already and give token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from cadenza.cluster import RoleConfig
from cadenza.inference.http_engine import HttpReplica
from cadenza.inference.replica import PauseMode, Replica
from cadenza.inference.server import Server
from cadenza.run.engines import EngineConfig, EngineKind

if TYPE_CHECKING:
    from cadenza.run.inference import InferenceSpec, WeightDelivery


class HttpEngine(EngineKind):
    """Each server is a replica."""

    settings = ("kv_tokens", "servers", "logprobs")
    backend = "embedded"
    needs_model_path = True
    takes_adapters = False

    def check(self, config: EngineConfig) -> None:
        if not config.servers:
            raise ValueError("kind 'http' needs servers: give it some, as servers: [{url: 'http://localhost:8000'}]")

    def check_devices(self, devices: RoleConfig) -> None:
        raise ValueError("devices.inference does nothing with engine.kind 'http', its servers have theirs: remove it")

    @asynccontextmanager
    async def local_replicas(self, spec: InferenceSpec) -> AsyncIterator[tuple[Sequence[Replica], WeightDelivery]]:
        from cadenza.run.inference import ServerDelivery

        delivery = ServerDelivery(spec.actor)
        async with servers(spec.engine, spec.codec.eos_token_ids, await delivery.deliver()) as replicas:
            yield replicas, delivery


@asynccontextmanager
async def servers(
    engine: EngineConfig, eos_token_ids: frozenset[int], weights: Mapping[str, Any]
) -> AsyncIterator[list[HttpReplica]]:
    """The servers as replicas, with these weights in them."""
    options: dict[str, Any] = {"eos_token_ids": eos_token_ids, "logprobs": engine.logprobs}
    if engine.kv_tokens is not None:
        options["kv_tokens"] = engine.kv_tokens
    async with AsyncExitStack() as stack:
        replicas = []
        for number, config in enumerate(engine.servers):
            replica = HttpReplica(Server(config), name=f"http-{number}", devices=(number,), **options)
            stack.push_async_callback(replica.close)
            replicas.append(replica)
            await replica.check()
            await replica.pause(0, PauseMode.ABORT)
            await replica.load_weights(0, weights)
            await replica.resume()
        yield replicas
