"""The backend 'ray': workers as Ray actors, each in the bundle of its device.

An argument of several ranks is put into the object store once and travels by reference: Ray fetches it once for each
node, and all processes of the node read the same memory. Arrays arrive as read-only views of it; tensors travel as
arrays.
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
from cadenza.cluster.dispatch import RankCall
from cadenza.cluster.placement import Place, PlacementError
from cadenza.cluster.ray_resources import RayResources
from cadenza.cluster.worker import HeadLost, VersionMismatch, Worker, WorkerError, WorkerHost, WorkerLost
from cadenza.cluster.worker_group import GRACE_SECONDS, BackgroundTasks, WorkerLaunch, gather_answers
from cadenza.errors import DeadlinePassed
from cadenza.off_loop import as_async, with_deadline

ray: Any = import_module("ray")

CLOSE_SECONDS = 10.0
"""For workers to close; those that may wait for a dead rank get GRACE_SECONDS."""
BY_VALUE_TYPES = (type(None), bool, int, float, str, bytes)
"""Arguments of these types are sent by value: they are too small for a reference."""


@dataclass(frozen=True, slots=True)
class CapturedError:
    """An error that a worker raised. It travels as an answer, so that Ray does not wrap it."""

    error: Exception
    trace: str
    """The traceback as text, because an exception loses it on the way."""

    @classmethod
    def of(cls, error: Exception) -> CapturedError:
        trace = "".join(traceback.format_exception(error))
        try:
            ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        except Exception:  # noqa: BLE001 - pickling runs the error's own code
            error = WorkerError(f"{type(error).__name__}: {error} (which does not pickle)")
        return cls(error.with_traceback(None), trace)


class RayWorkerHost:
    """The Ray actor around a worker."""

    def __init__(self, place: Place, visible: str, path: Sequence[str]) -> None:
        """`path` is where the controller finds modules: the worker class may be in one of them."""
        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        self._worker_host = WorkerHost(place)

    async def handshake(self) -> tuple[str, dict[str, str]]:
        """The id of the actor's node, and its versions of packages."""
        return ray.get_runtime_context().get_node_id(), versions()

    async def open(self, worker_class: type[Worker], init: Mapping[str, Any]) -> CapturedError | None:
        try:
            await self._worker_host.open(worker_class, init)
        except Exception as error:  # noqa: BLE001 - the controller raises it
            return CapturedError.of(error)
        return None

    async def call(self, method: str, wants_answer: bool, names: Sequence[str], *values: Any) -> Any:
        """`names` are the keywords of the last values. Each value is an argument of its own, so that Ray resolves
        references."""
        split = len(values) - len(names)
        try:
            answer = await self._worker_host.call(method, values[:split], dict(zip(names, values[split:], strict=True)))
        except Exception as error:  # noqa: BLE001 - the controller raises it
            return CapturedError.of(error)
        ray_tensors.register()
        return answer if wants_answer else None

    async def call_small(self, method: str, values: Any) -> Any:
        """`call` for frequent calls with small arguments and results; see `fast_pickle`."""
        try:
            return fast_pickle(await self._worker_host.call(method, fast_unpickle(values), {}))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return CapturedError.of(error)

    async def call_with_bulk(self, method: str, values: Any) -> tuple[Any, Any]:
        """`call_small` for a method that returns a pair, whose items become two Ray objects."""
        try:
            first, bulk = await self._worker_host.call(method, fast_unpickle(values), {})
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return CapturedError.of(error), None
        return fast_pickle(first), bulk

    async def close(self) -> None:
        await self._worker_host.close()


