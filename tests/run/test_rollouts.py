"""The rollouts of a run: who computes their rewards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza.run import rollouts
from cadenza.training import Checkpoints


class Found(Exception):
    """Ends the validation once its scheduler would be made."""


class Roles:
    reward_processes = ("a process",)

    def __init__(self, config: Any) -> None:
        self.actor = self

    async def __aenter__(self) -> Roles:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def load_weights(self, path: Path) -> None: ...

    @asynccontextmanager
    async def inference(self) -> AsyncIterator[Any]:
        yield SimpleNamespace()


def test_the_validation_of_a_checkpoint_has_the_reward_processes_of_its_roles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def scheduler_for(*args: Any, **options: Any) -> Any:
        raise Found(options)

    monkeypatch.setattr(rollouts, "AgenticRoles", Roles)
    monkeypatch.setattr(rollouts, "scheduler_for", scheduler_for)
    checkpoint: Any = Checkpoints(tmp_path, keep=1).save(0, {})
    config: Any = None
    with pytest.raises(Found) as found:
        asyncio.run(rollouts.validate_checkpoint(config, checkpoint))
    assert found.value.args == ({"reward_processes": Roles.reward_processes},)
