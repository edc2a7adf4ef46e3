"""The single controller's hands: workers, clusters of them, and the devices they sit on."""

from __future__ import annotations

from cadenza.cluster.embedded import Cluster, ResourceManager, Worker

__all__ = ["Cluster", "ResourceManager", "Worker"]
