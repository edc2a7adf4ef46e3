"""A cluster on a real Ray of three declared nodes: placement, travel, death."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

from ray_cases import SECONDS, RayTestCluster  # noqa: E402

import cadenza  # noqa: E402
from cadenza import Cluster, DataProto, ResourceManager, Worker  # noqa: E402
from cadenza.cluster import (  # noqa: E402
    DeviceSharing,
    PlacementError,
    VersionMismatch,
    WorkerError,
    WorkerLost,
    dispatch,
    ray_worker_group,
)
from cadenza.cluster.ray_worker_group import RayWorkerGroup, check_versions, module_path  # noqa: E402
from cadenza.data import IS_PADDING, Ragged  # noqa: E402
from cadenza.errors import DeadlinePassed  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class TwoWords(Exception):
    """Pickles, but does not come back from it."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Probe(Worker):
    """Tells where it is."""

    def __init__(self, greeting: str = "hello", fails: int = -1) -> None:
        self.greeting = greeting
        if self.place.rank == fails:
            raise MemoryError("no room")

    @dispatch("broadcast")
    def where(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {
            "node": context.get_node_id(), "visible": visible, "pid": os.getpid(), "name": self.place.node,
            "package": cadenza.__file__,
        }  # fmt: skip

    @dispatch("split")
    def double(self, batch: DataProto) -> DataProto:
        return DataProto({"y": batch.batch.numpy("x") * 2, "rank": np.full(len(batch), self.place.rank)})

    @dispatch("split", gather=sum)
    def total(self, batch: DataProto) -> float:
        return float(batch.batch.numpy("x")[~batch.batch.numpy(IS_PADDING)].sum())

    @dispatch("broadcast")
    def memory(self, batch: DataProto) -> tuple[str, bool, bool]:
        """The file and the offset in it that the tokens lie in, whether they can be written, and if all are there."""
        values = batch.batch.ragged("ids").values
        address = values.__array_interface__["data"][0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, device, inode, *name = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                place = f"{name[0]} {device} {inode} {int(offset, 16) + address - start}"
                return place, values.flags.writeable, int(values[-1]) == len(values) - 1
        return "nowhere", True, False

    @dispatch("broadcast")
    def weights(self, tensors: dict[str, Any]) -> list[Any]:
        import torch

        (weight, half) = tensors["weight"], tensors["half"]
        weight += 1  # a copy of its own
        return [float(weight.sum()), half.dtype == torch.bfloat16, half * 2]

    @dispatch("broadcast")
    def fail(self, rank: int, kind: str) -> None:
        if self.place.rank != rank:
            return
        if kind == "unpicklable":
            raise TwoWords("a", "b")
        raise KeyError(kind)

    @dispatch("broadcast")
    def die(self, rank: int) -> None:
        if self.place.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)  # the others wait for it, as in a collective

    @dispatch("broadcast")
    async def hang(self) -> None:
        await asyncio.sleep(1000)

    @dispatch("broadcast")
    def nothing(self, value: object = None) -> None: ...


class Trainer(Worker):
    """A policy that learns."""

    def __init__(self, seed: int) -> None:
        import torch
        from training_cases import tiny_model

        from cadenza.training import Actor, ActorConfig

        torch.set_num_threads(1)
        self.actor = Actor(tiny_model(), ActorConfig(lr=1e-3), seed)

    @dispatch("split")
    def logprobs(self, batch: DataProto) -> DataProto:
        return self.actor.logprobs(batch)

    @dispatch("split", gather=lambda parts: parts[0])
    def train(self, batch: DataProto) -> dict[str, float]:
        return self.actor.train(batch)

    @dispatch("rank_zero")
    def weights(self) -> dict[str, Any]:
        return self.actor.weights()


def run(
    roles: dict[str, Any], work: Callable[..., Awaitable[Any]], *, start: tuple[str, ...] = (), **options: Any
) -> Any:
    """What the work says about the clusters of these roles (or of those in `start`), which are on Ray meanwhile."""

    async def main() -> Any:
        resources = ResourceManager.on_ray()
        plan = resources.place(roles)
        clusters: list[Any] = []
        try:
            for role in start or roles:
                clusters.append(Cluster(role, Probe, plan[role], **{"start_seconds": SECONDS} | options))
                await clusters[-1].start()
            return await work(*clusters)
        finally:
            for cluster in clusters:
                await cluster.shutdown()
            await resources.shutdown()

    return asyncio.run(main())


def rows(count: int) -> DataProto:
    return DataProto({"x": np.arange(count, dtype=np.float32)})


def big(megabytes: int) -> DataProto:
    tokens = np.arange(megabytes * 2**18, dtype=np.int32)
    return DataProto({"ids": Ragged(tokens, np.linspace(0, len(tokens), 513).astype(np.int64))})


def wide(devices: str) -> dict[str, Any]:
    """Few processes with many devices each."""
    return {"devices": devices, "devices_per_worker": 4}


# -- placement


def test_the_devices_are_those_that_the_nodes_declare(nodes: RayTestCluster) -> None:
    resources = ResourceManager.on_ray()
    assert list(resources.devices) == list(range(20))
    assert sorted(len(node.devices) for node in resources.nodes) == [4, 8, 8]
    assert len({node.name for node in resources.nodes}) == 3


def test_colocated_roles_share_their_devices(nodes: RayTestCluster) -> None:
    roles = {"actor": wide("0-7"), "reference": "0-1"}
    assert ResourceManager.on_ray().place({"a": "0-7", "b": "0-7"}).sharing("a", "b") is DeviceSharing.COLOCATED

    async def work(actor: Any, reference: Any) -> None:
        big_ones, small_ones = await actor.where(), await reference.where()
        assert [found["node"] for found in big_ones + small_ones] == [nodes.head_node.node_id] * 4
        assert len({found["pid"] for found in big_ones + small_ones}) == 4
        visible = [found["visible"].split(",") for found in big_ones]
        assert sorted(visible[0] + visible[1], key=int) == list("01234567")
        assert [found["visible"] for found in small_ones] == visible[0][:2]

    run(roles, work)


def test_workers_run_the_code_of_the_controller(nodes: RayTestCluster) -> None:
    async def work(actor: Any) -> None:
        assert {found["package"] for found in await actor.where()} == {cadenza.__file__}

    run({"actor": [0, 8]}, work)


def test_disaggregated_and_partial_roles_sit_on_their_nodes(nodes: RayTestCluster) -> None:
    roles = {"actor": wide("0-7"), "sampler": wide("4-15")}

    async def work(actor: Any, sampler: Any) -> None:
        plan = actor.placement.map
        assert plan.sharing("actor", "sampler") is DeviceSharing.PARTIAL
        places = [*actor.places, *sampler.places]
        expected = [plan.node_of(place.devices[0]) for place in places]
        assert len({node.id for node in expected}) in (2, 3)
        found = await actor.where() + await sampler.where()
        assert [f["node"] for f in found] == [node.id for node in expected]
        assert [f["name"] for f in found] == [node.name for node in expected]

    run(roles, work)


def test_an_impossible_mapping_is_refused_with_the_map(nodes: RayTestCluster) -> None:
    with pytest.raises(PlacementError) as caught:
        ResourceManager.on_ray().place({"actor": wide("6-9"), "sampler": "18-21"})
    text = str(caught.value)
    assert "replica 0 on devices 6-9 lies on the nodes" in text
    assert "devices 20-21 do not exist: there are 20" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["no", "such", "device", "20", "21"],
        ["sampler", "2", "3"],
    ]


