"""Whole runs on Ray: `backend=ray` is the only difference, and a process that dies is named."""

from __future__ import annotations

import os
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from pipeline_cases import TINY, Done, cadenza, column, config_file, distance, lines, texts, trained

pytest.importorskip("ray")

from ray_cases import RayTestCluster, user_module

from cadenza.run import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LAKE = Path(__file__).parents[2] / "examples" / "frozenlake.yaml"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of TINY in this process: three steps."""
    return trained(tmp_path_factory.mktemp("embedded"), "steps=3", "samples=8").run


def same(one: Path, two: Path) -> None:
    """Three updates from the same tokens, with the same losses."""
    assert texts(one) == texts(two)
    assert texts(one, "val") == texts(two, "val")
    told = {name for line in lines(one) for name in line if name.startswith(("train/", "val/", "cold_start/"))}
    assert {"train/loss", "train/grad_norm", "train/tokens"} <= told
    for name in told:
        assert column(two, name) == pytest.approx(column(one, name), abs=1e-4), name


def test_the_example_is_the_same_run_on_ray(nodes: RayTestCluster, tmp_path: Path) -> None:
    def run(*options: str) -> Path:
        program = ("train", LAKE, "steps=3", "samples=128", "validation.episodes=16", f"out={tmp_path}", "--json")
        done = cadenza(*program, *options)
        assert done.code == 0, done.err
        return done.run

    embedded = run("name=embedded")
    same(embedded, run("name=remote", "backend=ray"))
    same(embedded, run("name=two", "backend=ray", "devices.actor=0-1"))


TWO = ("steps=3", "samples=8", "backend=ray", "devices={actor: 0, inference: 0-1}")


def test_two_replicas_are_the_same_run_as_one(nodes: RayTestCluster, embedded: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, *TWO).run
    same(embedded, run)
    lent, refused = (column(run, f"sharing/{name}") for name in ("lent", "refused"))
    assert [(lent[step], refused[step]) for step in (1, 2)] == [(1, 0), (1, 1)]  # each way is tried, then compared
    assert lent[3] + refused[3] == 3


def test_shared_devices_change_hands_under_way_and_nothing_is_lost(
    nodes: RayTestCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path, *TWO, "steps=6", "rollout.alpha=1", "envs.sampling.max_tokens=48", "envs.slots=16").run
    told = lines(run)[-1]
    assert told["sharing/lent"] + told["sharing/refused"] == 6
    assert told["sharing/lent"] >= 1
    assert told["fate/failed"] == told["sampler/replicas_lost"] == 0
    assert told["tokens/trained"] == sum(column(run, "train/tokens").values())
    assert all(column(run, name) for name in ("time/shrink", "time/expand", "sharing/moved_tokens"))
    assert "given up" not in caplog.text


MORTAL = """
import os, signal
from pathlib import Path
from cadenza.inference.replica import Request
from cadenza.run.workers import InferenceWorker
class Mortal(InferenceWorker):
    turns = 0
    async def exchange(self, client, number, messages):
        self.turns += sum(isinstance(message, Request) for message in messages)
        if self.turns > {turns}:
            try:
                Path(__file__).with_name("dead").touch(exist_ok=False)
            except FileExistsError:
                pass  # another one was
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return await super().exchange(client, number, messages)
"""
"""The first replica that is asked for so many turns dies."""


def make_mortal(monkeypatch: pytest.MonkeyPatch, directory: Path, turns: int) -> None:
    user_module(monkeypatch, directory, "mortal", MORTAL.replace("{turns}", str(turns)))
    monkeypatch.setattr(workers, "InferenceWorker", import_module("mortal").Mortal)


def test_a_replica_that_dies_does_not_end_or_change_a_run_that_has_another(
    nodes: RayTestCluster,
    embedded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_mortal(monkeypatch, tmp_path, turns=20)
    run = trained(tmp_path, *TWO).run
    assert re.search(r"replica torch-\d is given up", caplog.text)  # 24 episodes are 48 turns at least
    same(embedded, run)


WHERE = """
import os
from pathlib import Path
from cadenza.envs.frozenlake import FrozenLake
class Lake(FrozenLake):
    async def reset(self, seed):
        with open(Path(__file__).with_name("pids"), "a") as file:
            file.write(f"{os.getpid()}\\n")
        return await super().reset(seed)
