"""What every run that learns from rollouts is told, wherever its tasks come from. A pipeline adds its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from cadenza.cluster import RoleConfig
from cadenza.cluster.placement import AUTO, format_devices
from cadenza.config import Config, load_callable
from cadenza.datasets import DataConfig
from cadenza.inference.replica import Sampling, SamplingChanges
from cadenza.rollout.config import EnvManagerConfig, RolloutConfig
from cadenza.rollout.sampler import SamplerConfig
from cadenza.run.cold_start_config import ColdStartConfig
from cadenza.run.config import ConfigError, RunConfig, check_name
from cadenza.run.config_tree import merged_trees, value_at
from cadenza.run.engines import EngineConfig, find_engine
from cadenza.run.role_names import ACTOR, CRITIC, INFERENCE, REFERENCE, REWARD
from cadenza.training import ActorConfig, CriticConfig, EstimatorConfig, ReferenceConfig
from cadenza.training.estimators import names_within_groups
from cadenza.training.learner import LearnerConfig
from cadenza.training.models import is_adapter
from cadenza.user_code import named_user_code

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
    "distill": {"estimator": {"name": "distill"}, "actor": {"loss": "policy_gradient"}},
}
"""Algorithms by name: the few settings that make them."""
PRESET_KEY_OWNERS: Mapping[str, str] = {
    "critic": "estimator.name",
    "estimator.divide_by_std": "estimator.name",
    "actor.clip_high": "actor.loss",
}
"""Of some keys of presets, the key that they are there for: where the user sets that one to something else, the preset
does not set them."""


class ValidationConfig(Config):
    """What is measured during training, on tasks that are not trained."""

    every: int = Field(default=10, gt=0)
    """Steps between two validations. One is made before the first step and one after the last."""
    sampling: SamplingChanges = SamplingChanges()
    """What differs from the sampling in training, in every domain: `{temperature: 0}` changes the temperature alone."""
    samples: int = Field(default=1, gt=0)
    """Tries at each task. With k of them the metrics are avg@k, their mean, and pass@1, 2, 4 .. k. `cadenza eval` and
    `play` try each task once."""
    beside: bool = False
    """Train on while the validation runs. Its answers may then be written by several versions; the metrics stand at the
    step whose weights it began with, and choose no best checkpoint: its weights are gone."""


class RolloutRunConfig(RunConfig):
    """A run that learns from rollouts. What runs in the slots is `env_manager`, which a pipeline's own class makes."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS
    preset_key_owners: ClassVar = PRESET_KEY_OWNERS

    rollout_prefix: ClassVar[str] = ""
    """What stands before `sampling`, `domains` and `reward_workers` in the config."""
    bound_hint: ClassVar[str] = ""
    """Which other key would bound the turns."""

    batch_parts: int = Field(default=1, gt=0)
    """A batch is trained in so many chunks, each as soon as its groups are whole; together they are one update."""
    cold_start: ColdStartConfig | None = None
    rollout: RolloutConfig
    estimator: EstimatorConfig = EstimatorConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig | None = None
    reference: ReferenceConfig | None = None
    engine: EngineConfig = Field(default_factory=EngineConfig)
    sampler: SamplerConfig = SamplerConfig()
    validation: ValidationConfig | None = ValidationConfig()

    @property
    def env_manager(self) -> EnvManagerConfig:
        """What runs in the slots in training."""
        raise NotImplementedError

    def validation_tasks(self, settings: ValidationConfig) -> EnvManagerConfig:
        """What runs in the slots in training, but with domains `for_validation`, of tasks that are not trained."""
        raise NotImplementedError

    def with_episodes(self, episodes: int) -> Self:
        """The config whose validation has so many tasks, of those that are trained if there are no others."""
        raise NotImplementedError

    def validation_env_manager(self, settings: ValidationConfig) -> EnvManagerConfig:
        """What runs in the slots in validation. A key of `validation.sampling` wins over that of a domain's own
        sampling, which wins over that of all domains."""
        manager, changed = self.validation_tasks(settings), settings.sampling.applied_to
        domains = {
            name: domain.model_copy(update={"sampling": changed(domain.sampling)})
            for name, domain in manager.domains.items()
        }
        return manager.model_copy(update={"domains": domains, "sampling": changed(manager.sampling)})

    def for_playing(self, episodes: int, *, greedy: bool) -> Self:
        """The config whose validation plays so many episodes, for `cadenza play` and `cadenza eval`: each of another
        task, whatever `validation.samples` says. They are sampled as in validation; `greedy` takes the likeliest tokens
        in every domain."""
        playing = self.with_episodes(episodes)
        settings = playing.validation
        assert settings is not None
        changes: dict[str, Any] = {"samples": 1}
        if greedy:
            changes["sampling"] = settings.sampling.model_copy(update={"temperature": 0.0})
        return playing.model_copy(update={"validation": settings.model_copy(update=changes)})

    @classmethod
    def max_answer_tokens(cls, values: Mapping[str, Any]) -> int | None:
        """The most tokens that the responses of one sequence have, by values that are not validated yet; None where
        they have no bound."""
        raise NotImplementedError

    @classmethod
    def completed(cls, values: dict[str, Any], source: str) -> dict[str, Any]:
        """With `actor.constant_length` where 'sequence_sum' needs it: the most tokens that a sequence may have."""
        if (
            value_at(values, "actor.aggregation") != "sequence_sum"
            or value_at(values, "actor.constant_length") is not None
        ):
            return values
        tokens = cls.max_answer_tokens(values)
        if tokens is None:
            raise ConfigError(
                f"{source}: actor.aggregation 'sequence_sum' divides by the most tokens that a sequence may have, and "
                f"turns have no bound here: set actor.constant_length{cls.bound_hint}"
            )
        return merged_trees(values, {"actor": {"constant_length": tokens}})

    def check_names(self) -> None:
        super().check_names()
        if find_engine(self.engine.kind).needs_model_path and is_adapter(str(self.model.path)):
            raise ConfigError(
                f"model.path {self.model.path} is an adapter, and engine.kind '{self.engine.kind}' loads whole models: "
                "merge it first with `cadenza export RUN --to DIR --merged`, and set model.path=DIR"
            )
        for key, named in (
            ("rollout.group_filter", self.rollout.group_filter),
            ("sampler.routing", self.sampler.routing),
            ("actor.loss", self.actor.loss),
        ):
            if isinstance(named, str) and ":" in named:
                check_name(key, load_callable, named)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.estimator.method.needs_groups and self.rollout.group_size < 2:
            raise ValueError(
                f"estimator '{self.estimator.name}' compares the members of a group: set rollout.group_size to 2 or "
                f"more, got {self.rollout.group_size}"
            )
        if self.estimator.needs_critic and self.critic is None:
            raise ValueError(f"estimator '{self.estimator.name}' needs a critic: add 'critic: {{}}'")
        if self.critic is not None and not self.estimator.needs_critic:
            raise ValueError(f"critic does nothing for the estimator '{self.estimator.name}': remove it")
        if self.estimator.method.needs_teacher and self.teacher is None:
            raise ValueError(f"estimator '{self.estimator.name}' learns from a teacher: name it with reference.path")
        if self.reference is not None and not self.needs_reference:
            raise ValueError("reference does nothing while no kl_coef is set, in actor or in estimator: remove it")
        self._check_temperatures()
        self._check_limits()
        self._check_group_settings()
        for name, learner in ((ACTOR, self.actor), (CRITIC, self.critic)):
            if learner is not None and learner.mini_batches > self.rollout.batch_size:
                raise ValueError(
                    f"{name}.mini_batches must be at most rollout.batch_size {self.rollout.batch_size}, got "
                    f"{learner.mini_batches}"
                )
        if self.model.lora is not None and self.cold_start is not None and self.needs_reference and not self.teacher:
            raise ValueError(
                "model.lora, cold_start and a kl_coef do not go together: the reference is the model under the "
                "adapter, without what cold_start taught. Remove one of the three, or begin with the "
                "checkpoint of an SFT run at model.path"
            )
        if self.model.lora is not None and self.cold_start is None and self.model.lora.dropout:
            raise ValueError(f"model.lora.dropout {self.model.lora.dropout} does nothing without cold_start: remove it")
        self._check_engine()
        self._check_reward_processes()
        self._check_chunks()
        if self.rollout.seed not in (0, self.seed):
            raise ValueError(f"rollout.seed {self.rollout.seed} differs from seed {self.seed}: set seed alone")
        return self

    def _check_temperatures(self) -> None:
        """The policy that is trained is the one that was sampled from."""
        sampled = self.env_manager.sampling.temperature
        for name, temperature in (
            ("actor", self.actor.temperature),
            ("reference", self.reference.temperature if self.reference is not None else 1.0),
        ):
            if temperature not in (1.0, sampled):
                raise ValueError(f"{name}.temperature {temperature} is not that of sampling, {sampled}: leave it out")
        for name, domain in self.env_manager.domains.items():
            if (own := domain.sampling.temperature) not in (None, sampled):
                raise ValueError(
                    f"domains.{name}.sampling.temperature {own} differs from sampling.temperature {sampled}, and the "
                    "actor is trained at one temperature: leave it out, or set validation.sampling"
                )

    def _check_limits(self) -> None:
        """The actor computes the whole distribution, so that tokens that are trained are drawn from all of it."""
        manager, prefix = self.env_manager, self.rollout_prefix
        sampled: dict[str, Sampling | SamplingChanges] = {f"{prefix}sampling": manager.sampling}
        sampled |= {f"{prefix}domains.{name}.sampling": domain.sampling for name, domain in manager.domains.items()}
        for place, sampling in sampled.items():
            for key, unlimited in (("top_p", 1.0), ("top_k", 0)):
                if (value := getattr(sampling, key)) not in (None, unlimited):
                    raise ValueError(
                        f"{place}.{key} {value}: tokens that are trained are drawn from the whole distribution, which "
                        f"is what the actor computes. Leave {key} out; validation.sampling.{key} limits what is "
                        "measured and played"
                    )

    def _check_group_settings(self) -> None:
        """What looks at the spread of a group needs a group: the scores of one member are all equal."""
        rollout = self.rollout
        if rollout.extra_after and not rollout.extra_members:
            raise ValueError(
                f"rollout.extra_after {rollout.extra_after:g} says when extra members begin, and "
                "rollout.extra_members is 0: set it, or remove extra_after"
            )
        if rollout.group_size > 1:
            return
        for name, domain in self.env_manager.domains.items():
            for key, value in (("rest", domain.rest), ("difficulty", domain.difficulty)):
                if value:
                    raise ValueError(
                        f"domains.{name}.{key} looks at the scores of a group, and rollout.group_size is 1: set it to "
                        f"2 or more, or remove {key}"
                    )

    def _check_engine(self) -> None:
        """An engine has the backend, the model and the devices that it can use."""
        kind, engine = self.engine.kind, find_engine(self.engine.kind)
        if engine.backend not in (None, self.backend):
            raise ValueError(f"engine.kind '{kind}' needs backend '{engine.backend}', got '{self.backend}'")
        if engine.needs_model_path and self.model.path is None:
            raise ValueError(f"engine.kind '{kind}' needs a model.path: a tiny policy is built for 'torch'")
        if self.model.lora is not None and not engine.takes_adapters:
            raise ValueError(f"model.lora does not go with engine.kind '{kind}': servers are sent whole models")
        if (devices := self.devices.get(INFERENCE)) is not None:
            with named_user_code("engine.kind", kind, passes=(ValueError,)):
                engine.check_devices(devices)

    def _check_reward_processes(self) -> None:
        """Processes of their own compute the rewards, if there are any."""
        if (workers := self.env_manager.reward_workers) and self.backend == "embedded":
            raise ValueError(
                f"{self.rollout_prefix}reward_workers {workers} are processes of their own, and backend 'embedded' "
                "has none: set backend=ray, or remove it"
            )
        if (config := self.devices.get(REWARD)) is None:
            return
        if config.devices == AUTO:
            raise ValueError("devices.reward: 'auto' is for actor and inference: name the devices, as in reward: 2-3")
        named, envs = f"devices.reward: {format_devices(config.device_numbers)}", self.env_manager
        if self.backend == "embedded":
            raise ValueError(
                f"{named} are processes of their own, and backend 'embedded' has none: set backend=ray, or remove it"
            )
        if config.devices_per_replica > 1:
            raise ValueError(
                f"{named}: a process that computes rewards has one device: leave out devices_per_worker and "
                "tensor_parallel"
            )
        if envs.reward_workers:
            raise ValueError(
                f"{named} and reward_workers {envs.reward_workers} both say where rewards are computed: remove one"
            )
        domains = [*envs.domains.values()]
        if self.validation is not None:
            domains += self.validation_tasks(self.validation).domains.values()
        if not any(domain.reward or domain.rewards for domain in domains):
            raise ValueError(
                f"{named} have nothing to compute: no domain has a reward, its score is what the env paid. Give one a "
                "reward, or remove devices.reward"
            )

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
    def teacher(self) -> str | None:
        """The path of the reference, where it is another model than the policy was at first."""
        return None if self.reference is None else self.reference.path

    @property
    def learners(self) -> Mapping[str, LearnerConfig | None]:
        return {ACTOR: self.actor, CRITIC: self.critic, REFERENCE: None}

    @property
    def role_names(self) -> tuple[str, ...]:
        """The roles that get devices. Under an adapter the actor is the reference too, unless that is a teacher.
        Rewards have devices where they are named."""
        found = {
            CRITIC: self.critic is not None,
            REFERENCE: self.needs_reference and (self.model.lora is None or self.teacher is not None),
        }
        rewards = (REWARD,) if REWARD in self.devices else ()
        return (ACTOR, *(role for role, is_there in found.items() if is_there), INFERENCE, *rewards)

    @property
    def shared_devices(self) -> tuple[int, ...]:
        """Which actor and replicas use alternately: the devices of both, if there are others that only generate."""
        named = [self.devices.get(role, RoleConfig(devices=(0,))) for role in (ACTOR, INFERENCE)]
        if any(config.devices == AUTO for config in named):
            return ()
        trains, generates = (set(config.device_numbers) for config in named)
        return tuple(sorted(trains & generates)) if generates - trains else ()

    @property
    def is_exact(self) -> bool:
        """On-policy: the same seed gives the same run, also when it is killed and resumed. With `batch_parts` the same
        rows, which are added up in the order in which they are there. Where results choose the tasks (`curriculum`,
        `rest`), the next ones depend on which group is whole first."""
        domains = self.env_manager.domains.values()
        chooses = any(domain.rest or (domain.data and domain.data.curriculum) for domain in domains)
        return self.rollout.alpha == 0 and not chooses


def held_out(rows: DataConfig) -> DataConfig:
    """The rows of a validation: all of them once, in their order. Raises if they are told something else."""
    once = rows.one_pass()
    for key in sorted({"epochs", "shuffle"} & rows.model_fields_set):
        given = getattr(rows, key)
        if given != getattr(once, key):
            raise ValueError(
                f"{key} is {given}, but a validation passes once over all rows, in their order: remove {key}"
            )
    if rows.is_endless:
        raise ValueError(f"{rows.path} never ends: give it a size")
    return once
