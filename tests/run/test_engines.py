"""An engine of one's own, named in the config as 'module:name'."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pipeline_cases import cadenza, config_file, distance, trained

from cadenza.cluster import RoleConfig
from cadenza.inference.replica import Replica
from cadenza.inference.torch_engine import TorchReplica
from cadenza.run.engines import ENGINES, EngineConfig, EngineKind
from cadenza.run.inference import InferenceSpec, InProcessDelivery, WeightDelivery

OWN = f"engine.kind={__name__}:Own"


class Own(EngineKind):
    """A replica under a name that the config gives it."""

    backend = "embedded"
    opened: list[str] = []  # noqa: RUF012 - a record of what all of them did

    def check(self, config: EngineConfig) -> None:
        if "name" not in config.options:
            raise ValueError("options needs a name for the replica")

    def check_devices(self, devices: RoleConfig) -> None:
        raise ValueError("devices.inference: there is only one")

    @asynccontextmanager
    async def local_replicas(self, spec: InferenceSpec) -> AsyncIterator[tuple[Sequence[Replica], WeightDelivery]]:
        name, eos = spec.engine.options["name"], spec.codec.eos_token_ids
        replica = TorchReplica(
            await spec.actor.module(), name=name, devices=(0,), eos_token_ids=eos, max_running=spec.engine.max_running
        )
        self.opened.append(name)
        yield [replica], InProcessDelivery(spec.actor, [replica])
        replica.close()


def test_an_engine_of_the_user_generates_the_same_run(tmp_path: Path) -> None:
    usual = trained(tmp_path).run
    own = trained(tmp_path, OWN, "engine.options={name: mine}").run
    assert Own.opened == ["mine"]
    assert distance(usual / "checkpoints" / "last", own / "checkpoints" / "last") == 0
    assert cadenza("resume", own, "steps=3").code == 0, "its name is in the config of the run"
    assert Own.opened == ["mine", "mine"]
    assert cadenza("eval", own, "--episodes", "2").code == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([OWN], "engine: options needs a name for the replica"),
        ([OWN, "engine.options={name: x}", "engine.threads=2"], "threads does nothing with kind"),
        ([OWN, "engine.options={name: x}", "backend=ray"], "needs backend 'embedded', got 'ray'"),
        ([OWN, "engine.options={name: x}", "devices.inference=1"], "devices.inference: there is only one"),
        (["engine.kind=json:dumps"], "name a subclass of cadenza.run.engines.EngineKind"),
        (["engine.kind=nowhere:Engine"], "engine.kind: 'nowhere:Engine' cannot be loaded"),
    ],
)
def test_an_engine_of_the_user_refuses_what_it_cannot_use(tmp_path: Path, overrides: list[str], said: str) -> None:
    done = cadenza("train", config_file(tmp_path), *overrides, "--dry-run")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert said in done.err


@pytest.mark.parametrize("kind", ENGINES)
def test_every_setting_of_an_engine_is_a_key_of_the_config(kind: str) -> None:
    from cadenza.run.engines import find_engine

    assert set(find_engine(kind).settings) <= EngineConfig.model_fields.keys()
