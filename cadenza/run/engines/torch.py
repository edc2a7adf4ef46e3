"""The embedded engine: in the controller's process, or on Ray in one of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from cadenza.cluster import Cluster, Placement, RoleConfig
from cadenza.inference.replica import Replica
from cadenza.inference.torch_engine import TorchReplica
from cadenza.run.engines import EngineConfig, EngineKind
from cadenza.run.role_names import INFERENCE

if TYPE_CHECKING:
    from cadenza.run.inference import InferenceSpec, WeightDelivery


class TorchEngine(EngineKind):
    """A replica has one device."""

    settings = ("kv_tokens", "prefill_tokens", "keep_kv", "threads")

    def check_devices(self, devices: RoleConfig) -> None:
        if devices.devices_per_replica != 1:
            raise ValueError(
                "devices.inference: the torch engine runs on one device: leave devices_per_worker and "
                "tensor_parallel out, and every device is a replica"
            )

    @asynccontextmanager
    async def local_replicas(self, spec: InferenceSpec) -> AsyncIterator[tuple[Sequence[Replica], WeightDelivery]]:
        from cadenza.run.inference import InProcessDelivery

        options = torch_options(spec.engine, spec.codec.eos_token_ids)
        first, *others = (placement.devices for placement in spec.devices[INFERENCE].replicas())
        with ExitStack() as stack:
            replicas = [TorchReplica(await spec.actor.module(), name="torch-0", devices=first, **options)]
            stack.callback(replicas[0].close)
            for number, devices in enumerate(others, 1):
                replicas.append(replicas[0].clone(name=f"torch-{number}", devices=devices, **options))
                stack.callback(replicas[-1].close)
            yield replicas, InProcessDelivery(spec.actor, replicas)

    def replica_cluster(self, spec: InferenceSpec, placement: Placement) -> Cluster[Any]:
        from cadenza.run.workers import InferenceWorker

        options: dict[str, Any] = {
            "model_spec": spec.model_spec,
            "engine": spec.engine,
            "eos_token_ids": spec.codec.eos_token_ids,
        }
        return Cluster(INFERENCE, InferenceWorker, placement, **options)


def torch_options(engine: EngineConfig, eos_token_ids: frozenset[int]) -> Mapping[str, Any]:
    """What a replica of the embedded engine is told."""
    own = {name: getattr(engine, name) for name in ("max_running", *TorchEngine.settings)}
    return {"eos_token_ids": eos_token_ids, **own}
