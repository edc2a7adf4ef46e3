import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "transformers", "matplotlib", "pandas"}
LIGHT = [
    "cadenza",
    "cadenza.cluster.weight_transfer",
    "cadenza.data",
    "cadenza.datasets",
    "cadenza.envs",
    "cadenza.inference.codec",
    "cadenza.inference.replica",
    "cadenza.rollout",
    "cadenza.run.engines.vllm",
    "cadenza.sandbox",
    "cadenza.simulation",
]


@pytest.mark.parametrize("module", LIGHT)
def test_importing_a_light_module_loads_no_heavy_package(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(done.stdout.split())