class RayWorkerGroup:
    """The workers of one cluster, each in a process of its own."""

    def __init__(self, launch: WorkerLaunch, *, runtime_env: Mapping[str, Any] | None = None) -> None:
        """`runtime_env` is that of Ray: environment variables, or an interpreter of their own for the workers."""
        resources = launch.placement.map.resources
        if not isinstance(resources, RayResources):
            raise TypeError("backend 'ray' needs devices of a Ray cluster: take them from ResourceManager.on_ray()")
        self._resources = resources
        self._launch = launch
        self._runtime_env = dict(runtime_env or {})
        self._actors: list[Any] = []
        self._tasks = BackgroundTasks()
        self._submit_lock = asyncio.Lock()
        self._has_lost_worker = False
        """One of several workers is gone: the others may wait for it."""

    async def open(self) -> None:
        launch, loop = self._launch, asyncio.get_running_loop()
        ends = loop.time() + launch.seconds
        await self.check_alive()
        bundles = await self._resources.reserve(launch.placement.map, launch.seconds)
        kind = self._resources.kind
        actor_class, path = ray.remote(RayWorkerHost), module_path()
        for place in launch.places:
            several = kind == "GPU" and len(place.devices) > 1
            visible = ",".join(bundles[device].accelerator_id for device in place.devices) if several else ""
            options = bundles[place.devices[0]].options(kind) | {"runtime_env": self._runtime_env}
            self._actors.append(actor_class.options(**options).remote(place, visible, path))
        greetings = await self._gather(
            "hello", [actor.handshake.remote() for actor in self._actors], ends - loop.time()
        )
        for place, (node, theirs) in zip(launch.places, greetings, strict=True):
            check_versions(versions(), theirs, place)
            if node != launch.placement.map.node_of(place.devices[0]).id:
                raise PlacementError(f"Ray {ray.__version__} put {place} on another node, {node}")
        ray_tensors.register()
        worker_class, init = await as_async(_put_all)(launch.worker_class, dict(launch.init))
        await self._gather(
            "start", [actor.open.remote(worker_class, init) for actor in self._actors], ends - loop.time()
        )

    async def submit(self, method: str, calls: Sequence[RankCall]) -> list[asyncio.Task[Any]]:
        ray_tensors.register()
        async with self._submit_lock:  # calls arrive in the order in which they were made
            refs = await as_async(self._submit_to_actors)(method, calls)
        return [self._tasks.begin(self._answer(ref)) for ref in refs]

    def worker_handles(self) -> list[Any]:
        """A handle for each worker, by rank."""
        handle = import_module("cadenza.cluster.ray_worker_handle").RayWorkerHandle
        places = self._launch.places
        return [handle(str(place), actor) for place, actor in zip(places, self._actors, strict=True)]

    async def check_alive(self) -> None:
        if not ray.is_initialized():
            raise HeadLost("this process is not connected to Ray any more: was ray.shutdown() called?")
        await self._resources.check_head()

    async def close(self) -> None:
        actors, self._actors = self._actors, []
        if not actors:
            return
        try:
            await self.check_alive()
        except HeadLost:
            return  # without the head they cannot be ended from here; they end with the job
        closed = [self._tasks.begin(answer_of(actor.close.remote())) for actor in actors]
        await asyncio.wait(closed, timeout=GRACE_SECONDS if self._has_lost_worker else CLOSE_SECONDS)
        await with_deadline(CLOSE_SECONDS, as_async(_kill_all)(actors), "close seconds")

    async def _answer(self, ref: Any) -> Any:
        try:
            return await answer_of(ref)
        except WorkerLost:
            self._has_lost_worker = len(self._launch.places) > 1
            raise

    async def _gather(self, what: str, refs: Sequence[Any], seconds: float) -> list[Any]:
        futures = [self._tasks.begin(answer_of(ref)) for ref in refs]
        try:
            return await gather_answers(
                what, self._launch.places, futures, seconds=seconds, check_alive=self.check_alive
            )
        except DeadlinePassed as error:
            error.add_note(f"the workers had {self._launch.seconds:g} s to start (start_seconds)")
            raise

    def _submit_to_actors(self, method: str, calls: Sequence[RankCall]) -> list[Any]:
        """An argument of several ranks is put once; Ray itself puts a big argument of one rank."""
        times: dict[int, int] = {}
        for call in calls:
            for value in (*call.args, *call.kwargs.values()):
                times[id(value)] = times.get(id(value), 0) + 1
        put: dict[int, Any] = {}

        def shipped(value: Any) -> Any:
            if isinstance(value, BY_VALUE_TYPES) or times[id(value)] < 2:
                return value
            if id(value) not in put:
                put[id(value)] = ray.put(value)
            return put[id(value)]

        return [
            self._actors[call.rank].call.remote(
                method,
                call.wants_answer,
                list(call.kwargs),
                *(shipped(value) for value in (*call.args, *call.kwargs.values())),
            )
            for call in calls
        ]


def fast_pickle(value: Any) -> Any:
    """Bytes where plain pickling is enough, else the value itself, which Ray pickles. Ray's pickling calls a Python
    function for every object; only objects that cannot be imported at the other end need that."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - pickling runs the value's own code; Ray's pickling may still do
        return value
    return value if b"__main__" in data else data


def fast_unpickle(value: Any) -> Any:
    return pickle.loads(value) if isinstance(value, bytes) else value


def module_path() -> list[str]:
    """The entries of `sys.path` outside of the installation: the interpreter of a worker has its own packages."""
    installed = (Path(sys.prefix), Path(sys.base_prefix))
    entries = [os.path.abspath(entry) for entry in sys.path]
    return [entry for entry in entries if not any(Path(entry).is_relative_to(place) for place in installed)]


def versions() -> dict[str, str]:
    """The versions that must agree between two processes that exchange objects."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("cadenza", "ray", "torch", "numpy"):
        try:
            found[package] = version(package).partition("+")[0]  # builds for other devices are fine
        except PackageNotFoundError:
            continue
    return found


def check_versions(controller: Mapping[str, str], worker: Mapping[str, str], place: Place) -> None:
    """Raise if they differ. A package that only one of the two processes has does not matter."""
    for package, mine in controller.items():
        theirs = worker.get(package, mine)
        same = mine.split(".")[0] == theirs.split(".")[0] if package == "numpy" else mine == theirs
        if not same:
            raise VersionMismatch(
                f"{package} {mine} here, but {package} {theirs} in the worker {place}: install the same in both"
            )


async def answer_of(ref: Any) -> Any:
    """Returns the answer of a worker, or raises the error that the worker raised."""
    try:
        answer = await ref
    except ray.exceptions.RayTaskError as error:  # an error of the worker is an answer: this one is Ray's own
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
            raise cause from None
        raise WorkerError(f"what was sent, or the answer, cannot be read at the other end: {cause}") from None
    except ray.exceptions.RayActorError as error:
        raise WorkerLost(f"the worker's process is gone: {' '.join(str(error).split())}") from None
    except ray.exceptions.RayError as error:
        raise WorkerLost(f"the answer is lost: {' '.join(str(error).split())}") from None
    if isinstance(answer, CapturedError):
        answer.error.add_note(f"raised in the worker:\n{answer.trace}")
        raise answer.error
    return answer


def _put_all(*values: Any) -> list[Any]:
    return [ray.put(value) for value in values]


def _kill_all(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
