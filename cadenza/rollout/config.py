"""What a user sets of the rollout."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from cadenza.config import Config, Seed
from cadenza.datasets import DataConfig
from cadenza.envs.registry import BUILT_IN, find_factory, registered
from cadenza.inference.replica import PauseMode, Sampling, SamplingChanges
from cadenza.rewards import RewardConfig
from cadenza.rewards.config import RowCheck

SLICE_TOKENS = 10_000
"""To prefill an answer anew costs as much as some 400 decode steps with it (router.py), which is little of a slice."""


class RolloutConfig(Config):
    """How groups become batches."""

    batch_size: int = Field(gt=0)
    """Trajectories in a train batch; a multiple of group_size."""
    group_size: int = Field(default=1, gt=0)
    """Trajectories of one task in a batch."""
    alpha: float = Field(default=0.0, ge=0.0)
    """Asynchronous ratio: how many batches generation may run ahead of training. The staleness bound is its ceiling."""
    slice_tokens: int | None = Field(default=None, ge=0)
    """An answer that has written so many tokens gives way to those that wait for KV-cache capacity, and goes on
    when the wait queue calls it again, so that no long answer begins last. 0: every answer is written to its end. None:
    SLICE_TOKENS at alpha 0, where a batch is over when its last answer is. At other alphas None is 0: younger groups
    fill the gaps, and long answers that give way to them come late, or are dropped."""
    staleness: Literal["wait", "drop"] = "wait"
    """At the bound: wait for the old groups (nothing is thrown away), or drop them (counted, with the bias)."""
    extra_members: int = Field(default=0, ge=0)
    """Trajectories started beyond group_size; the first group_size to finish win."""
    extra_after: float = Field(default=0.0, ge=0.0)
    """When extra members begin. 0: with the group. Else only where the last `extra_members` of a group still lack when
    this share of the time that the others took has passed again: stragglers are replaced, and little is wasted."""
    extra_groups: int = Field(default=0, ge=0)
    """Groups started beyond what a batch needs; those that would hold a batch up become surplus."""
    group_filter: str | Callable[..., bool | Awaitable[bool]] | None = None
    """Whether to keep a whole group, given its trajectories. An async function runs on the loop, a plain one off it."""
    max_filtered: int = Field(default=1000, gt=0)
    """Groups that may be filtered in a row before the run ends with an error."""
    max_attempts: int = Field(default=3, gt=0)
    """Tries at a trajectory before its task is retired. A failure of the infrastructure counts as a quarter of one, a
    prompt beyond `max_context` as all of them."""
    error_budget: int = Field(default=100, ge=0)
    """Exceptions of user code that are tolerated between two batches."""
    suspend_mode: PauseMode = PauseMode.ABORT
    """What `suspend` does with turns in flight."""
    stall_seconds: float = Field(default=3600.0, gt=0)
    """`get_batch` fails when the gate is open and no attempt ended for this long."""
    seed: int = 0
    """Key of all sampling randomness of the run."""
    history: int = Field(default=100_000, ge=0)
    """Ended attempts that `why` still knows."""

    @model_validator(mode="after")
    def _whole_groups(self) -> RolloutConfig:
        if self.batch_size % self.group_size:
            raise ValueError(not_whole_groups("batch_size", self.batch_size, self.group_size))
        return self

    @property
    def tokens_per_slice(self) -> int:
        """`slice_tokens` as a number."""
        if self.slice_tokens is not None:
            return self.slice_tokens
        return 0 if self.alpha else SLICE_TOKENS

    @property
    def groups_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def max_staleness(self) -> int:
        """No trajectory is trained that is older than this many versions."""
        return math.ceil(self.alpha)


class DomainConfig(Config):
    """One kind of task."""

    env: str | Callable[..., Any] | None = None
    """A registered name, 'module:name', or the class itself; None where the rollout asks the model and nothing else."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    tasks: int | list[Any] | tuple[Any, ...] | None = None
    """How many seeds, or rows, which pass once; None is an endless stream of seeds. A file of rows is `data`."""
    data: DataConfig | None = None
    """The dataset whose rows are the tasks: a path, or the keys of `DataConfig`."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the groups, relative to the other domains."""
    max_envs: int | None = Field(default=None, gt=0)
    """Envs of this domain that may exist at once."""
    reward: RewardConfig | None = None
    """A reward that ships by its name, 'module:name', a function of a `Sample`, or `{name: ..., settings}`. It is
    computed after the slot is freed; None takes the sum of the step rewards."""
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """Several rewards by the names of their metrics, combined by `weight` and `gate` of each."""
    rollout: str | Callable[..., Awaitable[None]] | None = None
    """As `rollout` of all domains, for this one; None is that one, or 'single_turn' where there is no env."""
    sampling: SamplingChanges = SamplingChanges()
    """What differs from `sampling` of all domains: `{max_tokens: 6}` changes the length alone."""
    group_filter: str | Callable[..., bool | Awaitable[bool]] | None = None
    """As `rollout.group_filter`, for this domain and before that one."""
    difficulty: tuple[float, float] | None = None
    """Groups whose mean score is outside this range, or whose scores are all equal, are filtered and refilled."""
    rest: int = Field(default=0, ge=0)
    """Epochs for which a row rests after a group whose scores were all equal: solved always, or never."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _tasks_are_no_file(cls, tasks: Any) -> Any:
        if isinstance(tasks, str):
            raise ValueError(f"tasks is a number of seeds or a list of rows; a file of rows is `data: {tasks}`")
        return tasks

    @model_validator(mode="after")
    def _one_of_each(self) -> DomainConfig:
        if self.data is not None and self.tasks is not None:
            raise ValueError("data and tasks both say where the tasks come from: remove one")
        if self.reward is not None and self.rewards:
            raise ValueError("reward and rewards both say what the score is: put the one into rewards, or remove it")
        if self.env is None and self.env_args:
            raise ValueError("env_args does nothing without env: name the env, or remove it")
        if self.env is None and not self.has_rows and self.rollout is None:
            raise ValueError("a domain needs an env, or rows (data or tasks), or a rollout of its own")
        if self.difficulty is not None and not self.difficulty[0] <= self.difficulty[1]:
            raise ValueError(f"difficulty must be (lowest, highest) mean score, got {self.difficulty}")
        if self.rest and (self.data is None or self.data.epochs == 1):
            raise ValueError("rest counts epochs: give the domain data with more than one epoch, or remove rest")
        if self.rest and self.data is not None and self.data.is_endless:
            raise ValueError("rest is for rows that come again, and here none does: set data.size, or remove rest")
        return self

    @property
    def has_rows(self) -> bool:
        """Whether the tasks are rows, and not seeds."""
        return self.data is not None or isinstance(self.tasks, (list, tuple))

    @property
    def needs_answers(self) -> bool:
        """Whether a reward compares with the field `answer` of each row."""
        return any(reward.needs_answer for reward in (self.reward, *self.rewards.values()) if reward is not None)

    def row_check(self) -> RowCheck:
        """The function that says why a reward of this domain cannot score a row; None where all can."""
        rewards = self.rewards or ({} if self.reward is None else {self.reward.short_name: self.reward})
        checks = {name: check for name, reward in rewards.items() if (check := reward.row_check()) is not None}

        def check_row(row: Mapping[str, Any]) -> str | None:
            for name, check in checks.items():
                if (problem := check(row)) is not None:
                    return f"reward '{name}' cannot score it: {problem}"
            return None

        return check_row

    def with_tasks_up_to(self, count: int) -> DomainConfig:
        """The domain with its first rows only; seeds are left to the caller."""
        if self.data is not None:
            return self.model_copy(update={"data": self.data.first_rows(count)})
        return self.model_copy(update={"tasks": self.tasks[:count] if isinstance(self.tasks, (list, tuple)) else None})

    def for_validation(self) -> DomainConfig:
        """The domain as it is measured: every task once and in order, none filtered and none at rest."""
        changes = {"data": self.data and self.data.one_pass(), "difficulty": None, "rest": 0, "group_filter": None}
        return self.model_copy(update=changes)

    def __getstate__(self) -> dict[Any, Any]:
        """A name that was registered here means nothing in another process: the class goes with it."""
        state = super().__getstate__()
        if isinstance(self.env, str) and self.env in registered() and self.env not in BUILT_IN:
            state["__dict__"] = state["__dict__"] | {"env": find_factory(self.env)}
        return state


class EnvManagerConfig(Config):
    """What runs in the slots."""

    domains: dict[str, DomainConfig] = Field(min_length=1)
    slots: int = Field(gt=0)
    """Attempts that run at once. Any free slot serves any group."""
    workers: int = Field(default=0, ge=0)
    """Processes that share the slots: Ray actors where the devices are Ray's. 0 runs the slots in the scheduler's own
    process. Elsewhere than on Ray the workers are in that process too, and only rehearse."""
    reward_workers: int = Field(default=0, ge=0)
    """Processes that compute the rewards, for each process that has slots: `workers` 4 and `reward_workers` 2 are 8 of
    them. 0 computes rewards in the process of the slots. Elsewhere than on Ray no process is started: it rehearses."""
    rollout: str | Callable[..., Awaitable[None]] = "trajectory"
    """'trajectory' (one growing context), 'step' (a fresh context every turn), 'single_turn' (the row's messages, one
    answer), 'module:name', or a function `async (task, env, model)`."""
    sampling: Sampling = Sampling()
    max_context: int = Field(default=1 << 20, gt=0)
    """Tokens of one context, prompt and response together."""
    max_turns: int = Field(default=1000, gt=0)
    """Turns after which an episode is truncated."""
    lease_seconds: float = Field(default=600.0, gt=0)
    """How long an attempt may go without progress outside the model."""
    reward_seconds: float = Field(default=120.0, gt=0)
    """How long one call of a reward or a filter may take."""
    close_seconds: float = Field(default=30.0, gt=0)
    """How long the `close` of an env may take."""
    first_seed: Seed = 0
    """First seed of a domain whose tasks are seeds. Validation begins elsewhere than training."""

    def sampling_of(self, domain: str) -> Sampling:
        """How the answers of a domain are sampled."""
        return self.domains[domain].sampling.applied_to(self.sampling)

    @property
    def longest_answer(self) -> int:
        """The most tokens of one turn, of all domains."""
        return max(self.sampling_of(name).max_tokens for name in self.domains)

    @model_validator(mode="after")
    def _work_for_all(self) -> EnvManagerConfig:
        if self.workers > self.slots:
            raise ValueError(f"workers {self.workers} share {self.slots} slots: give each at least one slot")
        return self


def not_whole_groups(name: str, size: int, group_size: int) -> str:
    below = size // group_size * group_size
    choice = f"{below} or {below + group_size}" if below else f"{group_size}"
    return f"{name} must be a multiple of group_size {group_size}, got {size}; take {choice}"
