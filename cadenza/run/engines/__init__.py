"""Which engine generates. Each is one module here, or a class of your own that `engine.kind` names as 'module:name'.

    torch   in this process, or on Ray in a process of its own
    vllm    on Ray, in an interpreter of its own: vLLM wants other versions than training does
    http    servers that run already; the controller speaks to them

A worker of vLLM imports this module, so nothing here needs what training needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cadenza.cluster import Cluster, Placement, RoleConfig
from cadenza.config import Config, Threads, load_object
from cadenza.inference.replica import Replica
from cadenza.inference.server import ServerConfig
from cadenza.user_code import named_user_code

if TYPE_CHECKING:
    from cadenza.run.inference import InferenceSpec, WeightDelivery

ENGINES = {
    "torch": "cadenza.run.engines.torch:TorchEngine",
    "vllm": "cadenza.run.engines.vllm:VllmEngine",
    "http": "cadenza.run.engines.http:HttpEngine",
}
"""The engines that ship, by kind. Each is imported when it is used."""


class EngineKind:
    """How replicas of one kind are made, and what they need. An engine of your own is a subclass:

    class Echo(EngineKind):
        backend = "embedded"

        @asynccontextmanager
        async def local_replicas(self, spec):
            replicas = [EchoReplica(spec.engine.options["text"])]
            yield replicas, NoWeights()

    A replica is what `cadenza.inference.replica.Replica` says; a `WeightDelivery` brings weights of the actor to it.
    """

    settings: ClassVar[tuple[str, ...]] = ("options",)
    """The keys of `EngineConfig` that it heeds, besides `max_running`; others are refused."""
    backend: ClassVar[Literal["embedded", "ray"] | None] = None
    """The one that it needs; None is either."""
    needs_model_path: ClassVar[bool] = False
    """It loads the model itself, and so cannot have one that is built here."""
    takes_adapters: ClassVar[bool] = True

    def check(self, config: EngineConfig) -> None:
        """Raise a `ValueError` for settings that it cannot use."""

    def check_devices(self, devices: RoleConfig) -> None:
        """Raise a `ValueError` for devices that it cannot use."""

    def check_sharing(self, device_kind: str | None) -> None:
        """Raise a `ValueError` if it cannot leave devices of this kind ('CPU', 'GPU') to the trainer for a while."""

    def local_replicas(
        self, spec: InferenceSpec
    ) -> AbstractAsyncContextManager[tuple[Sequence[Replica], WeightDelivery]]:
        """Replicas that this process speaks to, with the policy in them, and how new weights reach them."""
        raise NotImplementedError(f"{type(self).__name__} has no replicas for backend 'embedded'")

    def replica_cluster(self, spec: InferenceSpec, placement: Placement) -> Cluster[Any]:
        """The process of one replica on Ray: a cluster of one `ReplicaWorker`."""
        raise NotImplementedError(f"{type(self).__name__} has no replicas for backend 'ray'")


def find_engine(kind: str) -> EngineKind:
    """The engine of this name in `ENGINES`, or the one that 'module:name' means."""
    found = load_object(ENGINES.get(kind, kind))
    if not isinstance(found, type) or not issubclass(found, EngineKind):
        raise ValueError(f"'{kind}' is {found!r}: name a subclass of cadenza.run.engines.EngineKind")
    with named_user_code("engine.kind", kind, passes=(ValueError,)):
        return found()


class EngineConfig(Config):
    """What generates."""

    kind: str = "torch"
    """The embedded engine ('torch'), 'vllm', OpenAI-compatible servers that give token ids ('http'), or 'module:name'
    of an `EngineKind`."""
    max_running: int = Field(default=64, gt=0)
    """Requests that decode side by side; of a server, what it was started with."""
    kv_tokens: int | None = Field(default=None, gt=1)
    """Tokens of context in the cache; None is what fits into a modest share of memory, and 65,536 for a server."""
    prefill_tokens: int | None = Field(default=None, gt=0)
    """Prompt tokens computed in one step."""
    keep_kv: bool = False
    """Go on with what was cached under older weights. Faster, but the logprobs are of a mixture."""
    threads: Threads | None = None
    python: str | None = None
    """The interpreter of the environment that vLLM is installed in; None is the one of this process."""
    options: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own engine arguments, as `max_model_len`; of an engine of your own, what it likes."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of vLLM's processes, as `VLLM_CPU_OMP_THREADS_BIND`."""
    servers: tuple[ServerConfig, ...] = ()
    """Each is a replica."""
    logprobs: Literal["raw", "processed"] = "raw"
    """What the servers say of the tokens: vLLM's `--logprobs-mode`."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in ENGINES and ":" not in kind:
            *first, last = (f"'{name}'" for name in ENGINES)
            raise ValueError(f"Input should be {', '.join(first)} or {last}, or 'module:name' of your own")
        find_engine(kind)
        return kind

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EngineConfig:
        engine = find_engine(self.kind)
        for name in self.model_fields_set - {"kind", "max_running", *engine.settings}:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                kinds = " or ".join(f"'{kind}'" for kind in ENGINES if name in find_engine(kind).settings)
                raise ValueError(f"{name} does nothing with kind '{self.kind}', it is for {kinds}: remove it")
        with named_user_code("engine.kind", self.kind, passes=(ValueError,)):
            engine.check(self)
        return self
