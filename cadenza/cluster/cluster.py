"""The workers of one role, as the controller calls them.

The methods that the worker class marks with `dispatch` are async methods of the cluster; the mark says how their data
travels. The cluster refuses a wrong call before it sends anything.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from cadenza.cluster.dispatch import DispatchCall, DispatchSpec, dispatch_spec_of
from cadenza.cluster.placement import Place, Placement
from cadenza.cluster.worker import Worker
from cadenza.cluster.worker_group import Backend, WorkerGroup, WorkerLaunch, gather_answers
from cadenza.cluster.worker_handle import WorkerHandle
from cadenza.off_loop import with_deadline

W = TypeVar("W", bound=Worker)

BACKENDS = {
    "embedded": ("cadenza.cluster.embedded", "EmbeddedWorkerGroup"),
    "ray": ("cadenza.cluster.ray_worker_group", "RayWorkerGroup"),
}
"""Module and class by name. A module is imported when it is used, so that Ray is imported only where it is needed."""


class Cluster(Generic[W]):
    """The workers of one role, each in its place, behind one object.

    A call runs on the ranks that its mark names, in parallel, and returns when all have answered or one has failed::

        class Scorer(Worker):
            def __init__(self, scale: float) -> None:
                self.scale = scale

            @dispatch("split")  # each rank gets its share of the rows
            def score(self, batch: DataProto) -> DataProto:
                return DataProto({"score": batch.batch.numpy("x") * self.scale})

            @dispatch("broadcast", gather=max)
            def steps(self) -> int: ...

        devices = ResourceManager(4).place({"scorer": "0-3"})
        async with Cluster("scorer", Scorer, devices["scorer"], scale=2.0) as scorer:
            scores = await scorer.score(batch)  # the rows in their order, computed by four workers
            await scorer.steps()  # the largest of four answers

    With `ResourceManager.on_ray()` the workers are Ray actors; nothing else changes. An error that a worker raises is
    raised here, with a note that says which worker it was. A cluster that was shut down does not start again.
    """

    def __init__(
        self,
        role: str,
        worker_class: type[W],
        placement: Placement,
        *,
        backend: str | Backend | None = None,
        start_seconds: float = 600.0,
        call_seconds: float = 3600.0,
        **init: Any,
    ) -> None:
        """`init` are the arguments of the worker class. `backend` is 'embedded', 'ray' or a function that makes a
        `WorkerGroup`; None takes the backend of the devices. `start_seconds` and `call_seconds` bound the start and
        every call. Nothing runs before `start`."""
        if placement.role != role:
            raise ValueError(f"cluster '{role}' is given the devices of the role '{placement.role}'")
        for name, seconds in (("start_seconds", start_seconds), ("call_seconds", call_seconds)):
            if not seconds > 0:
                raise ValueError(f"{name} must be above 0, got {seconds}")
        self.role = role
        self.placement = placement
        self.worker_class = worker_class
        self._methods = _dispatch_methods(worker_class)
        self._signatures = {name: _signature(getattr(worker_class, name)) for name in self._methods}
        try:
            inspect.signature(worker_class).bind(**init)
        except TypeError as error:
            text = f"{worker_class.__name__}{inspect.signature(worker_class)}: {error}"
            raise TypeError(f"cluster '{role}' cannot make its workers: {text}") from None
        self._backend = _backend(backend or placement.map.resources.backend)
        self._launch = WorkerLaunch(placement, worker_class, init, start_seconds)
        self._call_seconds = call_seconds
        self._worker_group: WorkerGroup | None = None
        self._ended = False

    @property
    def places(self) -> Sequence[Place]:
        """The places of all workers, by rank."""
        return self.placement.places

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def devices(self) -> list[int]:
        return sorted(self.placement.devices)

    @property
    def worker_handles(self) -> Sequence[WorkerHandle]:
        """A handle for each worker, by rank, to call it alone. On Ray they pickle."""
        if self._worker_group is None:
            raise RuntimeError(f"cluster '{self.role}' does not run: await its start(), or use 'async with'")
        return self._worker_group.worker_handles()

    async def start(self) -> Self:
        """Start all workers. If one fails, all of them are ended and its error is raised."""
        if self._worker_group is not None or self._ended:
            raise RuntimeError(f"cluster '{self.role}' was started before: make a new one")
        group = self._backend(self._launch)
        try:
            await group.open()
        except BaseException as error:
            self._ended = True
            try:
                await group.close()
            except Exception as consequence:  # noqa: BLE001 - the first error is the one to raise
                error.add_note(f"closing what was started failed too: {consequence}")
            raise
        self._worker_group = group
        return self

    async def shutdown(self) -> None:
        """End the workers. A second call does nothing."""
        group, self._worker_group, self._ended = self._worker_group, None, True
        if group is not None:
            await group.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.shutdown()
        except Exception as consequence:
            if error is None:
                raise
            error.add_note(f"the shutdown of '{self.role}' failed too: {type(consequence).__name__}: {consequence}")

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        methods: Mapping[str, DispatchSpec] = self.__dict__.get("_methods", {})
        if name in methods:
            return partial(self._call, name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]

    def __repr__(self) -> str:
        return f"Cluster({self.role}, {self.world_size} x {self.worker_class.__name__}: {', '.join(self._methods)})"

    async def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        what = f"{self.role}.{name}"
        signature = self._signatures[name]
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            near = [difflib.get_close_matches(key, signature.parameters, n=1) for key in kwargs]
            hint = "".join(f"; did you mean '{names[0]}'?" for names in near if names and names[0] not in kwargs)
            raise TypeError(f"{what}{signature}: {error}{hint}") from None
        if self._worker_group is None:
            state = "was shut down" if self._ended else "is not started: await its start(), or use 'async with'"
            raise RuntimeError(f"{what}: the cluster {state}")
        try:
            dispatch_call = DispatchCall(self._methods[name], self.places, args, kwargs)
            futures = await with_deadline(
                self._call_seconds, self._worker_group.submit(name, dispatch_call.calls), "call_seconds"
            )
        except Exception as error:
            error.add_note(f"in {what}, before it reached a worker")
            raise
        places = [self.places[call.rank] for call in dispatch_call.calls]
        found = await gather_answers(
            what, places, futures, seconds=self._call_seconds, check_alive=self._worker_group.check_alive
        )
        return dispatch_call.gather({place.rank: answer for place, answer in zip(places, found, strict=True)})

    def _unknown(self, name: str) -> str:
        kind, marked = self.worker_class.__name__, ", ".join(self._methods)
        if hasattr(self.worker_class, name):
            return f"{kind}.{name} is not for the controller: mark it with @dispatch(...); marked are {marked}"
        near = difflib.get_close_matches(name, self._methods, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {marked}"
        return f"{kind}, the worker class of '{self.role}', has no method '{name}'; {hint}"


def _dispatch_methods(worker_class: type[Worker]) -> dict[str, DispatchSpec]:
    if not (isinstance(worker_class, type) and issubclass(worker_class, Worker)):
        raise TypeError(f"a worker class derives from cadenza.Worker, got {worker_class!r}")
    methods: dict[str, DispatchSpec] = {}
    for name in dir(worker_class):
        # A method that overrides a marked one is marked like it, unless it says otherwise.
        specs = (dispatch_spec_of(vars(base).get(name)) for base in worker_class.__mro__)
        if (spec := next((spec for spec in specs if spec is not None), None)) is not None:
            methods[name] = spec
    if not methods:
        raise TypeError(f"{worker_class.__name__} has no method that is marked with @dispatch(...)")
    for name in methods:
        if name.startswith("_") or hasattr(Cluster, name) or name in ("role", "placement", "worker_class"):
            raise TypeError(f"{worker_class.__name__}.{name}: a cluster has a '{name}' of its own; rename the method")
    return methods


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    """The signature for the controller: without `self`."""
    whole = inspect.signature(method)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def _backend(backend: str | Backend) -> Backend:
    if not isinstance(backend, str):
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got '{backend}'")
    module, name = BACKENDS[backend]
    found: Backend = getattr(import_module(module), name)
    return found
