"""What a run in environments is told besides what every run with rollouts is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from cadenza import envs
from cadenza.config import Seed
from cadenza.inference.replica import Sampling
from cadenza.rewards import RewardConfig
from cadenza.rollout import rollout_functions
from cadenza.rollout.config import DomainConfig, EnvManagerConfig
from cadenza.run.config import check_name
from cadenza.run.config_tree import value_at
from cadenza.run.rollout_config import PRESETS, RolloutRunConfig, ValidationConfig, held_out


class AgenticValidationConfig(ValidationConfig):
    """What is measured during training, in episodes that are not trained."""

    episodes: int = Field(default=100, gt=0)
    """In all, shared among the domains; of a domain whose tasks are rows, all are played."""
    first_seed: Seed = 1_000_000_000
    """First task, where tasks are seeds."""
    domains: dict[str, DomainConfig] | None = None
    """Tasks of their own; None is those of `envs`, from `first_seed` on."""

    @field_validator("domains")
    @classmethod
    def _tasks_are_tried_once(cls, domains: dict[str, DomainConfig] | None) -> dict[str, DomainConfig] | None:
        for name, domain in (domains or {}).items():
            try:
                if domain.data is not None:
                    held_out(domain.data)
            except ValueError as error:
                raise ValueError(f"{name}.data: {error}") from error
            for key in ("difficulty", "rest", "group_filter"):
                if getattr(domain, key) != DomainConfig.model_fields[key].default:
                    raise ValueError(f"{name}.{key}: a validation tries every task and filters none: remove {key}")
        return domains and {name: domain.for_validation() for name, domain in domains.items()}


class AgenticConfig(RolloutRunConfig):
    """A run in environments."""

    presets: ClassVar = {
        **PRESETS,
        "gigpo": {"estimator": {"name": "gigpo"}, "envs": {"rollout": "step"}},
        "step": {"estimator": {"name": "step"}, "envs": {"rollout": "step"}},
    }
    rollout_prefix: ClassVar = "envs."
    bound_hint: ClassVar = ", or envs.max_turns (then it is max_turns * max_tokens)"

    envs: EnvManagerConfig
    validation: AgenticValidationConfig | None = AgenticValidationConfig()

    @property
    def env_manager(self) -> EnvManagerConfig:
        return self.envs

    def validation_tasks(self, settings: ValidationConfig) -> EnvManagerConfig:
        assert isinstance(settings, AgenticValidationConfig)
        domains = {name: own.for_validation() for name, own in (settings.domains or self.envs.domains).items()}
        share, rest = divmod(settings.episodes, len(domains))
        return self.envs.model_copy(
            update={
                "domains": {
                    name: domain
                    if domain.has_rows or (settings.domains and domain.tasks is not None)
                    else domain.model_copy(update={"tasks": max(1, share + (number < rest))})
                    for number, (name, domain) in enumerate(domains.items())
                },
                "first_seed": settings.first_seed,
            }
        )

    def with_episodes(self, episodes: int) -> Self:
        settings = self.validation or AgenticValidationConfig()
        domains = settings.domains or self.envs.domains
        share = -(-episodes // len(domains))
        first = {name: domain.with_tasks_up_to(share) for name, domain in domains.items()}
        changes = {"episodes": episodes, "domains": first}
        return self.model_copy(update={"validation": settings.model_copy(update=changes)})

    @classmethod
    def max_answer_tokens(cls, values: Mapping[str, Any]) -> int | None:
        is_one_turn = value_at(values, "envs.rollout") == "step" and value_at(values, "actor.sequence") != "trajectory"
        turns = 1 if is_one_turn else value_at(values, "envs.max_turns")
        tokens = value_at(values, "envs.sampling.max_tokens") or Sampling().max_tokens
        if turns is None:
            return None
        if not isinstance(turns, int) or not isinstance(tokens, int):
            return 1  # the values are refused for their type
        return turns * tokens

    def check_names(self) -> None:
        super().check_names()
        validation = (self.validation and self.validation.domains) or {}
        for where, domains in (("envs", self.envs.domains), ("validation", validation)):
            for name, domain in domains.items():
                check_domain_names(f"{where}.domains.{name}", domain)
        check_name("envs.rollout", rollout_functions.make, self.envs.rollout)

    @model_validator(mode="after")
    def _domains_have_tasks(self) -> Self:
        validation = (self.validation and self.validation.domains) or {}
        for where, domains in (("envs", self.envs.domains), ("validation", validation)):
            for name, domain in domains.items():
                tasks = domain.tasks
                if tasks is not None and (tasks if isinstance(tasks, int) else len(tasks)) < 1:
                    raise ValueError(
                        f"{where}.domains.{name}.tasks must be at least one, got {tasks}: leave it out for an "
                        "endless stream of seeds"
                    )
        return self

    @model_validator(mode="after")
    def _validation_has_its_own_rows(self) -> Self:
        rows = [name for name, domain in self.envs.domains.items() if domain.has_rows]
        if rows and self.validation is not None and self.validation.domains is None:
            raise ValueError(
                f"the tasks of {rows} are rows, and all of them are trained: give validation.domains rows of its own, "
                "or set 'validation: null'"
            )
        return self


def check_domain_names(key: str, domain: DomainConfig) -> None:
    """Load what a domain names, or raise an error that says the key."""
    if domain.env is not None:
        check_name(f"{key}.env", envs.find_factory, domain.env)
    if domain.rollout is not None:
        check_name(f"{key}.rollout", rollout_functions.make, domain.rollout)
    if domain.reward is not None:
        check_name(f"{key}.reward", RewardConfig.check, domain.reward)
    for name, reward in domain.rewards.items():
        check_name(f"{key}.rewards.{name}", RewardConfig.check, reward)
