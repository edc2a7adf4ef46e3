"""A whole run as one typed tree, read from YAML.

    preset  <  file  <  key=value on the command line

What comes later wins, key by key. Unknown keys are refused wherever they stand, with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from cadenza import envs, rewards
from cadenza.cluster import RoleConfig
from cadenza.cluster.placement import AUTO, format_devices
from cadenza.config import Config, load_object
from cadenza.inference.replica import Sampling
from cadenza.rollout import rollout_functions
from cadenza.rollout.config import DomainConfig, EnvManagerConfig, RolloutConfig
from cadenza.rollout.sampler import SamplerConfig
from cadenza.run.engines import EngineConfig
from cadenza.training import ActorConfig, CriticConfig, EstimatorConfig, ModelConfig, ReferenceConfig, SupervisedConfig
from cadenza.training.estimators import names_within_groups
from cadenza.training.strategy import load_strategy, names_with_tensor_parallel

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"estimator": {"name": "grpo"}, "actor": {"aggregation": "sequence_mean"}},
    "dr-grpo": {"estimator": {"name": "grpo", "divide_by_std": False}, "actor": {"aggregation": "sequence_sum"}},
    "dapo": {
        "estimator": {"name": "grpo"},
        "actor": {"loss": "ppo_clip", "clip_high": 0.28, "aggregation": "token_mean"},
        "rollout": {"group_filter": "cadenza.run.filters:has_variance"},
    },
    "ppo": {"estimator": {"name": "gae"}, "critic": {}},
    "reinforce++": {"estimator": {"name": "reinforce++"}},
    "gigpo": {"estimator": {"name": "gigpo"}, "envs": {"rollout": "step"}},
    "step": {"estimator": {"name": "step"}, "envs": {"rollout": "step"}},
}
"""Algorithms by name: the few settings that make them."""
PRESET_KEY_OWNERS: Mapping[str, str] = {
    "critic": "estimator.name",
    "estimator.divide_by_std": "estimator.name",
    "actor.clip_high": "actor.loss",
}
"""Of some keys of presets, the key that they are there for: where somebody sets that one to something else, the preset
does not set them."""


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


class WarmStartConfig(Config):
    """A supervised step before reinforcement learning."""

    source: Literal["format", "demonstrations"] = "format"
    """Random well-formed answers (`actions` of the env): only the format is learned. Or the env's own `solution`."""
    episodes: int = Field(default=64, gt=0)
    passes: int = Field(default=1, gt=0)
    first_seed: int = Field(default=2_000_000_000, ge=0)
    """Episodes come from seeds of their own."""
    trainer: SupervisedConfig = SupervisedConfig()


class ValidationConfig(Config):
    """What is measured during training, on tasks that are not trained."""

    every: int = Field(default=10, gt=0)
    """Steps between two validations. One is made before the first step and one after the last."""
    episodes: int = Field(default=100, gt=0)
    """In all, shared among the domains; of a domain whose tasks are rows, all are played."""
    first_seed: int = Field(default=1_000_000_000, ge=0)
    """First task, where tasks are seeds."""
    sampling: Sampling | None = None
    """None samples as in training."""
    domains: dict[str, DomainConfig] | None = None
    """Tasks of their own; None is those of `envs`, from `first_seed` on."""


class CheckpointConfig(Config):
    """What is kept."""

    every: int = Field(default=20, gt=0)
    """Steps between two checkpoints. One is always written at the end."""
    keep: int = Field(default=1, gt=0)
    """Last ones that stay; the best one stays besides."""