def test_devices_that_somebody_else_holds_are_named(nodes: RayTestCluster) -> None:
    held = ray.util.placement_group([{"GPU": 1}] * 8, strategy="STRICT_PACK")
    assert held.wait(SECONDS)
    try:
        with pytest.raises(PlacementError, match="something else holds them") as caught:
            run({"actor": "0-7", "sampler": "8-15"}, None, start_seconds=2.0)  # type: ignore[arg-type]
        assert "actor and sampler: disaggregated" in str(caught.value)
    finally:
        ray.util.remove_placement_group(held)


def test_a_second_mapping_waits_until_the_first_is_given_back(nodes: RayTestCluster) -> None:
    async def main() -> None:
        resources = ResourceManager.on_ray()
        one, other = resources.place({"a": "0"}), resources.place({"b": "1"})
        async with Cluster("a", Probe, one["a"], start_seconds=SECONDS):
            with pytest.raises(PlacementError, match="set aside for another mapping"):
                await Cluster("b", Probe, other["b"], start_seconds=SECONDS).start()
        await resources.shutdown()
        async with Cluster("b", Probe, other["b"], start_seconds=SECONDS) as b:
            assert len(await b.where()) == 1
        await resources.shutdown()

    asyncio.run(main())


# -- travel


def test_rows_come_back_in_order_also_when_the_ranks_do_not_divide_them(nodes: RayTestCluster) -> None:
    async def work(actor: Any) -> None:
        for count in (1, 7, 12):
            answer = await actor.double(rows(count))
            assert answer.batch.numpy("y").tolist() == [2.0 * n for n in range(count)]
            assert IS_PADDING not in answer.columns
            assert await actor.total(rows(count)) == sum(range(count))
        assert set((await actor.double(rows(7))).batch.numpy("rank").tolist()) == {0, 2}

    run({"actor": {"devices": "0-3", "tensor_parallel": 2}}, work)


