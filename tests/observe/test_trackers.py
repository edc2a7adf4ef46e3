"""Trackers: each service gets the metrics under one run, also after a resume. Fakes stand for the packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pipeline_cases import cadenza, config_file

from cadenza.observe.run import RunDirectory
from cadenza.observe.trackers import TRACKERS

SERVICES = [name for name in TRACKERS if name != "tensorboard"]
Calls = list[tuple[str, Any]]


def logged_twice(path: Path, tracker: str) -> None:
    """A run of two steps, and its resumption from the first one."""
    with RunDirectory(path, trackers=[tracker], config={"seed": 1, "actor": {"lr": 0.5}}) as run:
        run.log(1, {"train/loss": 1.0})
        run.log(2, {"train/loss": 0.5})
    with RunDirectory(path, resume=1, trackers=[tracker], config={"seed": 1}) as run:
        run.log(2, {"train/loss": 0.25})


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a module in the place of an installed package; None is one that is not installed."""

    def put(name: str, **attributes: Any) -> None:
        monkeypatch.delitem(sys.modules, f"cadenza.observe.trackers.{name}", raising=False)
        fake = ModuleType(name)
        vars(fake).update(attributes)
        monkeypatch.setitem(sys.modules, name, fake if attributes else None)

    return put


def test_an_unknown_tracker_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tracker 'tensorbord'.*'tensorboard'.*or name your own as 'module:name'"):
        RunDirectory(tmp_path / "run", trackers=["tensorbord"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_says_how_to_get_it_and_how_to_do_without(
    tmp_path: Path, package: Callable[..., None], name: str
) -> None:
    package(name)
    with pytest.raises(ImportError, match=rf"pip install 'cadenza\[{name}\]'.*leave it out of trackers"):
        RunDirectory(tmp_path / "run", trackers=[name])
    assert not (tmp_path / "run").exists()


def test_wandb_goes_on_under_the_same_id_with_the_step_as_its_axis(
    tmp_path: Path, package: Callable[..., None], calls: Calls
) -> None:
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: calls.append(("define", (name, step_metric))),
        log=lambda metrics: calls.append(("log", metrics)),
        finish=lambda: calls.append(("finish", None)),
    )
    package("wandb", init=lambda **options: calls.append(("init", options)) or run)
    logged_twice(tmp_path / "run", "wandb")
    first, second = (options for kind, options in calls if kind == "init")
    assert first["id"] == second["id"]
    assert (first["name"], first["config"]["seed"], first["resume"]) == ("run", 1, "allow")
    assert [metrics["step"] for kind, metrics in calls if kind == "log"] == [1, 2, 2]
    assert ("define", ("*", "step")) in calls
    assert calls[-1] == ("finish", None)


def test_swanlab_goes_on_under_an_id_of_its_length(tmp_path: Path, package: Callable[..., None], calls: Calls) -> None:
    run = SimpleNamespace(log=lambda metrics, step: calls.append(("log", (step, metrics))))
    package(
        "swanlab",
        init=lambda **options: calls.append(("init", options)) or run,
        finish=lambda: calls.append(("finish", None)),
    )
    logged_twice(tmp_path / "run", "swanlab")
    first, second = (options for kind, options in calls if kind == "init")
    assert first["id"] == second["id"]
    assert len(first["id"]) == 21
    assert [value for kind, value in calls if kind == "log"][1:] == [
        (2, {"train/loss": 0.5}),
        (2, {"train/loss": 0.25}),
    ]
    assert calls[-1] == ("finish", None)


def test_trackio_knows_the_run_by_a_name_that_no_other_run_has(
    tmp_path: Path, package: Callable[..., None], calls: Calls
) -> None:
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append(("log", (step, metrics))), finish=lambda: calls.append(("finish", None))
    )
    package("trackio", init=lambda **options: calls.append(("init", options)) or run)
    logged_twice(tmp_path / "run", "trackio")
    logged_twice(tmp_path / "elsewhere" / "run", "trackio")
    first, again, other, _ = (options["name"] for kind, options in calls if kind == "init")
    assert first == again
    assert first.startswith("run-")
    assert first != other
    assert ("log", (1, {"train/loss": 1.0})) in calls


def test_mlflow_gets_the_config_once_and_a_resumed_run_goes_on(
    tmp_path: Path, package: Callable[..., None], calls: Calls
) -> None:
    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            calls.append(("experiment", name))

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
            calls.append(("run", (experiment, run_name)))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            calls.append(("params" if params else "metrics", [run, *params, *metrics]))

        def update_run(self, run: str, status: str) -> None:
            calls.append((status, run))

        def set_terminated(self, run: str) -> None:
            calls.append(("finish", run))

    entities = SimpleNamespace(
        Metric=lambda name, value, time, step: (name, value, step), Param=lambda key, value: (key, value)
    )
    package("mlflow", MlflowClient=Client, entities=entities)
    logged_twice(tmp_path / "run", "mlflow")
    assert [value for kind, value in calls if kind == "run"] == [("7", "run")]
    assert [value for kind, value in calls if kind == "params"] == [["abc", ("seed", "1"), ("actor.lr", "0.5")]]
    assert [value for kind, value in calls if kind == "metrics"][2] == ["abc", ("train/loss", 0.25, 2)]
    assert ("RUNNING", "abc") in calls
    assert calls[-1] == ("finish", "abc")


class Own:
    """A tracker outside the package."""

    seen: Calls = []  # noqa: RUF012 - a record of what all of them were told

    def __init__(self, path: Path, config: Mapping[str, Any], resume: int | None) -> None:
        self.seen.append(("open", (path.name, config["steps"], resume)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(("log", step))

    def close(self) -> None:
        self.seen.append(("close", None))


def test_a_tracker_of_the_user_is_named_in_the_config(tmp_path: Path) -> None:
    Own.seen.clear()
    run = cadenza(
        "train", config_file(tmp_path), f"out={tmp_path}", f"trackers={__name__}:Own", "steps=1", "--json"
    ).run
    assert Own.seen == [("open", ("tiny", 1, None)), ("log", 0), ("log", 1), ("close", None)]
    cadenza("resume", run, "steps=2")
    assert Own.seen[4:] == [("open", ("tiny", 2, 1)), ("log", 2), ("close", None)]


def test_a_tracker_that_cannot_be_opened_is_an_error_of_one_line_and_leaves_nothing(
    tmp_path: Path, package: Callable[..., None]
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError("no route to the service")

    package("wandb", init=init)
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}/runs", "trackers=wandb")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "trackers: cadenza.observe.trackers.wandb:Wandb could not be opened: no route" in done.err
    assert not list((tmp_path / "runs").iterdir())


def test_a_tracker_that_is_none_is_refused_with_its_key(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}/runs", "trackers=[json:nothing]")
    assert done.code == 1
    assert "trackers.0: 'json:nothing' cannot be loaded" in done.err
    assert not (tmp_path / "runs").exists()
