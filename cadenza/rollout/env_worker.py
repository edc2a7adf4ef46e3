"""The slots: where attempts run.

Invariant: a slot is free, or runs one attempt whose task is in the task group. It is freed once, when the env of
its attempt is closed; the reward is computed after that. An attempt that has its fate (stopped, expired, lost a race)
does not speak any more: what its task still returns is dropped.

    fill() --issue()--> run(): env, rollout function | slot freed -> fill() | reward -> put()
    wakes fill: a freed slot, a handed-back or retried group, a published version, a taken batch
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from cadenza.datasets import RowError
from cadenza.envs.protocol import EnvType
from cadenza.errors import USER_CODE_ERRORS, DeadlinePassed, InfrastructureError, raise_if_cancelled
from cadenza.inference.replica import RequestRefused
from cadenza.off_loop import ignore_result, with_deadline
from cadenza.rewards import DomainReward, LateReward, RewardHost
from cadenza.rollout.config import EnvManagerConfig
from cadenza.rollout.domain_rollout import DomainRollout, add_score, reward_configs, reward_sample
from cadenza.rollout.env_handle import EnvHandle
from cadenza.rollout.failures import RolloutError, logger
from cadenza.rollout.leases import LeaseDeadlines
from cadenza.rollout.ledger import Attempt
from cadenza.rollout.model import GOLDEN, MASK64, ContextFull, Model, RolloutContext
from cadenza.rollout.policy_chat import PolicyChat
from cadenza.rollout.records import Task, Trajectory
from cadenza.rollout.reward_pool import NoRewardProcess, PooledReward, make_reward_pool
from cadenza.rollout.sampler import GrantSource
from cadenza.rollout.slot_pool import AttemptQueue, SlotSettings, StartTask


class EnvWorker:
    """Runs attempts in slots.

    With two slots and one group of three members:

        fill()      takes attempts 0 and 1 from the queue; each gets a task: make the env, play the rollout, close the
        env ...         attempt 0 is over: its slot is free, attempt 2 takes it, and the reward of attempt 0 is computed
                    without a slot; then `queue.put(attempt, trajectory)`
        stop(2)     the queue has given attempt 2 its fate, so its task is cancelled and its env closed; no result
                    of it is reported any more

    An env that raises costs its attempt (`queue.fail`), one that hangs loses its lease, and one that cannot even be
    cancelled is left behind while its slot goes on.
    """

    def __init__(
        self,
        config: EnvManagerConfig,
        settings: SlotSettings,
        queue: AttemptQueue,
        sampler: GrantSource,
        start_task: StartTask,
    ) -> None:
        self.config = config
        self.busy = 0
        self.leaked_envs = 0
        """Envs whose `close` failed or did not return in time."""
        self.expired_leases = 0
        """Leases that ran out."""
        self._queue = queue
        self._start_task = start_task
        self._seed = settings.seed
        self._warned: set[tuple[str, str]] = set()
        """Domains and causes of failures that the log has."""
        self._free = list(range(config.slots - 1, -1, -1))
        self._occupants: list[Attempt | None] = [None] * config.slots
        """The attempt in each slot, None for a free one: the only record of slot ownership."""
        self._closing: set[Attempt] = set()
        """Attempts that close their env."""
        self._leases = LeaseDeadlines(config.lease_seconds, self._on_lease_expired, self._occupants)
        shared = RolloutContext(
            sampler=sampler,
            codec=settings.codec,
            sampling=config.sampling,
            max_context=config.max_context,
            max_turns=config.max_turns,
            leases=self._leases,
            token_counter=queue.token_counter,
            namespace=sampler.allocate_ids(),
            is_training=settings.is_training,
            slice_tokens=settings.slice_tokens if settings.slice_tokens < config.longest_answer else 0,
        )
        self._codec = settings.codec
        chat = self._policy_chat = PolicyChat(shared)
        configs = reward_configs(config, settings.max_reward_tries)
        pool = self._reward_pool = make_reward_pool(configs, config, settings, chat)
        rewards: dict[str, DomainReward | PooledReward] = {
            name: DomainReward(own, name, RewardHost(policy=chat)) if pool is None else pool.reward(name)
            for name, own in configs.items()
        }
        self._domains = {
            name: DomainRollout.of(name, domain, config, shared, rewards.get(name))
            for name, domain in config.domains.items()
        }
        queue.on_stop = self.stop
        queue.on_work = self.fill

    async def open(self) -> None:
        """Open the rewards, or raise what prevents it; then those that are open are closed."""
        try:
            for domain in self._domains.values():
                if domain.reward is not None:
                    await domain.reward.open()
        except BaseException:
            await self.drain()
            raise

    async def drain(self) -> None:
        """Close the rewards; the scheduler waits for its own tasks. A reward that cannot close holds up no other."""
        rewards = {name: domain.reward for name, domain in self._domains.items() if domain.reward is not None}
        await asyncio.gather(*[self._close_reward(name, reward) for name, reward in rewards.items()])
        if self._reward_pool is not None:
            await self._reward_pool.close()

    async def _close_reward(self, domain: str, reward: DomainReward | PooledReward) -> None:
        try:
            await with_deadline(self.config.close_seconds, reward.close(), "close_seconds")
        except DeadlinePassed:
            logger.warning("close of a reward of domain '%s' did not return in time; it is left behind", domain)
        except USER_CODE_ERRORS as error:  # counted and shown once
            raise_if_cancelled(error)
            self._queue.errors.add(f"close of a reward of domain '{domain}'", error)

    def fill(self) -> None:
        """Give every free slot work, as long as there is any."""
        while self._free and (attempt := self._queue.issue(self._free[-1])) is not None:
            self._occupants[self._free.pop()] = attempt
            self.busy += 1
            attempt.runner = self._start_task(self._run(attempt), attempt.key)

    def stop(self, attempt: Attempt) -> None:
        """The attempt has its fate: end its task."""
        self._leases.end(attempt)
        if not isinstance(attempt.runner, asyncio.Task):
            return
        coroutine = attempt.runner.get_coro()
        if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
            self._free_slot(attempt)  # its coroutine will never run, so nothing else frees the slot
        elif attempt not in self._closing:
            asyncio.get_running_loop().call_later(self.max_stop_seconds, self._abandon, attempt)
        if attempt not in self._closing:
            attempt.runner.cancel()

    @property
    def judge_calls(self) -> int:
        """Questions of rewards to the policy."""
        return self._policy_chat.calls

    @property
    def judge_tokens(self) -> int:
        """Tokens that the policy wrote to answer them; no attempt has them on its account."""
        return self._policy_chat.tokens

    @property
    def max_stop_seconds(self) -> float:
        """How long attempts that are stopped may take to end."""
        return 2 * self.config.close_seconds

    def close(self) -> None:
        self._leases.close()

    async def _run(self, attempt: Attempt) -> None:
        """The life of an attempt: the rollout in its slot, then the reward without one."""
        # As many of these as there are slots wait at once: every local of it is kept so often.
        domain = self._domains[attempt.group.task.domain]
        trajectory = Trajectory(
            id=attempt.id,
            task=attempt.group.task,
            group=attempt.group.id,
            member=attempt.member,
            attempt=attempt.number,
            slot=attempt.slot,
            seed=sampling_key(self._seed, attempt),
            started=attempt.started,
        )
        attempt.stage = "init"
        self._leases.renew(attempt)
        env: Any = None
        handle: EnvHandle | None = None
        model = Model(attempt, trajectory, domain.shared)
        try:
            try:
                if isinstance(trajectory.task.data, RowError):
                    raise trajectory.task.data
                if domain.env_type is not None:
                    env = await domain.env_type.make()
                    domain.env_type.check(env)
                    handle = EnvHandle(env, domain.env_type, attempt, trajectory, domain.shared)
                attempt.stage = "rollout"
                try:
                    await domain.rollout_function(trajectory.task, handle, model)
                except ContextFull:  # truncates the episode, if it had a turn
                    if not trajectory.turns and not model.is_busy:
                        raise
                    trajectory.truncated = True
                if model.is_busy:
                    await model.end_calls()
                if not trajectory.turns:
                    raise ValueError("the rollout returned without one turn of the model")
            except USER_CODE_ERRORS as error:  # counted, shown once, bounded by a budget
                raise_if_cancelled(error)
                # Raised while another call waits for the model: by the rollout.
                self._fail(attempt, "rollout" if attempt.stage == "model" else attempt.stage, error)
            finally:
                trajectory.ended = asyncio.get_running_loop().time()
                model.end_session()
                await self._close_and_free_slot(attempt, domain.env_type, env, handle)
            if attempt.fate is None:
                await self._score(attempt, trajectory)
        finally:
            attempt.runner = None

    async def _close_and_free_slot(
        self, attempt: Attempt, type: EnvType | None, env: Any, handle: EnvHandle | None
    ) -> None:
        """Close the env and free the slot. A cancellation waits until this is done; it has deadlines of its own."""
        self._leases.end(attempt)
        self._closing.add(attempt)
        if handle is not None and (call := handle.call) is not None:  # it may raise when the attempt is over
            if call.done():
                ignore_result(call)
            else:
                call.add_done_callback(ignore_result)
        try:
            if type is not None and env is not None and hasattr(env, "close"):
                attempt.stage = "close"
                closing = asyncio.ensure_future(self._close_env(type, env, handle))
                closing.set_name(attempt.key)
                await _run_to_completion(closing)
        finally:
            self._closing.discard(attempt)
            self._free_slot(attempt)

    async def _score(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """Compute the reward, and hand the episode over."""
        self._queue.mark_scoring(attempt)
        attempt.stage = "reward"
        domain = self._domains[attempt.group.task.domain]
        if (reward := domain.reward) is None:
            trajectory.score = trajectory.episode_score
            self._queue.put(attempt, trajectory)
            return
        self._leases.begin_scoring(attempt)
        try:
            with self._policy_chat.scoring(trajectory):
                scored = await reward(reward_sample(trajectory, self._codec))
        except USER_CODE_ERRORS as error:  # counted, shown once, bounded by a budget
            raise_if_cancelled(error)
            self._fail(attempt, "reward", error)
            return
        finally:
            self._leases.scored(attempt)
        add_score(trajectory, scored, several=domain.several_rewards)
        if attempt.fate is None:
            self._queue.put(attempt, trajectory)

    def _fail(self, attempt: Attempt, stage: str, error: BaseException) -> None:
        """Decide what kind of failure it was, and book it."""
        if attempt.fate is not None:
            return
        tries_used = 1.0
        is_full_in_rollout = isinstance(error, ContextFull) and stage != "reward"
        if is_full_in_rollout or isinstance(error, RowError):  # data, and the next try would meet it again
            tries_used = float("inf")
            if isinstance(error, RowError):
                logger.warning("a row is left out: %s", error)
        elif isinstance(error, (ContextFull, RequestRefused, DeadlinePassed)):
            # data, a task that always hangs, or an answer that is too long for a question about it
            tries_used = 1.0
        elif isinstance(error, InfrastructureError):  # not the task's fault, but it cannot go on for ever
            tries_used = 0.25
        else:
            self._queue.errors.add(f"{stage} of domain '{attempt.group.task.domain}'", error)
        outage = stage == "reward" and isinstance(error, InfrastructureError)
        if isinstance(error, LateReward):
            logger.warning("%s failed: %s", attempt.key, error)
            self._queue.fail(attempt, str(error), tries_used=tries_used, outage=outage)
            return
        cause = f"{stage}: {type(error).__name__}"
        if isinstance(error, (ContextFull, InfrastructureError, RequestRefused)):
            self._warn_once(attempt.group.task, cause, error)
        self._queue.fail(attempt, cause, str(error)[:200], tries_used=tries_used, outage=outage)
        if isinstance(error, NoRewardProcess):  # every other task would fail in the same way
            self._queue.end_run(RolloutError(str(error)))

    def _warn_once(self, task: Task, cause: str, error: BaseException) -> None:
        if (task.domain, cause) not in self._warned:
            self._warned.add((task.domain, cause))
            where = f", row {task.row} of its data, counted from 0" if task.row >= 0 else ""
            logger.warning(
                "an attempt of domain '%s' (task %s%s) failed, %s: %s; further ones are only counted",
                task.domain, task.id, where, cause, error,
            )  # fmt: skip

    def _on_lease_expired(self, attempt: Attempt) -> None:
        """A lease ran out: the attempt fails, and its task ends. It counts against the task, for a task whose env
        always hangs must be retired."""
        self.expired_leases += 1
        detail = f"no progress within lease_seconds {self._leases.lease_seconds}"
        logger.warning(
            "%s of domain '%s' failed in %s: %s", attempt.key, attempt.group.task.domain, attempt.stage, detail
        )
        self._queue.fail(attempt, f"{attempt.stage}: lease expired", detail)
        self.stop(attempt)

    def _abandon(self, attempt: Attempt) -> None:
        """Its env does not even let itself be cancelled: the slot goes on without it."""
        if self._occupants[attempt.slot] is attempt:
            self.leaked_envs += 1
            logger.warning("%s does not end; its env is left behind, its slot is not", attempt.key)
            self._free_slot(attempt)

    async def _close_env(self, type: EnvType, env: Any, handle: EnvHandle | None) -> None:
        """Close the env, after a call that still runs in a thread, if that one ends in time."""
        seconds = self.config.close_seconds
        try:
            call = handle.call if handle is not None else None
            if call is not None and not call.done():
                await asyncio.wait([call], timeout=seconds)
            await with_deadline(seconds, type.call("close", env.close)(), "close_seconds")
        except DeadlinePassed:
            self.leaked_envs += 1
            logger.warning("close of an env of domain '%s' did not return in time; it is left behind", type.name)
        except USER_CODE_ERRORS as error:  # counted and shown once
            raise_if_cancelled(error)
            self.leaked_envs += 1
            self._queue.errors.add(f"close of domain '{type.name}'", error)

    def _free_slot(self, attempt: Attempt) -> None:
        """Free the slot, once."""
        if self._occupants[attempt.slot] is not attempt:
            return
        self._occupants[attempt.slot] = None
        self._queue.release_slot(attempt)
        self._free.append(attempt.slot)
        self.busy -= 1
        self.fill()


def sampling_key(seed: int, attempt: Attempt) -> int:
    """Key of the sampling randomness of an attempt: (seed, task, member, attempt)."""
    key = seed
    for word in (attempt.group.key64, attempt.member, attempt.number):
        key = ((key ^ word) + GOLDEN) & MASK64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        key ^= key >> 31
    return key


async def _run_to_completion(task: asyncio.Task[None]) -> None:
    """Await a task as a whole: a cancellation that comes meanwhile, or came just before, takes effect afterwards."""
    interruption: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        raise interruption
    task.result()