def test_a_large_batch_is_shipped_once_and_read_in_place(nodes: RayTestCluster, capsys: Any) -> None:
    megabytes = 100

    async def work(actor: Any) -> None:
        await actor.nothing()
        batch = big(megabytes)
        began = time.monotonic()
        found = await actor.memory(batch)
        seconds = time.monotonic() - began
        began = time.monotonic()
        await actor.nothing()
        empty = time.monotonic() - began
        with capsys.disabled():
            print(f"\n{megabytes} MB to 4 ranks on 2 nodes: {seconds:.3f} s; a call without data: {empty:.4f} s")
        assert [complete for _, _, complete in found] == [True] * 4
        assert [writeable for _, writeable, _ in found] == [False] * 4
        places = [place for place, _, _ in found]
        assert places[0] == places[1]  # the ranks of a node read the same bytes of the same file
        assert places[2] == places[3]
        assert places[0] != places[2]
        assert "nowhere" not in places

    run({"actor": [0, 1, 8, 9]}, work)


def test_tensors_arrive_whole_and_writable(nodes: RayTestCluster) -> None:
    torch = pytest.importorskip("torch")

    async def work(actor: Any) -> None:
        tensors = {"weight": torch.ones(3, 2), "half": torch.full((2,), 1.5, dtype=torch.bfloat16)}
        for total, is_half, doubled in await actor.weights(tensors):
            assert (total, is_half) == (12.0, True)
            assert torch.equal(doubled, torch.full((2,), 3.0, dtype=torch.bfloat16))
        assert torch.equal(tensors["weight"], torch.ones(3, 2))

    run({"actor": "0-1"}, work)


def test_a_policy_learns_the_same_in_this_process_and_on_ray(nodes: RayTestCluster) -> None:
    torch = pytest.importorskip("torch")
    from training_cases import random_batch

    async def learn(resources: ResourceManager) -> tuple[list[dict[str, float]], dict[str, Any]]:
        told = []
        plan = resources.place({"actor": "0"})
        async with Cluster("actor", Trainer, plan["actor"], start_seconds=SECONDS, seed=3) as actor:
            for step in range(3):
                batch = await actor.logprobs(random_batch(step))
                told.append(await actor.train(batch))
            weights = {name: tensor.clone() for name, tensor in (await actor.weights()).items()}
        await resources.shutdown()
        return told, weights

    here, there = asyncio.run(learn(ResourceManager(1))), asyncio.run(learn(ResourceManager.on_ray()))
    assert here[0] == there[0]
    assert all(torch.equal(tensor, there[1][name]) for name, tensor in here[1].items())


