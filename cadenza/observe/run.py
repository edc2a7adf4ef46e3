"""What a run leaves behind: a directory that can be read while the run writes it, and after a `kill -9`.

    config.yaml      what the run was told; its last line is `CONFIG_END`
    metrics.jsonl    {"step", "time", "cpu", "area/name" ...}; a number that is not finite is null
    samples.jsonl    rollouts as text, see `SampleRecord`
    trace.jsonl      lengths and times of every trajectory, for `cadenza simulate`; see simulation/comparison/traces.py
    summary.json     what came of it
    tensorboard/     the metrics again (observe/trackers/tensorboard.py)
    checkpoints/     written by the trainer

Invariant: a line is in its file when `log` or `sample` returns, so that only the last line can be half-written. A run
that goes on from the checkpoint of step s first cuts off what was written for later steps: they happen again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, TypedDict

import yaml

from cadenza.observe.trackers import Tracker, TrackerError, TrackerFactory, find_tracker

logger = logging.getLogger(__name__)
CONFIG_END = "# end of the config; a file without this line was cut off"


class SampleTurn(TypedDict):
    """One model call."""

    prompt: str
    """What was new in the prompt of this turn."""
    response: str
    reward: float


class SampleRecord(TypedDict):
    """One episode as text."""

    step: int
    mode: Literal["train", "val"]
    task: str
    domain: str
    score: float
    success: bool | None
    """None where the env does not say."""
    fate: NotRequired[str]
    versions: Sequence[int]
    """Lowest and highest version that wrote it."""
    turns: Sequence[SampleTurn]
    final: NotRequired[str]
    """What the env showed at the end."""


class RunDirectory:
    """The directory of one run. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        path: Path | str,
        *,
        resume: int | None = None,
        config: Mapping[str, Any] | None = None,
        trackers: Sequence[str | Tracker] = ("tensorboard",),
    ) -> None:
        """A new run never writes into a directory that holds something: it takes the next free name, see `path`.

        `resume` is the step of the checkpoint that the run in this directory goes on from; its `config` is kept when
        `keep_config` is called, which is when the checkpoint has turned out to fit it. `trackers` are names of
        `TRACKERS`, 'module:name', or trackers themselves; one that fails later is left out, and the run goes on.
        """
        if resume is True:
            raise TypeError("resume is the step of the checkpoint to go on from, got True")
        factories = [_factory(tracker) for tracker in trackers]  # a package that is missing is said before all else
        self.step = resume or 0
        """The last one that was logged."""
        self._seconds = self._cpu_seconds = 0.0
        if resume is None or resume is False:
            resume = None
            self.path, self._metrics = _claim(Path(path))
            self._lock = _lock(self.path)
        else:
            self.path = Path(path)
            if not self.path.is_dir():
                raise FileNotFoundError(f"there is no run in {self.path}")
            self._lock = _lock(self.path)
            last = _cut(self.path / "metrics.jsonl", resume)
            _cut(self.path / "samples.jsonl", resume)
            _cut(self.path / "trace.jsonl", resume)
            self._seconds, self._cpu_seconds = last.get("time", 0.0), last.get("cpu", 0.0)
            self._metrics = (self.path / "metrics.jsonl").open("ab")
        self._samples = (self.path / "samples.jsonl").open("ab")
        self._trace = (self.path / "trace.jsonl").open("ab")
        self._began, self._cpu_began = time.monotonic(), _cpu()
        self._config, self._resumed = config, resume
        if resume is None:
            self.keep_config()
        self._trackers: list[Tracker] = []
        for make in factories:
            try:
                self._trackers.append(make(self.path, config or {}, resume))
            except Exception as error:
                (self.discard if resume is None else self.close)()
                name = f"{make.__module__}:{getattr(make, '__qualname__', make)}"
                raise TrackerError(f"trackers: {name} could not be opened: {error}") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def seconds(self) -> float:
        """Wall seconds of the run, without the time between a stop and a resume."""
        return self._seconds + time.monotonic() - self._began

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of this process and of its children that have ended."""
        return self._cpu_seconds + _cpu() - self._cpu_began

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. A step may be logged in several calls."""
        if taken := {"step", "time", "cpu"} & metrics.keys():
            raise ValueError(f"'{taken.pop()}' cannot be the name of a metric: the line of a step has it already")
        numbers = {name: float(value) for name, value in metrics.items()}
        head = {"step": step, "time": round(self.seconds, 3), "cpu": round(self.cpu_seconds, 3)}
        _append(self._metrics, head | numbers)
        self.step = step
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception:  # the line is the record, a tracker is a copy of it
                logger.exception("%s failed at step %d; the run goes on without it", type(tracker).__name__, step)
                self._trackers.remove(tracker)

    def sample(self, record: SampleRecord) -> None:
        """Write an episode."""
        _append(self._samples, record)

    def trace(self, line: bytes) -> None:
        """Write the shape of a step: a JSON object with the key `step`."""
        self._trace.write(line + b"\n")
        self._trace.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write what came of the run, in place of what was written before."""
        _replace(self.path / "summary.json", _dump(values, indent=2) + b"\n")

    def keep_config(self) -> None:
        """Write what the run was told. A resumed run may be told something else; what it was told before stays."""
        if self._config is None:
            return
        path = self.path / "config.yaml"
        text = config_text(json.loads(_dump(self._config))).encode()
        if path.exists() and (old := path.read_bytes()) != text:
            name = f"config-until-{self._resumed}"
            number = len(list(self.path.glob(f"{name}*.yaml")))
            _replace(self.path / f"{name}{f'-{number + 1}' if number else ''}.yaml", old)
        _replace(path, text)

    def discard(self) -> None:
        """The run never was: its directory goes, and its name is free again."""
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception:  # as in `log`
                logger.exception("%s failed when it was closed", type(tracker).__name__)
        self._trackers = []
        for file in (self._metrics, self._samples, self._trace, self._lock):
            file.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _factory(tracker: str | Tracker) -> TrackerFactory:
    return find_tracker(tracker) if isinstance(tracker, str) else lambda path, config, resume: tracker


def make_fresh_directory(path: Path | str) -> Path:
    """Make this directory, or `name-2`, `name-3` ... if it holds something, and return the one that was free."""
    path = Path(path)
    number, free = 1, path
    while True:
        with contextlib.suppress(FileExistsError):  # a file has the name
            free.mkdir(parents=True, exist_ok=True)
            if not any(free.iterdir()):
                return free
        number += 1
        free = path.with_name(f"{path.name}-{number}")


def config_text(values: Mapping[str, Any]) -> str:
    """The config of a run as its file holds it: keys that are missing in it would have their defaults, so its last
    line says that it is whole."""
    return f"{yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)}{CONFIG_END}\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl or samples.jsonl; what is no record is left out."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (record := parse_line(line)) is not None:
                yield record


# -- files -------------------------------------------------------------------------------------------------------------


def _claim(path: Path) -> tuple[Path, IO[bytes]]:
    """Of two runs that begin at once, only one can make the file."""
    while True:
        free = make_fresh_directory(path)
        with contextlib.suppress(FileExistsError):
            return free, (free / "metrics.jsonl").open("xb")


def _lock(path: Path) -> IO[bytes]:
    """Held until the process ends, so that a run that is alive cannot be resumed."""
    file = (path / ".lock").open("ab")
    try:
        import fcntl

        # Not flock: a child that outlives this process would hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise RuntimeError(f"{path} is being written by another process; stop it, or choose another name") from error
    except (ImportError, OSError):
        pass  # neither every system nor every file system has locks
    return file


def _cut(path: Path, step: int) -> dict[str, Any]:
    """Drop the lines beyond the step, and a half-written last one; returns the last record that stays."""
    last: dict[str, Any] = {}
    if not path.exists():
        return last
    shorter = path.with_suffix(".cut")
    with path.open("rb") as lines, shorter.open("wb") as kept:
        for line in lines:
            record = parse_line(line)
            if record is None:
                if line.endswith(b"\n"):
                    kept.write(line)  # not ours to judge
            elif record.get("step", step) <= step:
                kept.write(line.rstrip(b"\n") + b"\n")
                last = record
        kept.flush()
        os.fsync(kept.fileno())
    shorter.replace(path)
    return last


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line, or None where the line is not one, as the last line of a run that was killed."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _append(file: IO[bytes], record: Mapping[str, Any]) -> None:
    file.write(_dump(record) + b"\n")
    file.flush()


def _replace(path: Path, content: bytes) -> None:
    """The file has its old content or the new one, and never a part of it."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else a crash of the machine may leave the new name with half of the content
    beside.replace(path)


def _dump(value: Any, indent: int | None = None) -> bytes:
    """JSON that every reader takes: no NaN, and a lone surrogate as its escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, default=_plain, indent=indent)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as its number, anything else as its text."""
    return value.item() if hasattr(value, "item") else str(value)


def _cpu() -> float:
    return time.process_time() + sum(os.times()[2:4])
