"""Replicas on Ray that take the time of a cost model: they leave and come back under load, and the policy of the
simulation trains with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("ray")

from ray_cases import RayTestCluster

from cadenza.benchmarks import schedule, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_requests_go_on_from_their_tokens_while_a_replica_leaves_and_comes_back(nodes: RayTestCluster) -> None:
    told = asyncio.run(share._measured(turns=48, in_flight=24, period=1.5))
    assert told["turns"] == 48
    assert told["shrinks"] == told["expands"] >= 1
    assert told["moves"] >= told["moved_per_shrink"] > 0
    assert (told["lost"], told["failed"], told["inexact"], told["regenerated_tokens"]) == (0, 0, 0, 0)


def test_the_policy_of_the_simulation_trains_with_replicas_in_processes_of_their_own(
    nodes: RayTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "SPEED", 400.0)
    told = schedule.measured(replace(schedule.CASES[0], steps=3, warm_up=1), "in 8 parts, moves", 0)
    assert told.staleness_max == 1
    assert told.waste == {}
    assert 0 < told.efficiency < 1
