"""What an env worker runs for one domain: its env, its rollout function, its sampling, its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cadenza import envs
from cadenza.envs.protocol import EnvType
from cadenza.rewards import DomainReward, RewardConfig, Sample, Scored
from cadenza.rollout import rollout_functions
from cadenza.rollout.config import DomainConfig, EnvManagerConfig
from cadenza.rollout.conversation import last_conversation
from cadenza.rollout.model import Codec, RolloutContext
from cadenza.rollout.records import Trajectory
from cadenza.rollout.reward_pool import PooledReward
from cadenza.rollout.rollout_functions import RolloutFunction


@dataclass(frozen=True, slots=True)
class DomainRollout:
    """How the attempts of one domain run."""

    env_type: EnvType | None
    """None where the rollout asks the model and nothing else."""
    rollout_function: RolloutFunction
    shared: RolloutContext
    """What its attempts share, with the sampling of this domain."""
    reward: DomainReward | PooledReward | None
    """None where the score is the sum of what the env paid."""
    several_rewards: bool
    """Whether the domain has more than one."""

    @classmethod
    def of(
        cls,
        name: str,
        domain: DomainConfig,
        config: EnvManagerConfig,
        shared: RolloutContext,
        reward: DomainReward | PooledReward | None,
    ) -> DomainRollout:
        type = None
        if domain.env is not None:
            type = EnvType(name, envs.find_factory(domain.env), dict(domain.env_args))
        function = domain.rollout or (config.rollout if type is not None else "single_turn")
        shared = replace(shared, sampling=config.sampling_of(name))
        return cls(type, rollout_functions.make(function), shared, reward, len(domain.rewards) > 1)


def reward_configs(config: EnvManagerConfig, tries: int) -> dict[str, dict[str, RewardConfig]]:
    """The rewards of each domain that has any, by name. Where a reward does not say it itself, one call may take
    `reward_seconds`, and one that is late is asked again up to so many `tries`. One that asks the policy may wait while
    the gate is closed: the sampler keeps its deadlines."""
    found: dict[str, dict[str, RewardConfig]] = {}
    for domain, settings in config.domains.items():
        rewards = settings.rewards or ({settings.reward.short_name: settings.reward} if settings.reward else {})
        if rewards:
            found[domain] = {name: _patient(reward, config.reward_seconds, tries) for name, reward in rewards.items()}
    return found


def _patient(reward: RewardConfig, seconds: float, tries: int) -> RewardConfig:
    defaults = {"tries": tries} if reward.asks_policy else {"seconds": seconds, "tries": tries}
    return reward.model_copy(update={k: v for k, v in defaults.items() if k not in reward.model_fields_set})


def reward_sample(trajectory: Trajectory, codec: Codec) -> Sample:
    """What a reward sees of a finished episode: its last answer, in the conversation of the last branch."""
    row: Mapping[str, Any] = trajectory.task.data if isinstance(trajectory.task.data, Mapping) else {}
    last = trajectory.turns[-1]
    messages = last_conversation(trajectory.turns, row.get("messages"), codec)
    prompts = [message["content"] for message in messages[:-1] if message.get("role") != "assistant"]
    return Sample(
        response=codec.decode(last.response),
        prompt=str(prompts[-1]) if prompts else "",
        row=row,
        messages=tuple(messages),
        domain=trajectory.task.domain,
        finish=last.finish.value,
        prompt_tokens=last.prompt,
        response_tokens=last.response,
        trajectory=trajectory,
    )


def add_score(trajectory: Trajectory, scored: Scored, *, several: bool) -> None:
    """Book what the reward said of an episode. `several`: the domain has more than one reward, each of which is a
    metric, also where a closed gate is the only one that was asked."""
    trajectory.score = scored.value
    said: dict[str, object] = {}
    if scored.success is not None:
        said["success"] = scored.success
    if several or len(scored.parts) > 1:  # one alone is the score
        said["rewards"] = dict(scored.parts)
    if said:
        trajectory.info = {**(trajectory.info or {}), **said}
