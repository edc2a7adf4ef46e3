"""vLLM, on Ray and in an interpreter of its own. A worker imports this module where only vLLM is installed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.cluster import Cluster, Placement, RoleConfig
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.run.engines import EngineConfig, EngineKind

if TYPE_CHECKING:
    from cadenza.run.inference import InferenceSpec


class VllmEngine(EngineKind):
    """A replica is one worker, which drives all its devices."""

    settings = ("keep_kv", "python", "options", "environment")
    backend = "ray"
    needs_model_path = True

    def check_devices(self, devices: RoleConfig) -> None:
        if devices.tensor_parallel != 1:
            raise ValueError(
                f"devices.inference: one worker of vLLM drives all devices of its replica: set devices_per_worker="
                f"{devices.devices_per_replica} and leave tensor_parallel out"
            )

    def check_sharing(self, device_kind: str | None) -> None:
        if device_kind == "CPU":
            raise ValueError("vLLM cannot sleep on a CPU")

    def replica_cluster(self, spec: InferenceSpec, placement: Placement) -> Cluster[Any]:
        model = spec.model_spec.model
        path = Path(str(model.path))  # a directory, by a name that other processes understand, or a name of a hub
        return vllm_cluster(
            placement,
            spec.engine,
            model=str(path.absolute()) if path.is_dir() else str(model.path),
            eos_token_ids=spec.codec.eos_token_ids,
            dtype=model.dtype,
            lora=None if model.lora is None else (model.lora.r, model.lora.alpha),
        )


class VllmWorker(ReplicaWorker):
    """A vLLM replica in a process of its own, with others that vLLM starts."""

    def __init__(
        self,
        model: str,
        engine: EngineConfig,
        eos_token_ids: frozenset[int],
        dtype: str,
        lora: tuple[int, float] | None = None,
    ) -> None:
        from cadenza.inference.vllm_engine import VllmReplica  # only here is vLLM installed

        self._replica = VllmReplica(
            model,
            name=f"vllm-{self.place.data_rank}",
            devices=self.place.devices,
            eos_token_ids=eos_token_ids,
            max_running=engine.max_running,
            keep_kv=engine.keep_kv,
            lora=lora,
            options={"tensor_parallel_size": len(self.place.devices), "dtype": dtype, **engine.options},
        )
        super().__init__(self._replica)

    async def close(self) -> None:  # on the loop of the requests
        await self._replica.close()


def vllm_cluster(placement: Placement, engine: EngineConfig, **init: Any) -> Cluster[VllmWorker]:
    """A worker in the interpreter that has vLLM; `init` is what `VllmWorker` is made with besides."""
    from cadenza.cluster.ray_worker_group import RayWorkerGroup

    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}
    variables = {"VLLM_NO_USAGE_STATS": "1", **quiet, **engine.environment}
    runtime_env: dict[str, Any] = {"env_vars": variables}
    if engine.python is not None:
        # A link stays one: it is how an interpreter finds its packages.
        runtime_env["py_executable"] = os.path.abspath(engine.python)
    return Cluster(
        placement.role,
        VllmWorker,
        placement,
        backend=partial(RayWorkerGroup, runtime_env=runtime_env),
        engine=engine,
        **init,
    )
