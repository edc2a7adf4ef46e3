"""Whole runs on Ray: `backend=ray` is the only difference, and a process that dies is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pipeline_cases import TINY, Done, column, config_file, distance, lines, texts, trained

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

LAKE = Path(__file__).parents[2] / "examples" / "frozenlake.yaml"
PROGRAM = "import sys; from cadenza.cli import main; sys.exit(main(sys.argv[1:]))"


ON_FOUR = f"import ray; ray.init('local', num_cpus=4, include_dashboard=False); {PROGRAM}"
"""With so many devices, wherever the test runs."""


def on_ray(directory: Path, *arguments: str | Path, program: str = PROGRAM, **variables: str) -> Done:
    """A command in a process of its own, so that its Ray ends with it."""
    environment = {"RAY_raylet_start_wait_time_s": "120", **os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=directory, capture_output=True, text=True, timeout=500, check=False, env=environment,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def same(one: Path, two: Path) -> None:
    """Three updates from the same tokens, with the same losses."""
    assert texts(one) == texts(two)
    assert texts(one, "val") == texts(two, "val")
    told = {name for line in lines(one) for name in line if name.startswith(("train/", "val/", "warm_start/"))}
    assert {"train/loss", "train/grad_norm", "train/tokens"} <= told
    for name in told:
        assert column(two, name) == pytest.approx(column(one, name), abs=1e-4), name


def test_the_example_is_the_same_run_on_ray(tmp_path: Path) -> None:
    program = ("train", LAKE, "steps=3", "samples=128", "validation.episodes=16", "--json")
    embedded = on_ray(tmp_path, *program, "name=embedded")
    remote = on_ray(tmp_path, *program, "name=remote", "backend=ray")
    two = on_ray(tmp_path, *program, "name=two", "backend=ray", "devices.actor=0-1", program=ON_FOUR)
    assert (embedded.code, remote.code, two.code) == (0, 0, 0), remote.err + two.err
    same(tmp_path / embedded.run, tmp_path / remote.run)
    same(tmp_path / embedded.run, tmp_path / two.run)


TWO = ("steps=3", "samples=8", "backend=ray", "devices={actor: 0, inference: 0-1}", "--json")
needs_two = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Ray declares one device here")


@needs_two
def test_two_replicas_are_the_same_run_as_one(tmp_path: Path) -> None:
    embedded = trained(tmp_path, "steps=3", "name=embedded", "samples=8")
    remote = on_ray(tmp_path, "train", config_file(tmp_path), *TWO, "name=remote", program=ON_FOUR)
    assert remote.code == 0, remote.err
    same(embedded.run, tmp_path / remote.run)
    lent, refused = (column(tmp_path / remote.run, f"sharing/{name}") for name in ("lent", "refused"))
    assert [(lent[step], refused[step]) for step in (1, 2)] == [(1, 0), (1, 1)]  # each way is tried, then compared
    assert lent[3] + refused[3] == 3


def test_shared_devices_change_hands_under_way_and_nothing_is_lost(tmp_path: Path) -> None:
    asked = (*TWO, "steps=6", "rollout.alpha=1", "envs.sampling.max_tokens=48", "envs.slots=16", "name=turns")
    turns = on_ray(tmp_path, "train", config_file(tmp_path), *asked, program=ON_FOUR)
    assert turns.code == 0, turns.err
    told = lines(tmp_path / turns.run)[-1]
    assert told["sharing/lent"] + told["sharing/refused"] == 6
    assert told["sharing/lent"] >= 1
    assert told["fate/failed"] == told["sampler/replicas_lost"] == 0
    assert told["tokens/trained"] == sum(column(tmp_path / turns.run, "train/tokens").values())
    assert all(column(tmp_path / turns.run, name) for name in ("time/shrink", "time/expand", "sharing/moved_tokens"))
    assert "given up" not in turns.err


@needs_two
def test_a_replica_that_dies_does_not_end_or_change_a_run_that_has_another(tmp_path: Path) -> None:
    embedded = trained(tmp_path, "steps=3", "name=embedded", "samples=8")
    (tmp_path / "mortal.py").write_text(MORTAL)
    program = f"import mortal; {PROGRAM}"
    bereft = on_ray(tmp_path, "train", config_file(tmp_path), *TWO, "name=bereft", program=program, MORTAL="20")
    assert bereft.code == 0, bereft.err
    assert re.search(r"replica torch-\d is given up", bereft.err)  # 24 episodes are 48 turns at least
    same(embedded.run, tmp_path / bereft.run)


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


@needs_two
def test_env_workers_are_processes_and_the_same_run(tmp_path: Path) -> None:
    embedded = trained(tmp_path, "steps=3", "name=embedded", "samples=8")
    (tmp_path / "where.py").write_text(WHERE)
    path = config_file(tmp_path)
    program = f"import os; print(os.getpid(), file=open('controller', 'w')); {PROGRAM}"
    options = (*TWO, "envs.domains.lake.env=where:Lake", "envs.workers=2", "name=workers")
    workers = on_ray(tmp_path, "train", path, *options, program=program)
    assert workers.code == 0, workers.err
    same(embedded.run, tmp_path / workers.run)
    controller = (tmp_path / "controller").read_text().strip()
    played = Counter((tmp_path / "pids").read_text().split())
    del played[controller]  # the warm start
    assert len(played) == 2
    assert played.total() == 3 * TINY["rollout"]["batch_size"]


def test_all_roles_in_their_own_processes_are_the_same_run_and_it_resumes(tmp_path: Path) -> None:
    options = ("samples=8", "preset=ppo", "actor.kl_coef=0.1", "checkpoint.every=2")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options)
    remote = on_ray(
        tmp_path, "train", config_file(tmp_path), "steps=2", "name=remote", "backend=ray", *options, "--json"
    )
    assert remote.code == 0, remote.err
    run = tmp_path / remote.run
    resumed = on_ray(tmp_path, "resume", run, "steps=3", "--json")
    assert resumed.code == 0, resumed.err
    same(embedded.run, run)
    for part in (".", "critic"):
        assert distance(*(path / "checkpoints" / "last" / part for path in (embedded.run, run))) < 1e-4


def test_two_actors_and_two_critics_are_the_same_run_and_it_resumes_with_others(tmp_path: Path) -> None:
    options = ("samples=8", "preset=ppo", "checkpoint.every=2", "critic.value_clip=null")
    options += ("actor.mini_batches=2", "rollout.batch_size=12", "rollout.group_size=4")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options)
    devices = ("backend=ray", "devices.actor=1-2", "devices.critic=0-1")
    program = ("train", config_file(tmp_path), "steps=2", "name=two", *devices, *options, "--json")
    two = on_ray(tmp_path, *program, program=ON_FOUR)
    assert two.code == 0, two.err
    run = tmp_path / two.run
    devices = ("devices.actor=0-2", "devices.critic=0")
    resumed = on_ray(tmp_path, "resume", run, "steps=3", *devices, "--json", program=ON_FOUR)
    assert resumed.code == 0, resumed.err
    same(embedded.run, run)
    for part in (".", "critic"):
        assert distance(*(path / "checkpoints" / "last" / part for path in (embedded.run, run))) < 1e-4


def test_an_actor_in_shards_is_the_same_run_and_it_resumes(tmp_path: Path) -> None:
    options = ("samples=8", "actor.kl_coef=0.1", "checkpoint.every=2")
    embedded = trained(tmp_path, "steps=3", "name=embedded", *options)
    devices = ("backend=ray", "devices.actor=1-2", "actor.strategy=fsdp2")
    program = ("train", config_file(tmp_path), "steps=2", "name=two", *devices, *options, "--json")
    two = on_ray(tmp_path, *program, program=ON_FOUR)
    assert two.code == 0, two.err
    run = tmp_path / two.run
    resumed = on_ray(tmp_path, "resume", run, "steps=3", "devices.actor=0", "--json", program=ON_FOUR)
    assert resumed.code == 0, resumed.err
    same(embedded.run, run)
    # Adam makes steps of the learning rate also of gradients that are next to nothing.
    assert distance(*(path / "checkpoints" / "last" for path in (embedded.run, run))) < 1e-3


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
MORTAL = """
import os, signal
from pathlib import Path
from cadenza.run import inference
class Mortal(replicas.InferenceWorker):
    turns = 0
    async def exchange(self, requests, aborts, *client):
        self.turns += len(requests)
        if self.turns > int(os.environ["MORTAL"]):
            try:
                Path(__file__).with_name("dead").touch(exist_ok=False)
            except FileExistsError:
                pass  # another one was
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return await super().exchange(requests, aborts, *client)
replicas.InferenceWorker = Mortal
"""
"""The first replica that is asked for so many turns dies."""


def test_an_actor_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "accident.py").write_text(LOSS)
    path = config_file(tmp_path, actor={**TINY["actor"], "loss": "accident:loss"})
    done = on_ray(tmp_path, "train", path, "steps=4", "backend=ray", "--json")
    assert done.code == 1, done.err
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert re.search(r"process is gone.*in actor\.train, actor rank 0 on \S+, device 0", said)


@pytest.mark.parametrize(("strategy", "devices"), [("torch", "0-1"), ("fsdp2", "0-3")])
def test_one_of_the_actors_that_dies_in_a_step_ends_the_run_and_is_named(
    strategy: str, devices: str, tmp_path: Path
) -> None:
    (tmp_path / "accident.py").write_text(LOSS)
    path = config_file(tmp_path, actor={**TINY["actor"], "loss": "accident:loss", "strategy": strategy})
    options = ("steps=4", "backend=ray", f"devices.actor={devices}", "--json")
    done = on_ray(tmp_path, "train", path, *options, program=ON_FOUR)
    assert done.code == 1, done.err
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert re.search(r"process is gone.*in actor\.train, actor rank 1 on \S+, device 1", said)


def test_a_rank_on_a_device_that_is_not_there_is_refused_with_the_map(tmp_path: Path) -> None:
    program = ("train", config_file(tmp_path), "backend=ray", "devices.actor=2-4", "--json")
    done = on_ray(tmp_path, *program, program=ON_FOUR)
    assert done.code == 1, done.err
    assert "actor: devices 4 do not exist: there are 4, numbered 0-3" in done.err
    assert re.search(r"  actor +\. +\. +0 +1", done.err)


def test_a_replica_that_dies_ends_the_run_that_has_no_other_and_what_was_learned_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL)
    program = f"import mortal; {PROGRAM}"
    path = config_file(tmp_path)
    done = on_ray(tmp_path, "train", path, "steps=40", "backend=ray", "--json", program=program, MORTAL="40")
    assert done.code == 1, done.err
    (said,) = (line for line in done.err.splitlines() if line.startswith("cadenza: "))
    assert re.search(r"no replica.*process is gone.*inference rank 0 on \S+, device 0", said)
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "last" / "training").is_dir()
