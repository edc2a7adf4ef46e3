"""The sampler, as its clients see it: one gate, one version, and grants to send requests to replicas.

Two classes are a `Sampler`: `LocalSampler` (local_sampler.py), in the process in which the sampler lives, and
`SamplerClient` (sampler_client.py), in every other one. Schedulers, env workers and grant servers are written against
the protocol and do not see the difference. A turn is one grant, or several when it is interrupted:

    grant = await sampler.grant(GrantRequest(route_request, sticky, cached))  # waits for the gate and for a KV cache
    request = Request(grant.request_id, ..., epoch=grant.epoch)
    generation = await grant.entry.replica.generate(request)            # straight to the replica
    sampler.release(grant, RequestOutcome.SERVED, cached=context)
    if generation.finish is Finish.ABORT:                               # suspended, moved, or its replica leaves
        grant = await sampler.grant(GrantRequest(route_request, grant.entry, cached, interrupted=grant.request_id))
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.config import Config
from cadenza.inference.replica import PauseMode, Replica, ReplicaError, ReplicaStats
from cadenza.rollout.failures import RolloutError
from cadenza.rollout.prefix_routing import PREFILL_WEIGHT
from cadenza.rollout.router import ReplicaEntry, RouteRequest
from cadenza.rollout.routing import check_name


class SamplerConfig(Config):
    """How patient the sampler is."""

    control_seconds: float = Field(default=60.0, gt=0)
    """Deadline of a control call to a replica: pause, resume, sleep, wake."""
    load_seconds: float = Field(default=600.0, gt=0)
    """Deadline of loading weights into one replica."""
    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Between two looks at the replicas that answered nothing."""
    max_strikes: int = Field(default=3, gt=0)
    """Looks without progress, or requests failed in a row, after which a replica is given up."""
    balance_seconds: float = Field(default=5.0, ge=0)
    """Between two looks at which running requests should change replicas, or give way to others (balance.py); 0 leaves
    them where they are."""
    routing: Annotated[str, AfterValidator(check_name)] = "prefix"
    """The rule that chooses the replica of a request: 'prefix' (prefix_routing.py), or 'module:name' (routing.py)."""
    prefill_weight: float = Field(default=PREFILL_WEIGHT, ge=0)
    """What the prefill of a token costs, in decode steps over a token of context: how dear it is to leave a prefix."""


class RequestOutcome(Enum):
    """How a request ended, as far as it speaks for or against its replica."""

    SERVED = "served"
    """It answered."""
    REFUSED = "refused"
    """It answered that it will not: alive, but not therefore well."""
    FAILED = "failed"
    LOST = "lost"
    UNSENT = "unsent"
    """Nothing: the request was given up, or never sent."""


class NoReplicas(RolloutError):
    """No replica is left to generate."""


class GrantRequest(NamedTuple):
    """What a turn asks the sampler for."""

    route_request: RouteRequest
    sticky: ReplicaEntry | None = None
    """The replica that may hold `cached` tokens of the session."""
    cached: int = 0
    interrupted: int | None = None
    """Id of the request that this one goes on from: if the sampler moved that one, the grant is for the target of the
    move, unless the gate is closed meanwhile."""


class Grant(NamedTuple):
    """The right to send one request to one replica. Its holder gives it back with `release`, exactly once."""

    entry: ReplicaEntry
    """The replica that serves the request."""
    request_id: int
    """For the request. When the request comes back interrupted, the next grant of its turn names this id: the
    sampler knows whether it moved the request, and where to."""
    epoch: int
    """The gate epoch, for the request: the replica refuses an older one."""
    route_request: RouteRequest
    """What was asked for."""


class ReplicaAddress(NamedTuple):
    """A replica, for the processes that send requests to it."""

    name: str
    devices: tuple[int, ...]
    kv_capacity: int
    endpoint: WorkerHandle | Replica
    """The handle of its worker; or the replica itself, where it is in the same process."""


