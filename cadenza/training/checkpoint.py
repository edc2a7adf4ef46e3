"""Checkpoints: everything that a run needs to go on, in a directory that appears whole or not at all.

    step-000012/           what `save_pretrained` writes: `from_pretrained` of transformers loads it
      training/            state.json, tensors.safetensors: optimizer, schedule, random state, the user's values
      critic/ ...          other roles, each laid out the same way
    last -> step-000012    best -> step-000008

Invariant: at any instant, also after `kill -9` or on a full disk, every directory called step-N is complete. It is
written beside its final path under another name, flushed, then renamed. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cadenza.training.models import is_adapted, save_model, without_progress_bars

FORMAT = 1
_STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")
_UNFINISHED = ".unfinished-"


class CheckpointError(OSError):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a learner needs besides its weights to go on after a restart."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """JSON-like"""


class Checkpointable(Protocol):
    """What a checkpoint saves and restores: an actor, a critic."""

    @property
    def module(self) -> nn.Module: ...

    def state(self) -> TrainingState: ...

    def load_state(self, state: TrainingState) -> None: ...

    def offload(self) -> int: ...

    def reload(self) -> None: ...


def save(
    path: Path,
    roles: Mapping[str, Checkpointable],
    *,
    user: Mapping[str, Any] | None = None,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint to `path`, which must not exist. The first role is the model at its top.

    `user` is a JSON-like dict that `load` gives back. `extra` writes more files, as those of a tokenizer, into the
    directory it is called with. One process at a time writes to a directory of checkpoints.
    """
    with writing(path, user=user) as directory:
        for role_directory, role in _role_directories(directory, roles):
            save_role(role_directory, role)
        if extra is not None:
            extra(directory)


