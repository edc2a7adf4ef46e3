"""A fuzzer that finds nothing proves nothing: the scheduler is broken on purpose, and each break is found."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from cadenza.inference.replica import Finish, Generation, PauseMode
from cadenza.rewards import DomainReward, Sample, Scored
from cadenza.rollout.env_worker import EnvWorker
from cadenza.rollout.group_queue import GroupQueue
from cadenza.rollout.leases import LeaseDeadlines
from cadenza.rollout.ledger import Attempt, AttemptState, Group, Ledger
from cadenza.rollout.local_sampler import LocalSampler
from cadenza.rollout.model import Model
from cadenza.rollout.records import Fate
from cadenza.rollout.replica_health import HealthCheck
from cadenza.rollout.staleness_bound import StalenessBound
from cadenza.simulation.fuzzing.fuzz import examine
from cadenza.simulation.fuzzing.scenario import Scenario

# A broken scheduler leaves coroutines and futures behind.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """They are collected before the test is over, while its filter holds."""
    yield
    gc.collect()


LIMIT = 300
Patch = pytest.MonkeyPatch


def hunt(invariant: int, *, twice: bool = False) -> str:
    """The first finding about this invariant."""
    for seed in range(LIMIT):
        for found in examine(Scenario.draw(seed), twice=twice).violations:
            if found.invariant == invariant:
                return found.message
    pytest.fail(f"{LIMIT} schedules did not show that invariant {invariant} is broken")


# -- 1: one fate -------------------------------------------------------------------------------------------------------


def test_a_surplus_loser_without_a_fate_is_found(monkeypatch: Patch) -> None:
    close = Ledger.close

    def forgetful(self: Ledger, attempt: Attempt, fate: Fate, cause: str, now: float) -> None:
        if fate is not Fate.SURPLUS or attempt.state is AttemptState.FINISHED:
            close(self, attempt, fate, cause, now)

    monkeypatch.setattr(Ledger, "close", forgetful)
    hunt(1)


def test_a_second_fate_is_found(monkeypatch: Patch) -> None:
    close = Ledger.close

    def generous(self: Ledger, attempt: Attempt, fate: Fate, cause: str, now: float) -> None:
        close(self, attempt, fate, cause, now)
        if fate is Fate.FILTERED:
            attempt.fate, attempt.state = None, AttemptState.FINISHED
            self.live += 1
            close(self, attempt, Fate.CANCELLED, cause, now)

    monkeypatch.setattr(Ledger, "close", generous)
    assert "became cancelled, but it is filtered" in hunt(1)


def test_tokens_that_are_not_booked_are_found(monkeypatch: Patch) -> None:
    close = Ledger.close

    def careless(self: Ledger, attempt: Attempt, fate: Fate, cause: str, now: float) -> None:
        attempt.tokens -= fate is Fate.SURPLUS and attempt.tokens > 0
        close(self, attempt, fate, cause, now)

    monkeypatch.setattr(Ledger, "close", careless)
    assert "tokens" in hunt(1)


# -- 2: whole groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("doubled", [False, True])
def test_a_group_with_a_member_missing_or_doubled_is_found(monkeypatch: Patch, doubled: bool) -> None:
    consume = GroupQueue._consume

    def sloppy(self: GroupQueue, group: Group, now: float) -> None:
        consume(self, group, now)
        if len(group.finished) > 1:
            group.finished.pop()
            group.finished += group.finished[:1] if doubled else []

    monkeypatch.setattr(GroupQueue, "_consume", sloppy)
    assert "different members of one task" in hunt(2)


# -- 3: staleness ------------------------------------------------------------------------------------------------------


def test_a_cut_without_its_rule_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StalenessBound, "may_cut", lambda self, groups, **options: True)
    hunt(3)


def test_admission_without_a_reservation_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StalenessBound, "max_started", lambda self: self.consumed + 40)
    hunt(3)


# -- 4: the oldest that is ready ---------------------------------------------------------------------------------------


def test_waiting_for_the_oldest_group_is_found(monkeypatch: Patch) -> None:
    cut = GroupQueue.cut

    def patient(self: GroupQueue) -> list[Group] | None:
        groups = self.bound.awaited_groups
        oldest = self.ledger.open_groups()[: None if groups is None or groups == math.inf else int(groups)]
        waits = self.fatal_error is None and any(group.state.value != "ready" for group in oldest)
        return None if waits else cut(self)

    monkeypatch.setattr(GroupQueue, "cut", patient)
    assert "was possible at" in hunt(4)


def test_the_youngest_first_is_found(monkeypatch: Patch) -> None:
    make_ready = GroupQueue.make_ready

    def upside_down(self: GroupQueue, group: Group) -> None:
        make_ready(self, group)
        self._ready[:] = sorted((-group.id, group) for _, group in self._ready)

    monkeypatch.setattr(GroupQueue, "make_ready", upside_down)
    assert "was left behind" in hunt(4)


# -- 5: deadlines ------------------------------------------------------------------------------------------------------


def test_leases_that_never_expire_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(LeaseDeadlines, "_expire_due", lambda self: None)
    hunt(5)


def test_a_sampler_without_a_health_check_is_found(monkeypatch: Patch) -> None:
    async def blind(self: HealthCheck) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(HealthCheck, "run", blind)
    hunt(5)


def test_a_slot_that_is_never_freed_is_found(monkeypatch: Patch) -> None:
    free_slot = EnvWorker._free_slot

    def forgetful(self: EnvWorker, attempt: Attempt) -> None:
        if attempt.fate is not Fate.FAILED:
            free_slot(self, attempt)

    monkeypatch.setattr(EnvWorker, "_free_slot", forgetful)
    hunt(5)


# -- 6: suspension -----------------------------------------------------------------------------------------------------


def test_a_suspension_that_does_not_wait_for_the_engines_is_found(monkeypatch: Patch) -> None:
    async def hasty(self: LocalSampler, mode: PauseMode) -> None:
        self._replicas_paused = True

    monkeypatch.setattr(LocalSampler, "_suspend", hasty)
    hunt(6)


def test_a_fence_that_is_not_raised_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(LocalSampler, "epoch", property(lambda self: 0, lambda self, value: None), raising=False)
    assert "accepted request" in hunt(6)


def test_partial_tokens_that_are_thrown_away_are_found(monkeypatch: Patch) -> None:
    async def wasteful(
        self: Model, chunks: Any, length: int, max_tokens: int, sampling: Any, generation: Generation
    ) -> Generation:
        while generation.finish is Finish.ABORT:
            generation = await self._generate_once(chunks, length, max_tokens, sampling, 0)
        return generation

    monkeypatch.setattr(Model, "_continue", wasteful)
    assert "continues from token 0" in hunt(6)


def test_a_move_that_drops_the_partial_tokens_is_found(monkeypatch: Patch) -> None:
    going_on = Model._continue

    def is_moved(model: Model) -> bool:
        balancer = getattr(model._shared.sampler, "balancer", None)  # none in an env worker's process
        return balancer is not None and model._interrupted in balancer._targets

    async def wasteful(
        self: Model, chunks: Any, length: int, max_tokens: int, sampling: Any, generation: Generation
    ) -> Generation:
        while generation.finish is Finish.ABORT and is_moved(self):
            generation = await self._generate_once(chunks, length, max_tokens, sampling, 0)
        return await going_on(self, chunks, length, max_tokens, sampling, generation)

    monkeypatch.setattr(Model, "_continue", wasteful)
    assert "continues from token 0" in hunt(6)


def test_a_shrink_that_touches_other_replicas_is_found(monkeypatch: Patch) -> None:
    shrink = LocalSampler._shrink

    async def clumsy(self: LocalSampler, devices: Sequence[int]) -> dict[str, Any]:
        report = await shrink(self, devices)
        for other in self._pool.active():
            await other.replica.pause(self.epoch, PauseMode.ABORT)
            if not self._replicas_paused:
                await other.replica.resume()
        return report

    monkeypatch.setattr(LocalSampler, "_shrink", clumsy)
    assert "unasked" in hunt(6)


# -- 7: a failure is no reward -----------------------------------------------------------------------------------------


def test_a_failed_reward_that_counts_as_zero_is_found(monkeypatch: Patch) -> None:
    score = DomainReward.__call__

    async def lenient(self: DomainReward, sample: Sample) -> Scored:
        try:
            return await score(self, sample)
        except Exception:  # noqa: BLE001 - this is what must not be done
            return Scored(0.0)

    monkeypatch.setattr(DomainReward, "__call__", lenient)
    hunt(7)


def test_a_failed_episode_that_counts_as_finished_is_found(monkeypatch: Patch) -> None:
    fail = EnvWorker._fail

    def lenient(self: EnvWorker, attempt: Attempt, stage: str, error: BaseException) -> None:
        if stage != "step":
            fail(self, attempt, stage, error)

    monkeypatch.setattr(EnvWorker, "_fail", lenient)
    assert "it met env_exception" in hunt(7)


# -- 8: one seed, one schedule -----------------------------------------------------------------------------------------


def test_a_slot_chosen_by_global_randomness_is_found(monkeypatch: Patch) -> None:
    _before(monkeypatch, EnvWorker, "fill", lambda self: random.shuffle(self._free))
    assert "event" in hunt(8, twice=True)


def test_a_choice_that_depends_on_addresses_is_found(monkeypatch: Patch) -> None:
    kept: list[object] = []

    def by_address(self: Any) -> None:
        kept.append([object() for _ in range(random.randrange(100))])
        self._free.sort(key=lambda slot: hash(id(object()) ^ slot * 0x9E3779B9) % 97)

    _before(monkeypatch, EnvWorker, "fill", by_address)
    assert "event" in hunt(8, twice=True)


def _before(monkeypatch: Patch, owner: type, name: str, act: Callable[[Any], Any]) -> None:
    original: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

    def both(self: Any, *args: Any) -> Any:
        act(self)
        return original(self, *args)

    monkeypatch.setattr(owner, name, both)
