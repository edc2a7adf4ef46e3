"""Runs small enough for a test: a lake of two by two cells, a policy of one layer.

run = trained(tmp_path, "steps=3")            in this process
with Commands() as commands:                  in a process of its own, which signals and kills reach
    done = commands.run(tmp_path, "train", "config.yaml")
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cadenza.cli import main
from cadenza.observe.run import read_lines

TINY: dict[str, Any] = {
    "name": "tiny",
    "out": "runs",
    "steps": 2,
    "preset": "grpo",
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "cold_start": {"source": "format", "episodes": 32, "passes": 3, "trainer": {"lr": 1e-2, "batch_size": 32}},
    "envs": {
        "slots": 8,
        "rollout": "step",
        "sampling": {"max_tokens": 1},
        "domains": {"lake": {"env": "frozenlake", "env_args": {"map": ["SF", "FG"], "max_steps": 4}}},
    },
    "rollout": {"batch_size": 8, "group_size": 4},
    "actor": {"lr": 2e-3},
    "validation": None,
    "trackers": [],
}
"""Some episodes succeed and some do not from the first step on, so that there is always something to learn."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left in the terminal."""

    code: int
    out: str
    err: str

    @property
    def figures(self) -> dict[str, Any]:
        """The JSON object in the last line."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    @property
    def run(self) -> Path:
        return Path(self.figures["run_dir"])


def config_file(directory: Path, **changes: Any) -> Path:
    """TINY with other values at its top, as a file."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}), encoding="utf-8")
    return path


def cadenza(*arguments: str | Path) -> Done:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def trained(directory: Path, *overrides: str, **changes: Any) -> Done:
    """A run that must come to its end."""
    done = cadenza("train", config_file(directory, **changes), f"out={directory}", *overrides, "--json")
    assert done.code == 0, done.err
    return done


# -- what a run left behind --------------------------------------------------------------------------------------------


def lines(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return list(read_lines(run / f"{name}.jsonl"))


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """The lines of train steps."""
    return {line["step"]: line for line in lines(run) if "train/loss" in line}


def column(run: Path, name: str) -> dict[int, float]:
    """A metric by step."""
    return {line["step"]: line[name] for line in lines(run) if name in line}


def texts(run: Path, mode: str = "train") -> list[tuple[int, str, list[str]]]:
    """Step, task and answers of the samples."""
    return [
        (sample["step"], sample["task"], [turn["response"] for turn in sample["turns"]])
        for sample in lines(run, "samples")
        if sample["mode"] == mode
    ]


def weights(checkpoint: Path, name: str = "model") -> dict[str, NDArray[np.float32]]:
    return dict(load_file(checkpoint / f"{name}.safetensors"))


def distance(one: Path, two: Path, name: str = "model") -> float:
    """The largest difference between the weights of two checkpoints."""
    first, second = weights(one, name), weights(two, name)
    assert first.keys() == second.keys()
    return max(float(np.abs(first[key] - second[key]).max()) for key in first)


def rollouts(checkpoint: Path) -> dict[str, Any]:
    """The saved state of the scheduler."""
    found: dict[str, Any] = json.loads((checkpoint / "rollouts" / "rollouts.json").read_text())
    return found


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# -- processes ---------------------------------------------------------------------------------------------------------


PROGRAM = "import sys; from cadenza.cli import main; sys.exit(main(sys.argv[1:]))"


class Commands:
    """Processes that run commands. They are forked off one that has imported everything, which takes seconds."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.communicate()

    def start(
        self,
        directory: Path,
        *arguments: str | Path,
        program: str = PROGRAM,
        largest_file: int | None = None,
        **variables: str,
    ) -> Command:
        """Run a command in a directory, where no file may become larger than so many bytes. Its process leads a session
        of its own."""
        place = directory / f".command-{time.monotonic_ns()}"
        place.mkdir()
        order = {
            "directory": str(directory), "arguments": [str(argument) for argument in arguments],
            "place": str(place), "program": program, "largest_file": largest_file, "variables": variables,
        }  # fmt: skip
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return Command(self, int(self.answer()), place)

    def run(self, directory: Path, *arguments: str | Path, program: str = PROGRAM, **variables: str) -> Done:
        """A command from its start to its end."""
        return self.start(directory, *arguments, program=program, **variables).wait()

    def answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()


@dataclass(frozen=True, slots=True)
class Command:
    """One that runs. The next one is started after `wait`."""

    commands: Commands
    pid: int
    place: Path

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> Done:
        """Its end; the code of a killed process is the negative signal."""
        code = int(self.commands.answer())
        return Done(code, (self.place / "out").read_text(), (self.place / "err").read_text())


def until(found: Any, seconds: float = 60.0) -> None:
    """Look again and again, from outside of the process that does it."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def _serve() -> None:
    """Fork off a process for each line, and say its id and then its exit code."""
    from transformers import LlamaForCausalLM  # noqa: F401

    from cadenza import commands  # noqa: F401 - loaded once, for all
    from cadenza.training.models import load_model  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _obey(json.loads(line))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _obey(order: dict[str, Any]) -> None:
    import resource

    os.setsid()
    os.chdir(order["directory"])
    os.environ.update(order["variables"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(order["place"], name), os.O_WRONLY | os.O_CREAT), number)
    if (most := order["largest_file"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sys.path[0] = ""  # the directory of the command, in place of that of this file
    sys.argv = ["cadenza", *order["arguments"]]
    code = 70
    try:
        exec(order["program"], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - a traceback is what a test looks for
        import traceback

        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> None:
    """End this process as an interpreter ends: what modules have registered for the exit runs."""
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def listed(directory: Path) -> Iterator[Path]:
    """The runs in a directory."""
    return (path.parent for path in directory.rglob("config.yaml") if path.parent != directory)


if __name__ == "__main__":
    _serve()
