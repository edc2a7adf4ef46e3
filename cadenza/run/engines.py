"""Which engine generates, and how its workers are started.

    torch   in this process, or on Ray in a process of its own
    vllm    on Ray, in an interpreter of its own: vLLM wants other versions than training does
    http    servers that run already; the controller speaks to them

A worker of vLLM imports this module, so nothing here needs what training needs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from cadenza.cluster import Cluster, Placement
from cadenza.cluster.remote_replica import ReplicaWorker
from cadenza.config import Config
from cadenza.inference.http_engine import HttpReplica
from cadenza.inference.replica import PauseMode
from cadenza.inference.server import Server, ServerConfig

SETTINGS_BY_KIND = {
    "torch": ("kv_tokens", "prefill_tokens", "keep_kv", "threads"),
    "vllm": ("keep_kv", "python", "options", "environment"),
    "http": ("kv_tokens", "servers", "logprobs"),
}
"""Settings by kind; `max_running` is common to all."""


class EngineConfig(Config):
    """What generates."""

    kind: Literal["torch", "vllm", "http"] = "torch"
    """The embedded engine, vLLM, or OpenAI-compatible servers that give token ids."""
    max_running: int = Field(default=64, gt=0)
    """Requests that decode side by side; of a server, what it was started with."""
    kv_tokens: int | None = Field(default=None, gt=1)
    """Tokens of context in the cache; None is what fits into a modest share of memory, and 65,536 for a server."""
    prefill_tokens: int | None = Field(default=None, gt=0)
    """Prompt tokens computed in one step."""
    keep_kv: bool = False
    """Go on with what was cached under older weights. Faster, but the logprobs are of a mixture."""
    threads: int | None = Field(default=None, gt=0)
    python: str | None = None
    """The interpreter of the environment that vLLM is installed in; None is the one of this process."""
    options: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own engine arguments, as `max_model_len`."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of vLLM's processes, as `VLLM_CPU_OMP_THREADS_BIND`."""
    servers: tuple[ServerConfig, ...] = ()
    """Each is a replica."""
    logprobs: Literal["raw", "processed"] = "raw"
    """What the servers say of the tokens: vLLM's `--logprobs-mode`."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EngineConfig:
        for name in {name for names in SETTINGS_BY_KIND.values() for name in names} - set(SETTINGS_BY_KIND[self.kind]):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                kinds = " or ".join(f"'{kind}'" for kind, names in SETTINGS_BY_KIND.items() if name in names)
                raise ValueError(f"{name} does nothing with kind '{self.kind}', it is for {kinds}: remove it")
        if self.kind == "http" and not self.servers:
            raise ValueError("kind 'http' needs servers: give it some, as servers: [{url: 'http://localhost:8000'}]")
        return self


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

    async def close(self) -> None:  # type: ignore[override]  # its host awaits it, on the loop of the requests
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


def torch_options(engine: EngineConfig, eos_token_ids: frozenset[int]) -> Mapping[str, Any]:
    """What a replica of the embedded engine is told."""
    own = {name: getattr(engine, name) for name in ("max_running", *SETTINGS_BY_KIND["torch"])}
    return {"eos_token_ids": eos_token_ids, **own}