class GrantSource(Protocol):
    """What the model of an attempt needs of a sampler."""

    def allocate_ids(self) -> int:
        """Reserve a range of session and group ids for one scheduler, so that those of two schedulers do not mix;
        returns where it begins."""
        ...

    async def grant(self, grant_request: GrantRequest) -> Grant:
        """Returns a grant for this request once the gate is open and a KV cache has capacity. The caller must pass the
        grant to `release`."""
        ...

    def release(
        self,
        grant: Grant,
        outcome: RequestOutcome = RequestOutcome.UNSENT,
        error: ReplicaError | None = None,
        cached: int = 0,
    ) -> None:
        """The request of this grant is over, whatever came of it. The session goes on later, behind `cached` tokens
        that this replica has of it now; 0 if it does not."""
        ...

    def end_session(self, entry: ReplicaEntry, session: int) -> None:
        """The session is over: the replica need not keep its context."""
        ...

    def observe_answer_length(self, tokens: int) -> None:
        """An answer had so many tokens: the router averages them."""
        ...


class Sampler(GrantSource, Protocol):
    """The pool of inference replicas. Train and validation schedulers share it; it belongs to the inference cluster.

    await cluster.sampler.suspend()                    # no token is being generated
    await cluster.sampler.load_weights(version)        # every active replica has them
    await cluster.sampler.resume()                     # turns go on from the tokens they had
    """

    @property
    def version(self) -> int:
        """Newest version that every active replica has."""
        ...

    @property
    def devices(self) -> Mapping[int, str]:
        """Every device and the state of its replica: active, leaving, asleep or lost."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether a holder keeps the gate closed."""
        ...

    @property
    def waits_for(self) -> str:
        """The call without which no token is generated: 'resume' while the gate is held, 'expand' when all devices
        were shrunk, '' otherwise."""
        ...

    @property
    def opened_at(self) -> float:
        """When the gate was last opened, on the clock of this loop."""
        ...

    @property
    def on_version(self) -> list[Callable[[int], None]]:
        """Called when a version is fully published."""
        ...

    @property
    def on_lost(self) -> list[Callable[[str, str], None]]:
        """Called with name and cause when a replica is given up."""
        ...

    @property
    def on_all_shrunk(self) -> list[Callable[[], None]]:
        """Called when generation begins to wait for an expand, because all devices were shrunk."""
        ...

    @property
    def entries(self) -> Sequence[ReplicaEntry]:
        """Of all replicas, in their order. A `refresh` goes before."""
        ...

    @property
    def addresses(self) -> Sequence[ReplicaAddress]:
        """Of all replicas, in the order of their entries. A `refresh` goes before."""
        ...

    def grant_now(self, grant_request: GrantRequest) -> Grant | None:
        """`grant` without the wait: returns None when the gate is closed, when no KV cache has capacity, or when the
        sampler is in another process. An answer that has had a slice and gets None gives up the cache that it had."""
        ...

    async def refresh(self) -> None:
        """Know what the sampler knows now: in another process, version and devices may be a moment old."""
        ...

    async def suspend(self, mode: PauseMode = PauseMode.ABORT, holder: object = None) -> None:
        """Close the gate; returns when no token is being generated. The gate stays closed until every holder has
        resumed."""
        ...

    async def resume(self, holder: object = None) -> None:
        """Stop holding the gate; returns when it is open, or when others still hold it."""
        ...

    def begin_resume(self, holder: object = None) -> asyncio.Task[None] | None:
        """`resume` without the wait: returns the task that opens the gate, None when it is open."""
        ...

    def is_held_by(self, holder: object) -> bool:
        """Whether this holder keeps the gate closed."""
        ...

    async def load_weights(self, version: int, weights: object = None) -> None:
        """Publish a version. Behind a closed gate all replicas load at once; with the gate open they are updated
        one by one, and what runs on them is kept in place."""
        ...

    async def shrink(self, devices: Sequence[int]) -> dict[str, Any]:
        """Take replicas off these devices; their requests move, with their tokens, to the others. If none is left,
        generation waits for the next expand. Devices that are asleep already are `unchanged` in the answer."""
        ...

    async def expand(self, devices: Sequence[int], skip_load: bool = False) -> dict[str, Any]:
        """Bring replicas back on these devices. `skip_load` says that they have the current weights already. Devices
        that are active already are `unchanged` in the answer."""
        ...

    async def stats(self) -> dict[str, ReplicaStats]:
        """What every replica that answers says about itself, the dead ones too where they still can."""
        ...

    def counters(self) -> dict[str, float]:
        """For metrics."""
        ...

    async def close(self) -> None:
        """End the background tasks; calls that wait for a grant raise."""
        ...
