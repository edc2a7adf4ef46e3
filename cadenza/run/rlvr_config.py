"""What a run on datasets with verifiable rewards is told besides what every run with rollouts is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from cadenza.datasets import DataConfig
from cadenza.inference.replica import Sampling
from cadenza.rollout.config import DomainConfig, EnvManagerConfig
from cadenza.run.agentic_config import check_domain_names
from cadenza.run.config_tree import value_at
from cadenza.run.rollout_config import RolloutRunConfig, ValidationConfig, held_out

MAX_SLOTS = 4096
"""Answers that are under way at once, unless `slots` says more."""


class RlvrDomainConfig(DomainConfig):
    """One dataset, its reward, and the rows that measure it."""

    data: DataConfig
    validation: DataConfig | None = None
    """Rows that are not trained: a path, or the keys of `DataConfig`. Each is tried `validation.samples` times."""

    @model_validator(mode="after")
    def _has_a_reward(self) -> Self:
        if self.env is not None:
            raise ValueError("a domain of 'rlvr' has no env: remove it, or take 'pipeline: agentic'")
        if self.reward is None and not self.rewards:
            raise ValueError("the answers need a reward: name one, as in 'reward: exact' (docs/rewards.md lists them)")
        return self

    @field_validator("validation")
    @classmethod
    def _validation_is_one_pass(cls, rows: DataConfig | None) -> DataConfig | None:
        return rows and held_out(rows)


class RlvrConfig(RolloutRunConfig):
    """A run on datasets with verifiable rewards."""

    domains: dict[str, RlvrDomainConfig] = Field(min_length=1)
    sampling: Sampling = Sampling()
    """How answers are sampled; a domain may have its own."""
    slots: int | None = Field(default=None, gt=0)
    """Answers under way at once; None is what the asynchronous ratio can use, at most MAX_SLOTS."""
    workers: int = Field(default=0, ge=0)
    """Processes that share the slots, on Ray; 0 runs them in the controller's own."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that compute the rewards, on Ray; 0 computes them where the slots are. It counts for each of `workers`:
    `workers` 4 and `reward_workers` 2 are 8 processes."""
    max_context: int = Field(default=1 << 20, gt=0)
    """Tokens of prompt and answer together."""
    lease_seconds: float = Field(default=600.0, gt=0)
    """How long a rollout may go without progress outside the model."""
    reward_seconds: float = Field(default=120.0, gt=0)
    """How long one call of a reward or a filter may take."""
    validation: ValidationConfig | None = ValidationConfig()

    @property
    def env_manager(self) -> EnvManagerConfig:
        rollout = self.rollout
        groups = math.ceil(rollout.groups_per_batch * (1 + rollout.alpha)) + rollout.extra_groups
        return self._env_manager(dict(self.domains), groups * (rollout.group_size + rollout.extra_members))

    def validation_tasks(self, settings: ValidationConfig) -> EnvManagerConfig:
        domains = {
            name: domain.model_copy(update={"data": domain.validation, "validation": None}).for_validation()
            for name, domain in self.domains.items()
            if domain.validation is not None
        }
        return self._env_manager(domains, MAX_SLOTS)

    def _env_manager(self, domains: Mapping[str, DomainConfig], wanted: int) -> EnvManagerConfig:
        return EnvManagerConfig(
            domains=dict(domains),
            slots=self.slots or max(min(wanted, MAX_SLOTS), self.workers),
            workers=self.workers,
            reward_workers=self.reward_workers,
            rollout="single_turn",
            sampling=self.sampling,
            max_context=self.max_context,
            lease_seconds=self.lease_seconds,
            reward_seconds=self.reward_seconds,
        )

    def with_episodes(self, episodes: int) -> Self:
        settings = self.validation or ValidationConfig()
        measured = {name: domain.validation for name, domain in self.domains.items() if domain.validation is not None}
        rows = measured or {name: domain.data for name, domain in self.domains.items()}
        share, rest = divmod(episodes, len(rows))
        first = {name: own.first_rows(max(1, share + (n < rest))) for n, (name, own) in enumerate(rows.items())}
        domains = {
            name: domain.model_copy(update={"validation": first.get(name)}) for name, domain in self.domains.items()
        }
        return self.model_copy(update={"domains": domains, "validation": settings})

    @classmethod
    def max_answer_tokens(cls, values: Mapping[str, Any]) -> int | None:
        """Known where every rollout is one answer."""
        most = value_at(values, "sampling.max_tokens") or Sampling().max_tokens
        domains = values.get("domains")
        for domain in domains.values() if isinstance(domains, dict) else ():
            if not isinstance(domain, dict):
                continue
            if domain.get("rollout") not in (None, "single_turn"):
                return None
            own = value_at(domain, "sampling.max_tokens")
            most = max(most, own) if isinstance(own, int) and isinstance(most, int) else most
        return most if isinstance(most, int) else 1  # a value that is refused for its type

    def check_names(self) -> None:
        super().check_names()
        for name, domain in self.domains.items():
            check_domain_names(f"domains.{name}", domain)

    @model_validator(mode="after")
    def _cold_start_has_rows(self) -> Self:
        if self.cold_start is not None and self.cold_start.data is None:
            raise ValueError("cold_start plays envs, and there are none here: give it rows with cold_start.data")
        return self

    @model_validator(mode="after")
    def _validation_has_rows(self) -> Self:
        has_rows = [domain.validation is not None for domain in self.domains.values()]
        if self.validation is not None and not any(has_rows):
            raise ValueError(
                "no domain has rows to validate with: set domains.NAME.validation to a file of them, or 'validation: "
                "null' to train without"
            )
        if self.validation is None and any(has_rows):
            raise ValueError("validation is null, so domains.NAME.validation does nothing: remove one of the two")
        return self
