"""What a run leaves behind: a directory that can be read while the run writes it, and after a `kill -9`.

    config.yaml      what the run was told
    metrics.jsonl    {"step", "time", "cpu", "area/name" ...}; a number that is not finite is null
    samples.jsonl    rollouts as text, see `SampleRecord`
    trace.jsonl      lengths and times of every trajectory, for `cadenza simulate`; see simulation/comparison/traces.py
    summary.json     what came of it
    tensorboard/     the metrics again, see `TensorBoard`
    checkpoints/     written by the trainer

Invariant: a line is in its file when `log` or `sample` returns, so that only the last line can be half-written. A run
that goes on from the checkpoint of step s first cuts off what was written for later steps: they happen again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import shutil
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NotRequired, Protocol, TypedDict

import yaml

logger = logging.getLogger(__name__)


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


class Tracker(Protocol):
    """Where else the metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


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
        `keep_config` is called, which is when the checkpoint has turned out to fit it. `trackers` are 'tensorboard',
        'wandb' or objects of your own; one that fails later is left out, and the run goes on.
        """
        if resume is True:
            raise TypeError("resume is the step of the checkpoint to go on from, got True")
        opened = [_tracker(tracker) for tracker in trackers]
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
        self._trackers = [make(self.path, config or {}, resume) for make in opened]

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
            raise ValueError(f"'{taken.pop()}' is no name for a metric: the line of a step has it already")
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
        text = yaml.safe_dump(json.loads(_dump(self._config)), sort_keys=False, allow_unicode=True).encode()
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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl or samples.jsonl; what is no record is left out."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (record := _parse(line)) is not None:
                yield record


# -- files -------------------------------------------------------------------------------------------------------------


def _claim(path: Path) -> tuple[Path, IO[bytes]]:
    """Of two runs that begin at once, only one can make the file."""
    while True:
        free = make_fresh_directory(path)
        with contextlib.suppress(FileExistsError):
            return free, (free / "metrics.jsonl").open("xb")


def _lock(path: Path) -> IO[bytes]:
    """Held until the process ends: nobody resumes a run that is alive."""
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
            record = _parse(line)
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


def _parse(line: bytes) -> dict[str, Any] | None:
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
    beside.write_bytes(content)
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


# -- trackers ----------------------------------------------------------------------------------------------------------

Opener = Callable[[Path, Mapping[str, Any], int | None], Tracker]
"""From the directory, the config and the step to go on from."""


def _tracker(tracker: str | Tracker) -> Opener:
    """How to open it. What is missing is said before the directory is made."""
    if not isinstance(tracker, str):
        return lambda path, config, resume: tracker
    if tracker == "tensorboard":
        return lambda path, config, resume: TensorBoard(path / "tensorboard", resume=resume)
    if tracker == "wandb":
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                "the tracker 'wandb' needs a package that is not installed: pip install 'cadenza[wandb]', "
                "or leave it out of trackers"
            ) from error
        return lambda path, config, resume: Wandb(wandb, path, config)
    raise ValueError(f"there is no tracker '{tracker}'; known are 'tensorboard' and 'wandb'")


class Wandb:
    """Weights & Biases. A resumed run goes on under its id; steps that happen again are drawn again."""

    def __init__(self, wandb: Any, path: Path, config: Mapping[str, Any]) -> None:
        name = path / ".wandb-id"
        if not name.exists():
            name.write_text(uuid.uuid4().hex)
        project = os.environ.get("WANDB_PROJECT", "cadenza")
        self._run = wandb.init(
            project=project, name=path.name, dir=str(path), config=dict(config), id=name.read_text(), resume="allow"
        )
        # Its own step counter only goes up, and would refuse the steps after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """Scalars in an event file, which TensorBoard reads.

    The format is a handful of fields, so that no package is needed, a step is one record instead of one per metric,
    and it is on disk at once: tensorboardX takes 25 times the CPU time and keeps up to two minutes of it in memory.
    """

    def __init__(self, directory: Path, *, resume: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(directory.glob(f"{stem}.*")))
        self._file = (directory / f"{stem}.{number}").open("xb")
        self._tags: dict[str, bytes] = {}
        self._write(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))
        if resume is not None:
            start = _bytes(7, _varint(1, 1))  # of a session: what older files say of this step and later is void
            self._write(_double(1, time.time()) + _varint(2, resume + 1) + start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = b"".join(_bytes(1, self._tag(name) + _float(2, value)) for name, value in metrics.items())
        self._write(_double(1, time.time()) + _varint(2, step) + _bytes(5, values))

    def close(self) -> None:
        self._file.close()

    def _tag(self, name: str) -> bytes:
        if name not in self._tags:
            self._tags[name] = _bytes(1, name.encode("utf-8", "replace"))
        return self._tags[name]

    def _write(self, event: bytes) -> None:
        """A record of TFRecord: length and content, each with its checksum."""
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _varint(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _number(value)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    if math.isfinite(value) and abs(value) > _LARGEST:
        value = math.copysign(math.inf, value)
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _number(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, masked as TFRecord wants it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC = [_crc(byte) for byte in range(256)]
_LARGEST = 3.4028234e38
"""The largest number that four bytes hold."""
