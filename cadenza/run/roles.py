"""The roles of a run: which workers compute what, and on which devices.

Each role is a cluster of workers (workers.py), in this process or on Ray. A pipeline whose roles are more than the
ones here has a subclass (agentic_roles.py).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from cadenza.cluster import Cluster, DeviceMap, PlacementError, ResourceManager, Worker
from cadenza.cluster.placement import AUTO
from cadenza.run.config import ConfigError, RunConfig
from cadenza.run.role_names import ACTOR
from cadenza.run.tokenizer import load_run_codec
from cadenza.run.workers import LearnerWorker, ModelSpec, ReferenceWorker
from cadenza.training.strategy import load_strategy


class Roles:
    """The tokenizer, and the clusters of workers. They live inside `async with`.

    A subclass starts its clusters in `start`:

        class StudentRoles(Roles):
            async def start(self) -> None:
                self.student = await self.start_trainers("actor", StudentWorker, config=self.config.actor)
    """

    device_map: DeviceMap
    """The devices of each role."""
    reference: Cluster[ReferenceWorker] | None = None
    """What the trained model is measured from. None without one, and where the actor has it under its adapter."""

    def __init__(self, config: RunConfig, *, failures: Path | None = None) -> None:
        """`failures` is where a batch goes whose loss is not finite."""
        self.config = config
        self.failures = absolute_path(failures) if failures and config.backend == "ray" else failures
        self.codec = load_run_codec(config)
        self.trainers: dict[str, Cluster[Any]] = {}
        """The roles that train, by name: what a checkpoint holds. The first one is at its top."""
        self.model_spec = ModelSpec(
            config.model,
            self.codec.vocab_size,
            self.codec.end_token_id,
            config.seed,
            config.threads or (1 if config.model.path is None else None),
        )
        if self.model_spec.threads is not None:
            torch.set_num_threads(self.model_spec.threads)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            self.device_map = self._place_roles()
            await self.start()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def start(self) -> None:
        """Start the clusters of the roles."""

    async def start_cluster(self, role: str, worker: type[Worker], **init: Any) -> Cluster[Any]:
        """Workers on the devices of a role; `init` is what they are made with besides the model."""
        cluster = Cluster(role, worker, self.device_map[role], model_spec=self.model_spec, **init)
        return await self._stack.enter_async_context(cluster)

    async def start_trainers(self, role: str, worker: type[LearnerWorker], **init: Any) -> Cluster[Any]:
        """Workers that train one model together, and are saved in checkpoints."""
        cluster = await self.start_cluster(role, worker, **init)
        needs_processes = load_strategy(init["config"].strategy).needs_processes
        where = await cluster.open_rendezvous() if needs_processes or cluster.world_size > 1 else None
        await cluster.build(where, [str(place) for place in cluster.places])
        self.trainers[role] = cluster
        return cluster

    async def freeze_reference(self, directory: Path) -> None:
        """The model of the actor as it is now becomes the reference. It is kept for a resumed run, unless it is the
        model under an adapter."""
        if self.reference is not None:
            await self.trainers[ACTOR].save_model(absolute_path(directory))
            await self.load_reference(directory)

    async def load_reference(self, directory: Path) -> None:
        """The reference is the model in a directory."""
        if self.reference is not None:
            await self.reference.load(absolute_path(directory))

    async def save(self, directory: Path) -> None:
        """Write the files of the roles that train into a checkpoint."""
        for cluster, path in self._checkpoint_paths(directory):
            await cluster.save(path)

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        for cluster, path in self._checkpoint_paths(directory):
            await cluster.load_state(path)

    def _checkpoint_paths(self, directory: Path) -> list[tuple[Cluster[Any], Path]]:
        top = absolute_path(directory)
        return [(cluster, top / role if n else top) for n, (role, cluster) in enumerate(self.trainers.items())]

    def check_resources(self, resources: ResourceManager) -> None:
        """Raise where the roles cannot do on these devices what the config wants of them."""

    def _place_roles(self) -> DeviceMap:
        """The devices of each role."""
        config = self.config
        roles = {role: config.devices.get(role, "0") for role in config.role_names}
        if open_roles := [role for role, given in config.devices.items() if given.devices == AUTO]:
            raise ConfigError(
                f"devices: 'auto' of {', '.join(open_roles)} is for `cadenza plan CONFIG`, which says what to name here"
            )
        on_ray = config.backend == "ray"
        try:
            resources = ResourceManager.on_ray() if on_ray else ResourceManager(config.device_count)
            self._stack.push_async_callback(resources.shutdown)
            placed = resources.place(roles)
        except PlacementError as error:
            raise ConfigError(f"devices: {error}") from error
        self.check_resources(resources)
        return placed


def absolute_path(directory: Path) -> Path:
    """The directory by a name that means the same in other processes."""
    return directory.absolute()


def local_or_hub(path: str) -> Path:
    """A directory by a name that means the same in other processes, or a name on the hub as it is."""
    return absolute_path(Path(path)) if Path(path).is_dir() else Path(path)
