"""What every run is told, whatever its pipeline. A pipeline's own config class adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from cadenza.cluster import RoleConfig
from cadenza.cluster.placement import AUTO, format_devices
from cadenza.config import Config, Seed, Threads, load_callable
from cadenza.observe.trackers import check_tracker
from cadenza.run.role_names import ACTOR, INFERENCE
from cadenza.training import ModelConfig
from cadenza.training.learner import LearnerConfig
from cadenza.training.strategy import load_strategy, names_with_tensor_parallel


class ConfigError(ValueError):
    """The config of a run is wrong; the message says where."""


class TokenizerConfig(Config):
    """Between text and tokens."""

    path: str | None = None
    """None takes the tokenizer of the model; for a tiny policy that is one of characters, built here."""
    template: Literal["chat", "plain"] | None = None
    """How turns are put together: by the tokenizer's chat template, or plainly one after the other."""
    system: str | None = None
    """What every conversation begins with."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, as `enable_thinking`."""


class CheckpointConfig(Config):
    """What is kept."""

    every: int = Field(default=20, gt=0)
    """Steps between two checkpoints. One is always written at the end."""
    keep: int = Field(default=1, gt=0)
    """Last ones that stay; the best one stays besides."""


class RunConfig(Config):
    """What every run is told. A pipeline declares a subclass with the keys that it adds."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Algorithms by name: the few settings that make them."""
    preset_key_owners: ClassVar[Mapping[str, str]] = {}
    """Of some keys of presets, the key that they are there for: where the user sets that one to something else, the
    preset does not set them."""

    pipeline: str = "agentic"
    """The program: one of `PIPELINES`, or 'module:name' of a `Pipeline` of your own."""
    name: str = "run"
    """Its directory is `out`/`name`."""
    out: Path = Path("runs")
    seed: Seed = 0
    """Of everything: weights, tasks, sampling, shuffling."""
    steps: int = Field(gt=0)
    """Train steps."""
    target: float | None = Field(default=None, ge=0, le=1)
    """Stop when the success in validation, or without one in training, reaches this."""
    preset: str | None = None
    """One of the pipeline's `presets`; what is set here besides wins."""
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    actor: LearnerConfig = LearnerConfig()
    """How the model learns; a pipeline narrows the type."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    backend: Literal["embedded", "ray"] = "embedded"
    """Where the workers run: in this process, or each in one of its own on Ray."""
    devices: dict[str, RoleConfig] = Field(default_factory=dict)
    """By role: actor, critic, reference, inference, reward. A role that is not named shares device 0; only `reward` has
    none then. `actor: 1` is short for `actor: {devices: [1]}`. Every device of `inference` is a replica; with vLLM,
    every `devices_per_worker` of them. Every device of `reward` is a process that computes rewards."""
    threads: Threads | None = None
    """Of torch; None is one for a tiny policy, which more would only slow down, and torch's own choice else."""
    samples: int = Field(default=2, ge=0)
    """Rollouts of each step, and of each validation, that are written out as text."""
    trackers: tuple[Annotated[str, AfterValidator(check_tracker)], ...] = ("tensorboard",)
    """Where else the metrics go: names of `TRACKERS`, or 'module:name'. One may stand without brackets."""

    @classmethod
    def completed(cls, values: dict[str, Any], source: str) -> dict[str, Any]:
        """The values with what follows from the others, before they are validated."""
        return values

    def check_names(self) -> None:
        """Load what the config names as 'module:name', so that a name that means nothing is found before a run
        begins."""
        for number, tracker in enumerate(self.trackers):
            if ":" in tracker:
                check_name(f"trackers.{number}", load_callable, tracker)

    @field_validator("name")
    @classmethod
    def _name_is_one_directory(cls, name: str) -> str:
        if not name.strip() or name in (".", "..") or any(char in "/\\" or not char.isprintable() for char in name):
            raise ValueError("must be the name of one directory below out, without separators, as in name=my-run")
        return name

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_tracker_is_a_list(cls, trackers: Any) -> Any:
        return (trackers,) if isinstance(trackers, str) else trackers

    @field_validator("devices", mode="before")
    @classmethod
    def _expand_short_forms(cls, devices: Any) -> Any:
        if devices == AUTO:
            return {role: {"devices": AUTO} for role in (ACTOR, INFERENCE)}
        if not isinstance(devices, dict):
            return devices
        short = {role: [given] if isinstance(given, int) else given for role, given in devices.items()}
        return {role: {"devices": d} if isinstance(d, (str, list)) else d for role, d in short.items()}

    @model_validator(mode="after")
    def _roles_have_their_devices(self) -> RunConfig:
        for role in self.devices:
            if role not in self.role_names:
                raise ValueError(f"devices: this run has no role '{role}'; it has {', '.join(self.role_names)}")
        self._check_trainers()
        return self

    def _check_trainers(self) -> None:
        """Ranks that train have a device and a process each."""
        for role, learner in self.learners.items():
            name = "torch" if learner is None else learner.strategy
            strategy = load_strategy(name)
            if strategy.needs_processes and self.backend == "embedded":
                raise ValueError(f"{role}.strategy '{name}' needs ranks in processes of their own: set backend=ray")
            if (config := self.devices.get(role)) is None or config.devices == AUTO:
                continue
            named = f"devices.{role}: {format_devices(config.device_numbers)}"
            if len(config.device_numbers) > 1 and self.backend == "embedded":
                raise ValueError(
                    f"{named} are {len(config.device_numbers)} ranks that compute together, each in a process of its "
                    "own: set backend=ray, or name one device"
                )
            if config.devices_per_worker > 1:
                raise ValueError(f"{named}: a rank that trains has one device: leave out devices_per_worker")
            if config.tensor_parallel > 1 and not strategy.tensor_parallel:
                names = " or ".join(names_with_tensor_parallel())
                way_out = "leave it out" if learner is None else f"set {role}.strategy={names}"
                raise ValueError(f"{named}: tensor_parallel {config.tensor_parallel} needs shards: {way_out}")

    @property
    def learners(self) -> Mapping[str, LearnerConfig | None]:
        """The roles that hold weights, and how each of them learns; None where it does not."""
        return {ACTOR: self.actor}

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles that get devices."""
        return (ACTOR,)

    @property
    def device_count(self) -> int:
        """Devices that there must be."""
        named = [config.device_numbers for config in self.devices.values() if config.devices != AUTO]
        return max((number for numbers in named for number in numbers), default=0) + 1


def check_name(key: str, load: Callable[[Any], Any], name: Any) -> None:
    """Load what a key of the config names, or raise an error that says the key."""
    try:
        load(name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
