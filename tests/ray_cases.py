"""One Ray for all tests of a session: three declared nodes of 8, 8 and 4 GPUs, and workers that start in no time.

    def test_something(nodes: RayTestCluster) -> None:          # a fixture of conftest.py
        resources = ResourceManager.on_ray()                    # 20 devices; 0 to 7 are those of the head

A test that leaves an actor, a placement group or a node behind fails itself, and the next one gets another Ray.
Tests that are about the start or the end of Ray have one of their own.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from ray_worker import worker_server

os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
ray: Any = pytest.importorskip("ray")

from ray.cluster_utils import Cluster as RayTestCluster  # noqa: E402

from cadenza.cluster.ray_worker_group import module_path  # noqa: E402

SECONDS = 120.0
"""For anything on a busy machine."""
GPUS = (8, 8, 4)
"""The devices of the nodes; the first is the head."""
LAUNCHER = Path(__file__).with_name("ray_worker.py")


class SharedRay:
    """The Ray of a test session; tests borrow it."""

    def __init__(self, directory: Path) -> None:
        """`directory` is for the socket of the process that forks workers."""
        self._directory = directory
        self._server = ExitStack()
        self._node_args: dict[str, Any] = {}
        self._cluster: RayTestCluster

    def __enter__(self) -> Self:
        variables = self._server.enter_context(worker_server(self._directory, module_path()))
        memory = 400 * 2**20
        self._node_args = {
            "num_cpus": 16, "object_store_memory": memory, "env_vars": variables, "setup_worker_path": str(LAUNCHER)
        }  # fmt: skip
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._server.close()

    def lend(self) -> Iterator[RayTestCluster]:
        """The nodes, for one test."""
        yield self._cluster
        if left := self._left():
            self._stop()
            self._start()
            pytest.fail(f"this test left behind on Ray: {left}")

    def _start(self) -> None:
        head = {"include_dashboard": False, "num_gpus": GPUS[0], **self._node_args}
        self._cluster = RayTestCluster(initialize_head=True, head_node_args=head)
        for gpus in GPUS[1:]:
            self._cluster.add_node(num_gpus=gpus, **self._node_args)
        self._cluster.wait_for_nodes(SECONDS)
        ray.init(address=self._cluster.address, log_to_driver=False)

    def _stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _left(self) -> str:
        """What is there and was not before, once Ray's books have settled."""
        gc.collect()  # an actor ends with its last handle
        try:
            until(lambda: not _leftovers(), 30.0)
        except AssertionError:
            return _leftovers()
        return ""


def _leftovers() -> str:
    groups = [group["placement_group_id"] for group in _placement_groups() if group["state"] != "REMOVED"]
    nodes = sum(node["Alive"] for node in ray.nodes())
    found = {"actors": sorted(actors()), "placement groups": groups}
    return "; ".join(
        [f"{kind} {', '.join(ids)}" for kind, ids in found.items() if ids]
        + ([f"{nodes} nodes of {len(GPUS)}"] if nodes != len(GPUS) else [])
    )


def _placement_groups() -> list[dict[str, Any]]:
    return list(ray.util.placement_group_table().values())


def actors() -> set[str]:
    """Those that live."""
    found = ray._private.state.actors()  # the public way asks the dashboard, which does not run here
    return {id for id, actor in found.items() if actor["State"] == "ALIVE"}


def until(what: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What comes to be true in other processes."""
    ends = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < ends, "it did not come to pass"
        time.sleep(0.05)
    return found


def user_module(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, text: str) -> None:
    """A module of a user, which a config can name."""
    (directory / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, name, raising=False)
