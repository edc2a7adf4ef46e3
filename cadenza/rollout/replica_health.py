"""The health check of a sampler: gives up replicas that have work and make no progress.

Every `heartbeat_seconds` it asks those replicas for their stats that have requests and have answered none since the
last look. A replica whose progress stands still, or which does not answer, gets a strike; `max_strikes` in a row end
it. A replica that loads weights is left alone: the load has a deadline of its own. So is one without work for which no
client that lives waits: the grants of a client that vanished say nothing about a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from cadenza.rollout.replica_pool import ReplicaPool, ReplicaTimeout
from cadenza.rollout.router import ReplicaEntry, ReplicaState
from cadenza.rollout.sampler import SamplerConfig


class HealthCheck:
    """Looks at the replicas of a pool until it is cancelled."""

    def __init__(
        self, pool: ReplicaPool, config: SamplerConfig, has_live_client: Callable[[ReplicaEntry, float], bool]
    ) -> None:
        """`has_live_client(entry, since)`: whether a client that was heard of since then has a grant for this
        replica."""
        self._pool = pool
        self._has_live_client = has_live_client
        self._seconds = config.heartbeat_seconds
        self._max_strikes = config.max_strikes

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while True:
            last_look = now
            await asyncio.sleep(self._seconds)
            now = loop.time()
            quiet = []
            for entry in self._pool.entries:
                working = entry.state in (ReplicaState.ACTIVE, ReplicaState.LEAVING) and (entry.inflight or entry.sent)
                if working and not entry.served and not entry.loading_weights:
                    quiet.append(entry)
                else:
                    entry.strikes = 0
                entry.sent = entry.served = 0
            if quiet:
                await self._pool.call_each(quiet, partial(self._check_progress, last_look))

    async def _check_progress(self, last_look: float, entry: ReplicaEntry) -> None:
        try:
            stats = await self._pool.stats(entry, self._seconds)
        except ReplicaTimeout:
            moves = False
        else:
            moves = stats.paused or stats.progress != entry.progress
            entry.progress = stats.progress
            is_idle = not stats.running and not stats.waiting
            if not moves and is_idle and entry.inflight and not self._has_live_client(entry, last_look):
                return
        entry.strikes = 0 if moves else entry.strikes + 1
        if entry.strikes >= self._max_strikes:
            self._pool.give_up(entry, f"no progress in {entry.strikes} looks, {self._seconds} s apart")
