from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from cadenza.cpu import limit_onednn
from cadenza.envs import registry

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as RayTestCluster
    from ray_cases import SharedRay

# Before torch computes anything, here and in the processes that tests start.
limit_onednn()

# A busy machine is slow at random; pytest-timeout bounds each test instead.
settings.register_profile("cadenza", deadline=None)
settings.load_profile("cadenza")


@pytest.fixture(autouse=True)
def _env_names() -> Iterator[None]:
    """The names of envs that a test registers end with it."""
    known = dict(registry._factories)
    yield
    registry._factories.clear()
    registry._factories.update(known)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2, with its tokenizer."""
    path = Path(__file__).parents[1] / "models" / "smollm2"
    if not path.is_dir():
        pytest.skip("SmolLM2 is not here: make test-smollm2 fetches it")
    return path


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    from ray_cases import SharedRay

    with tempfile.TemporaryDirectory() as directory, SharedRay(Path(directory)) as shared:
        yield shared


@pytest.fixture
def nodes(shared_ray: SharedRay) -> Iterator[RayTestCluster]:
    """Ray nodes of 8, 8 and 4 declared GPUs, which all tests share; this process is connected to them."""
    yield from shared_ray.lend()
