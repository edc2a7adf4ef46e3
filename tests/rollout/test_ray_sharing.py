"""Replicas on Ray that take the time of a cost model: they leave and come back under load, and the policy of the
simulation trains with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARE = """
import json
from cadenza.benchmarks.share import measure
print(json.dumps(measure(turns=120, in_flight=24, period=2.0)))
"""


SCHEDULE = """
import json
from dataclasses import asdict, replace
from cadenza.benchmarks import schedule
schedule.SPEED = 400.0
with schedule.own_ray(schedule.GPUS):
    case = replace(schedule.CASES[0], steps=3, warm_up=1)
    print(json.dumps(asdict(schedule.measured(case, "in 8 parts, moves", 0))))
"""


def run(program: str) -> dict[str, Any]:
    """What a program prints last; it has a Ray of its own."""
    environment = {"RAY_raylet_start_wait_time_s": "300", **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_requests_go_on_from_their_tokens_while_a_replica_leaves_and_comes_back() -> None:
    told = run(SHARE)
    assert told["turns"] == 120
    assert told["shrinks"] == told["expands"] >= 1
    assert told["moves"] >= told["moved_per_shrink"] > 0
    assert (told["lost"], told["failed"], told["inexact"], told["regenerated_tokens"]) == (0, 0, 0, 0)


def test_the_policy_of_the_simulation_trains_with_replicas_in_processes_of_their_own() -> None:
    told = run(SCHEDULE)
    assert told["staleness_max"] == 1
    assert told["waste"] == {}
    assert 0 < told["efficiency"] < 1