# -- failures


def test_failures_come_back_as_what_they_are_with_role_rank_and_node(nodes: RayTestCluster) -> None:
    async def work(actor: Any) -> None:
        node = actor.places[1].node
        with pytest.raises(KeyError, match="x") as caught:
            await actor.fail(1, "x")
        assert type(caught.value) is KeyError
        notes = "\n".join(caught.value.__notes__)
        assert f"in actor.fail, actor rank 1 on {node}, device 1" in notes
        assert "raise KeyError(kind)" in notes
        with pytest.raises(WorkerError, match="TwoWords: a b"):
            await actor.fail(0, "unpicklable")
        with pytest.raises(TypeError, match="missing a required argument: 'rank'"):
            await actor.fail()
        with pytest.raises((TypeError, WorkerError)):
            await actor.nothing(mmap.mmap(-1, 8))
        assert len(await actor.where()) == 2  # and it still works
        with pytest.raises(WorkerLost, match="process is gone") as lost:
            await actor.die(1)
        assert f"in actor.die, actor rank 1 on {node}, device 1" in lost.value.__notes__
        with pytest.raises(WorkerLost):
            await actor.where()

    run({"actor": "0-1"}, work)


def test_ranks_that_wait_for_a_dead_one_are_not_waited_for(
    nodes: RayTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker_group, "CLOSE_SECONDS", 1000.0)

    async def work(actor: Any) -> list[int]:
        pids = [found["pid"] for found in await actor.where()]
        with pytest.raises(WorkerLost, match="process is gone"):
            await actor.die(1)
        await asyncio.wait_for(actor.shutdown(), SECONDS)
        return pids

    pids = run({"actor": "0-2"}, work)
    assert asyncio.run(_free()) == 20.0
    assert not _left(pids)


def test_a_worker_that_cannot_be_made_is_named_and_nothing_is_left(nodes: RayTestCluster) -> None:
    with pytest.raises(MemoryError, match="no room") as caught:
        run({"actor": "0-1"}, None, fails=1)  # type: ignore[arg-type]
    assert any("in start, actor rank 1 on" in note for note in caught.value.__notes__)
    free = asyncio.run(_free())
    assert free == 20.0


async def _free() -> float:
    """GPUs that nobody holds, once Ray's books have settled."""
    for _ in range(60):
        if ray.available_resources().get("GPU") == 20.0:
            break
        await asyncio.sleep(0.5)
    return float(ray.available_resources()["GPU"])


def _left(pids: list[int]) -> list[int]:
    """Processes that are still there, once Ray has had time to bury the dead."""
    for _ in range(120):
        if not (found := [pid for pid in pids if Path(f"/proc/{pid}").exists()]):
            break
        time.sleep(0.5)
    return found


def test_shutdown_ends_the_processes_and_frees_the_devices(nodes: RayTestCluster) -> None:
    async def work(actor: Any) -> list[int]:
        return [found["pid"] for found in await actor.where()]

    pids = run({"actor": "0-1"}, work)
    assert asyncio.run(_free()) == 20.0
    assert not _left(pids)


def test_a_call_has_a_deadline(nodes: RayTestCluster) -> None:
    async def work(actor: Any) -> None:
        with pytest.raises(DeadlinePassed, match=r"actor\.hang: no answer within 1 s from actor rank 0 on"):
            await actor.hang()

    run({"actor": "0"}, work, call_seconds=1.0)


