"""Reinforcement-learning post-training for large language models.

Public names load on first use, so that `import cadenza` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "DataProto",
    "GroupQueueManager",
    "ResourceManager",
    "RolloutScheduler",
    "Worker",
    "env",
]

if TYPE_CHECKING:
    from cadenza.cluster import Cluster, ResourceManager, Worker
    from cadenza.data import DataProto
    from cadenza.envs import env
    from cadenza.rollout.group_queue_manager import GroupQueueManager
    from cadenza.rollout.scheduler import RolloutScheduler
else:  # Hidden from type checkers, which would otherwise accept any attribute.
    _HOME = {
        "Cluster": "cadenza.cluster",
        "DataProto": "cadenza.data",
        "GroupQueueManager": "cadenza.rollout.group_queue_manager",
        "ResourceManager": "cadenza.cluster",
        "RolloutScheduler": "cadenza.rollout.scheduler",
        "Worker": "cadenza.cluster",
        "env": "cadenza.envs",
    }

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
