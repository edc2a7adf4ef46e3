"""What a config says about one reward: which, how it counts, how patient we are with it, and its own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from cadenza.config import Config
from cadenza.rewards.registry import RewardName, called, check_settings, find_reward, is_config

RowCheck: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""Says why a row cannot be scored; None where it can."""


class RewardConfig(Config):
    """One reward of a domain. A bare name or a function is short for `{name: ...}`; keys that are not listed here are
    settings of the reward itself (`{name: format, pattern: '...', weight: 0.1}`), which refuses those it does not have.
    """

    name: RewardName
    """A registered name, 'module:name', or the function, class or object itself."""
    weight: float = 1.0
    """The reward of the domain is the sum of weight times value. A penalty has a negative value or weight."""
    gate: bool = False
    """A gate is not added to the sum. Where it scores below `gate_at`, the sum is 0 and the other rewards are not
    asked."""
    gate_at: float = 1.0
    seconds: float | None = Field(default=None, gt=0)
    """How long one call may take, once it has begun; None waits. Being late is an infrastructure fault."""
    tries: int = Field(default=3, gt=0)
    """Calls before an infrastructure fault is passed on. What else a reward raises is never tried again."""
    retry_seconds: float = Field(default=0.5, ge=0)
    """The wait before the second try; it doubles with every further one."""
    cache: int = Field(default=0, ge=0)
    """Values kept for the same prompt, response, row and finish reason; 0 keeps none."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings of the reward. It is no key: it is made of the keys that are not common to all."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, str) or callable(values):
            return {"name": values}
        if not isinstance(values, Mapping):
            return values
        common = {key: value for key, value in values.items() if key in cls.model_fields and key != "settings"}
        own = {str(key): value for key, value in values.items() if key not in common}
        return common | {"settings": own}

    @field_validator("name")
    @classmethod
    def _known_name(cls, name: RewardName) -> RewardName:
        if not _is_elsewhere(name):
            find_reward(name)
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> RewardConfig:
        given = self.model_fields_set
        if self.gate and "weight" in given:
            raise ValueError("weight does nothing for a gate, which is not added: remove one of the two")
        if "gate_at" in given and not self.gate:
            raise ValueError("gate_at does nothing without 'gate: true': add it, or remove gate_at")
        if not _is_elsewhere(self.name):
            self.check()
        return self

    def check(self) -> None:
        """Load the reward and check its settings; raises ValueError. What 'module:name' means is not loaded before."""
        check_settings(self.name, self.settings, [key for key in type(self).model_fields if key != "settings"])

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As it is written in a config, so that it can be read again."""
        values: dict[str, Any] = handler(self)
        settings = values.pop("settings")
        given = {key: value for key, value in values.items() if key in self.model_fields_set}
        flat: dict[str, Any] = {"name": values["name"]} | given | settings
        return flat

    @property
    def asks_policy(self) -> bool:
        """Whether it asks the policy of the run. What 'module:name' means is loaded."""
        found = find_reward(self.name)
        reward = found.model_validate(self.settings) if is_config(found) else found
        return bool(getattr(reward, "asks_policy", False))

    @property
    def needs_answer(self) -> bool:
        """Whether each row must have an `answer` for it."""
        return bool(getattr(find_reward(self.name), "needs_answer", False))

    def row_check(self) -> RowCheck | None:
        """The function that says why this reward cannot score a row; None where it has none."""
        found = find_reward(self.name)
        if not is_config(found):
            return None
        check: RowCheck | None = getattr(found.model_validate(self.settings), "check_row", None)
        return check

    @property
    def short_name(self) -> str:
        """What metrics and messages call it where the config gives it no key."""
        return called(self.name)


def _is_elsewhere(name: RewardName) -> bool:
    """Whether it is named as 'module:name'."""
    return isinstance(name, str) and ":" in name