def test_a_node_that_goes_costs_its_workers_and_is_named(nodes: RayTestCluster) -> None:
    extra = nodes.add_node(num_cpus=4, num_gpus=2)
    removed = False
    try:

        async def main() -> None:
            nonlocal removed
            resources = ResourceManager.on_ray()
            (there,) = (node for node in resources.nodes if len(node.devices) == 2)
            plan = resources.place({"actor": [0, there.devices[0]]})
            try:
                async with Cluster("actor", Probe, plan["actor"], start_seconds=SECONDS) as actor:
                    waiting = asyncio.ensure_future(actor.hang())
                    await actor.where()
                    await asyncio.to_thread(nodes.remove_node, extra, False)
                    removed = True
                    with pytest.raises(WorkerLost) as caught:
                        await asyncio.wait_for(waiting, SECONDS)
                    assert any(f"actor rank 1 on {there.name}" in note for note in caught.value.__notes__)
            finally:
                await resources.shutdown()

        asyncio.run(main())
    finally:
        if not removed:
            nodes.remove_node(extra)


# -- versions and the head


def test_versions_that_differ_are_refused_with_both(nodes: RayTestCluster, tmp_path: Path) -> None:
    other = tmp_path / "torch-1.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    backend = partial(RayWorkerGroup, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    torch = pytest.importorskip("torch")
    here = torch.__version__.partition("+")[0]
    with pytest.raises(VersionMismatch, match=rf"torch {here} here, but torch 1\.0\.0 in the worker actor rank 0 on"):
        run({"actor": "0"}, None, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        ({"python": "3.11"}, {"python": "3.12"}, "python 3.11 here, but python 3.12"),
        ({"ray": "2.60.0"}, {"ray": "2.59.0"}, "ray 2.60.0 here, but ray 2.59.0"),
        ({"numpy": "1.26.4"}, {"numpy": "2.4.6"}, "numpy 1.26.4 here"),
        ({"numpy": "2.1.0"}, {"numpy": "2.4.6"}, ""),
        ({"torch": "2.13.0"}, {}, ""),
    ],
)
def test_only_versions_that_matter_are_refused(here: dict[str, str], there: dict[str, str], message: str) -> None:
    place = ResourceManager(1).place({"actor": "0"})["actor"].places[0]
    if not message:
        check_versions(here, there, place)
        return
    with pytest.raises(VersionMismatch, match=message):
        check_versions(here, there, place)


def test_ray_needs_devices_of_a_ray_cluster() -> None:
    async def main() -> None:
        plan = ResourceManager(1).place({"actor": "0"})
        with pytest.raises(TypeError, match=r"take them from ResourceManager\.on_ray\(\)"):
            await Cluster("actor", Probe, plan["actor"], backend="ray").start()

    asyncio.run(main())


CONTROLLER = """
import asyncio, time
from cadenza import Cluster, ResourceManager
from cadenza.cluster import HeadLost
from ray.cluster_utils import Cluster as RayTestCluster
from test_ray_cluster import Probe

async def main():
    cluster = RayTestCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    resources = ResourceManager.on_ray(cluster.address)
    try:
        async with Cluster("actor", Probe, resources.place({"actor": "0"})["actor"], start_seconds=120) as actor:
            waiting = asyncio.ensure_future(actor.hang())
            await actor.nothing()
            cluster.head_node.kill_gcs_server()
            began = time.monotonic()
            await waiting
    except HeadLost as error:
        print("LOST", time.monotonic() - began, error, *error.__notes__, flush=True)
    await resources.shutdown()

asyncio.run(main())
"""


def test_a_dead_head_is_an_error_and_no_hang() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(module_path())}
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER], capture_output=True, text=True, timeout=300, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOST")]
    assert lines, done.stdout + done.stderr
    assert "the Ray head at" in lines[0]
    assert "while actor.hang was under way" in lines[0]
    assert float(lines[0].split()[1]) < 45


def test_a_head_that_is_not_there_is_refused_at_once() -> None:
    program = (
        "from cadenza import ResourceManager\n"
        "from cadenza.cluster import HeadLost\n"
        "try: ResourceManager.on_ray('127.0.0.1:1')\n"
        "except HeadLost as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "the Ray head at 127.0.0.1:1 does not answer" in done.stdout
