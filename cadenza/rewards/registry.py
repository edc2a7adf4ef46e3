"""The rewards by name: one small file each. A new one is a file beside this and a line in `REWARDS`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from pydantic import ValidationError

from cadenza.config import Config, load_object, nearest_key

RewardName: TypeAlias = str | Callable[..., Any]
"""One of `REWARDS`, 'module:name', or the function, class or object itself."""

REWARDS: Mapping[str, str] = {
    "math": "cadenza.rewards.math:Math",
    "code": "cadenza.rewards.code:Code",
    "choice": "cadenza.rewards.choice:Choice",
    "exact": "cadenza.rewards.exact:Exact",
    "fuzzy": "cadenza.rewards.fuzzy:Fuzzy",
    "format": "cadenza.rewards.format:Format",
    "json_schema": "cadenza.rewards.json_schema:JsonSchema",
    "instructions": "cadenza.rewards.instructions:Instructions",
    "judge": "cadenza.rewards.judge:Judge",
    "reward_model": "cadenza.rewards.reward_model:RewardModel",
    "remote": "cadenza.rewards.remote:Remote",
    "overlong": "cadenza.rewards.overlong:Overlong",
}
"""Where each of them is."""


def find_reward(name: RewardName) -> Callable[..., Any]:
    """The function, class or object that a name means; raises ValueError if it means nothing."""
    if isinstance(name, str) and name not in REWARDS and ":" not in name:
        near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(
            f"reward '{name}' is not known{hint} (there are {', '.join(REWARDS)}; write your own as 'module:name')"
        )
    found: Any = load_object(REWARDS.get(name, name)) if isinstance(name, str) else name
    if not callable(found):
        raise ValueError(f"reward {name!r} is a {type(found).__name__}; a reward is a function, a class or an object")
    reward: Callable[..., Any] = found
    return reward


def called(name: RewardName) -> str:
    """A short name for metrics and messages."""
    if isinstance(name, str):
        return name.rpartition(":")[2]
    return str(getattr(name, "__name__", type(name).__name__))


def check_settings(name: RewardName, settings: Mapping[str, Any], common: Sequence[str] = ()) -> None:
    """Raise ValueError unless the reward can be made with these settings. Nothing is made but a `Config`.

    `common` are keys that are not its own, which may have been meant by one that it does not know.
    """
    found = find_reward(name)
    known = _settings_of(found)
    for key in settings:
        if known is not None and key not in known:
            near = nearest_key(key, [*known, *common])
            hint = f"did you mean '{near}'?" if near else f"its settings: {', '.join(known) or 'none'}"
            raise ValueError(f"reward '{called(name)}' has no setting '{key}'; {hint}")
    if is_config(found):
        try:
            found.model_validate(dict(settings))
        except ValidationError as error:
            raise ValueError(f"reward '{called(name)}': {_details(error)}") from error
        return
    try:
        inspect.signature(found).bind(*([] if isinstance(found, type) else [None]), **settings)
    except TypeError as error:
        raise ValueError(f"reward '{called(name)}': {error}; set it beside 'name'") from error


def _details(error: ValidationError) -> str:
    """What is wrong with which setting, in one line."""
    found = [(".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")) for item in error.errors()]
    return "; ".join(f"{place}: {message}" if place else message for place, message in found)


def _settings_of(found: Any) -> list[str] | None:
    """The names of its settings; None if every keyword goes."""
    if is_config(found):
        return list(found.model_fields)
    parameters = list(inspect.signature(found).parameters.values())
    own = parameters if isinstance(found, type) else parameters[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
        return None
    return [p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def build_reward(name: RewardName, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward, ready to be called with a sample. Its settings are the arguments of its class, or keyword arguments
    of its function; raises ValueError for one that it does not know."""
    check_settings(name, settings)
    found = find_reward(name)
    if not isinstance(found, type):
        return partial(found, **settings) if settings else found
    reward: Any = found.model_validate(dict(settings)) if is_config(found) else found(**settings)
    if not callable(reward):
        raise ValueError(f"reward '{called(name)}' is a class without __call__(self, sample)")
    return reward  # type: ignore[no-any-return]


def is_config(found: Any) -> TypeGuard[type[Config]]:
    """Whether it is a class whose fields are its settings."""
    return isinstance(found, type) and issubclass(found, Config)
