"""The fakes that ship for the tests of users."""

from __future__ import annotations

import asyncio

import numpy as np

from cadenza.inference.replica import Request, Sampling
from cadenza.testing import KEPT_REQUESTS, FakeReplica


def request(number: int) -> Request:
    return Request(number, (np.zeros(1, np.int32),), 1, 2, Sampling(), 0, 0, number, number, 0)


def test_a_fake_replica_keeps_the_last_requests_and_counts_all() -> None:
    async def main() -> FakeReplica:
        replica = FakeReplica()
        for number in range(3 * KEPT_REQUESTS):
            await replica.generate(request(number))
            assert len(replica.requests) <= 2 * KEPT_REQUESTS
        return replica

    replica = asyncio.run(main())
    assert replica.asked == 3 * KEPT_REQUESTS
    kept = [one.id for one in replica.requests]
    assert kept[-KEPT_REQUESTS:] == list(range(2 * KEPT_REQUESTS, 3 * KEPT_REQUESTS))
