"""Workers as Ray actors, each in the bundle of its device.

What several ranks get is put into the object store once and travels by reference: Ray fetches it once for each node,
and all processes of the node read the same memory. Arrays arrive as read-only views of it; tensors travel as arrays.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import platform
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cadenza.cluster import ray_tensors
from cadenza.cluster.crew import GRACE_SECONDS, Launch, Tasks, answers
from cadenza.cluster.dispatch import Call
from cadenza.cluster.placement import Place, PlacementError
from cadenza.cluster.ray_resources import RayResources
from cadenza.cluster.worker import HeadLost, Host, VersionMismatch, Worker, WorkerError, WorkerLost
from cadenza.errors import DeadlinePassed
from cadenza.off_loop import as_async, within

ray: Any = import_module("ray")

CLOSE_SECONDS = 10.0
"""For workers to close in good order; those that may wait for a dead one get GRACE_SECONDS."""
PLAIN = (type(None), bool, int, float, str, bytes)
"""Too small to be worth a reference."""


@dataclass(frozen=True, slots=True)
class Raised:
    """What a worker raised. It is an answer, so that Ray does not dress it up."""

    error: Exception
    trace: str
    """Its traceback, which does not travel with it."""

    @classmethod
    def of(cls, error: Exception) -> Raised:
        trace = "".join(traceback.format_exception(error))
        try:
            ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001 - pickling runs the error's own code
            error = WorkerError(f"{type(error).__name__}: {error} (which does not pickle)")
        return cls(error.with_traceback(None), trace)


class RayHost:
    """The actor around a worker."""

    def __init__(self, place: Place, visible: str, path: Sequence[str]) -> None:
        """`path` is where the controller finds modules, which are those of the worker class too."""
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        self._host = Host(place)

    async def hello(self) -> tuple[str, dict[str, str]]:
        """The node that it is on, and what runs there."""
        return ray.get_runtime_context().get_node_id(), versions()

    async def open(self, worker_class: type[Worker], init: Mapping[str, Any]) -> Raised | None:
        try:
            await self._host.open(worker_class, init)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            return Raised.of(error)
        return None

    async def call(self, method: str, answers: bool, names: Sequence[str], *values: Any) -> Any:
        """`names` are those of the last values. Each is an argument of its own, so that Ray resolves references."""
        split = len(values) - len(names)
        try:
            answer = await self._host.call(method, values[:split], dict(zip(names, values[split:], strict=True)))
        except Exception as error:  # noqa: BLE001 - the controller raises it
            return Raised.of(error)
        ray_tensors.register()
        return answer if answers else None

    async def talk(self, method: str, values: Any) -> Any:
        """For a method that is called all the time with small things; see `packed`."""
        try:
            return packed(await self._host.call(method, unpacked(values), {}))
        except Exception as error:  # noqa: BLE001 - whoever called raises it
            return Raised.of(error)

    async def talk_for_bulk(self, method: str, values: Any) -> tuple[Any, Any]:
        """The same for a method that returns two things: they become two objects."""
        try:
            first, bulk = await self._host.call(method, unpacked(values), {})
        except Exception as error:  # noqa: BLE001 - whoever called raises it
            return Raised.of(error), None
        return packed(first), bulk

    async def close(self) -> None:
        await self._host.close()


class RayCrew:
    """The workers of one cluster, each in a process of its own."""

    def __init__(self, launch: Launch, *, runtime_env: Mapping[str, Any] | None = None) -> None:
        """`runtime_env` is Ray's: variables, or an interpreter of their own for the workers."""
        resources = launch.placement.map.resources
        if not isinstance(resources, RayResources):
            raise TypeError("backend 'ray' needs devices of a Ray cluster: take them from ResourceManager.on_ray()")
        self._resources = resources
        self._launch = launch
        self._runtime_env = dict(runtime_env or {})
        self._actors: list[Any] = []
        self._tasks = Tasks()
        self._turn = asyncio.Lock()
        self._is_torn = False
        """One of several is gone."""

    async def open(self) -> None:
        launch, loop = self._launch, asyncio.get_running_loop()
        ends = loop.time() + launch.seconds
        await self.look()
        bundles = await self._resources.reserve(launch.placement.map, launch.seconds)
        kind = self._resources.kind
        host, path = ray.remote(RayHost), module_path()
        for place in launch.places:
            several = kind == "GPU" and len(place.devices) > 1
            visible = ",".join(bundles[device].accelerator for device in place.devices) if several else ""
            options = bundles[place.devices[0]].options(kind) | {"runtime_env": self._runtime_env}
            self._actors.append(host.options(**options).remote(place, visible, path))
        greetings = await self._all("hello", [actor.hello.remote() for actor in self._actors], ends - loop.time())
        for place, (node, theirs) in zip(launch.places, greetings, strict=True):
            check_versions(versions(), theirs, place)
            if node != launch.placement.map.node_of(place.devices[0]).id:
                raise PlacementError(f"Ray {ray.__version__} put {place} on another node, {node}")
        ray_tensors.register()
        worker_class, init = await as_async(_put)(launch.worker_class, dict(launch.init))
        await self._all("start", [actor.open.remote(worker_class, init) for actor in self._actors], ends - loop.time())

    async def begin(self, method: str, calls: Sequence[Call]) -> list[asyncio.Task[Any]]:
        ray_tensors.register()
        async with self._turn:  # so that calls arrive in the order in which they were made
            refs = await as_async(self._submit)(method, calls)
        return [self._tasks.begin(self._answer(ref)) for ref in refs]

    def peers(self) -> list[Any]:
        """Addresses of the workers, by rank."""
        peer = import_module("cadenza.cluster.ray_peer").RayPeer
        places = self._launch.places
        return [peer(str(place), actor) for place, actor in zip(places, self._actors, strict=True)]

    async def look(self) -> None:
        if not ray.is_initialized():
            raise HeadLost("this process is not connected to Ray any more: was ray.shutdown() called?")
        await self._resources.look()

    async def close(self) -> None:
        actors, self._actors = self._actors, []
        if not actors:
            return
        try:
            await self.look()
        except HeadLost:
            return  # nobody is left who could end them; they end with the job
        closed = [self._tasks.begin(answer_of(actor.close.remote())) for actor in actors]
        await asyncio.wait(closed, timeout=GRACE_SECONDS if self._is_torn else CLOSE_SECONDS)
        await within(CLOSE_SECONDS, as_async(_kill)(actors), "close seconds")

    async def _answer(self, ref: Any) -> Any:
        try:
            return await answer_of(ref)
        except WorkerLost:
            self._is_torn = len(self._launch.places) > 1
            raise

    async def _all(self, what: str, refs: Sequence[Any], seconds: float) -> list[Any]:
        futures = [self._tasks.begin(answer_of(ref)) for ref in refs]
        try:
            return await answers(what, self._launch.places, futures, seconds=seconds, look=self.look)
        except DeadlinePassed as error:
            error.add_note(f"the workers had {self._launch.seconds:g} s to start (start_seconds)")
            raise

    def _submit(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """What more than one rank gets is put once; what only one gets, Ray puts itself if it is big."""
        times: dict[int, int] = {}
        for call in calls:
            for value in (*call.args, *call.kwargs.values()):
                times[id(value)] = times.get(id(value), 0) + 1
        put: dict[int, Any] = {}

        def shipped(value: Any) -> Any:
            if isinstance(value, PLAIN) or times[id(value)] < 2:
                return value
            if id(value) not in put:
                put[id(value)] = ray.put(value)
            return put[id(value)]

        return [
            self._actors[call.rank].call.remote(
                method,
                call.answers,
                list(call.kwargs),
                *(shipped(value) for value in (*call.args, *call.kwargs.values())),
            )
            for call in calls
        ]


def packed(value: Any) -> Any:
    """Bytes, where plain pickling does. Ray's own asks a Python function about every single object; that is only needed
    for what cannot be imported at the other end."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - pickling runs the value's own code; Ray's pickling may still do
        return value
    return value if b"__main__" in data else data


def unpacked(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, bytes) else value


def module_path() -> list[str]:
    """Where this process finds modules that are not installed: the interpreter of a worker has its own packages."""
    installed = (Path(sys.prefix), Path(sys.base_prefix))
    entries = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in entries if not any(Path(entry).is_relative_to(place) for place in installed)]


def versions() -> dict[str, str]:
    """Of whatever has to agree between two processes that exchange objects."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("cadenza", "ray", "torch", "numpy"):
        try:
            found[package] = version(package).partition("+")[0]  # builds for other devices are fine
        except PackageNotFoundError:
            continue
    return found


def check_versions(controller: Mapping[str, str], worker: Mapping[str, str], place: Place) -> None:
    """Raise if the two differ. A package that only one of them has does not matter."""
    for package, mine in controller.items():
        theirs = worker.get(package, mine)
        same = mine.split(".")[0] == theirs.split(".")[0] if package == "numpy" else mine == theirs
        if not same:
            raise VersionMismatch(
                f"{package} {mine} here, but {package} {theirs} in the worker {place}: install the same in both"
            )


async def answer_of(ref: Any) -> Any:
    """What a worker answered; its failure is raised as what it was."""
    try:
        answer = await ref
    except ray.exceptions.RayTaskError as error:  # what the worker raises comes as an answer: this is Ray's own trouble
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise WorkerError(f"what was sent, or the answer, cannot be read at the other end: {cause}") from None
    except ray.exceptions.RayActorError as error:
        raise WorkerLost(f"the worker's process is gone: {' '.join(str(error).split())}") from None
    except ray.exceptions.RayError as error:
        raise WorkerLost(f"the answer is lost: {' '.join(str(error).split())}") from None
    if isinstance(answer, Raised):
        answer.error.add_note(f"raised in the worker:\n{answer.trace}")
        raise answer.error
    return answer


def _put(*values: Any) -> list[Any]:
    return [ray.put(value) for value in values]


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
