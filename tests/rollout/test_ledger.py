"""The ledger against a model of it that keeps nothing but a dict."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from cadenza.observe.events import Event
from cadenza.rollout.ledger import Attempt, AttemptState, Group, GroupState, Ledger, LedgerError
from cadenza.rollout.records import Fate, Task, Trajectory

FATES = st.sampled_from(list(Fate))


def trajectory(attempt: Attempt, score: float = 1.0) -> Trajectory:
    group = attempt.group
    return Trajectory(attempt.id, group.task, group.id, attempt.member, attempt.number, attempt.slot, 0, score=score)


class LedgerMachine(RuleBasedStateMachine):
    """Whatever is called in whatever order: the sums match, and a state or a fate changes only as it may."""

    groups = Bundle("groups")
    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.ledger = Ledger(events=self.events.append)
        self.now = 0.0
        self.fates: dict[str, Fate] = {}
        self.tokens: dict[str, int] = {}
        self.known: list[Attempt] = []
        self.open: set[int] = set()

    def _close(self, attempt: Attempt, fate: Fate) -> None:
        assert attempt.key not in self.fates
        self.fates[attempt.key] = fate

    # -- what the scheduler may do -------------------------------------------------------------------------------------

    @rule(target=groups, version=st.integers(0, 5))
    def open_group(self, version: int) -> Group:
        self.now += 1.0
        group = self.ledger.open(Task(f"task/{self.ledger.groups_opened % 3}", 0), version, self.now)
        assert (group.state, group.begun_version, group.opened) == (GroupState.OPEN, version, self.now)
        self.open.add(group.id)
        return group

    @rule(target=attempts, group=groups)
    def issue_the_next_member(self, group: Group):  # type: ignore[no-untyped-def]
        member = 1 + max((attempt.member for attempt in group.attempts), default=-1)
        if group.state is not GroupState.OPEN:
            with pytest.raises(LedgerError, match="no attempt can be issued"):
                self.ledger.issue(group, member, 0, self.now)
            return multiple()
        attempt = self.ledger.issue(group, member, 7, self.now)
        assert (attempt.number, attempt.slot, attempt.state) == (0, 7, AttemptState.RUNNING)
        return self._remember(attempt)

    @rule(target=attempts, earlier=attempts)
    def try_a_member_again(self, earlier: Attempt):  # type: ignore[no-untyped-def]
        group = earlier.group
        tries = [attempt for attempt in group.attempts if attempt.member == earlier.member]
        if group.state is not GroupState.OPEN or any(attempt.fate is None for attempt in tries):
            with pytest.raises(LedgerError):
                self.ledger.issue(group, earlier.member, 0, self.now)
            return multiple()
        attempt = self.ledger.issue(group, earlier.member, 0, self.now)
        assert attempt.number == len(tries)
        return self._remember(attempt)

    def _remember(self, attempt: Attempt) -> Attempt:
        assert attempt.key not in self.tokens, "a key is given once"
        self.tokens[attempt.key] = 0
        self.known.append(attempt)
        return attempt

    @rule(attempt=attempts, count=st.integers(0, 50))
    def tokens_arrive(self, attempt: Attempt, count: int) -> None:
        """While it runs, or too late; never for what is consumed."""
        if attempt.fate in (Fate.TRAINED, Fate.VALIDATED):
            return
        self.ledger.add_tokens(attempt, count)
        self.tokens[attempt.key] += count

    @rule(attempt=attempts)
    def end_the_episode(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.RUNNING:
            self.ledger.mark_scoring(attempt)
            assert attempt.state is AttemptState.SCORING
        else:
            with pytest.raises(LedgerError):
                self.ledger.mark_scoring(attempt)

    @rule(attempt=attempts, score=st.floats(-1, 1))
    def learn_the_reward(self, attempt: Attempt, score: float) -> None:
        if attempt.state is AttemptState.SCORING:
            self.ledger.finish(attempt, trajectory(attempt, score), self.now)
            assert attempt.reward == score
            assert attempt in attempt.group.finished
        else:
            with pytest.raises(LedgerError):
                self.ledger.finish(attempt, trajectory(attempt, score), self.now)

    @rule(attempt=attempts, fate=FATES)
    def give_a_fate(self, attempt: Attempt, fate: Fate) -> None:
        if attempt.fate is None:
            self.ledger.close(attempt, fate, "because", self.now)
            self._close(attempt, fate)
        else:
            with pytest.raises(LedgerError, match=f"already {attempt.fate.value}"):
                self.ledger.close(attempt, fate, "because", self.now)

    @rule(group=groups, state=st.sampled_from([GroupState.OPEN, GroupState.FILTERING, GroupState.READY]))
    def move_a_group(self, group: Group, state: GroupState) -> None:
        order = [GroupState.OPEN, GroupState.FILTERING, GroupState.READY, GroupState.CLOSED]
        if order.index(state) > order.index(group.state):
            self.ledger.advance(group, state)
            assert group.state is state
        else:
            with pytest.raises(LedgerError):
                self.ledger.advance(group, state)

    @rule(group=groups, fate=FATES)
    def end_a_group(self, group: Group, fate: Fate) -> None:
        if group.state is GroupState.CLOSED:
            with pytest.raises(LedgerError, match="already closed"):
                self.ledger.close_group(group, fate, "over", self.now)
            return
        live = list(group.live)
        ran = [attempt for attempt in live if attempt.state is not AttemptState.FINISHED]
        assert self.ledger.close_group(group, fate, "over", self.now) == ran
        for attempt in live:
            self._close(attempt, fate)
        self.open.remove(group.id)

    @precondition(lambda self: len(self.open) > 3)
    @rule(group=consumes(groups), fate=FATES)
    def end_a_group_for_good(self, group: Group, fate: Fate) -> None:
        """Keeps the machine from drowning in open groups."""
        if group.state is not GroupState.CLOSED:
            self.end_a_group(group, fate)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_sums_match(self) -> None:
        ledger = self.ledger
        ledger.check()
        assert ledger.issued == len(self.known) == ledger.live + ledger.fates.total()
        assert ledger.fates == Counter(self.fates.values())
        assert ledger.live == len(self.known) - len(self.fates)

    @invariant()
    def every_token_is_with_its_fate(self) -> None:
        booked: Counter[Fate] = Counter()
        for key, fate in self.fates.items():
            booked[fate] += self.tokens[key]
        assert {f: n for f, n in self.ledger.tokens.items() if n} == {f: n for f, n in booked.items() if n}
        lost = booked.total() - booked[Fate.TRAINED] - booked[Fate.VALIDATED]
        assert self.ledger.lost_tokens.total() == lost

    @invariant()
    def the_stream_tells_each_fate_once(self) -> None:
        told = [(event.subject, event.kind) for event in self.events if event.kind in set(Fate)]
        assert sorted(told) == sorted((key, fate.value) for key, fate in self.fates.items())

    @invariant()
    def open_groups_are_those_without_an_end(self) -> None:
        assert [group.id for group in self.ledger.open_groups()] == sorted(self.open)

    @invariant()
    def a_closed_attempt_has_a_fate_and_no_other_has(self) -> None:
        for attempt in self.known:
            assert (attempt.state is AttemptState.CLOSED) == (attempt.fate is not None)
            assert attempt.fate == self.fates.get(attempt.key)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedgerMachine = LedgerMachine.TestCase


def test_why_tells_the_life_of_a_task_a_group_an_attempt_and_a_trajectory() -> None:
    ledger = Ledger()
    group = ledger.open(Task("math/1", 1, "math"), 3, 10.0)
    attempt = ledger.issue(group, 0, 5, 10.0)
    ledger.close(attempt, Fate.FAILED, "reset: the sandbox burned", 12.5)
    for id in ("math/1", "g0", "g0.0#0", 0):
        assert "the sandbox burned" in ledger.why(id)
        assert "begun at version 3" in ledger.why(id)
    assert "not known" in ledger.why("math/2")


def test_what_is_older_than_the_history_is_forgotten_but_still_counted() -> None:
    ledger = Ledger(history=2)
    for number in range(5):
        group = ledger.open(Task(f"t/{number}", number), 0, 0.0)
        ledger.issue(group, 0, 0, 0.0)
        ledger.close_group(group, Fate.SURPLUS, "", 0.0)
    assert ledger.fates[Fate.SURPLUS] == 5
    assert "not known" in ledger.why("t/0")
    assert "surplus" in ledger.why("t/4")
    ledger.check()


def test_a_second_try_has_its_own_number_also_where_an_extra_member_went_before_others() -> None:
    ledger = Ledger()
    group = ledger.open(Task(id="toy/0", seed=0), 0, 0.0)
    group.extra_begun = True
    ledger.issue(group, 0, 0, 0.0)
    extra = ledger.issue(group, 2, 1, 0.0)
    ledger.close(extra, Fate.FAILED, "step: ValueError", 1.0)
    assert ledger.issue(group, 2, 1, 1.0).key == f"g{group.id}.2#1"
