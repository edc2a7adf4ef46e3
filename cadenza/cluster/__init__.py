"""The single controller's hands: workers, clusters of them, and the devices they sit on."""

from __future__ import annotations

from cadenza.cluster.cluster import Cluster
from cadenza.cluster.dispatch import Mode, dispatch
from cadenza.cluster.placement import DeviceMap, Place, Placement, PlacementError, RoleConfig, Sharing
from cadenza.cluster.resources import ResourceManager
from cadenza.cluster.worker import HeadLost, VersionMismatch, Worker, WorkerError, WorkerLost

__all__ = [
    "Cluster",
    "DeviceMap",
    "HeadLost",
    "Mode",
    "Place",
    "Placement",
    "PlacementError",
    "ResourceManager",
    "RoleConfig",
    "Sharing",
    "VersionMismatch",
    "Worker",
    "WorkerError",
    "WorkerLost",
    "dispatch",
]