class RunConfig(Config):
    """Everything that a run is told."""

    name: str = "run"
    """Its directory is `out`/`name`."""
    out: Path = Path("runs")
    seed: int = Field(default=0, ge=0)
    """Of everything: weights, tasks, sampling, shuffling."""
    steps: int = Field(gt=0)
    """Train steps."""
    batch_parts: int = Field(default=1, gt=0)
    """A batch is trained in so many chunks, each as soon as its groups are whole; together they are one update."""
    target: float | None = Field(default=None, ge=0, le=1)
    """Stop when the success in validation, or without one in training, reaches this."""
    preset: str | None = None
    """One of the algorithms in `PRESETS`; what is set here besides wins."""
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    warm_start: WarmStartConfig | None = None
    envs: EnvManagerConfig
    rollout: RolloutConfig
    estimator: EstimatorConfig = EstimatorConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig | None = None
    reference: ReferenceConfig | None = None
    engine: EngineConfig = EngineConfig()
    sampler: SamplerConfig = SamplerConfig()
    validation: ValidationConfig | None = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    backend: Literal["embedded", "ray"] = "embedded"
    """Where the workers run: in this process, or each in one of its own on Ray."""
    devices: dict[str, RoleConfig] = Field(default_factory=dict)
    """By role: actor, critic, reference, inference. A role that is not named shares device 0. `actor: 1` is short for
    `actor: {devices: [1]}`. Every device of `inference` is a replica; with vLLM, every `devices_per_worker` of them."""
    threads: int | None = Field(default=None, gt=0)
    """Of torch; None is one for a tiny policy, which more would only slow down, and torch's own choice else."""
    samples: int = Field(default=2, ge=0)
    """Rollouts of each step, and of each validation, that are written out as text."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)

    @field_validator("devices", mode="before")
    @classmethod
    def _expand_short_forms(cls, devices: Any) -> Any:
        if devices == AUTO:
            return {"actor": {"devices": AUTO}, "inference": {"devices": AUTO}}
        if not isinstance(devices, dict):
            return devices
        short = {role: [given] if isinstance(given, int) else given for role, given in devices.items()}
        return {role: {"devices": d} if isinstance(d, (str, list)) else d for role, d in short.items()}

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.estimator.method.needs_groups and self.rollout.group_size < 2:
            raise ValueError(
                f"estimator '{self.estimator.name}' compares the members of a group: set rollout.group_size to 2 or "
                f"more, got {self.rollout.group_size}"
            )
        if self.estimator.needs_critic and self.critic is None:
            raise ValueError(f"estimator '{self.estimator.name}' needs a critic: add 'critic: {{}}'")
        if self.critic is not None and not self.estimator.needs_critic:
            raise ValueError(f"critic does nothing for the estimator '{self.estimator.name}': remove it")
        if self.reference is not None and not self.needs_reference:
            raise ValueError("reference does nothing while no kl_coef is set, in actor or in estimator: remove it")
        if self.actor.temperature != 1.0 and self.actor.temperature != self.envs.sampling.temperature:
            raise ValueError(
                f"actor.temperature {self.actor.temperature} is not that of envs.sampling, "
                f"{self.envs.sampling.temperature}: leave it out"
            )
        if self.reference is not None and self.reference.temperature not in (1.0, self.envs.sampling.temperature):
            raise ValueError(
                f"reference.temperature {self.reference.temperature} is not that of envs.sampling, "
                f"{self.envs.sampling.temperature}: leave it out"
            )
        for name, learner in (("actor", self.actor), ("critic", self.critic)):
            if learner is not None and learner.mini_batches > self.rollout.batch_size:
                raise ValueError(
                    f"{name}.mini_batches must be at most rollout.batch_size {self.rollout.batch_size}, got "
                    f"{learner.mini_batches}"
                )
        if self.model.lora is not None and self.warm_start is not None and self.needs_reference:
            raise ValueError(
                "model.lora, warm_start and a kl_coef do not go together: the reference is the model under the "
                "adapter, without what warm_start taught. Remove one of the three, or warm up the model at model.path "
                "in a run without lora"
            )
        if self.model.lora is not None and self.warm_start is None and self.model.lora.dropout:
            raise ValueError(f"model.lora.dropout {self.model.lora.dropout} does nothing without warm_start: remove it")
        if self.validation is not None and self.validation.domains is None:
            rows = [name for name, domain in self.envs.domains.items() if isinstance(domain.tasks, (list, tuple))]
            if rows:
                raise ValueError(
                    f"the tasks of {rows} are rows, and all of them are trained: give validation.domains rows of its "
                    "own, or set 'validation: null'"
                )
        for role in self.devices:
            if role not in self.role_names:
                raise ValueError(f"devices: this run has no role '{role}'; it has {', '.join(self.role_names)}")
        self._check_engine()
        self._check_trainers()
        self._check_chunks()
        if self.rollout.seed not in (0, self.seed):
            raise ValueError(f"rollout.seed {self.rollout.seed} differs from seed {self.seed}: set seed alone")
        return self

    def _check_engine(self) -> None:
        """An engine has the backend, the model and the devices that it can use."""
        kind = self.engine.kind
        needed = {"vllm": "ray", "http": "embedded"}.get(kind, self.backend)
        if self.backend != needed:
            raise ValueError(f"engine.kind '{kind}' needs backend '{needed}', got '{self.backend}'")
        if kind != "torch" and self.model.path is None:
            raise ValueError(f"engine.kind '{kind}' needs a model.path: a tiny policy is built for 'torch'")
        if kind == "http" and self.model.lora is not None:
            raise ValueError("model.lora does not go with engine.kind 'http': servers are sent whole models")
        if (config := self.devices.get("inference")) is None:
            return
        if kind == "http":
            raise ValueError(
                "devices.inference does nothing with engine.kind 'http', its servers have theirs: remove it"
            )
        if kind == "torch" and config.devices_per_replica != 1:
            raise ValueError(
                "devices.inference: the torch engine runs on one device: leave devices_per_worker and "
                "tensor_parallel out, and every device is a replica"
            )
        if kind == "vllm" and config.tensor_parallel != 1:
            raise ValueError(
                f"devices.inference: one worker of vLLM drives all devices of its replica: set devices_per_worker="
                f"{config.devices_per_replica} and leave tensor_parallel out"
            )

    def _check_trainers(self) -> None:
        """Ranks that train have a device and a process each."""
        for role, learner in (("actor", self.actor), ("critic", self.critic), ("reference", None)):
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

    def _check_chunks(self) -> None:
        """The chunks of a batch must come to what the whole batch would."""
        chunks, updates = self.batch_parts, self.actor.epochs * self.actor.mini_batches
        if chunks == 1:
            return
        if chunks > (groups := self.rollout.groups_per_batch):
            raise ValueError(f"batch_parts must be at most the groups of a batch, {groups}, got {chunks}")
        for problem, way_out in (
            (updates > 1 and f"the actor makes {updates} of them", "leave actor.epochs and actor.mini_batches at 1"),
            (
                self.shared_devices and f"devices {format_devices(self.shared_devices)} are taken back once for it",
                "give actor and inference devices of their own",
            ),
            (self.critic is not None and "a critic is trained on whole batches", "take an estimator without critic"),
            (
                self.estimator.cross_group_setting
                and f"estimator.{self.estimator.cross_group_setting} may need all groups at once",
                f"take one that compares within groups ({', '.join(names_within_groups())})",
            ),
        ):
            if problem:
                raise ValueError(f"batch_parts {chunks} are one update, but {problem}: {way_out}, or set batch_parts=1")

    @property
    def chunk_sizes(self) -> list[int]:
        """Trajectories of each chunk of a batch, in whole groups."""
        groups, chunks = self.rollout.groups_per_batch, self.batch_parts
        ends = [groups * chunk // chunks * self.rollout.group_size for chunk in range(chunks + 1)]
        return [end - start for start, end in pairwise(ends)]

    @property
    def needs_reference(self) -> bool:
        return self.estimator.needs_reference or self.actor.kl_coef > 0

    @property
    def role_names(self) -> tuple[str, ...]:
        """Who gets devices. Under an adapter, the actor is the reference too."""
        found = {"critic": self.critic is not None, "reference": self.needs_reference and self.model.lora is None}
        return ("actor", *(role for role, is_there in found.items() if is_there), "inference")

    @property
    def device_count(self) -> int:
        """Devices that there must be."""
        named = [config.device_numbers for config in self.devices.values() if config.devices != AUTO]
        return max((number for numbers in named for number in numbers), default=0) + 1

    @property
    def shared_devices(self) -> tuple[int, ...]:
        """Which actor and replicas use alternately: the devices of both, if there are others that only generate."""
        named = [self.devices.get(role, RoleConfig(devices=(0,))) for role in ("actor", "inference")]
        if any(config.devices == AUTO for config in named):
            return ()
        trains, generates = (set(config.device_numbers) for config in named)
        return tuple(sorted(trains & generates)) if generates - trains else ()

    @property
    def is_exact(self) -> bool:
        """On-policy: the same seed gives the same run, also when it is killed and resumed. With `batch_parts` the same
        rows, which are added up in the order in which they are there."""
        return self.rollout.alpha == 0


def read_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a file, with `key=value` overrides."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no config file {path}")
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    return build_config(values, overrides, source=str(path))


def build_config(values: Any, overrides: Sequence[str] = (), *, source: str = "config") -> RunConfig:
    """The config that a tree of plain values means."""
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must be a mapping of keys to values, got {type(values).__name__}")
    for override in overrides:
        values = _merged(values, _override(override))
    preset = values.get("preset")
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            near = difflib.get_close_matches(str(preset), PRESETS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PRESETS)}"
            raise ConfigError(f"{source}: preset '{preset}' is not known; {hint}")
        values = _merged(_preset(preset, values), values)
    values = _with_constant_length(values, source)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_describe_errors(error, values, source)) from error


def check_names(config: RunConfig) -> None:
    """Load what the config names as 'module:name', so that a name that means nothing is found before a run begins."""

    def check(key: str, load: Callable[[Any], Any], name: Any) -> None:
        try:
            load(name)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error

    validation = (config.validation and config.validation.domains) or {}
    for where, domains in (("envs", config.envs.domains), ("validation", validation)):
        for name, domain in domains.items():
            check(f"{where}.domains.{name}.env", envs.find_factory, domain.env)
            if domain.reward is not None:
                check(f"{where}.domains.{name}.reward", rewards.as_reward, domain.reward)
    check("envs.rollout", rollout_functions.make, config.envs.rollout)
    for key, named in (
        ("rollout.group_filter", config.rollout.group_filter),
        ("actor.loss", config.actor.loss),
    ):
        if isinstance(named, str) and ":" in named:
            check(key, load_object, named)


def dump_config(config: RunConfig) -> dict[str, Any]:
    """The resolved tree as plain values, which `build_config` reads back. The preset is resolved in it."""
    values: dict[str, Any] = config.model_dump(mode="json", fallback=_path_of, exclude={"preset"})
    return values


def _path_of(value: Any) -> str:
    """A function or class as 'module:name'."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    raise ConfigError(f"{value!r} cannot be written into a config file: name it as 'module:name'")