"""


def test_env_workers_are_processes_and_the_same_run(
    nodes: RayTestCluster, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module(monkeypatch, tmp_path, "where", WHERE)
    workers = trained(tmp_path, *TWO, "envs.domains.lake.env=where:Lake", "envs.workers=2")
    same(embedded, workers.run)
    played = Counter((tmp_path / "pids").read_text().split())
    del played[str(os.getpid())]  # the cold start
    assert len(played) == 2
    assert played.total() == 3 * TINY["rollout"]["batch_size"]


def resumed(run: Path, *options: str) -> None:
    done = cadenza("resume", run, "steps=3", *options, "--json")
    assert done.code == 0, done.err


def test_all_roles_in_their_own_processes_are_the_same_run_and_it_resumes(
    nodes: RayTestCluster, tmp_path: Path
) -> None:
    options = ("samples=8", "preset=ppo", "actor.kl_coef=0.1", "checkpoint.every=2")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options).run
    run = trained(tmp_path, "steps=2", "name=remote", "backend=ray", *options).run
    resumed(run)
    same(embedded, run)
    for role in (".", "critic"):
        assert distance(*(path / "checkpoints" / "last" / role for path in (embedded, run))) < 1e-4


def test_two_actors_and_two_critics_are_the_same_run_and_it_resumes_with_others(
    nodes: RayTestCluster, tmp_path: Path
) -> None:
    options = ("samples=8", "preset=ppo", "checkpoint.every=2", "critic.value_clip=null")
    options += ("actor.mini_batches=2", "rollout.batch_size=12", "rollout.group_size=4")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options).run
    devices = ("backend=ray", "devices.actor=1-2", "devices.critic=0-1")
    run = trained(tmp_path, "steps=2", "name=two", *devices, *options).run
    resumed(run, "devices.actor=0-2", "devices.critic=0")
    same(embedded, run)
    for role in (".", "critic"):
        assert distance(*(path / "checkpoints" / "last" / role for path in (embedded, run))) < 1e-4


def test_an_actor_in_shards_is_the_same_run_and_it_resumes(nodes: RayTestCluster, tmp_path: Path) -> None:
    options = ("samples=8", "actor.kl_coef=0.1", "checkpoint.every=2")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options).run
    devices = ("backend=ray", "devices.actor=1-2", "actor.strategy=fsdp2")
    run = trained(tmp_path, "steps=2", "name=two", *devices, *options).run
    resumed(run, "devices.actor=0")
    same(embedded, run)
    # Adam makes steps of the learning rate also of gradients that are next to nothing.
    assert distance(*(path / "checkpoints" / "last" for path in (embedded, run))) < 1e-3


LOSS = """
import os, signal
from cadenza.algorithms import ppo_clip
import torch.distributed as dist
def loss(logprobs, old, advantages, mask, updates=[]):
    updates.append(1)
    if len(updates) == 2 and (not dist.is_initialized() or dist.get_rank() == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return ppo_clip(logprobs, old, advantages, mask)
"""


def fails(directory: Path, *options: str, **changes: object) -> Done:
    """A run on Ray that fails."""
    path = config_file(directory, **changes)
    done = cadenza("train", path, f"out={directory}", "backend=ray", *options, "--json")
    assert done.code == 1, done.err
    return done


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("torch", "0", 0), ("torch", "0-1", 1), ("fsdp2", "0-3", 1)])
def test_an_actor_that_dies_in_a_step_ends_the_run_and_is_named(
    strategy: str, devices: str, rank: int, nodes: RayTestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_module(monkeypatch, tmp_path, "accident", LOSS)
    actor = {**TINY["actor"], "loss": "accident:loss", "strategy": strategy}
    done = fails(tmp_path, "steps=4", f"devices.actor={devices}", actor=actor)
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert re.search(rf"process is gone.*in actor\.train, actor rank {rank} on \S+, device {rank}", said)


@pytest.mark.parametrize("role", ["actor", "inference"])
def test_a_device_that_is_not_there_is_refused_with_the_map(role: str, nodes: RayTestCluster, tmp_path: Path) -> None:
    done = fails(tmp_path, f"devices.{role}=18-20")
    assert "devices: impossible device mapping" in done.err
    assert f"{role}: devices 20 do not exist: there are 20, numbered 0-19" in done.err
    assert re.search(rf"  {role} +(\. +)+0 +1\n", done.err)


def test_a_replica_that_dies_ends_the_run_that_has_no_other_and_what_was_learned_is_kept(
    nodes: RayTestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mortal(monkeypatch, tmp_path, turns=40)
    done = fails(tmp_path, "steps=40")
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert re.search(r"no replica.*process is gone.*inference rank 0 on \S+, device 0", said)
    assert (tmp_path / "tiny" / "checkpoints" / "last" / "training").is_dir()