@contextmanager
def writing(path: Path, *, user: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """A directory for the roles of a checkpoint, which becomes `path` when the block ends, and is gone if it fails."""
    document = json.dumps({"format": FORMAT, "user": dict(user or {})})
    for killed in path.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(killed, ignore_errors=True)
    unfinished = path.parent / f"{_UNFINISHED}{path.name}"
    try:
        if path.exists():
            raise FileExistsError(f"{path} exists already")
        (unfinished / "training").mkdir(parents=True)
        yield unfinished
        _save_random_state(unfinished / "training")
        (unfinished / "training" / "user.json").write_text(document, encoding="utf-8")
        _flush(unfinished)
        unfinished.rename(path)
    except (OSError, SafetensorError) as error:
        kept = latest(path.parent)
        rest = f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint"
        raise CheckpointError(f"the checkpoint {path} could not be saved: {error}; {rest}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load(path: Path, roles: Mapping[str, Checkpointable]) -> dict[str, Any]:
    """Restore the roles, in the order in which they were saved, and the random state; the user's dict."""
    user = _read(path)
    for role_directory, role in _role_directories(path, roles):
        load_role(role_directory, role)
    _load_random_state(path / "training")
    return user


def load_weights(path: Path, module: nn.Module) -> None:
    """Set the weights of the module, or of its adapter, to those in the directory."""
    found: Any = module
    try:
        if is_adapted(module):
            import peft

            peft.set_peft_model_state_dict(module, peft.load_peft_weights(str(path), device="cpu"))
        else:
            # Through transformers, which knows how names and tied weights of each model are stored.
            with without_progress_bars():
                stored = type(found).from_pretrained(path, dtype=found.dtype)
            module.load_state_dict(stored.state_dict())
    except (OSError, SafetensorError, RuntimeError) as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[:2])  # torch lists every tensor
        raise CheckpointError(f"the weights of the checkpoint {path} do not fit this model: {what}") from error


def step_of(path: Path) -> int:
    """The step after which a checkpoint of a run was written."""
    document = json.loads((path / "training" / "user.json").read_text(encoding="utf-8"))
    step: int = document["user"]["step"]
    return step


def latest(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    steps = _steps(directory)
    return steps[max(steps)] if steps else None


class Checkpoints:
    """The checkpoints of one run: the last ones and the best are kept."""

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        """`keep` is how many of the last ones stay."""
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.directory = directory
        self.keep = keep

    def save(
        self,
        step: int,
        roles: Mapping[str, Checkpointable],
        *,
        score: float | None = None,
        user: Mapping[str, Any] | None = None,
        extra: Callable[[Path], None] | None = None,
    ) -> Path:
        """Save as `step-N`; see `writing`."""
        path = self._free_name(step)
        with self.writing(step, score=score, user=user) as directory:
            for role_directory, role in _role_directories(directory, roles):
                save_role(role_directory, role)
            if extra is not None:
                extra(directory)
        return path

    @contextmanager
    def writing(
        self, step: int, *, score: float | None = None, user: Mapping[str, Any] | None = None
    ) -> Iterator[Path]:
        """A directory to write the roles of a checkpoint into. When the block ends it is called `step-N`, and linked as
        `last`, and as `best` if no kept one has a higher score."""
        path = self._free_name(step)
        with writing(path, user={"step": step, "score": score, "user": dict(user or {})}) as directory:
            yield directory
        self._link("last", latest(self.directory))
        best = self.best
        self._link("best", best)
        self._prune(best)

    def load(self, path: Path, roles: Mapping[str, Checkpointable]) -> dict[str, Any]:
        """Restore from one of the checkpoints; the user's dict."""
        user: dict[str, Any] = load(path, roles)["user"]
        return user

    @property
    def latest(self) -> Path | None:
        return latest(self.directory)

    @property
    def best(self) -> Path | None:
        """The one with the highest score; the newest among equals, which has learned more."""
        scored = [(score, path) for path in _steps(self.directory).values() if (score := _score(path)) is not None]
        return max(reversed(scored), key=lambda pair: pair[0])[1] if scored else None

    def _free_name(self, step: int) -> Path:
        """A step that is saved again gets a number: what is there is never replaced, only outlived."""
        path, number = self.directory / f"step-{step:06d}", 0
        while path.exists():
            number += 1
            path = self.directory / f"step-{step:06d}.{number}"
        return path

    def _link(self, name: str, path: Path | None) -> None:
        if path is None:
            return
        fresh = self.directory / f".{name}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(self.directory / name)

    def _prune(self, best: Path | None) -> None:
        """Delete the others, each under a name that is no checkpoint's: a kill on the way leaves no half of one."""
        steps = _steps(self.directory)
        for step in sorted(steps)[: -self.keep]:
            if steps[step] != best:
                doomed = steps[step].rename(self.directory / f"{_UNFINISHED}{steps[step].name}")
                shutil.rmtree(doomed, ignore_errors=True)


def _steps(directory: Path) -> dict[tuple[int, int], Path]:
    """The complete checkpoints, by step and number."""
    if not directory.is_dir():
        return {}
    found = [(_STEP.fullmatch(path.name), path) for path in directory.iterdir()]
    return dict(sorted(((int(match[1]), int(match[2] or 0)), path) for match, path in found if match))


def _score(path: Path) -> float | None:
    document = json.loads((path / "training" / "user.json").read_text(encoding="utf-8"))
    score = document["user"].get("score")
    return None if score is None or math.isnan(score) else float(score)


def save_role(directory: Path, role: Checkpointable) -> None:
    """Write weights and training state of one role, as an actor, into a directory of a checkpoint."""
    (directory / "training").mkdir(parents=True, exist_ok=True)
    save_model(directory, role.module)
    state = role.state()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    save_file(tensors, directory / "training" / "tensors.safetensors")
    (directory / "training" / "state.json").write_text(json.dumps(state.values), encoding="utf-8")


def load_role(directory: Path, role: Checkpointable) -> None:
    """Restore what `save_role` wrote."""
    if not directory.is_dir():
        raise CheckpointError(
            f"the checkpoint {directory.parent} has no {directory.name}: go on without one, or begin a new run"
        )
    if not (directory / "training" / "tensors.safetensors").is_file():
        raise CheckpointError(f"the checkpoint {directory} is sharded: go on with the strategy 'fsdp2', which wrote it")
    load_weights(directory, role.module)
    values = json.loads((directory / "training" / "state.json").read_text(encoding="utf-8"))
    role.load_state(TrainingState(load_file(directory / "training" / "tensors.safetensors"), values))


def _role_directories(directory: Path, roles: Mapping[str, Checkpointable]) -> Iterator[tuple[Path, Checkpointable]]:
    """The first role is at the top of a checkpoint, the others have directories of their own."""
    for number, (name, role) in enumerate(roles.items()):
        yield (directory if number == 0 else directory / name), role


def _read(path: Path) -> dict[str, Any]:
    """The user's values."""
    if not (path / "training" / "user.json").is_file():
        raise CheckpointError(f"{path} is not a checkpoint of cadenza: it has no training/user.json")
    document = json.loads((path / "training" / "user.json").read_text(encoding="utf-8"))
    if document["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {document['format']}, this version of cadenza reads {FORMAT}")
    user: dict[str, Any] = document["user"]
    return user


def _save_random_state(directory: Path) -> None:
    numpy_state: Any = np.random.get_state()
    version, internal, gauss = random.getstate()
    save_file({"torch": torch.get_rng_state()}, directory / "random.safetensors")
    document = {
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
    }
    (directory / "random.json").write_text(json.dumps(document), encoding="utf-8")


def _load_random_state(directory: Path) -> None:
    state: Tensor = load_file(directory / "random.safetensors")["torch"]
    torch.set_rng_state(state)
    document = json.loads((directory / "random.json").read_text(encoding="utf-8"))
    version, internal, gauss = document["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = document["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def _flush(directory: Path) -> None:
    """Bytes and names are on the disk, not only in its cache: a rename must not overtake them."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