def _override(text: str) -> dict[str, Any]:
    """'a.b=c' as {a: {b: c}}."""
    key, separator, value = text.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise ConfigError(f"'{text}' is no override; write key=value, as in rollout.alpha=1")
    try:
        tree: Any = _parse(value)
    except ValueError as error:
        raise ConfigError(f"the value of '{text}' is no YAML: {error}") from error
    for name in reversed(names):
        tree = {name: tree}
    found: dict[str, Any] = tree
    return found


def _preset(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a preset sets besides these values."""
    preset = PRESETS[name]
    for key, owner in PRESET_KEY_OWNERS.items():
        if _value_at(values, owner) not in (None, _value_at(preset, owner)):
            preset = _without(preset, key)
    return preset


def _with_constant_length(values: dict[str, Any], source: str) -> dict[str, Any]:
    """With `actor.constant_length` where 'sequence_sum' needs it: the most tokens that a sequence may have."""
    if (
        _value_at(values, "actor.aggregation") != "sequence_sum"
        or _value_at(values, "actor.constant_length") is not None
    ):
        return values
    is_one_turn = _value_at(values, "envs.rollout") == "step" and _value_at(values, "actor.sequence") != "trajectory"
    turns = 1 if is_one_turn else _value_at(values, "envs.max_turns")
    tokens = _value_at(values, "envs.sampling.max_tokens") or Sampling().max_tokens
    if turns is None:
        raise ConfigError(
            f"{source}: actor.aggregation 'sequence_sum' divides by the most tokens that a sequence may have, and "
            "turns have no bound here: set actor.constant_length, or envs.max_turns (then it is max_turns * max_tokens)"
        )
    if not isinstance(turns, int) or not isinstance(tokens, int):
        return values  # which is refused for that
    return _merged(values, {"actor": {"constant_length": turns * tokens}})


def _value_at(tree: Any, key: str) -> Any:
    """The value at 'a.b'; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _without(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The tree without 'a.b'."""
    first, _, rest = key.partition(".")
    return {
        name: _without(value, rest) if name == first else value for name, value in tree.items() if rest or name != first
    }


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, anything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged


class _Loader(yaml.SafeLoader):
    """`on`, `off`, `yes` and `no` are words here, as in YAML 1.2, and no key may stand twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML wants it
        first: [(tag, pattern) for tag, pattern in resolvers if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1} has the key '{key.value}' for the second time")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """The values in a text, or a `ValueError` of one line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _describe_errors(error: ValidationError, values: Any, source: str) -> str:
    """One line for each key: where, what, and the value. A value that could have been of several types has a
    problem with each of them."""
    problems: dict[str, tuple[list[str], str]] = {}
    for problem in error.errors():
        key = _key_path(problem["loc"], values)
        given = problem["input"]
        shown = "" if isinstance(given, (dict, Config)) or problem["type"] == "missing" else f" (got {given!r})"
        problems.setdefault(key, ([], shown))[0].append(problem["msg"].removeprefix("Value error, "))
    return "\n".join(f"{source}: {key}{' or '.join(messages)}{shown}" for key, (messages, shown) in problems.items())


def _key_path(path: tuple[int | str, ...], values: Any) -> str:
    """'a.b: '; what pydantic names beyond the keys that were given are types it tried, or a key that is missing."""
    keys: list[str] = []
    for step in path:
        if isinstance(values, Mapping):
            keys.append(str(step))
            values = values.get(step)
        elif isinstance(values, (list, tuple)) and isinstance(step, int):
            keys.append(str(step))
            values = values[step]
        else:
            break
    return f"{'.'.join(keys)}: " if keys else ""
