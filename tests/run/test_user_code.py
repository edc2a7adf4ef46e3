"""Code of the user that a config names as 'module:name', and that raises: one clear error, also as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pipeline_cases import cadenza, config_file

BROKEN = """\
from contextlib import asynccontextmanager

from cadenza.run.engines import EngineKind
from cadenza.testing import FakeReplica
from cadenza.training.estimators import AdvantageEstimator


def advantages(batch):
    return batch.batch["scores"] / {}["scale"]


def no_advantages(batch):
    return None


class Careless(AdvantageEstimator):
    def estimate(self, inputs):
        raise ArithmeticError("no inputs")


def loss(logprobs, old_logprobs, advantages, mask):
    return deeper(logprobs)


def deeper(logprobs):
    return logprobs.view(-1, 10_007)


def number(logprobs, old_logprobs, advantages, mask):
    from cadenza.algorithms import TokenLoss

    return TokenLoss((logprobs * mask).sum(), {}, int(mask.sum()))


class Engine(EngineKind):
    @asynccontextmanager
    async def local_replicas(self, spec):
        raise ConnectionError("no engine today")
        yield


class Undelivered:
    name = "not at all"

    async def deliver(self):
        raise OverflowError("too heavy")


class Heavy(EngineKind):
    @asynccontextmanager
    async def local_replicas(self, spec):
        yield [FakeReplica(lambda request: [1])], Undelivered()


class Demanding(EngineKind):
    def check(self, config):
        config.options["name"]


class Nothing(EngineKind):
    @asynccontextmanager
    async def local_replicas(self, spec):
        yield None
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("broken_code", "unfinished_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("broken_code.py").write_text(BROKEN)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("estimator.name=broken_code:advantages", "failed: KeyError: 'scale' (broken_code.py:9, in advantages)"),
        ("estimator.name=broken_code:no_advantages", "failed: "),
        ("estimator.name=broken_code:Careless", "failed: ArithmeticError: no inputs (broken_code.py:18, in estimate)"),
        ("actor.loss=broken_code:loss", "(broken_code.py:26, in deeper)"),
        ("actor.loss=broken_code:number", "actor.loss must return values of the shape of its mask"),
        ("engine.kind=broken_code:Engine", "ConnectionError: no engine today (broken_code.py:38, in local_replicas)"),
        ("engine.kind=broken_code:Heavy", "failed: OverflowError: too heavy (broken_code.py:46, in deliver)"),
        ("engine.kind=broken_code:Demanding", "failed: KeyError: 'name' (broken_code.py:57, in check)"),
        ("engine.kind=broken_code:Nothing", "failed: TypeError: cannot unpack"),
    ],
)
def test_code_of_the_user_that_raises_is_one_error_with_its_key_its_name_and_its_place(
    tmp_path: Path, override: str, said: str
) -> None:
    key, _, name = override.partition("=")
    done = cadenza("train", config_file(tmp_path, cold_start=None, preset=None), override, "--json")
    assert done.code == 1
    error = json.loads(done.out)["error"]
    assert error.startswith(f"{key}: '{name}' failed: ")
    assert said in error
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def loss(:\n    pass\n", "SyntaxError: invalid syntax (unfinished_code.py, line 1)"),
        ("\nlimit = 1 / 0\n", "ZeroDivisionError: division by zero (unfinished_code.py:2, in <module>)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_its_key(tmp_path: Path, code: str, said: str) -> None:
    Path("unfinished_code.py").write_text(code)
    done = cadenza("train", config_file(tmp_path), "actor.loss=unfinished_code:loss")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "actor.loss: 'unfinished_code:loss' cannot be loaded: " in done.err
    assert said in done.err
