"""Replicas on Ray that leave and come back under load: nothing is lost, nothing is written twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = """
import json
from cadenza.benchmarks.share import measure
print(json.dumps(measure(turns=120, in_flight=24, period=2.0)))
"""


def test_requests_go_on_from_their_tokens_while_a_replica_leaves_and_comes_back() -> None:
    environment = {"RAY_raylet_start_wait_time_s": "300", **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=800, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["turns"] == 120
    assert told["shrinks"] == told["expands"] >= 1
    assert told["moves"] >= told["moved_per_shrink"] > 0
    assert (told["lost"], told["failed"], told["inexact"], told["regenerated_tokens"]) == (0, 0, 0, 0)
