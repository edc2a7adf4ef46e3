"""How one controller drives many workers: clusters of workers, and the devices that they sit on."""

from __future__ import annotations

from cadenza.cluster.cluster import Cluster
from cadenza.cluster.dispatch import DispatchMode, dispatch
from cadenza.cluster.placement import DeviceMap, DeviceSharing, Place, Placement, PlacementError, RoleConfig
from cadenza.cluster.resources import ResourceManager
from cadenza.cluster.worker import HeadLost, VersionMismatch, Worker, WorkerError, WorkerLost

__all__ = [
    "Cluster",
    "DeviceMap",
    "DeviceSharing",
    "DispatchMode",
    "HeadLost",
    "Place",
    "Placement",
    "PlacementError",
    "ResourceManager",
    "RoleConfig",
    "VersionMismatch",
    "Worker",
    "WorkerError",
    "WorkerLost",
    "dispatch",
]
